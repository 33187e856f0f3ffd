"""What Flyte's API knows of executions: how they ended, also those that were aborted or whose pods
never started, and whether a person has answered.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ebbflow.tracking.reconcile import Ending

ENDPOINT = "FLYTE_PLATFORM_URL"
"""Environment variable of flytekit: where Flyte's API is. Pods have it if the deployment's ``env``
names it.
"""


def find_ending(execution: str) -> Ending | None:
    """Find how an execution has ended; None if it has not, or if Flyte does not know it.

    Args:
        execution: "project/domain/name".
    """
    from flytekit.configuration import Config
    from flytekit.exceptions.user import FlyteEntityNotExistException
    from flytekit.models.core.execution import WorkflowExecutionPhase
    from flytekit.models.core.identifier import WorkflowExecutionIdentifier
    from flytekit.remote import FlyteRemote

    from ebbflow.tracking.reconcile import Ending

    remote = FlyteRemote(Config.auto())
    try:
        record = remote.client.get_execution(WorkflowExecutionIdentifier(*execution.split("/")))
    except FlyteEntityNotExistException:
        return None
    phase = WorkflowExecutionPhase.enum_to_string(record.closure.phase)
    reason = f"Flyte: {phase}"
    if phase in ("ABORTED", "ABORTING"):
        return Ending("KILLED", reason)
    if phase in ("FAILED", "TIMED_OUT"):
        return Ending("FAILED", reason)
    return Ending("FINISHED", reason) if phase == "SUCCEEDED" else None


def find_start(execution: str) -> datetime:
    """Find when an execution began.

    Args:
        execution: "project/domain/name".
    """
    from flytekit.configuration import Config
    from flytekit.models.core.identifier import WorkflowExecutionIdentifier
    from flytekit.remote import FlyteRemote

    client = FlyteRemote(Config.auto()).client
    record = client.get_execution(WorkflowExecutionIdentifier(*execution.split("/")))
    return record.closure.started_at.astimezone(UTC)


def is_answered(execution: str, gate: str) -> bool:
    """Return whether a gate node of an execution has its value.

    Args:
        execution: "project/domain/name".
    """
    from flytekit.configuration import Config
    from flytekit.remote import FlyteRemote

    project, domain, name = execution.split("/")
    signals = FlyteRemote(Config.auto()).list_signals(name, project, domain)
    return any(signal.id.signal_id == gate and signal.HasField("value") for signal in signals)


def refuse(execution: str, gate: str) -> None:
    """Answer false at a gate node of an execution."""
    from flytekit.configuration import Config
    from flytekit.remote import FlyteRemote

    project, domain, name = execution.split("/")
    FlyteRemote(Config.auto()).set_input(gate, name, False, project, domain, python_type=bool)
