"""The curves of a run, on its parent: what its stages and evaluations measure, by the training
steps of the whole run.

A training step is a step of an online stage or an optimiser step of an offline one. Runs are
compared by these curves, so they have no speeds.

MLflow shows a section for each prefix, in the order of the alphabet: ``reward`` comes first, with
the training reward, the held-out and the validation reward and the alarms, then ``scores``, then
the series of the stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ebbflow.data.records import Evaluation
from ebbflow.storage.tables import read_table_metadata

TRAINING_REWARD = "reward/train"
ALARMS = "reward/alarms"
"""How many alarms the last step of training raised."""
ALARM = "alarm/"
"""How the names of a stage's alarms begin, which are 0 or 1."""
REWARD = "reward"
"""The weighted sum of the rewards, among the means of an evaluation."""
STAGE_REWARD = "reward/mean"
"""The mean reward of what is trained on: its name among the curves, and among a stage's metrics."""
SPEEDS = ("seconds/", "ms_per_image/", "images_per_second", "utilisation/", "push/")
"""How the names of metrics begin that say nothing about the policy."""


def build_stage_curves(stage: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Name the metrics of a training step as curves: each is a series of the stage, and the
    training reward and the number of alarms are also series of the run.

    Example:
        >>> build_stage_curves("1.1 online", {"reward/mean": 0.4, "seconds/step": 2.0})
        {'stage 1.1 online/reward/mean': 0.4, 'reward/train': 0.4}
    """
    series = {
        f"stage {stage}/{name}": value
        for name, value in metrics.items()
        if not name.startswith(SPEEDS)
    }
    alarms = [value for name, value in metrics.items() if name.startswith(ALARM)]
    if alarms:
        series[ALARMS] = sum(alarms)
    return series | _select_training_reward(metrics)


def read_rollout_curves(advantages: Path) -> dict[str, float]:
    """Read the mean reward of the rollouts that an offline stage trains on; empty for pairs, which
    have none.
    """
    return _select_training_reward(read_table_metadata(advantages).get("metrics", {}))


def build_evaluation_curves(evaluation: Evaluation) -> dict[str, float]:
    """Name the means over the held-out and the validation prompts as curves.

    Example:
        The reward and one of the scores::

            {"reward/held_out": 0.7, "scores/held_out/ocr": 0.7, "reward/validation": 0.6, ...}
    """
    splits = {"held_out": evaluation.held_out, "validation": evaluation.validation}
    curves = {}
    for split, means in splits.items():
        if REWARD in means:
            curves[f"reward/{split}"] = means[REWARD]
        scores = {name: value for name, value in means.items() if name != REWARD}
        curves |= {f"scores/{split}/{name}": value for name, value in scores.items()}
    return curves


def _select_training_reward(metrics: Mapping[str, float]) -> dict[str, float]:
    return {TRAINING_REWARD: metrics[STAGE_REWARD]} if STAGE_REWARD in metrics else {}
