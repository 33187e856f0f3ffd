"""Second sinks of a run's curves, beside MLflow: what ``tracking.sinks`` names. None of them can
stop a run.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import fsspec

from ebbflow.data.records import TrackedRun
from ebbflow.recipe import Recipe, RecipeError
from ebbflow.recipe.secrets import redact_secrets

GLOBAL_STEP = "global_step"
NODE_STEP = "step"
"""Metrics of W&B: the x axis of all others, and, below the name of a node, the last step that it
logged.
"""

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Takes the curves of one node. Its methods may raise anything."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Values by the names of the parent's curves; ``step`` counts the training steps of the
        whole run.
        """

    def close(self) -> None:
        """Deliver the rest."""


class TensorBoard:
    """Event files in the folder ``tensorboard`` of the run, those of all nodes side by side.

    A node that is retried repeats the steps of its checkpoint, so its attempt replaces the files of
    the one before.
    """

    def __init__(self, tracked: TrackedRun, node: str) -> None:
        from torch.utils.tensorboard import SummaryWriter  # imports TensorBoard

        folder = f"{tracked.folder}/tensorboard"
        suffix = f".{re.sub(r'[^A-Za-z0-9.]+', '-', node)}"
        store, path = fsspec.core.url_to_fs(folder)
        for file in store.ls(path, detail=False) if store.exists(path) else ():
            if str(file).endswith(suffix):
                store.rm_file(file)
        self._writer = SummaryWriter(folder, filename_suffix=suffix)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A W&B run with the id of the MLflow run; ``WANDB_API_KEY``, ``WANDB_MODE`` and the like say
    where it goes.

    A node that is retried finds its last step in the summary of the W&B run, and leaves out the
    steps before.
    """

    def __init__(self, tracked: TrackedRun, node: str) -> None:
        import wandb

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
        self._first_step = int(self._run.summary.get(self._node_step, -1))

    def log(self, values: Mapping[str, float], step: int) -> None:
        if step >= self._first_step:
            self._run.log({**values, GLOBAL_STEP: step, self._node_step: step})

    def close(self) -> None:
        self._run.finish()


SINKS: dict[str, tuple[Callable[[TrackedRun, str], Sink], str]] = {
    "tensorboard": (TensorBoard, "tensorboard"),
    "wandb": (WandB, "wandb"),
}
"""Of each name in ``tracking.sinks``, the class and the package that it needs."""


def check_sinks_installed(recipe: Recipe) -> None:
    """Check that what the sinks of a recipe need is installed.

    Raises:
        RecipeError: it is not.
    """
    for name in recipe.tracking.sinks:
        package = SINKS[name][1]
        if importlib.util.find_spec(package) is None:
            raise RecipeError(
                f"tracking.sinks = {name!r} needs the package {package}: install it with `pip"
                f" install {package}`, or remove it from tracking.sinks"
            )


class NodeSinks:
    """The sinks of a node, opened when there is something to log. One that fails is named once, and
    gets no more.
    """

    def __init__(self, tracked: TrackedRun, node: str) -> None:
        self.tracked = tracked
        self.node = node
        self._open: dict[str, Sink] = {}
        self._left = list(tracked.sinks)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log to all sinks."""
        while self._left:
            name = self._left.pop(0)
            try:
                self._open[name] = SINKS[name][0](self.tracked, self.node)
            except Exception as error:  # as in _each
                self._warn_of_failure(name, error)
        self._call_each(lambda sink: sink.log(values, step))

    def close(self) -> None:
        """Close all that were opened."""
        self._call_each(lambda sink: sink.close())

    def _call_each(self, call: Callable[[Sink], None]) -> None:
        for name, sink in list(self._open.items()):
            try:
                call(sink)
            except Exception as error:
                # The library behind a sink may raise anything; none of it may stop the training.
                self._warn_of_failure(name, error)
                del self._open[name]
                with suppress(Exception):
                    sink.close()

    def _warn_of_failure(self, name: str, error: Exception) -> None:
        reason = redact_secrets(str(error)) or type(error).__name__
        logger.warning(
            "node %s: %s of tracking.sinks fails and gets no more of this node: %s",
            self.node,
            name,
            reason,
        )
