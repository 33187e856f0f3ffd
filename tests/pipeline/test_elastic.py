"""The ranks of a training group: they hear of a SIGTERM, know where they are, and end with their
launcher.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing import process, util
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from flytekit.configuration import ImageConfig, SerializationSettings
from flytekit.exceptions.user import FlyteRecoverableException, FlyteUserRuntimeException
from torch.distributed import DistNetworkError
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError, dynamic_rendezvous

from ebbflow.recipe import Recipe
from tasks import fork_server
from tasks.elastic import (
    GracefulElastic,
    GracefulElasticTask,
    _explain_lost_process,
    _skip_method_name_search,
)
from tasks.fork_server import _can_forks_train, _create_socket_folder
from tasks.train_offline import train_offline
from tests.forked import ROOT, run_forked

CASES = Path(__file__).with_name("elastic_cases.py")


def wait_until(done: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, f"waited for {seconds} s"
        time.sleep(0.05)


def runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ignores(process: int, number: int) -> bool:
    (mask,) = re.findall(
        r"^SigIgn:\s*(\w+)$", Path(f"/proc/{process}/status").read_text(), re.MULTILINE
    )
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux alone")
def test_a_rank_is_where_its_launcher_is_and_ends_with_it(tmp_path: Path) -> None:
    said = tmp_path / "said.json"
    with (tmp_path / "printed").open("w") as printed:
        command = [sys.executable, str(CASES), str(said), "forkserver"]
        launcher = subprocess.Popen(command, cwd=tmp_path, stdout=printed, stderr=printed)
    wait_until(lambda: said.exists() or launcher.poll() is not None)
    assert said.exists(), (tmp_path / "printed").read_text()
    about = json.loads(said.read_text())
    assert (about["folder"], about["LATE"], about["imported"]) == (
        str(tmp_path),
        "after the server",
        True,
    )
    assert about["server"] != launcher.pid
    assert ignores(about["server"], signal.SIGTERM), "it ends after the ranks"
    assert not ignores(about["rank"], signal.SIGTERM)
    launcher.kill()
    launcher.wait()
    wait_until(lambda: not runs(about["rank"]) and not runs(about["server"]))
    assert "resource_tracker" not in (tmp_path / "printed").read_text(), (
        "its process was taken for a fork server's"
    )


def test_a_spawned_rank_leaves_ctrl_c_to_its_launcher_and_ends_with_it(tmp_path: Path) -> None:
    said = tmp_path / "said.json"
    with (tmp_path / "printed").open("w") as printed:
        command = [sys.executable, str(CASES), str(said), "spawn"]
        launcher = subprocess.Popen(command, cwd=tmp_path, stdout=printed, stderr=printed)
    # Two interpreters import Flyte one after the other.
    wait_until(lambda: said.exists() or launcher.poll() is not None, seconds=180)
    assert said.exists(), (tmp_path / "printed").read_text()
    rank = json.loads(said.read_text())["rank"]
    assert ignores(rank, signal.SIGINT), "the launcher passes it on as a SIGTERM"
    assert not ignores(rank, signal.SIGTERM)
    launcher.kill()
    launcher.wait()
    wait_until(lambda: not runs(rank))


def test_its_processes_are_terminated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_offline, "terminated", False)
    ranks = [MagicMock(), MagicMock()]
    monkeypatch.setattr("tasks.elastic.multiprocessing.active_children", lambda: ranks)
    train_offline._forward_signal(signal.SIGTERM, None)
    assert [rank.terminate.call_count for rank in ranks] == [1, 1]


def test_without_processes_nobody_would_save_and_flyte_starts_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(train_offline, "terminated", False)
    monkeypatch.setattr("tasks.elastic.multiprocessing.active_children", list)
    with pytest.raises(
        FlyteRecoverableException, match="train_offline was terminated before it had processes"
    ):
        train_offline._forward_signal(signal.SIGTERM, None)


def a_task(recipe: str) -> None:
    """What a task's function looks like."""


@pytest.mark.parametrize(("nodes", "kind"), [(1, "python-task"), (4, "pytorch")])
def test_several_nodes_are_a_pytorch_job(nodes: int, kind: str) -> None:
    made = GracefulElasticTask(GracefulElastic(nnodes=nodes, nproc_per_node=8), a_task)
    assert made.task_type == kind
    custom = made.get_custom(SerializationSettings(ImageConfig.auto_default_image()))
    group = {"rdzvBackend": "c10d", "minReplicas": 4, "maxReplicas": 4, "nprocPerNode": 8}
    assert (custom or {}) == (
        {} if nodes == 1 else {"workerReplicas": {"replicas": 4}, "elasticConfig": group}
    )


def test_the_rendezvous_finds_the_name_of_a_caller_as_torch_does() -> None:
    def named() -> str:
        return dynamic_rendezvous.get_method_name()

    def caller() -> str:
        return named()

    slow = dynamic_rendezvous.get_method_name
    with _skip_method_name_search():
        assert caller() == "caller"
        assert dynamic_rendezvous.get_method_name is not slow
    assert dynamic_rendezvous.get_method_name is slow
    assert caller() == "caller"


def failed(exitcode: int) -> FlyteUserRuntimeException:
    failure = ProcessFailure(local_rank=3, pid=1, exitcode=exitcode, error_file="/none")
    return FlyteUserRuntimeException(ChildFailedError("train", {3: failure}))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RendezvousTimeoutError(), "did not come"),
        (DistNetworkError("The client socket has timed out"), "another node is gone"),
        (
            RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error"),
            "another node is gone",
        ),
        (failed(-signal.SIGABRT), "process 3 of this node ended by SIGABRT"),
        (
            failed(-signal.SIGKILL),
            "SIGKILL; its memory may be used up; another node may be gone",
        ),
        (failed(1), None),
        (ValueError("a bug"), None),
    ],
)
def test_what_another_attempt_may_not_meet(error: Exception, words: str | None) -> None:
    lost = _explain_lost_process(error, several_nodes=True)
    assert words in lost if words and lost else lost is words


@pytest.mark.parametrize(("exitcode", "retried"), [(-signal.SIGKILL, True), (1, False)])
def test_a_process_that_is_killed_is_retried_on_one_node_as_well(
    monkeypatch: pytest.MonkeyPatch, exitcode: int, retried: bool
) -> None:
    def fail(*of_launch: object, **inputs: object) -> None:
        raise failed(exitcode)

    monkeypatch.setattr(GracefulElasticTask, "_launch_all_processes", fail)
    with pytest.raises(FlyteRecoverableException if retried else FlyteUserRuntimeException) as kept:
        train_offline._launch_processes(recipe=Recipe())
    if retried:
        # The whole of it: no cause, which would be printed once for each level of the workflow.
        assert str(kept.value).endswith(
            "train_offline: process 3 of this node ended by SIGKILL; its memory may be used up"
        )


def test_ranks_that_die_of_the_task_s_own_sigterm_are_not_said_to_lack_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def terminate(task: GracefulElasticTask, **inputs: object) -> None:
        task.terminated = True
        raise failed(-signal.SIGTERM)

    monkeypatch.setattr(train_offline, "terminated", False)
    monkeypatch.setattr(GracefulElasticTask, "_launch_all_processes", terminate)
    with pytest.raises(FlyteRecoverableException, match="terminated before its first step$"):
        train_offline.execute(recipe=Recipe())


def test_sockets_have_short_paths_however_long_the_output_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("long" * 20)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.delitem(process.current_process()._config, "tempdir", raising=False)  # type: ignore[attr-defined]
    _create_socket_folder()
    assert len(util.get_temp_dir()) < 40
    assert tempfile.gettempdir() == str(folder)


STARTS_A_SERVER = """
import multiprocessing
import sys
from multiprocessing import forkserver

from ebbflow.recipe import Recipe
from tasks import fork_server

def start_server():
    import torch

    torch.ones((), requires_grad=True).backward()
    forkserver.set_forkserver_preload([])  # that it starts is asked, not what it imports
    forkserver.ensure_running()


if __name__ == "__main__":
    if "cannot train" in sys.argv:
        fork_server._can_forks_train = lambda: False
    assert fork_server.preload_fork_server(Recipe())
    rank = multiprocessing.get_context("forkserver").Process(target=start_server)
    rank.start()
    rank.join(120)
    print(rank.exitcode)
    rank.kill()
    # The bits of the signals that the server ignores; SIGTERM is the 15th.
    server = forkserver._forkserver._forkserver_pid
    with open(f"/proc/{server}/status") as status:
        ignored = next(int(line.split()[1], 16) for line in status if line.startswith("SigIgn"))
    print("SIGTERM" if ignored & 1 << 14 else "nothing")
"""


@pytest.mark.parametrize("forks", ["can train", "cannot train"])
def test_a_rank_trains_and_can_start_a_fork_server_of_its_own(tmp_path: Path, forks: str) -> None:
    """A lock that the launcher held when it forked the server would stop the rank for ever. A
    server that a SIGTERM ended would not tell how the ranks end, which save first.
    """
    script = tmp_path / "starts.py"
    script.write_text(STARTS_A_SERVER)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = run_forked([str(script), forks], cwd=tmp_path, env=environment, timeout=240)
    assert done.stdout.split() == ["0", "SIGTERM"], done.stderr


DROPPED_A_GROUP = """
import gc
import multiprocessing

import torch.distributed as dist

from ebbflow.recipe import Recipe
from tasks import fork_server


def drop_a_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    cycle = [dist.group.WORLD]
    cycle.append(cycle)
    dist.destroy_process_group()


if __name__ == "__main__":
    gc.disable()  # the launcher drops the group, and does not collect it before it forks
    drop_a_group()
    assert fork_server.preload_fork_server(Recipe())
    rank = multiprocessing.get_context("forkserver").Process(target=gc.collect)
    rank.start()
    rank.join(60)
    print(rank.exitcode)
    rank.kill()
"""


def test_a_rank_does_not_end_what_the_launcher_has_dropped(tmp_path: Path) -> None:
    """It hung in the destructor of a process group, whose threads it waits for."""
    script = tmp_path / "dropped.py"
    script.write_text(DROPPED_A_GROUP)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = run_forked([str(script)], cwd=tmp_path, env=environment, timeout=240)
    assert done.stdout.split() == ["0"], done.stderr


def test_a_process_whose_forks_torch_refuses_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(tensor: torch.Tensor) -> None:
        raise RuntimeError("Unable to handle autograd's threading in combination with fork")

    monkeypatch.setattr(torch.Tensor, "backward", refuse)
    assert not _can_forks_train()


def test_a_process_whose_forks_hang_in_a_lock_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = threading.Lock()
    monkeypatch.setattr(fork_server, "TRIAL_SECONDS", 1)
    monkeypatch.setattr(torch.Tensor, "backward", lambda tensor: lock.acquire())
    # As of a thread that held it at the fork.
    with lock:
        assert not _can_forks_train()
