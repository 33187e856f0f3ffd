"""Launch plans and approval, as a cluster gets to see them: decoded from the package, and from the
dynamic's own compilation.
"""

from __future__ import annotations

import tarfile
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from flyteidl.admin import launch_plan_pb2
from flytekit import FlyteContextManager
from flytekit.configuration import Image, ImageConfig, SerializationSettings
from flytekit.core.context_manager import ExecutionState
from flytekit.core.type_engine import TypeEngine
from flytekit.models.core.execution import WorkflowExecutionPhase
from flytekit.models.dynamic_job import DynamicJobSpec
from flytekit.models.literals import Literal
from flytekit.models.types import SimpleType
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from ebbflow.data.records import Comparison, Evaluation, GateDecision, Registration, TrackedRun
from ebbflow.recipe import Recipe, load_recipe
from tasks.deployment import DeploymentConfig
from tasks.promote_policy import promote_policy
from tasks.register_policy import register_policy
from tasks.request_approval import ApprovalError, request_approval
from tasks.start_run import start_run
from tasks.types import BaseModelArtifact, ChampionPolicy, EvaluatedPolicy, TrainedPolicy
from tasks.write_report import Report, write_report
from tests.pipeline.conftest import ROOT, package
from workflows import launch_plans
from workflows.post_training import conclude

GLYPH = load_recipe(ROOT / "workflows" / "recipes" / "glyph.yaml")


# --- launch plans


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, launch_plan_pb2.LaunchPlan]:
    with tarfile.open(package(tmp_path_factory.mktemp("package"))) as archive:
        files = [archive.extractfile(member) for member in archive if member.name.endswith("_3.pb")]
        decoded = [launch_plan_pb2.LaunchPlan.FromString(file.read()) for file in files if file]
    return {plan.id.name: plan for plan in decoded}


def _recipe(literal: Any) -> Recipe:
    value = TypeEngine.to_python_value(
        FlyteContextManager.current_context(), Literal.from_flyte_idl(literal), Recipe
    )
    assert isinstance(value, Recipe)
    return value


def test_the_nightly_plan_runs_at_two_with_a_fixed_recipe(
    plans: dict[str, launch_plan_pb2.LaunchPlan],
) -> None:
    spec = plans["workflows.launch_plans.nightly"].spec
    assert spec.workflow_id.name == "workflows.post_training.post_train"
    assert spec.entity_metadata.schedule.cron_schedule.schedule == "0 2 * * *"
    assert spec.entity_metadata.schedule.kickoff_time_input_arg == ""
    assert list(spec.fixed_inputs.literals) == ["recipe"]
    assert list(spec.default_inputs.parameters) == []
    recipe = _recipe(spec.fixed_inputs.literals["recipe"])
    assert recipe.promotion.approval == 72
    assert recipe.model_dump(exclude={"promotion": {"approval"}}) == GLYPH.model_dump(
        exclude={"promotion": {"approval"}}
    )


def test_the_manual_plan_has_a_default_recipe_and_no_schedule(
    plans: dict[str, launch_plan_pb2.LaunchPlan],
) -> None:
    spec = plans["workflows.launch_plans.manual"].spec
    assert spec.workflow_id.name == "workflows.post_training.post_train"
    assert not spec.entity_metadata.HasField("schedule")
    assert list(spec.fixed_inputs.literals) == []
    (parameter,) = spec.default_inputs.parameters.values()
    assert not parameter.required
    assert _recipe(parameter.default).promotion.approval == 72


def test_the_launch_plans_have_a_recipe_and_a_workflow_alone_asks_for_one(
    plans: dict[str, launch_plan_pb2.LaunchPlan],
) -> None:
    # A schedule that lacks an input fails without a word.
    assert len(plans) == 4
    for name, plan in plans.items():
        parameters = plan.spec.default_inputs.parameters
        assert {*parameters, *plan.spec.fixed_inputs.literals} == {"recipe"}
        assert all(
            parameter.required == name.startswith("workflows.post_training.")
            for parameter in parameters.values()
        )


def test_a_plan_notifies_those_whom_the_deployment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"email": ["team@example.com"], "slack": ["channel@example.com"], "phases": ["FAILED"]}
    monkeypatch.setattr(
        launch_plans, "DEPLOYMENT", DeploymentConfig.model_validate({"notifications": said})
    )
    email, slack = (
        notification.to_flyte_idl() for notification in launch_plans._build_notifications()
    )
    assert list(email.email.recipients_email) == said["email"]
    assert list(slack.slack.recipients_email) == said["slack"]
    assert list(email.phases) == list(slack.phases) == [WorkflowExecutionPhase.FAILED]


def test_a_plan_runs_as_the_service_account_of_the_deployment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert launch_plans._build_security_context() is None
    deployment = DeploymentConfig(service_account="trainer")
    monkeypatch.setattr(launch_plans, "DEPLOYMENT", deployment)
    context = launch_plans._build_security_context()
    assert context is not None
    assert context.run_as.k8s_service_account == "trainer"


class Started(Exception):
    """Carries the recipe that a run began with."""


@pytest.mark.parametrize(
    "plan", [launch_plans.nightly, launch_plans.manual], ids=["nightly", "manual"]
)
def test_called_in_python_they_run_their_recipe(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []

    def begin(recipe: Recipe) -> TrackedRun:
        begun.append(recipe)
        raise Started

    monkeypatch.setattr(start_run, "_task_function", begin)
    with pytest.raises(Started):
        plan()
    assert [recipe.promotion.approval for recipe in begun] == [72]


def test_the_recipe_is_named_when_registering(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text("name: mine\npromotion: {approval: 5}\n")
    monkeypatch.setenv("EBBFLOW_RECIPE", str(tmp_path / "mine.yaml"))
    recipe = launch_plans._read_recipe_with_approval()
    assert (recipe.name, recipe.promotion.approval) == ("mine", 5)


# --- approval

EVALUATION = Evaluation(
    label="before",
    policy_version=0,
    held_out={"reward": 0.5},
    validation={},
    coverage=1.0,
    velocity_drift=0.0,
    seconds={},
)
TARGET = Comparison(
    metric="reward", champion=0.5, candidate=0.9, difference=0.4, low=0.3, high=0.5, prompts=128
)


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, Any]:
    """What ``conclude`` gets after a gate that said yes."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "samples.parquet").write_bytes(b"")
    folder = FlyteDirectory(str(tmp_path / "folder"))
    evaluated = EvaluatedPolicy(
        policy=TrainedPolicy(folder=folder),
        evaluation=EVALUATION,
        samples=FlyteFile(str(tmp_path / "samples.parquet")),
    )
    store = f"sqlite:///{tmp_path}/mlflow.db"
    return {
        "recipe": Recipe(promotion={"approval": 48}),  # type: ignore[arg-type]
        "run": TrackedRun(
            run_id="r",
            experiment_id="0",
            tracking_uri=store,
            folder=str(tmp_path),
            recipe_digest="d",
            started_at=0.0,
        ),
        "base": BaseModelArtifact(folder=folder, seconds=0.0, finished_at=0.0),
        "prompts": FlyteFile(str(tmp_path / "samples.parquet")),
        "history": [evaluated],
        "candidate": evaluated,
        "champion": ChampionPolicy(version="1", evaluated=evaluated),
        "decision": GateDecision(
            promote=True,
            candidate="before",
            champion="v1",
            target=TARGET,
            guardrails=[],
            coverage=1.0,
            reasons=["It won."],
        ),
    }


def _compiled(inputs: dict[str, Any]) -> DynamicJobSpec:
    """``conclude`` as its pod compiles it, once: a dynamic keeps the nodes that it has compiled."""
    conclude._wf = None
    image = Image("default", "ebbflow", "test")
    settings = SerializationSettings(ImageConfig(image, [image]), "project", "domain", "version")
    context = FlyteContextManager.current_context().with_serialization_settings(settings).build()
    assert context.execution_state
    state = context.execution_state.with_params(mode=ExecutionState.Mode.TASK_EXECUTION)
    with FlyteContextManager.with_context(context.with_execution_state(state)) as context:
        types = conclude.python_interface.inputs
        spec = conclude.dispatch_execute(
            context, TypeEngine.dict_to_literal_map(context, inputs, types)
        )
    assert isinstance(spec, DynamicJobSpec)
    return spec


def _order(spec: DynamicJobSpec) -> list[str]:
    """The nodes by their tasks' short names, the gate node as what its signal is called, each after
    what it waits for.
    """
    names: dict[str, str] = {}
    waiting = {node.id: node for node in spec.nodes}
    while waiting:
        ready = [
            node for node in waiting.values() if not set(node.upstream_node_ids) & set(waiting)
        ]
        (node,) = ready  # one at a time: the order is the only one there can be
        del waiting[node.id]
        gate = node.gate_node
        names[node.id] = (
            gate.signal.signal_id if gate else node.task_node.reference_id.name.rsplit(".")[-1]
        )
    return list(names.values())


def test_on_a_cluster_a_person_is_asked_between_two_reports(inputs: dict[str, Any]) -> None:
    spec = _compiled(inputs)
    asked = [
        "register_policy",
        "write_report",
        "request_approval",
        "promotion",
        "promote_policy",
        "write_report",
    ]
    assert _order(spec) == asked
    (gate,) = [node for node in spec.nodes if node.gate_node]
    assert gate.metadata.timeout == timedelta(hours=48)
    (promotion,) = [
        node
        for node in spec.nodes
        if node.task_node and node.task_node.reference_id.name.endswith("promote_policy")
    ]
    (answer,) = [binding for binding in promotion.inputs if binding.var == "answer"]
    assert answer.binding.promise.node_id == gate.id, "what promotes waits for the answer"
    assert gate.gate_node.signal.output_variable_name == answer.binding.promise.var
    assert gate.gate_node.signal.type.simple == SimpleType.BOOLEAN


def test_nobody_is_asked_when_the_recipe_does_not_say_so(inputs: dict[str, Any]) -> None:
    assert _order(_compiled(inputs | {"recipe": Recipe()})) == [
        "register_policy",
        "promote_policy",
        "write_report",
    ]


def test_nobody_is_asked_about_what_the_gate_refused(inputs: dict[str, Any]) -> None:
    refused = inputs["decision"].model_copy(update={"promote": False})
    assert _order(_compiled(inputs | {"decision": refused})) == ["register_policy", "write_report"]


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What a local ``conclude`` did, whose tasks do nothing else; there is a terminal."""
    done: list[str] = []
    page = tmp_path / "page.html"
    page.write_text("")

    def register(**_: Any) -> Registration:
        done.append("registered")
        return Registration(model_name="m", version="3", champion=False, previous=None)

    def promote(registration: Registration, question: str, answer: bool, **_: Any) -> Registration:
        done.append(f"{'promoted' if answer else 'declined'}: {question}")
        return registration.model_copy(update={"champion": answer, "declined": not answer})

    def report(registration: Registration, **_: Any) -> Report:
        outcome = "champion" if registration.champion else "challenger"
        done.append("reported declined" if registration.declined else f"reported {outcome}")
        return Report(FlyteFile(str(page)), FlyteFile(str(page)))

    monkeypatch.setattr(register_policy, "_task_function", register)
    monkeypatch.setattr(promote_policy, "_task_function", promote)
    monkeypatch.setattr(write_report, "_task_function", report)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr(
        "ebbflow.tracking.child_run.open_node_run", lambda run, node: nullcontext(MagicMock())
    )
    return done


def test_here_the_question_is_asked_on_the_terminal(
    inputs: dict[str, Any],
    done: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("click.prompt", lambda text, type: True)
    conclude(**inputs)
    question = "m version 3 as champion (reward 0.500 -> 0.900; "
    assert question in caplog.text
    assert [step.partition(":")[0] for step in done] == [
        "registered",
        "reported challenger",
        "promoted",
        "reported champion",
    ]
    assert question in done[2]


def test_a_no_leaves_the_challenger_and_its_report(
    inputs: dict[str, Any], done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("click.prompt", lambda text, type: False)
    conclude(**inputs)
    assert [step.partition(":")[0] for step in done] == [
        "registered",
        "reported challenger",
        "declined",
        "reported declined",
    ]


def test_without_a_terminal_nothing_is_promoted(
    inputs: dict[str, Any], done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    monkeypatch.setattr("click.prompt", lambda text, type: True)
    with pytest.raises(
        ApprovalError, match=r"no terminal .* version 3 of 'm' stays challenger.*in a terminal"
    ):
        conclude(**inputs)
    assert done == ["registered", "reported challenger"]
    assert request_approval.name
