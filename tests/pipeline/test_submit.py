"""``ebbflow submit``: what it sends to Flyte, and what it says."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from flytekit.exceptions.system import FlyteSystemException, FlyteSystemUnavailableException
from flytekit.exceptions.user import FlyteEntityNotExistException
from flytekit.models.core.execution import WorkflowExecutionPhase

from ebbflow.cli import main
from ebbflow.data.records import Registration
from ebbflow.launch import SubmitError
from ebbflow.recipe import RecipeError, load_recipe
from ebbflow.recipe.recipe_file import parse_recipe
from tasks.sources import describe_submitted_sources
from workflows import submit as module
from workflows.submit import Target, submit

TARGET = Target("p", "d")
REGISTRATION = Registration(model_name="m", version="7", champion=True, previous=None)


@dataclass
class FakeRemote:
    """As much of ``FlyteRemote`` as a submission needs: one version, whose execution ends."""

    phases: tuple[int, ...] = (WorkflowExecutionPhase.RUNNING, WorkflowExecutionPhase.SUCCEEDED)
    sources: str = field(default_factory=describe_submitted_sources)
    inputs: dict[str, Any] = field(default_factory=dict)
    network_errors: int = 0
    """How many requests for the state of the execution fail, before one is answered."""

    def fetch_launch_plan(self, name: str, version: str | None) -> Any:
        if version not in (None, "v2"):
            raise FlyteEntityNotExistException("no such version")
        assert name == "workflows.launch_plans.manual"
        return SimpleNamespace(id=SimpleNamespace(version="v2"))

    def fetch_task(self, name: str, version: str) -> Any:
        variables = [{"name": "EBBFLOW_SOURCES", "value": self.sources}]
        pod = SimpleNamespace(pod_spec={"containers": [{"env": variables}]})
        return SimpleNamespace(k8s_pod=pod)

    def execute(self, plan: Any, inputs: dict[str, Any], overwrite_cache: bool) -> Any:
        self.inputs = inputs
        self.overwrites_cache = overwrite_cache
        return SimpleNamespace(id=SimpleNamespace(name="a1"), calls=0)

    def generate_console_url(self, execution: Any) -> str:
        return "http://flyte/console/a1"

    def sync(self, execution: Any, sync_nodes: bool) -> Any:
        if self.network_errors:
            self.network_errors -= 1
            raise FlyteSystemUnavailableException("connection reset by peer")
        phase = self.phases[execution.calls]
        outputs = {
            "decision": SimpleNamespace(reasons=["it is better"]),
            "registration": REGISTRATION,
            "run": SimpleNamespace(folder="s3://runs/m-1", run_id="r1"),
        }
        is_successful = phase == WorkflowExecutionPhase.SUCCEEDED
        return SimpleNamespace(
            calls=execution.calls + 1,
            closure=SimpleNamespace(phase=phase),
            is_done=execution.calls + 1 == len(self.phases),
            is_successful=is_successful,
            error=SimpleNamespace(message="OutOfMemory: 8Gi"),
            outputs=SimpleNamespace(get=lambda name, kind: outputs[name]),
        )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nseed: 3\n")
    return path


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_SECONDS", 0)


def test_a_file_is_sent_as_its_text(file: Path) -> None:
    remote = FakeRemote()
    lines: list[str] = []
    assert submit(str(file), TARGET, False, lines.append, remote=remote)
    assert parse_recipe(remote.inputs["recipe"], "sent") == load_recipe(file)
    assert remote.inputs["approval_hours"] == 0
    assert lines == ["execution a1 of version v2", "http://flyte/console/a1"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_execution_may_overwrite_what_flytes_cache_points_at(overwrite: bool) -> None:
    remote = FakeRemote()
    submit("glyph", TARGET, False, lambda line: None, overwrite, remote)
    assert remote.overwrites_cache == overwrite


@pytest.mark.parametrize("name", ["glyph", "s3://bucket/mine.yaml"])
def test_a_name_is_sent_as_it_is(name: str) -> None:
    remote = FakeRemote()
    submit(name, TARGET, False, lambda line: None, remote=remote)
    assert remote.inputs["recipe"] == name


def test_waiting_prints_phases_and_the_outcome(file: Path) -> None:
    lines: list[str] = []
    assert submit(str(file), TARGET, True, lines.append, remote=FakeRemote())
    assert lines[2:] == [
        "RUNNING",
        "SUCCEEDED",
        "m version 7: promoted to champion",
        "  it is better",
        "report s3://runs/m-1/report.html, MLflow run r1",
    ]


def test_waiting_for_a_failure_prints_its_error(file: Path) -> None:
    lines: list[str] = []
    remote = FakeRemote(phases=(WorkflowExecutionPhase.FAILED,))
    assert not submit(str(file), TARGET, True, lines.append, remote=remote)
    assert lines[2:] == ["FAILED", "OutOfMemory: 8Gi"]


def test_waiting_survives_network_errors(file: Path) -> None:
    lines: list[str] = []
    assert submit(str(file), TARGET, True, lines.append, remote=FakeRemote(network_errors=3))
    silent = [line for line in lines if line.startswith("Flyte does not answer")]
    assert len(silent) == 1
    assert "up to 30 minutes" in silent[0]
    assert lines[-3] == "m version 7: promoted to champion"


def test_waiting_ends_when_flyte_stays_silent(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SILENT_SECONDS", 0)
    with pytest.raises(SubmitError, match="does not answer"):
        submit(str(file), TARGET, True, lambda line: None, remote=FakeRemote(network_errors=9))


def test_a_version_with_other_sources_says_so(file: Path) -> None:
    lines: list[str] = []
    sources = json.dumps(json.loads(describe_submitted_sources()) | {"tasks": "0"})
    submit(str(file), TARGET, False, lines.append, remote=FakeRemote(sources=sources))
    assert lines[0].startswith("version v2 runs its own tasks, which differ from those here")


def test_a_version_that_is_not_registered_is_an_error(file: Path) -> None:
    with pytest.raises(SubmitError, match=r"not registered in p/d in version 'v9'"):
        submit(str(file), Target("p", "d", "v9"), False, lambda line: None, remote=FakeRemote())


def test_a_recipe_that_is_missing_is_an_error_before_flyte_is_asked() -> None:
    with pytest.raises(RecipeError, match="no recipe at nowhere/mine.yaml"):
        submit("nowhere/mine.yaml", TARGET, False, lambda line: None)


def test_the_command_says_where_flyte_is_configured(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise FlyteSystemException("connection refused")

    monkeypatch.setattr(module, "FlyteRemote", fail)
    done = CliRunner().invoke(main, ["submit", str(file)])
    assert done.exit_code == 1
    assert "connection refused" in done.output
    assert "FLYTECTL_CONFIG" in done.output
