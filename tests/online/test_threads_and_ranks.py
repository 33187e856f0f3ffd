"""Workers that are threads of the process of the loop, and ranks that answer together."""

from __future__ import annotations

import asyncio
import threading

import pytest

from ebbflow.online.training_worker import TrainingWorker
from ebbflow.online.workers import StageError, ThreadWorker, TrainingGroup


class Meeting:
    """Answers once three threads wait for it, or never."""

    def __init__(self):
        self.barrier, self.end = threading.Barrier(3), threading.Event()

    def wait_for_others(self):
        self.barrier.wait(60)
        return threading.get_ident()

    def hang(self):
        self.end.wait(60)

    def fail(self):
        raise KeyError("no such image")


def test_threads_work_beside_the_loop_and_their_errors_arrive():
    async def run():
        worker = ThreadWorker(Meeting())
        threads = await asyncio.gather(*[worker.call(Meeting.wait_for_others) for _ in range(3)])
        with pytest.raises(KeyError, match="no such image"):
            await worker.call(Meeting.fail)
        return threads

    threads = asyncio.run(run())
    assert len({*threads, threading.get_ident()}) == 4


def test_a_thread_that_hangs_keeps_nobody_waiting(monkeypatch):
    meeting = Meeting()
    errors = []
    monkeypatch.setattr(threading, "excepthook", errors.append)

    async def run():
        async with asyncio.timeout(0.05):
            await ThreadWorker(meeting).call(Meeting.hang)

    with pytest.raises(TimeoutError):
        asyncio.run(run())
    meeting.end.set()
    for thread in threading.enumerate():
        if thread.daemon and thread.name.startswith("reward"):
            thread.join(60)  # it answers a loop that is closed
    assert not errors


class Rank:
    """A rank that answers, fails or waits for the others."""

    def __init__(self, outcome, seconds=0.0):
        self.outcome = outcome
        self.seconds = seconds

    async def call(self, method, requests, advantages):
        await asyncio.sleep(self.seconds)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def test_a_group_gives_every_ranks_answer_in_order():
    assert asyncio.run(
        TrainingGroup([Rank("first", 0.02), Rank("second")]).call(TrainingWorker.train, None, None)
    ) == [
        "first",
        "second",
    ]


def test_the_rank_that_died_explains_the_others():
    """A rank that lost its peer fails before it is known that the peer died."""
    died = StageError("training rank 1 died")
    group = TrainingGroup(
        [Rank(RuntimeError("connection reset")), Rank(died, 0.05), Rank("waits", 60)], grace=0.3
    )
    with pytest.raises(StageError, match="rank 1 died") as error:
        asyncio.run(group.call(TrainingWorker.train, None, None))
    assert error.value.__notes__ == ["another rank: connection reset"]


def test_a_rank_that_died_is_said_at_once():
    group = TrainingGroup([Rank(StageError("rank 0 died")), Rank("waits", 3600)], grace=3600)
    with pytest.raises(StageError, match="rank 0 died"):
        asyncio.run(asyncio.wait_for(group.call(TrainingWorker.train, None, None), 60))
