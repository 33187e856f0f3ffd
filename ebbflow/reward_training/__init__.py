"""Reward models: trained on labels of people, measured on held-out ones, and registered.

Where it fits
    Above ``labeling``, whose answers it learns from, and above ``registry``, where its versions go.
    The command ``ebbflow train-reward`` and the workflow ``train_reward`` call it. What it trains
    is used far below, as the reward ``model`` (``ebbflow.rewards.built_in.model``).

Why
    A published reward was trained on other pictures and other tastes. One that is trained on
    labels of the policy's own pictures is as good as those labels, and nobody should train on it
    without knowing how good that is.

How
    - ``train``: the Bradley-Terry or the rating loss, in epochs that a killed process resumes.
    - ``measure``: agreement with held-out answers, its interval, the raters' own agreement,
      calibration, and whether hacked pictures are preferred.
    - ``decide``: whether a new reward model replaces the registered one.
    - ``folder``: labels to a committed folder with the network, its card and its report.

Gotchas
    - Prompts are held out, not answers: two pairs of one prompt are alike. Which prompts are is a
      function of their text, so a label that was held out once is never trained on, as long as
      ``held_out`` does not fall.
    - A model can agree with single answers more often than two raters do: it predicts what most
      would say.
"""

from ebbflow.extras import require

require("ebbflow.reward_training", "matplotlib", "mlflow", "pandas")
