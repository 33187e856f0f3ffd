"""TensorBoard as a sink: event files in the folder of the run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

import fsspec

from ebbflow.data.records import TrackedRun


class TensorBoard:
    """Write event files to the folder ``tensorboard`` of the run, those of all nodes side by side.

    A retried node repeats the steps after its checkpoint, so each attempt replaces the files of the
    one before.
    """

    package: ClassVar[str | None] = "tensorboard"

    def __init__(self, tracked: TrackedRun, node: str) -> None:
        from torch.utils.tensorboard import SummaryWriter  # imports TensorBoard

        folder = f"{tracked.folder}/tensorboard"
        # TensorBoard reads every file whose name contains "tfevents"; the suffix says which node
        # wrote it.
        suffix = f".{re.sub(r'[^A-Za-z0-9.]+', '-', node)}"
        file_system, path = fsspec.core.url_to_fs(folder)
        if file_system.exists(path):
            for file in file_system.ls(path, detail=False):
                if str(file).endswith(suffix):
                    file_system.rm_file(file)
        self._writer = SummaryWriter(folder, filename_suffix=suffix)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add a scalar per value."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is buffered and close the file."""
        self._writer.close()


SINK = TensorBoard
