"""The sinks of a node: found by the names of ``tracking.sinks``, opened when there is something to
log, and closed with the node.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module

from ebbflow.data.records import TrackedRun
from ebbflow.recipe import Recipe, RecipeError
from ebbflow.recipe.plugins import PATH, check_members, import_object
from ebbflow.recipe.secrets import redact_secrets
from ebbflow.tracking.sinks import Sink

logger = logging.getLogger(__name__)


def load_sink(name: str) -> type[Sink]:
    """Import the class of a sink.

    Args:
        name: as ``tracking.sinks`` has it: the name of a file in ``ebbflow.tracking.sinks``, or the
            path of a user's own class.

    Raises:
        RecipeError: the path leads nowhere, or to something that is no sink.
    """
    if not PATH.fullmatch(name):
        sink: type[Sink] = import_module(f"ebbflow.tracking.sinks.{name}").SINK
        return sink
    sink = import_object(name)
    check_members(sink, ("log", "close"), name, "sink of ebbflow.tracking.sinks.Sink")
    return sink


def check_sinks(recipe: Recipe) -> None:
    """Check that the sinks of a recipe can be imported, and what they need is installed.

    Raises:
        RecipeError: one cannot, or its package is missing.
    """
    for name in recipe.tracking.sinks:
        package = getattr(load_sink(name), "package", None)
        if package is not None and importlib.util.find_spec(package) is None:
            raise RecipeError(
                f"tracking.sinks = {name!r} needs the package {package}: install it with `pip"
                f" install {package}`, or remove it from tracking.sinks"
            )


class NodeSinks:
    """Logs to all sinks of a node. A sink that fails is reported once and gets nothing more."""

    def __init__(self, tracked: TrackedRun, node: str) -> None:
        self.tracked = tracked
        self.node = node
        self._open_sinks: dict[str, Sink] = {}
        # Opened with the first values: a node without curves, such as a shard, leaves no empty file
        # or run behind.
        self._unopened_names = list(tracked.sinks)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log to all sinks."""
        while self._unopened_names:
            name = self._unopened_names.pop(0)
            try:
                self._open_sinks[name] = load_sink(name)(self.tracked, self.node)
            except Exception as error:  # as in _call_each
                self._warn_of_failure(name, error)
        self._call_each(lambda sink: sink.log(values, step))

    def close(self) -> None:
        """Close all sinks that were opened."""
        self._call_each(lambda sink: sink.close())

    def _call_each(self, call: Callable[[Sink], None]) -> None:
        for name, sink in list(self._open_sinks.items()):
            try:
                call(sink)
            # A sink's library and the service behind it raise anything, and none of it may stop the
            # training.
            except Exception as error:
                self._warn_of_failure(name, error)
                del self._open_sinks[name]
                with suppress(Exception):
                    sink.close()

    def _warn_of_failure(self, name: str, error: Exception) -> None:
        # a service may put the API key into the message of its error
        reason = redact_secrets(str(error)) or type(error).__name__
        logger.warning(
            "node %s: %s of tracking.sinks fails and gets no more of this node: %s",
            self.node,
            name,
            reason,
        )
