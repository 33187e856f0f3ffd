"""Pools and groups of workers, with workers that answer, die, hang and fail when the test says
so."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from ebbflow.flow.noise import SampleKeys
from ebbflow.online import rollout_queue
from ebbflow.online.messages import RolloutBatch, RolloutRequest
from ebbflow.online.ray_workers import RayWorkers
from ebbflow.online.rollout_queue import RolloutQueue
from ebbflow.online.workers import (
    MAX_DEATHS,
    CallFailed,
    LocalWorkers,
    ResultLost,
    RewardPool,
    RolloutPool,
    StageError,
    ThreadWorker,
    WorkerDied,
    WorkerPool,
)
from ebbflow.recipe.online import ScoringConfig
from ebbflow.rewards.combine import RewardError


class Crew:
    """Starts workers and notes what they are asked. ``script``: (argument, attempt) -> what happens
    instead of an answer.
    """

    def __init__(self, script=None, loading=0):
        self.script = script or {}
        self.loading = loading
        self.started = []
        self.stopped = []
        self.calls = []

    def worker(self, index):
        self.started.append(index)
        return Hand(self, index)

    async def start(self, index):
        await asyncio.sleep(self.loading)
        return self.worker(index)

    def attempt(self, argument):
        return sum(given == argument for _, given in self.calls)


def ask(worker, argument):
    """The method that the tests call: a crew's workers answer it themselves."""


class Hand:
    """A worker of a crew."""

    def __init__(self, crew, index):
        self.crew = crew
        self.index = index

    async def call(self, method, argument):
        self.crew.calls.append((self.index, argument))
        outcome = self.crew.script.get((argument, self.crew.attempt(argument)))
        if outcome == "dies":
            raise WorkerDied("killed")
        if outcome == "hangs":
            await asyncio.sleep(60)
        if isinstance(outcome, Exception):
            raise outcome
        await asyncio.sleep(outcome or 0)
        return argument

    def stop(self):
        self.crew.stopped.append(self.index)


@pytest.fixture
def work():
    """``work(pool, arguments)``: (answers in the order in which they came, why calls failed by
    argument).
    """

    def do(pool, arguments):
        done = []
        failed = {}

        async def one(argument):
            try:
                done.append(await pool.run(lambda worker: worker.call(ask, argument)))
            except CallFailed as error:
                failed[argument] = str(error)

        async def everything():
            async with asyncio.TaskGroup() as tasks:
                for argument in arguments:
                    tasks.create_task(one(argument))

        try:
            asyncio.run(everything())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return done, failed

    return do


def rollouts(crew, count):
    return RolloutPool([crew.worker(index) for index in range(count)], crew.start)


def rewards(crew, count, **scoring):
    return RewardPool(
        [crew.worker(index) for index in range(count)], crew.start, ScoringConfig(**scoring)
    )


def test_calls_start_in_order_one_per_worker(work):
    crew = Crew({(1, 1): 0.05})
    done, failed = work(rollouts(crew, 2), [1, 2, 3, 4, 5])
    assert done == [2, 3, 4, 5, 1]
    assert not failed
    assert crew.calls == [(0, 1), (1, 2), (1, 3), (1, 4), (1, 5)]


def test_a_call_that_waits_goes_before_one_that_comes_later():
    """Also where the later one comes in the very moment in which the worker becomes free."""
    crew = Crew()

    async def run():
        pool = rollouts(crew, 1)

        async def one_after_the_other():
            await pool.run(lambda worker: worker.call(ask, 1))
            await pool.run(lambda worker: worker.call(ask, 3))

        await asyncio.gather(one_after_the_other(), pool.run(lambda worker: worker.call(ask, 2)))

    asyncio.run(run())
    assert [given for _, given in crew.calls] == [1, 2, 3]


def test_the_work_of_a_worker_that_died_is_repeated_by_its_replacement(work, caplog):
    crew = Crew({(2, 1): "dies"})
    pool = rollouts(crew, 2)
    assert sorted(work(pool, [1, 2, 3])[0]) == [1, 2, 3]
    assert "rollout worker 1 died; another is started (killed)" in caplog.text
    assert pool.num_replaced == 1
    assert (crew.stopped, crew.started) == ([1], [0, 1, 1])


def test_repeated_work_goes_before_the_rest_of_the_line(work):
    crew = Crew({(1, 1): "dies"})
    assert work(rollouts(crew, 1), [1, 2, 3])[0] == [1, 2, 3]


def test_a_request_that_kills_every_worker_ends_the_stage(work):
    crew = Crew({(7, attempt): "dies" for attempt in range(1, 9)})
    _, failed = work(rollouts(crew, 1), [7])
    assert failed == {7: f"WorkerDied: killed (attempt {MAX_DEATHS} of {MAX_DEATHS})"}

    class Request(int):
        step = 0

    class Queue:
        workers = type("Workers", (), {"rollout": rollouts(Crew(crew.script), 1)})
        spans = []

    Hand.call, whole = (
        (lambda self, method, request, weights: whole(self, method, request)),
        Hand.call,
    )
    try:
        with pytest.raises(
            StageError,
            match=(
                rf"{MAX_DEATHS} rollout workers died or hung over the same"
                r" request.*killed.*micro_batch"
            ),
        ):
            asyncio.run(RolloutQueue.generate_request(Queue(), Request(7), "version 0"))
    finally:
        Hand.call = whole


@pytest.mark.parametrize("error", [StopIteration, concurrent.futures.CancelledError])
def test_an_error_that_asyncio_gives_a_meaning_is_one_of_the_reward(error):
    class Reward:
        def score(self):
            raise error

    async def run():
        pool = WorkerPool("reward", [ThreadWorker(Reward())], None, 5, 2, lambda error: True)
        await pool.run(lambda worker: worker.call(Reward.score))

    with pytest.raises(CallFailed, match=f"{error.__name__}.*attempt 2 of 2"):
        asyncio.run(run())


def test_an_answer_in_time_counts_however_late_the_event_loop_sees_it():
    answered = threading.Event()

    class Judge:
        calls = 0

        def score(self):
            self.calls += 1
            answered.set()
            return "score"

    judge = Judge()
    worker = ThreadWorker(judge)

    async def start(index):
        return worker

    async def run():
        pool = WorkerPool("reward", [worker], start, timeout=0.2, max_attempts=2)
        call = asyncio.ensure_future(pool.run(lambda worker: worker.call(Judge.score)))
        await asyncio.sleep(0)
        # As training does: nothing else has a turn until long after the deadline.
        assert answered.wait(60)
        time.sleep(0.4)
        return await call, pool.num_replaced

    assert asyncio.run(run()) == ("score", 0)
    assert judge.calls == 1


def test_images_that_are_gone_cost_no_reward_worker_and_no_attempt(work):
    crew = Crew({(1, 1): ResultLost("their machine is gone")})
    pool = rewards(crew, 1)
    with pytest.raises(ResultLost):
        work(pool, [1])
    assert (pool.num_replaced, crew.stopped, len(crew.calls)) == (0, [], 1)


def test_what_a_checkpoint_does_not_find_is_generated_again():
    """The rollouts of a step in flight, with the weights of its own."""
    request = RolloutRequest(3, [], None, np.zeros(0), SampleKeys(0, [], []), None, None)
    gone, found, again = (
        SimpleNamespace(request=request, rollouts=name, images=name)
        for name in ("gone", "found", "again")
    )
    queue = RolloutQueue.__new__(RolloutQueue)
    started = []

    async def done(part):
        return part

    async def fetch(handle):
        if handle == "gone":
            raise ResultLost("their machine is gone")
        return handle

    async def roll_out(request, weights):
        started.append((request, weights))
        return again

    async def run():
        tasks = [asyncio.ensure_future(done(part)) for part in (gone, found)]
        step = RolloutBatch(3, [request, request], tasks, weights="version 2")
        return [await queue.fetch_part(step, index) for index in range(2)]

    queue.workers = SimpleNamespace(fetch_value=fetch)
    queue.generate_and_score = roll_out
    assert asyncio.run(run()) == [(again, "again", "again"), (found, "found", "found")]
    assert started == [(request, "version 2")]


@pytest.mark.parametrize("kind", [RayWorkers, LocalWorkers])
def test_the_ranks_receive_a_step_before_it_trains(kind):
    """Wherever it was generated: the queue does not ask whether it may have been lost."""
    workers = kind.__new__(kind)
    received = []

    async def receive(*rollouts):
        received.append(rollouts)

    workers.training = SimpleNamespace(receive=receive)
    queue = RolloutQueue.__new__(RolloutQueue)
    config = SimpleNamespace(placement="ray", mode="sync")
    queue.ctx = SimpleNamespace(online_config=config)
    queue.workers = workers

    async def run():
        task = asyncio.ensure_future(asyncio.sleep(0, SimpleNamespace(rollouts="rollouts")))
        step = RolloutBatch(5, [None], [task])
        queue.in_flight = [step]
        assert await queue.next_batch(5) is step

    asyncio.run(run())
    assert received == [("rollouts",)]


@pytest.mark.parametrize(
    ("role", "what"),
    [("reward", "scoring samples of step 5"), ("rollout", "generating samples of step 5")],
)
def test_who_has_a_request_that_hangs_is_named(monkeypatch, caplog, role, what):
    monkeypatch.setattr(rollout_queue, "SAY_EVERY_SECONDS", 0.05)
    caplog.set_level("INFO")

    async def run():
        may_end = asyncio.Event()

        async def hang(worker):
            await may_end.wait()
            return "samples"

        async def watch_the_log():
            # The test is ended from outside where the line never comes.
            while "waiting for" not in caplog.text:
                await asyncio.sleep(0.01)
            may_end.set()

        pool = WorkerPool(role, [Crew().worker(3)], None)
        step = RolloutBatch(5, [None], [asyncio.ensure_future(pool.run(hang, what))])
        queue = RolloutQueue.__new__(RolloutQueue)
        config = SimpleNamespace(placement="in_process", mode="sync")
        queue.ctx = SimpleNamespace(online_config=config)
        queue.in_flight = [step]
        queue._receive_step = lambda step: asyncio.sleep(0, True)
        return (await asyncio.gather(queue.next_batch(5), watch_the_log()))[0]

    assert asyncio.run(run()).parts == ["samples"]
    (line, *_) = [record.getMessage() for record in caplog.records]
    assert line.startswith("waiting for 1 requests; none was generated and scored in 0.05 s: ")
    assert f"{role} worker 3: {what} for " in line


def test_rollouts_that_failed_while_another_step_trained_end_the_stage():
    async def fail():
        raise OSError("CUDA")

    async def run():
        queue = RolloutQueue.__new__(RolloutQueue)
        config = SimpleNamespace(placement="in_process", mode="one_step_off")
        queue.ctx = SimpleNamespace(online_config=config)
        queue.in_flight = [RolloutBatch(1, [None], [asyncio.ensure_future(fail())])]
        # One turn of the event loop, in which the task ends before anyone waits for it.
        await asyncio.sleep(0)
        await queue.next_batch(1)

    with pytest.raises(OSError, match="CUDA"):
        asyncio.run(run())


def test_errors_of_an_engine_are_not_tried_again(work):
    crew = Crew({(1, 1): OSError("CUDA")})
    with pytest.raises(OSError, match="CUDA"):
        work(rollouts(crew, 1), [1])
    assert len(crew.calls) == 1


def test_images_that_kill_every_reward_worker_have_no_score(work):
    """As often as any other attempt may fail."""
    crew = Crew({(7, attempt): "dies" for attempt in range(1, 9)})
    done, failed = work(rewards(crew, 1, retries=1), [6, 7, 8])
    assert done == [6, 8]
    assert failed == {7: "WorkerDied: killed (attempt 2 of 2)"}


def test_the_time_that_a_replacement_loads_is_nobodys_time_out(work):
    """One of two workers dies, and the next one takes longer to load than a call may take."""
    crew = Crew({(1, 1): "dies", (2, 1): 0.05}, loading=1.5)
    pool = rewards(crew, 2, timeout=1, retries=1)
    done, failed = work(pool, [1, 2])
    assert (sorted(done), failed) == ([1, 2], {})
    assert pool.num_replaced == 1
    assert [given for _, given in crew.calls] == [1, 2, 1]


def test_what_takes_too_long_is_tried_again_and_then_fails(work, caplog):
    crew = Crew({(1, 1): "hangs", (2, 1): "hangs", (2, 2): "hangs"})
    pool = rewards(crew, 1, timeout=0.5, retries=1)
    done, failed = work(pool, [1, 2, 3])
    assert done == [1, 3]
    assert list(failed) == [2]
    assert "no answer after 0.5 s (attempt 2 of 2)" in failed[2]
    assert pool.num_replaced == len(crew.stopped) == 3
    assert "reward worker 0 hung; another is started" in caplog.text


def test_a_time_out_of_the_reward_itself_keeps_its_worker(work):
    crew = Crew({(1, 1): TimeoutError("the server is busy")})
    pool = rewards(crew, 1, retries=1)
    assert work(pool, [1]) == ([1], {})
    assert pool.num_replaced == 0


def test_errors_are_tried_again_unless_a_contract_is_broken(work):
    crew = Crew({(1, 1): OSError("busy"), (2, 1): OSError("gone"), (2, 2): OSError("gone")})
    pool = rewards(crew, 1, retries=1)
    assert work(pool, [1, 2]) == ([1], {2: "OSError: gone (attempt 2 of 2)"})
    assert pool.num_replaced == 0
    crew.script[(3, 1)] = RewardError("a broken contract")
    with pytest.raises(RewardError, match="broken contract"):
        work(pool, [3])


def test_arguments_are_those_of_the_moment_when_a_worker_takes_the_call():
    crew = Crew({(0, 1): 0.02})
    newest = [0]

    async def run():
        pool = WorkerPool("rollout", [crew.worker(0)], crew.start)
        first = asyncio.ensure_future(pool.run(lambda worker: worker.call(ask, newest[0])))
        second = asyncio.ensure_future(pool.run(lambda worker: worker.call(ask, newest[0])))
        await asyncio.sleep(0)
        newest[0] = 5
        return await first, await second

    assert asyncio.run(run()) == (0, 5)


def test_the_modes_differ_in_the_steps_that_run_ahead(make_recipe):
    for keys, ahead in (
        ({"mode": "sync"}, 0),
        ({"mode": "one_step_off"}, 1),
        ({"mode": "async", "staleness": 3}, 3),
    ):
        assert rollout_queue.count_steps_ahead(make_recipe(online=keys).stages[0]) == ahead
