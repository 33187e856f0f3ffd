"""Start a registered version of the pipeline on a Flyte cluster (``ebbflow submit``)."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flytekit.configuration import Config
from flytekit.exceptions.base import FlyteException
from flytekit.exceptions.system import FlyteSystemException
from flytekit.exceptions.user import FlyteEntityNotExistException, FlyteTimeout
from flytekit.models.core.execution import WorkflowExecutionPhase
from flytekit.remote import FlyteRemote

from ebbflow.data.records import GateDecision, Registration, TrackedRun
from ebbflow.launch import SubmitError, pin_rewards
from ebbflow.recipe import load_recipe
from ebbflow.storage.sources import SUBMITTED
from tasks.sources import describe_submitted_sources
from tasks.transformers import write_recipe_text

LAUNCH_PLAN = "workflows.launch_plans.manual"
FIRST_TASK = "tasks.start_run.start_run"
POLL_SECONDS = 10
MAX_SILENT_SECONDS = 1800
"""How long ``--wait`` goes on asking a Flyte that does not answer: longer than its restart takes.
The execution goes on meanwhile.
"""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Target:
    """Where on Flyte: project, domain and registered version; None is the newest."""

    project: str
    domain: str
    version: str | None = None


def submit(
    recipe: str,
    target: Target,
    wait: bool,
    echo: Callable[[str], object],
    overwrite_cache: bool = False,
    remote: Any = None,
) -> bool:
    """Start the registered version with a recipe; print the address in Flyte's console, and at the
    end what came out.

    Args:
        recipe: a YAML file, or what the version itself can find: a name or a URI.
        wait: until the execution has ended.
        echo: prints a line.
        overwrite_cache: runs cached tasks again, and replaces their entries.
        remote: a ``FlyteRemote``; default: that of flytekit's configuration.

    Returns:
        whether the execution has succeeded, as far as that was waited for.

    Raises:
        RecipeError: the file is no recipe.
        SubmitError: Flyte does not answer, has no such version, or does not take the execution.
    """
    # A file of this machine travels as text; a name and a URI mean the same to every pod.
    is_named = "://" in recipe or (recipe.isidentifier() and not Path(recipe).is_file())
    text = recipe
    if not is_named:
        # Without the store: this machine's address of it may be a port that is forwarded.
        text = write_recipe_text(pin_rewards(load_recipe(recipe), with_store=False))
    try:
        remote = remote or FlyteRemote(Config.auto(), target.project, target.domain)
        plan = _fetch_launch_plan(remote, target)
        _compare_sources(remote, plan.id, echo)
        inputs = {"recipe": text, "approval_hours": 0.0}
        execution = remote.execute(plan, inputs=inputs, overwrite_cache=overwrite_cache)
        echo(f"execution {execution.id.name} of version {plan.id.version}")
        echo(remote.generate_console_url(execution))
        return _wait_for_end(remote, execution, echo) if wait else True
    except FlyteException as error:
        raise SubmitError(
            f"Flyte refused, or does not answer: {error}. Its address is in ~/.flyte/config.yaml,"
            " FLYTECTL_CONFIG or FLYTE_PLATFORM_URL"
        ) from error


def _fetch_launch_plan(remote: Any, target: Target) -> Any:
    where = f"{target.project}/{target.domain}"
    try:
        return remote.fetch_launch_plan(name=LAUNCH_PLAN, version=target.version)
    except FlyteEntityNotExistException as error:
        version = f"version {target.version!r}" if target.version else "any version"
        raise SubmitError(
            f"{LAUNCH_PLAN} is not registered in {where} in {version}: register the workflows"
            " (containers/README.md, Versions), or name another --version, --project or --domain."
            " `pyflyte run --remote` registers no launch plan"
        ) from error


def _compare_sources(remote: Any, plan: Any, echo: Callable[[str], object]) -> None:
    """Say which packages of the version differ from those of this clone: its own are what runs."""
    task = remote.fetch_task(name=FIRST_TASK, version=plan.version)
    (container,) = task.k8s_pod.pod_spec["containers"]
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    registered = json.loads(variables.get(SUBMITTED) or "{}")
    here = json.loads(describe_submitted_sources())
    differing = sorted(name for name in registered if here.get(name) != registered[name])
    if differing:
        echo(
            f"version {plan.version} runs its own {', '.join(differing)}, which differ from those"
            " here; `pyflyte run --remote --copy all` runs these"
        )


def _read_execution(remote: Any, execution: Any, echo: Callable[[str], object]) -> Any:
    """Read the state of an execution, and ask again while Flyte does not answer.

    Raises:
        FlyteException: Flyte refused, or did not answer for ``MAX_SILENT_SECONDS``.
    """
    deadline = time.monotonic() + MAX_SILENT_SECONDS
    is_silent = False
    while True:
        try:
            return remote.sync(execution, sync_nodes=False)
        except (FlyteSystemException, FlyteTimeout) as error:
            if time.monotonic() > deadline:
                raise
            if not is_silent:
                echo(
                    f"Flyte does not answer ({error}); asking again for up to"
                    f" {MAX_SILENT_SECONDS / 60:g} minutes, while the execution goes on"
                )
                is_silent = True
            time.sleep(POLL_SECONDS)


def _wait_for_end(remote: Any, execution: Any, echo: Callable[[str], object]) -> bool:
    """Wait, print each new phase, and what came out; return whether it succeeded."""
    shown = None
    while True:
        execution = _read_execution(remote, execution, echo)
        phase = WorkflowExecutionPhase.enum_to_string(execution.closure.phase)
        if phase != shown:
            echo(phase)
            shown = phase
        if execution.is_done:
            break
        time.sleep(POLL_SECONDS)
    if not execution.is_successful:
        error = execution.error
        echo(error.message if error else "no error was reported")
        return False
    decision = execution.outputs.get("decision", GateDecision)
    registration = execution.outputs.get("registration", Registration)
    run = execution.outputs.get("run", TrackedRun)
    outcome = "promoted to champion" if registration.champion else "not promoted"
    if registration.declined:
        outcome = "not approved by a person"
    echo(f"{registration.model_name} version {registration.version}: {outcome}")
    for reason in decision.reasons:
        echo(f"  {reason}")
    echo(f"report {run.folder}/report.html, MLflow run {run.run_id}")
    return True
