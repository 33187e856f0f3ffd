"""Offline training on two nodes: two launchers on loopback, with a temporary folder each, that meet
by c10d (node_cases.py).
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path

import pytest
from safetensors.torch import load_file

from ebbflow.recipe import Recipe
from ebbflow.storage.artifacts import verify_folder
from tests.forked import ROOT, ForkedProgram
from tests.offline_stage import write_offline_stage

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux alone")
CASES = Path(__file__).with_name("node_cases.py")
LOST = "FlyteRecoverableException"
Launch = Callable[..., list[str]]


@pytest.fixture
def launch(make_prompts, make_recipe, base_folder, scorer, tmp_path: Path) -> Launch:
    """``launch("name", nodes=2, dies="3 killed")``: what the launchers of an attempt at a stage
    said, of those that live.
    """
    stage = {"prompts": 4, "batch_size": 8, "checkpoints": {"every": 2}}
    recipe: Recipe = make_recipe(offline=stage, policy={"train": "lora", "rank": 2})
    write_offline_stage(tmp_path, recipe, base_folder, make_prompts(4), scorer)
    (tmp_path / "stage.json").write_text(recipe.model_dump_json())
    (tmp_path / "base").write_text(str(base_folder))

    def launched(name: str, nodes: int = 2, dies: str = "", **environment: str) -> list[str]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            job = (
                {"PET_NNODES": "2", "PET_RDZV_ENDPOINT": f"127.0.0.1:{free.getsockname()[1]}"}
                if nodes > 1
                else {}
            )
        group = (
            os.environ | job | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"} | environment
        )
        said = [tmp_path / f"said-{name}-{node}" for node in range(nodes)]
        for path in said:
            path.unlink(missing_ok=True)
        with ExitStack() as machines:
            programs = []
            for node in range(nodes):
                # A new machine each time. A socket lies in its folder, and its path may have about
                # a hundred characters.
                own = machines.enter_context(tempfile.TemporaryDirectory(prefix="node-"))
                command = [str(CASES), str(tmp_path), name, str(node), dies]
                given = {
                    "cwd": tmp_path,
                    "env": group | {"TMPDIR": own},
                    "output": [tmp_path / f"printed-{name}-{node}"],
                }
                programs.append(ForkedProgram(command, new_session=True, **given))
                machines.callback(end, programs[-1])
            for program in programs:
                program.wait(300)
        return [path.read_text() for path in said if path.exists()]

    return launched


def end(program: ForkedProgram) -> None:
    """Kill a node that still runs, with its ranks."""
    if program.poll() is None:
        os.killpg(program.pid, signal.SIGKILL)


def parts(folder: Path, name: str) -> Collection[str]:
    """The files of the checkpoint in the store, but for those that every checkpoint has."""
    return {
        path.name
        for path in (folder / f"{name}-run" / "checkpoints").rglob("step-00002/*.safetensors")
    }


def test_two_nodes_learn_the_bytes_of_one_and_resume_with_them_when_one_dies(
    launch: Launch, tmp_path: Path
) -> None:
    assert launch("whole", nodes=1) == ["done"]
    (said,) = launch("again", dies="3 killed")
    assert said.startswith(LOST), said
    # Its rank finds the other one gone, or its launcher the store that the other node held.
    assert "another machine is gone" in said or "another node is gone" in said
    assert not (tmp_path / "again").exists()
    assert parts(tmp_path, "again") == parts(tmp_path, "whole") != set()
    assert sorted(launch("again")) == ["IgnoreOutputs ", "done"]
    assert verify_folder(tmp_path / "again") == verify_folder(tmp_path / "whole")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("dies", "name"), [("1 preempted", "preempted"), ("0 killed", "early")])
def test_a_node_that_is_taken_away_ends_all_of_them_and_they_resume(
    launch: Launch, tmp_path: Path, dies: str, name: str
) -> None:
    assert launch("whole", nodes=1) == ["done"]
    first = launch(name, dies=dies)
    assert len(first) == (2 if "preempted" in dies else 1)
    assert all(said.startswith(LOST) for said in first), first
    assert sorted(launch(name)) == ["IgnoreOutputs ", "done"]
    assert verify_folder(tmp_path / name) == verify_folder(tmp_path / "whole")


@pytest.mark.exhaustive
def test_the_error_of_a_rank_is_repeated_by_the_other_node(launch: Launch) -> None:
    said = launch("wrong", dies="1 error")
    assert len(said) == 2
    assert all("of its own" in words and not words.startswith(LOST) for words in said), said
    assert any(
        "rank 1 failed: ValueError: of its own" in words or "rank 0 failed" in words
        for words in said
    )


@pytest.mark.exhaustive
def test_four_ranks_on_two_nodes_are_four_ranks_on_one_also_with_replicas(
    launch: Launch, tmp_path: Path
) -> None:
    four = {"PER_NODE": "2"}
    launch("whole", nodes=1, **four)
    assert sorted(launch("nodes", **four)) == ["IgnoreOutputs ", "done"]
    assert verify_folder(tmp_path / "nodes") == verify_folder(tmp_path / "whole")
    launch("hybrid", **four, HYBRID="1")
    assert len(parts(tmp_path, "whole")) == 2 * len(parts(tmp_path, "hybrid")) > 0
    for path in (tmp_path / "whole").rglob("*.safetensors"):
        found = load_file(tmp_path / "hybrid" / path.relative_to(tmp_path / "whole"))
        expected = load_file(path)
        assert (
            max(float((found[key] - value).abs().max()) for key, value in expected.items()) < 1e-5
        )
