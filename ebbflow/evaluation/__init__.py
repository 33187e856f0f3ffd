"""Evaluate policies on fixed prompts, choose a candidate, and decide whether it replaces the
champion.

Where it fits
    Above ``models``, ``rollouts``, ``rewards`` and ``training``; below ``tracking``, which shows
    its results, and the tasks, which run it after every stage.

Why
    A training reward is a poor measure of progress: prompts, noise and the policy's exploration
    change with every step. Here the prompts, the noise, the sampler and the size are the same for
    every policy, so a difference is the policy's.

How
    - ``evaluate``: one sample per validation and held-out prompt, and several of some held-out
      ones, scored with all rewards and guardrails, and the velocity drift.
    - ``image_statistics``: entropy, edges, brightness, diversity ... of the samples;
      ``distribution``: what a mean hides.
    - ``selection``: the candidate is the policy with the best validation reward; also when to stop
      training.
    - ``gate``: on the held-out prompts, the reward must provably rise, and no guardrail may have
      fallen too far, neither below the champion nor, in all, below the anchor.
    - ``look``: what a look may spend of the model's error budget, and how many prompts it needs.
    - ``mean_test``: the test of a mean for few values and heavy tails behind it.
    - ``gate_inputs``: whether the gate's tables are what their evaluations say. ``gate_scores``:
      both sides' stored pictures, scored together. ``pinned_policy``: a decision held to what is
      pinned to the model.
    - ``non_inferiority``: the gate's test that image statistics moved by less than their margins.
    - ``statistics``: paired p-values and intervals over prompts, and Holm's correction.
    - ``serve``: images of a registered policy, from prompts and seeds.

Gotchas
    - Validation prompts choose and stop, held-out prompts decide. Never use the held-out ones for
      anything else.
    - Noise comes from the evaluation's own seed, not the recipe's: a champion of another recipe is
      met on equal terms. Held-out prompts have new noise in every look.
    - A sample that could not be generated or scored has no reward. It lowers coverage, and the gate
      wants full coverage.
"""
