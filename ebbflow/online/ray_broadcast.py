"""How the stage's own process has weights broadcast: who takes part, and what becomes of a version when somebody does not.

Training never waits for a worker that is loading, or died. A version goes to those that can take part in its transfer; one that
lacks it when it is to generate with it gets it from the first rank, as with ``transfer: store``. A group that lost a member is
given up, and the next version goes to a new one, of those that are left or came since.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, Protocol

from ebbflow.online.broadcast import BroadcastError
from ebbflow.online.placement import Call, Placement, Worker, WorkerDied
from ebbflow.online.roles import KEPT
from ebbflow.rollouts.weights import WeightsVersion

TIMEOUT, GRACE = 600, 60
"""Seconds that one waits for another, which is as long as the first rank may take to gather the weights and their checksum; and
that the others have to stop once a group is given up. One that died is noticed at once."""


class Member(Worker, Protocol):
    """A worker that can do something beside its work."""

    @property
    def index(self) -> int:
        """Its number in its role."""

    @property
    def ready(self) -> bool:
        """Whether it has loaded."""

    def beside(self, method: str, *arguments: Any) -> Call:
        """Begin while another method may be at work."""


class Broadcast:
    """Sends versions from a training group to rollout workers.

    Args:
        first: the first rank, which sends.
        workers: the rollout workers that there are now.
    """

    def __init__(self, placement: Placement, first: Member, workers: Callable[[], Sequence[Member]]) -> None:
        self.placement, self.first, self.workers = placement, first, workers
        self.expected = first.start("expected").report
        self.store: tuple[str, int] = self._ask("host")
        self.groups = count(1)
        self.name = ""
        self.members: Sequence[Member] | None = None
        self.dead: set[Member] = set()
        self.hanging: dict[Member, Call] = {}
        self.arrived: deque[tuple[str, set[Member]]] = deque(maxlen=2 * KEPT)  # a version has two, where there is a validation
        self.resent: dict[str, WeightsVersion] = {}

    def publish(self, version: int, copy: str | None = None) -> WeightsVersion:
        """Send the weights as they are (``Trainer.broadcast``) to all rollout workers that can receive them; without buckets.

        Raises:
            TransferError: something was changed on the way.
        """
        self.resent.clear()
        problems = self._meet()
        receiving = {worker.beside("receive", self.expected): worker for worker in self.members or ()}
        sending = [rank.start("broadcast", version, copy) for rank in self.placement.training]
        arrived, lost = self._together(sending, receiving)
        if problems := problems + lost:
            warnings.warn(
                f"the weights of version {version} were not broadcast to all rollout workers ({problems[0]}); those that lack "
                "them get them through the object store, and the next ones are broadcast again",
                stacklevel=2,
            )
        weights: WeightsVersion = self._resend() if lost else self.placement.report(sending[0])
        self.arrived.append((weights.digest, arrived))
        return replace(weights, buckets=())

    def within_reach(self, weights: WeightsVersion, worker: Member) -> WeightsVersion:
        """The same weights for a rollout worker: with buckets where they have not arrived."""
        if any(digest == weights.digest and worker in members for digest, members in self.arrived):
            return weights
        resent = self.resent.get(weights.digest) or self._resend(weights.digest)
        return replace(weights, buckets=resent.buckets)

    def _resend(self, digest: str | None = None) -> WeightsVersion:
        """Weights with buckets; left out, those that were sent last."""
        weights: WeightsVersion = self._ask("resend", digest)
        self.resent[weights.digest] = weights
        return weights

    def _meet(self) -> list[Exception]:
        """Let all who can take part have a group, the first rank alone if that comes to nothing; what went wrong."""
        able = [worker for worker in self.workers() if self._can(worker)]
        if able == self.members:
            return []
        problems = self._join(able)
        if problems and (further := self._join([])):
            raise further[0]
        return problems

    def _can(self, worker: Member) -> bool:
        """Whether a worker has loaded, lives as far as is known, and does not hang in an earlier transfer."""
        if worker in self.hanging and self.placement.wait([self.hanging[worker]], timeout=0):
            del self.hanging[worker]
        return worker.ready and worker not in self.dead and worker not in self.hanging

    def _join(self, workers: Sequence[Member]) -> list[Exception]:
        """What went wrong."""
        self.name, self.members = f"weights-{next(self.groups)}", workers
        where, world = (*self.store, self.name), 1 + len(workers)
        joining = {worker.beside("join", *where, rank, world, TIMEOUT): worker for rank, worker in enumerate(workers, 1)}
        return self._together([self.first.start("join", *where, world, TIMEOUT)], joining)[1]

    def _together(self, sending: Sequence[Call], receiving: Mapping[Call, Member]) -> tuple[set[Member], list[Exception]]:
        """(workers that took part to the end, what went wrong); with the first problem the group is given up."""
        problems: dict[Call, Exception] = {}
        waiting: Sequence[Call] = [*sending, *receiving]
        while waiting:
            patience = GRACE if problems else TIMEOUT
            ended, found = self._next(waiting, sending, receiving, patience)
            if found and not problems:
                self._give_up()
            problems |= found
            waiting = [call for call in waiting if call not in ended]
        return {worker for call, worker in receiving.items() if call not in problems}, list(problems.values())

    def _next(
        self, waiting: Sequence[Call], sending: Sequence[Call], receiving: Mapping[Call, Member], patience: float
    ) -> tuple[Sequence[Call], dict[Call, Exception]]:
        """(calls that are not to be waited for any longer, what went wrong with them)."""
        try:
            # The ranks have time-outs of their own, and more to do than to send.
            ended = self.placement.wait(waiting, None if any(call in waiting for call in sending) else patience)
        except BroadcastError as error:  # of the first rank
            return sending, {sending[0]: error}
        if not ended:
            late = {receiving[call]: call for call in waiting}
            self.hanging |= late
            who = ", ".join(str(worker.index) for worker in late)
            return waiting, dict.fromkeys(waiting, BroadcastError(f"no answer from rollout worker {who} for {patience} s"))
        found = {call: self._problem(call, receiving[call]) for call in ended if call in receiving}
        return ended, {call: problem for call, problem in found.items() if problem}

    def _problem(self, call: Call, worker: Member) -> Exception | None:
        """Why a worker could not take part."""
        try:
            self.placement.report(call)
        except WorkerDied as error:
            self.dead.add(worker)
            return error
        except BroadcastError as error:
            return error
        return None

    def _give_up(self) -> None:
        """Let nobody wait any longer for what will not come."""
        self.first.beside("abort", self.name)
        for worker in self.members or ():
            worker.beside("leave")
        self.members = None

    def _ask(self, method: str, *arguments: Any) -> Any:
        """What the first rank says, whatever else it is doing."""
        call = self.first.beside(method, *arguments)
        self.placement.wait([call], None)
        return self.placement.report(call)
