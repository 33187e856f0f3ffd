"""Losses and advantages: one file per algorithm, pure functions on tensors.

Where it fits
    ``ebbflow.training`` builds the rows of a loss and takes the optimiser step; online and offline
    stages compute advantages. This room knows neither a model nor a stage: only ``ebbflow.flow``
    and ``ebbflow.recipe``.

Why
    Algorithms differ in a formula, not in a training loop. A loss that is a function from rows to a
    value per row can be checked against its closed form, and every stage runs it unchanged.

How
    - ``base``: ``Algorithm`` (loss, policy copies, how copies follow), which samples are trained on
      and which stay together, and the rows that a loss gets: ``TrajectoryRows`` (transitions with
      log-probs), ``ForwardRows`` (noised final latents), ``GradientRows`` (rewards with gradient)
      or ``MatchingRows`` (a student's samples, noised again).
    - ``built_in``: a file per algorithm with its hyper-parameters and its loss. Nothing else lists
      them: ``ebbflow.recipe`` finds the files, and reads the classes of hyper-parameters from them.
    - ``registry``: the algorithm of a recipe's ``algorithm.name``, or of a user's
      ``package.module:Name``.
    - ``advantages``: rewards to advantages inside a group.
    - ``loss_terms``: the clipped policy gradient, and the penalty against the base model;
      ``correction``: importance weights against the rollout policy.

Gotchas
    - Reading a recipe imports ``built_in``, ``base``, ``distribution_matching``, ``imitation`` and
      ``loss_terms``: they import torch and numpy for type checking only, or inside functions.
    - Log-probs are means over latent elements, not sums: a clip range depends on their number.
    - A loss returns one value per row, [M], and takes no mean; the update averages over all
      processes.
    - Rows of one ``group_index`` (a pair, a group) share sigma, and the noise unless the algorithm
      says otherwise, and are always in the same micro-batch.
"""

# First: it imports the files in ``built_in``, which need its base classes.
import ebbflow.recipe  # noqa: F401
