"""Weights & Biases as a sink: one W&B run per MLflow run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from ebbflow.data.records import TrackedRun

GLOBAL_STEP = "global_step"
"""The metric that is the x axis of all others."""
NODE_STEP = "step"
"""Below the name of a node: the last step that the node logged."""


class WandB:
    """Log to a W&B run with the id of the MLflow run; ``WANDB_API_KEY`` and ``WANDB_MODE`` say
    where it goes.

    A retried node reads its last step from the summary of the W&B run and skips the steps before
    it.
    """

    package: ClassVar[str | None] = "wandb"

    def __init__(self, tracked: TrackedRun, node: str) -> None:
        import wandb

        # prompt=False: a pod has nobody who could type a key, and would wait for one forever
        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False, verify=False):
            raise RuntimeError("there is no API key; set WANDB_API_KEY, or WANDB_MODE=offline")
        self._run = wandb.init(
            project=tracked.experiment,
            id=tracked.run_id,
            name=tracked.name,
            resume="allow",
            dir=tracked.folder if Path(tracked.folder).is_dir() else None,
            config={"recipe_digest": tracked.recipe_digest},
            settings=wandb.Settings(silent=True, console="off", init_timeout=30),
        )
        self._run.define_metric("*", step_metric=GLOBAL_STEP)
        self._node_step = f"{node}/{NODE_STEP}"
        # -1: no earlier attempt of this node has logged
        self._first_step = int(self._run.summary.get(self._node_step, -1))

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log a row. The last step of the earlier attempt is logged again: it may have been
        delivered in part.
        """
        if step >= self._first_step:
            self._run.log({**values, GLOBAL_STEP: step, self._node_step: step})

    def close(self) -> None:
        """Upload the rest and finish the process of W&B."""
        self._run.finish()


SINK = WandB
