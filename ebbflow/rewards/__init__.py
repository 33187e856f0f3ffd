"""Rewards: deterministic functions from images and their prompts to one number per image.

Where it fits
    Between rollouts (images) and advantages (one number per sample). Online stages score in reward
    workers, offline stages in a mapped task, evaluation scores held-out prompts and guardrails.
    ``ebbflow.rewards.combine.load_scorer`` is what they call.

Why
    A reward that fails must not become a number: a sample without a score is masked and counted,
    and its reason is kept. And a reward of another environment (a detector, a judge on a GPU) must
    be as easy to name as one of this process.

How
    Every file in ``built_in/`` is one reward: the class of its options (``RewardConfig``, whose
    ``name`` a recipe writes) and what scores (``ebbflow.rewards.base.Reward``), which the options
    ``build``. Nothing else lists them: ``ebbflow.recipe`` finds the files. A user's own is named by
    its path (docs/extending.md). ``combine`` makes the weighted sum; ``groups`` calls a reward as
    it declares, ``videos`` with frames where it scores images. ``server`` puts any reward behind
    HTTP for ``remote``. The rest is shared by several rewards (``network``, ``weights``, ``clip``,
    ``ppocr``, ``text``, ``http``, ``chat``), or what one of them computes (``geneval_rules``).

Gotchas
    - Reading a recipe imports every file in ``built_in/``: import numpy, torch and the like inside
      the functions that use them.
    - A score depends on its image and prompt alone, never on the batch; a guardrail that depends on
      it measures nothing. What compares images (``Reward.compares``) gets whole groups, in
      training alone.
    - NaN is a failure of one sample; a number above 1e30 or a wrong shape is a bug of the reward
      and stops the run.
"""

# First: it imports the files in built_in, which need its base classes.
import ebbflow.recipe  # noqa: F401
