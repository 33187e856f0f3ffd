"""A rank whose process stands still is named by another one."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch.distributed as dist

from ebbflow.training import heartbeats
from ebbflow.training.distributed import enter_phase, join_process_group
from ebbflow.training.heartbeats import Heartbeats, exchange_heartbeats
from tests.forked import CONTEXT
from tests.two_processes import as_two_ranks

pytestmark = pytest.mark.any_cpu


class Group:
    """Ranks of this process with a store in a file, and a clock that tests move."""

    def __init__(self, folder: Path, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.alerts: list[str] = []
        monkeypatch.setattr(heartbeats.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(heartbeats, "send_alert_in_background", self.alerts.append)
        self.ranks = [
            Heartbeats(
                dist.FileStore(str(folder / "store"), world),  # type: ignore[attr-defined]
                rank,
                world,
                lambda rank=rank: f"training step {rank}",  # type: ignore[misc]
            )
            for rank in range(world)
        ]

    def pass_seconds(self, seconds: float, *stopped: int) -> None:
        """Let all ranks beat but those that are stopped."""
        for _ in range(int(seconds / heartbeats.BEAT_SECONDS)):
            self.now += heartbeats.BEAT_SECONDS
            for rank in self.ranks:
                if rank.rank not in stopped:
                    rank.beat()


def test_ranks_that_run_are_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(tmp_path, 3, monkeypatch)
    group.pass_seconds(600)
    assert group.alerts == []


@pytest.mark.parametrize("stopped", [0, 1, 2])
def test_a_stopped_rank_is_named_once_within_two_minutes(
    stopped: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(tmp_path, 3, monkeypatch)
    group.pass_seconds(60)
    group.pass_seconds(120, stopped)
    (alert,) = group.alerts
    assert alert.startswith(f"rank {stopped} of 3 gives no sign of life for 75 s (process ")
    assert f", training step {stopped})" in alert
    group.pass_seconds(600, stopped)
    assert len(group.alerts) == 1


def test_a_rank_that_has_ended_is_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(tmp_path, 3, monkeypatch)
    group.pass_seconds(60)
    # Rank 0 stores the policy while the others have nothing more to do.
    for rank in group.ranks[1:]:
        rank.end()
    group.pass_seconds(600, 1, 2)
    assert group.alerts == []


def test_a_stopped_rank_is_named_although_the_first_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(tmp_path, 3, monkeypatch)
    group.pass_seconds(60)
    group.ranks[0].end()
    group.pass_seconds(120, 0, 2)
    (alert,) = group.alerts
    assert alert.startswith("rank 2 of 3 gives no sign of life for 75 s (process ")


def test_a_rank_that_goes_on_may_be_named_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(tmp_path, 2, monkeypatch)
    group.pass_seconds(60)
    for _ in range(2):
        group.pass_seconds(120, 1)
        group.pass_seconds(60)
    assert len(group.alerts) == 2


def test_the_thread_beats_while_the_block_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeats, "BEAT_SECONDS", 0.05)
    store = dist.FileStore(str(tmp_path / "store"), 2)  # type: ignore[attr-defined]
    with exchange_heartbeats(store, 1, 2, lambda: "loading the policy"):
        deadline = time.monotonic() + 60
        while not store.check([f"{heartbeats.KEY}/1"]):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert b"loading the policy" in store.get(f"{heartbeats.KEY}/1")
    assert store.get(f"{heartbeats.KEY}/1") == heartbeats.ENDED.encode()


def hold_store(port: Connection) -> None:
    """Hold the store of a group in this process."""
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    port.send(store.port)
    port.recv()  # until the test closes the pipe


@pytest.mark.parametrize("local_rank", ["0", "3"])
def test_the_stopped_process_of_the_store_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, local_rank: str
) -> None:
    alerts: list[str] = []
    monkeypatch.setattr(heartbeats, "send_alert_in_background", alerts.append)
    monkeypatch.setattr(heartbeats, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(heartbeats, "SILENT_SECONDS", 1.0)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setenv("MASTER_ADDR", "node-0")
    line = "the store of the training group on node-0 gives no sign of life"
    here, there = CONTEXT.Pipe()
    host = CONTEXT.Process(target=hold_store, args=(there,))
    host.start()
    assert host.pid is not None
    try:
        store = dist.TCPStore("127.0.0.1", here.recv(), 2, is_master=False)
        with exchange_heartbeats(store, 3, 4, lambda: "training step 2"):
            deadline = time.monotonic() + 60
            while not store.check([f"{heartbeats.KEY}/3"]):
                assert time.monotonic() < deadline
            os.kill(host.pid, signal.SIGSTOP)
            while line not in caplog.text:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            os.kill(host.pid, signal.SIGCONT)
    finally:
        host.kill()
        host.join()
    assert [text.startswith(line) for text in alerts] == ([True] if local_rank == "0" else [])


def work_beside_a_stopped_rank(folder: Path) -> None:
    """Rank 1 stops itself in the middle of a collective, as an operator or a debugger does; rank 0
    lets it go on once it has been named.
    """
    with pytest.MonkeyPatch.context() as patch:
        named: list[str] = []
        patch.setattr(heartbeats, "BEAT_SECONDS", 0.2)
        patch.setattr(heartbeats, "SILENT_SECONDS", 5.0)
        patch.setattr(heartbeats, "send_alert_in_background", named.append)
        process_file = folder / "process"
        beat = Heartbeats.beat

        def beat_and_stop(self: Heartbeats) -> None:
            beat(self)
            # Between two heartbeats, because a process that stops inside one may hold the lock of
            # the store's file, which the others wait for.
            if self.rank == 1 and self.num_beats == 10:
                process_file.write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGSTOP)

        patch.setattr(Heartbeats, "beat", beat_and_stop)
        with join_process_group() as ranks:
            enter_phase("training step 3")
            if ranks.rank == 0:
                deadline = time.monotonic() + 120
                while not any(text.startswith("rank 1 of 2") for text in named):
                    assert time.monotonic() < deadline
                    time.sleep(0.1)
                os.kill(int(process_file.read_text()), signal.SIGCONT)
                (folder / "named").write_text("\n".join(named))
            dist.barrier()


def test_a_real_rank_that_is_stopped_is_named(tmp_path: Path) -> None:
    as_two_ranks(work_beside_a_stopped_rank, tmp_path)
    text = (tmp_path / "named").read_text()
    process = (tmp_path / "process").read_text()
    assert f"(process {process} on " in text
    assert ", training step 3): its process is stopped" in text
