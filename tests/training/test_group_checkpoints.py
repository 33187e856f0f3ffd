"""Checkpoints of a process group whose machines share no disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbflow.recipe import Recipe
from ebbflow.stage import StageContext
from ebbflow.storage.artifacts import verify_folder
from ebbflow.training.checkpoint import Checkpoints
from ebbflow.training.distributed import join_process_group
from ebbflow.training.group_checkpoints import GroupCheckpoints
from tests.two_processes import as_two_ranks

pytestmark = pytest.mark.any_cpu


def find_best_as_node(recipe: Recipe, folder: Path) -> None:
    """As the only rank of one of two nodes: only that of rank 0 has the checkpoints."""
    with join_process_group() as ranks:
        checkpoints = Checkpoints(StageContext(recipe, 0, 0), folder / f"node-{ranks.rank}")
        if ranks.rank == 0:
            for step, score in ((1, 0.7), (2, 0.4)):
                with checkpoints.save_step(step, {"step": step}, score) as unfinished:
                    (unfinished / "parameters").write_bytes(bytes([step]) * 1000)
        best = GroupCheckpoints.of_group(checkpoints).find_best()
        assert best is not None
        assert (best.step, best.score) == (1, 0.7)
        assert best.folder.is_relative_to(checkpoints.folder)
        assert checkpoints.read_state(best.folder) == {"step": 1}
        assert verify_folder(best.folder) == verify_folder(folder / "node-0" / "step-00001")


def test_the_best_checkpoint_comes_to_machines_without_it(make_recipe, tmp_path):
    as_two_ranks(find_best_as_node, make_recipe(), tmp_path, LOCAL_WORLD_SIZE="1")
