"""Sinks: where the curves of a run go besides MLflow. A file here is a sink that ``tracking.sinks``
names by the name of the file.

A user's own sink is named by its path, ``package.module:Name``, and is a class like those in these
files: it is created with the run and the name of a node, and has the methods of ``Sink``. No sink
can stop a run: one that fails is reported once and gets nothing more from this node.

Example:
    A sink that appends the curves to a text file::

        class TextFile:
            package = None  # needs nothing that Ebbflow does not install

            def __init__(self, tracked: TrackedRun, node: str) -> None:
                self.file = open(f"{tracked.folder}/curves-{node}.txt", "w")

            def log(self, values: Mapping[str, float], step: int) -> None:
                print(step, values, file=self.file)  # 12 {'reward/train': 0.31}

            def close(self) -> None:
                self.file.close()
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:  # recipes list the files of this folder, and reading a recipe stays light
    from ebbflow.data.records import TrackedRun


class Sink(Protocol):
    """Takes the curves of one node. Its methods may raise anything.

    Attributes:
        package: the package that the sink imports and Ebbflow does not install; None if there is
            none. ``ebbflow check`` and the start of a run refuse a recipe whose package is missing.
    """

    package: ClassVar[str | None]

    def __init__(self, tracked: TrackedRun, node: str) -> None:
        """Open the sink for a node; called when the node logs its first curve."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log finite values by the names of the parent run's curves; ``step`` counts the training
        steps of the whole run.
        """

    def close(self) -> None:
        """Deliver the rest."""
