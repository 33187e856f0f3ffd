"""A Flyte that runs somewhere: start executions there, wait for their nodes, and reach their
pods."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from flyteidl.admin.execution_pb2 import (
    ExecutionRecoverRequest,
    ExecutionTerminateRequest,
    WorkflowExecutionGetRequest,
)
from flyteidl.admin.node_execution_pb2 import NodeExecutionListRequest
from flyteidl.admin.task_execution_pb2 import TaskExecutionListRequest
from flyteidl.core.catalog_pb2 import CatalogCacheStatus
from flyteidl.core.execution_pb2 import NodeExecution, TaskExecution, WorkflowExecution
from flyteidl.core.identifier_pb2 import NodeExecutionIdentifier, WorkflowExecutionIdentifier
from flytekit.exceptions.system import FlyteSystemUnavailableException
from flytekit.remote import FlyteRemote

POLL_SECONDS = 3
MAPPED = re.compile(r"map_(.+)_[0-9a-f]{32}-arraynode")
"""The name that flytekit gives to a mapped task."""
FINAL = ("SUCCEEDED", "FAILED", "ABORTED", "TIMED_OUT")
"""Phases in which an execution stays."""


class EngineError(Exception):
    """An execution did not do what a test waits for: names its nodes and their last messages."""


@dataclass(frozen=True)
class Attempt:
    """An attempt of the task of a node, as the engine tells of it.

    Example:
        ``Attempt("n5-0-dn0", "tasks.train_online.train_online", 0, "RUNNING", "DISABLED", "")``
    """

    node: str
    task: str
    """Its full name."""
    number: int
    phase: str
    cache: str
    """CACHE_HIT, CACHE_POPULATED ..."""
    message: str
    """Its error, or the last that the engine said about it."""
    cached_in: str = ""
    """The execution whose outputs were taken; empty: those of none."""

    @property
    def short_task(self) -> str:
        """The task's name without its module; of a mapped task, that of the task that is mapped."""
        name = self.task.rpartition(".")[2]
        mapped = MAPPED.fullmatch(name)
        return mapped[1] if mapped else name


@dataclass(frozen=True)
class Execution:
    """An execution of a workflow."""

    remote: FlyteRemote
    id: WorkflowExecutionIdentifier

    @property
    def name(self) -> str:
        return self.id.name

    def read_phase(self) -> str:
        return WorkflowExecution.Phase.Name(self._read().closure.phase)

    def read_error(self) -> str:
        """Read why it failed, as the console's error box shows it; empty: it did not fail."""
        return str(self._read().closure.error.message)

    def list_attempts(self) -> list[Attempt]:
        """List every attempt of every task so far, in the order in which their nodes began."""
        return list(self._iterate_attempts(""))

    def attempts_of(self, task: str) -> list[Attempt]:
        """List the attempts of a task, which is named without its module."""
        return [attempt for attempt in self.list_attempts() if attempt.short_task == task]

    def wait_for_end(self, max_seconds: float, expected: str = "SUCCEEDED") -> None:
        """Wait until the execution has ended.

        Raises:
            EngineError: it has not ended in time, or in another phase.
        """
        self.wait_until(
            lambda: self.read_phase() in FINAL, f"the end of {self.name}", max_seconds, ends=True
        )
        phase = self.read_phase()
        if phase != expected:
            raise EngineError(f"{self.name} is {phase}: {self.read_error()}\n{self._describe()}")

    def wait_for_task(self, task: str, phases: tuple[str, ...], max_seconds: float) -> Attempt:
        """Wait until an attempt of a task is in one of these phases, and return the newest."""

        def newest() -> list[Attempt]:
            return [one for one in self.attempts_of(task) if one.phase in phases]

        self.wait_until(newest, f"{task} to be {' or '.join(phases)}", max_seconds)
        return newest()[-1]

    def wait_until(
        self, condition: Callable[[], Any], what: str, max_seconds: float, ends: bool = False
    ) -> None:
        """Wait until ``condition()`` holds.

        Args:
            what: is waited for, for the message.
            ends: the end of the execution is not too early.

        Raises:
            EngineError: the condition does not hold in time, or the execution ended before.
        """
        deadline = time.monotonic() + max_seconds
        phase = "unknown"
        while True:
            # A platform restarts its Flyte, and executions go on after that.
            with suppress(FlyteSystemUnavailableException):
                # Read first: what the condition then finds includes all that came before the end.
                phase = self.read_phase()
                if condition():
                    return
                if phase in FINAL and not ends:
                    raise EngineError(
                        f"{self.name} is {phase}, before {what}: {self.read_error()}\n"
                        f"{self._describe()}"
                    )
            if time.monotonic() > deadline:
                raise EngineError(
                    f"no {what} in {max_seconds:.0f} s; {self.name} is {phase}\n{self._describe()}"
                )
            time.sleep(POLL_SECONDS)

    def abort(self, cause: str) -> None:
        self.remote.client.raw.terminate_execution(
            ExecutionTerminateRequest(id=self.id, cause=cause)
        )

    def recover(self, name: str) -> Execution:
        """Start the execution again with what its succeeded nodes have left."""
        request = ExecutionRecoverRequest(id=self.id, name=name)
        return Execution(self.remote, self.remote.client.raw.recover_execution(request).id)

    def answer(self, gate: str, value: bool) -> None:
        """Answer a gate that waits for a value, as the console does."""
        self.remote.set_input(
            gate, self.name, value, self.id.project, self.id.domain, python_type=bool
        )

    def list_gates(self) -> list[str]:
        """List the gates that were reached."""
        return [signal.id.signal_id for signal in self.remote.list_signals(self.name)]

    def is_asked(self, gate: str) -> bool:
        """Return whether the question of a gate is written and the gate waits for its answer."""
        asked = any(one.phase == "SUCCEEDED" for one in self.attempts_of("request_approval"))
        return asked and gate in self.list_gates()

    def _read(self) -> Any:
        return self.remote.client.raw.get_execution(WorkflowExecutionGetRequest(id=self.id))

    def _iterate_attempts(self, parent: str) -> Iterator[Attempt]:
        for node in self._iterate_nodes(parent):
            metadata = node.closure.task_node_metadata
            cache = CatalogCacheStatus.Name(metadata.cache_status)
            if cache == "CACHE_HIT":
                # Such a node runs no task; the catalog knows of which one the outputs are.
                source = metadata.catalog_key.source_task_execution
                yield Attempt(
                    node=node.id.node_id,
                    task=source.task_id.name,
                    number=0,
                    phase="SUCCEEDED",
                    cache=cache,
                    message="",
                    cached_in=source.node_execution_id.execution_id.name,
                )
            for task in self._list_tasks(node.id):
                closure = task.closure
                yield Attempt(
                    node=node.id.node_id,
                    task=task.id.task_id.name,
                    number=task.id.retry_attempt,
                    phase=TaskExecution.Phase.Name(closure.phase),
                    cache=cache,
                    message=closure.error.message or closure.reason,
                )
            if node.metadata.is_parent_node:
                yield from self._iterate_attempts(node.id.node_id)

    def _iterate_nodes(self, parent: str) -> Iterator[Any]:
        token = ""
        while True:
            request = NodeExecutionListRequest(
                workflow_execution_id=self.id, limit=100, token=token, unique_parent_id=parent
            )
            listed = self.remote.client.raw.list_node_executions_paginated(request)
            yield from sorted(
                listed.node_executions, key=lambda node: node.closure.created_at.ToNanoseconds()
            )
            token = listed.token
            if not token:
                return

    def _list_tasks(self, node: NodeExecutionIdentifier) -> list[Any]:
        request = TaskExecutionListRequest(node_execution_id=node, limit=100)
        listed = self.remote.client.raw.list_task_executions_paginated(request).task_executions
        return sorted(listed, key=lambda task: int(task.id.retry_attempt))

    def _describe(self) -> str:
        """Describe what has not succeeded, with the last that the engine said about it."""
        lines = [
            f"  {attempt.node} {attempt.short_task} attempt {attempt.number}: {attempt.phase}"
            f" {attempt.message[-2000:]}"
            for attempt in self.list_attempts()
            if attempt.phase != "SUCCEEDED"
        ]
        waiting = [
            f"  {node.id.node_id}: {NodeExecution.Phase.Name(node.closure.phase)}"
            for node in self._iterate_nodes("")
            if NodeExecution.Phase.Name(node.closure.phase) not in ("SUCCEEDED", "RECOVERED")
        ]
        return "\n".join([*waiting, *lines])


def list_deck_links(execution: Execution, node: str) -> list[str]:
    """List the addresses from which the console reads the deck of a node."""
    response = execution.remote.client.get_download_artifact_signed_url(
        node,
        execution.id.project,
        execution.id.domain,
        execution.name,
        expires_in=timedelta(minutes=5),
    )
    return list(response.pre_signed_urls.signed_url)
