"""Checkpoints of a process group: every rank writes its part, and rank 0 commits them all.

Each machine has a folder for the parts of its ranks, because machines may share no disk. Rank 0
collects the parts of the others into its own (``checkpoint.collect_parts``), and puts them into the
checkpoint. When a group resumes, rank 0 chooses the checkpoint: it reads all of it to see that it
is whole, and the others must not see something else.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ebbflow.storage.artifacts import verify_folder
from ebbflow.storage.disk import DiskFullError, raise_if_disk_full
from ebbflow.training.checkpoint import BestCheckpoint, Checkpoints, find_damage, step_of
from ebbflow.training.distributed import (
    Ranks,
    broadcast_first,
    enter_phase,
    receive_file,
    send_file,
)
from ebbflow.training.object_messages import broadcast_object, gather_objects


class GroupCheckpoints(Checkpoints):
    """The checkpoints of a stage that several processes train together. All of them call every
    method, with the same arguments.
    """

    @staticmethod
    def of_group(checkpoints: Checkpoints) -> GroupCheckpoints:
        """Return the same checkpoints for the processes of this group."""
        return GroupCheckpoints(checkpoints.ctx, checkpoints.folder, checkpoints.saved)

    @contextmanager
    def save_step(
        self, step: int, state: dict[str, Any], score: float | None = None
    ) -> Iterator[Path]:
        """As ``Checkpoints.save_step``; the block writes this rank's part into the folder of its
        machine, and brings those of other machines to that of rank 0. None continues before the
        checkpoint is whole.
        """
        ranks = Ranks.current()
        enter_phase(f"saving the checkpoint of step {step}")
        parts = self.folder / f".parts-{ranks.node_rank}"
        if ranks.local_rank == 0:
            shutil.rmtree(parts, ignore_errors=True)
            parts.mkdir(parents=True)
        ranks.wait_for_all()
        try:
            with raise_if_disk_full(parts):
                yield parts
        except DiskFullError:
            shutil.rmtree(parts, ignore_errors=True)
            raise
        ranks.wait_for_all()
        if ranks.rank == 0:
            with super().save_step(step, state, score) as folder:
                for path in parts.iterdir():
                    path.replace(folder / path.name)
        elif ranks.local_rank == 0:
            shutil.rmtree(parts)
        ranks.wait_for_all()

    def find_newest(self) -> tuple[Path, dict[str, Any]] | None:
        """As ``Checkpoints.find_newest``.

        Raises:
            CheckpointError, ArtifactError: another machine has not what rank 0 has.
        """
        newest = super().find_newest() if Ranks.current().rank == 0 else None
        # No checkpoint has the step 0, where no weight has moved.
        step = broadcast_first(step_of(newest[0]) if newest else 0)
        if not step:
            return None
        self._require_step_on_node(step)
        return self.load_step(step)

    def find_best(self) -> BestCheckpoint | None:
        """As ``Checkpoints.find_best``; machines that lack the checkpoint get it from rank 0, whose
        machine alone has those of this attempt where no disk is shared.
        """
        of_first_rank = super().find_best() if Ranks.current().rank == 0 else None
        best: BestCheckpoint | None = broadcast_object(of_first_rank, 0)
        if best is None:
            return None
        return best._replace(folder=self._send_to_other_nodes(best.step))

    def _send_to_other_nodes(self, step: int) -> Path:
        """Send the checkpoint of a step from rank 0 to the machines that do not have all of it.

        Returns:
            Where this machine has it.
        """
        ranks = Ranks.current()
        enter_phase(f"sending the checkpoint of step {step} to other machines")
        folder = self._path_of_step(step)
        is_missing = ranks.local_rank == 0 and ranks.rank > 0 and find_damage(folder) is not None
        receivers = [rank for rank, missing in enumerate(gather_objects(is_missing)) if missing]
        names: list[str] = broadcast_object(sorted(path.name for path in folder.glob("*")), 0)
        # Beside the checkpoints: on a shared disk that lags behind, the folder itself is rank 0's.
        received = self.folder / f".received-{ranks.node_rank}"
        if ranks.rank in receivers:
            shutil.rmtree(received, ignore_errors=True)
            received.mkdir(parents=True)
        for receiver in receivers:
            for name in names:
                if ranks.rank == 0:
                    send_file(folder / name, receiver)
                elif ranks.rank == receiver:
                    receive_file(received / name, sender=0)
        if ranks.rank in receivers:
            verify_folder(received)
        ranks.wait_for_all()
        return received if ranks.rank - ranks.local_rank in receivers else folder

    def _require_step_on_node(self, step: int) -> None:
        ranks = Ranks.current()
        # Once on each other machine, because it reads all of the checkpoint.
        if ranks.local_rank == 0 and ranks.node_rank > 0:
            self.require_step(step)
