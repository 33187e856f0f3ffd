"""The curves of a run, on its parent: what its stages and evaluations measure, by the training
steps of the whole run.

A training step is a step of an online stage or an optimiser step of an offline one. Runs are
compared by these curves, so they have no speeds.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ebbflow.data.records import Evaluation
from ebbflow.storage.tables import read_table_metadata

TRAINING_REWARD = "train/reward"
STAGE_REWARD = "reward/mean"
"""The mean reward of what is trained on: its name among the curves, and among a stage's metrics."""
SPEEDS = ("seconds/", "ms_per_image/", "images_per_second", "utilisation/", "push/")
"""How the names of metrics begin that say nothing about the policy."""


def build_stage_curves(stage: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Name the metrics of a training step as curves: each is a series of the stage, and the
    training reward also one of the run.

    Example:
        >>> build_stage_curves("1.1 online", {"reward/mean": 0.4, "seconds/step": 2.0})
        {'1.1 online/reward/mean': 0.4, 'train/reward': 0.4}
    """
    series = {
        f"{stage}/{name}": value for name, value in metrics.items() if not name.startswith(SPEEDS)
    }
    return series | _select_training_reward(metrics)


def read_rollout_curves(advantages: Path) -> dict[str, float]:
    """Read the mean reward of the rollouts that an offline stage trains on; empty for pairs, which
    have none.
    """
    return _select_training_reward(read_table_metadata(advantages).get("metrics", {}))


def build_evaluation_curves(evaluation: Evaluation) -> dict[str, float]:
    """Name the means over the held-out and the validation prompts as curves."""
    held_out = {f"held_out/{name}": value for name, value in evaluation.held_out.items()}
    return held_out | {f"validation/{name}": value for name, value in evaluation.validation.items()}


def _select_training_reward(metrics: Mapping[str, float]) -> dict[str, float]:
    return {TRAINING_REWARD: metrics[STAGE_REWARD]} if STAGE_REWARD in metrics else {}
