"""Records of runs that tests of tasks and workflows pass on."""

from __future__ import annotations

from ebbflow.data.records import Evaluation


def make_evaluation(held_out: dict[str, float]) -> Evaluation:
    """An evaluation of the untouched base model, with these means."""
    return Evaluation(
        label="before",
        policy_version=0,
        held_out=held_out,
        validation={},
        coverage=1.0,
        velocity_drift=0.0,
        seconds={},
    )
