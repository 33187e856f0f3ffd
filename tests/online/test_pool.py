"""Pools and the desk, with workers that end, die, hang and fail when the test says so."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ebbflow.online import pool as pools
from ebbflow.online.placement import Call, WorkerDied
from ebbflow.online.pool import MAX_DEATHS, Desk, Job, Pool, StageError


class Hand:
    """A worker that notes what it was asked."""

    def __init__(self, crew, role, index):
        self.crew, self.name, self.stopped = crew, (role, index, crew.hired.count((role, index))), False
        crew.hired.append((role, index))

    def start(self, method, *arguments):
        call = Call((), (method, *arguments))
        self.crew.started.append((self.name, arguments[0]))
        self.crew.running[call] = self.crew.script.get((arguments[0], self.crew.attempt(arguments[0])), "ends")
        return call

    def stop(self):
        self.stopped = True
        self.crew.stopped.append(self.name)


class Crew:
    """A placement whose calls end in the order of ``finish``; the rest by ``script``: (argument, attempt) -> what happens."""

    def __init__(self, script=None):
        self.script, self.hired, self.stopped, self.started, self.running = script or {}, [], [], [], {}
        self.latest_first = False

    def attempt(self, argument):
        return sum(given == argument for _, given in self.started)

    def hire(self, role, index):
        return Hand(self, role, index)

    def wait(self, calls, timeout):
        able = [call for call in calls if self.running[call] != "hangs"]
        return able[-1:] if self.latest_first else able[:1]

    def report(self, call):
        outcome = self.running.pop(call)
        if outcome == "dies":
            raise WorkerDied("killed")
        if isinstance(outcome, Exception):
            raise outcome
        return call.report[1]


@pytest.fixture
def work():
    """``work(crew, pool, arguments)``: (what each job gave, why jobs failed), by argument."""

    def do(pool, arguments, fails=True, **rest):
        done, failed = {}, {}
        for argument in arguments:

            def fail(reason, argument=argument):
                failed[argument] = reason

            job = Job("method", lambda a=argument: (a,), lambda call, report: done.update({report: report}), **rest)
            job.failed = fail if fails else None
            pool.submit(job)
        Desk(pool.placement, [pool]).until(lambda: len(done) + len(failed) == len(arguments))
        return done, failed

    return do


def test_jobs_are_started_in_order_one_a_worker(work):
    crew = Crew()
    crew.latest_first = True
    pool = Pool(crew, "rollout", 2)
    done, failed = work(pool, [1, 2, 3, 4, 5])
    assert list(done) == [2, 3, 4, 5, 1]
    assert not failed
    assert [given for _, given in crew.started] == [1, 2, 3, 4, 5]
    assert [name[1] for name, _ in crew.started] == [0, 1, 1, 1, 1]


def test_the_work_of_a_worker_that_died_is_done_again_by_another(work):
    crew = Crew({(2, 1): "dies"})
    pool = Pool(crew, "rollout", 2)
    with pytest.warns(UserWarning, match="rollout worker died.*done again.*killed"):
        done, _ = work(pool, [1, 2, 3], fails=False)
    assert sorted(done) == [1, 2, 3]
    assert pool.replaced == 1
    assert crew.stopped == [("rollout", 1, 0)]
    assert ("rollout", 1) in crew.hired[2:]


@pytest.mark.filterwarnings("ignore:rollout worker died")
def test_work_that_kills_every_worker_ends_the_stage(work):
    crew = Crew({(7, attempt): "dies" for attempt in range(1, 9)})
    with pytest.raises(StageError, match=rf"{MAX_DEATHS} rollout workers died over the same work.*killed.*micro_batch"):
        work(Pool(crew, "rollout", 1), [7], fails=False)


@pytest.mark.filterwarnings("ignore:reward worker died")
def test_images_that_kill_every_reward_worker_have_no_score(work):
    """As often as any other attempt may fail."""
    crew = Crew({(7, attempt): "dies" for attempt in range(1, 9)})
    done, failed = work(Pool(crew, "reward", 1, retries=1), [6, 7, 8])
    assert sorted(done) == [6, 8]
    assert failed == {7: "WorkerDied: killed (attempt 2 of 2)"}


@pytest.mark.filterwarnings("ignore:reward worker died")
def test_what_ends_while_a_worker_is_replaced_was_not_late(work, monkeypatch):
    """One of two workers dies, and the next one takes longer to come than a call may take."""
    crew, clock = Crew({(1, 1): "dies"}), SimpleNamespace(now=0)
    monkeypatch.setattr(pools, "time", SimpleNamespace(monotonic=lambda: clock.now))
    pool, hire = Pool(crew, "reward", 2, timeout=10, retries=1), crew.hire

    def slow(role, index):
        clock.now += 20
        return hire(role, index)

    crew.hire = slow
    done, failed = work(pool, [1, 2])
    assert (sorted(done), failed) == ([1, 2], {})
    assert pool.replaced == 1
    assert [given for _, given in crew.started] == [1, 2, 1]


def test_what_takes_too_long_is_tried_again_and_then_fails(work):
    crew = Crew({(1, 1): "hangs", (2, 1): "hangs", (2, 2): "hangs"})
    pool = Pool(crew, "reward", 1, timeout=0.01, retries=1)
    done, failed = work(pool, [1, 2, 3])
    assert sorted(done) == [1, 3]
    assert list(failed) == [2]
    assert "no answer after 0.01 s (attempt 2 of 2)" in failed[2]
    assert pool.replaced == 3
    assert len(crew.stopped) == 3


def test_errors_are_tried_again_unless_nothing_would_mend_them(work):
    crew = Crew({(1, 1): OSError("busy"), (2, 1): OSError("gone"), (2, 2): OSError("gone")})
    pool = Pool(crew, "reward", 1, retries=1)
    done, failed = work(pool, [1, 2], fatal=(ValueError,))
    assert list(done) == [1]
    assert failed == {2: "OSError: gone (attempt 2 of 2)"}
    assert pool.replaced == 0
    crew.script[(3, 1)] = ValueError("a broken contract")
    with pytest.raises(ValueError, match="broken contract"):
        work(pool, [3], fatal=(ValueError,))


def test_waiting_for_others_keeps_the_pools_at_work(work):
    crew = Crew()
    pool, done = Pool(crew, "rollout", 1), []
    for argument in (1, 2, 3):
        pool.submit(Job("method", lambda a=argument: (a,), lambda call, report: done.append(report)))
    training = Hand(crew, "training", 0).start("train", "lesson")
    Desk(crew, [pool]).until_ended([training])
    assert done == [1, 2, 3]
