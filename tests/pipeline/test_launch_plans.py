"""Launch plans and approval, as a cluster gets to see them: decoded from the package, and from the
dynamic's own compilation.
"""

from __future__ import annotations

import json
import re
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
from flytekit.models.dynamic_job import DynamicJobSpec
from flytekit.models.literals import Literal
from flytekit.models.types import SimpleType
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from ebbflow.data.records import Comparison, GateDecision, Registration, TrackedRun
from ebbflow.recipe import Recipe, RecipeError, load_recipe
from tasks.deployment import DeploymentConfig
from tasks.promote_policy import promote_policy
from tasks.read_recipe import read_recipe
from tasks.register_policy import register_policy
from tasks.request_approval import ApprovalError, request_approval
from tasks.schedules import ScheduleConfig
from tasks.start_run import start_run
from tasks.transformers import write_recipe_text
from tasks.types import BaseModelArtifact, ChampionPolicy, EvaluatedPolicy, TrainedPolicy
from tasks.write_report import Report, write_report
from tests.pipeline.conftest import ROOT, package
from tests.pipeline.records import make_evaluation
from workflows import launch_plans
from workflows.post_training import conclude

GLYPH = load_recipe(ROOT / "workflows" / "recipes" / "glyph.yaml")


# --- launch plans


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, launch_plan_pb2.LaunchPlan]:
    folder = tmp_path_factory.mktemp("package")
    for name in ("first", "second"):
        (folder / f"{name}.yaml").write_text(f"name: {name}\noutput: s3://bucket/runs\n")
    schedules = [
        {"name": "weekly", "recipe": str(folder / "first.yaml"), "cron": "30 4 * * 1"},
        {
            "name": "second",
            "recipe": str(folder / "second.yaml"),
            "approval": 5,
            "notifications": {"email": ["second@example.com"]},
        },
    ]
    deployment = {"schedules": schedules, "notifications": {"slack": ["all@example.com"]}}
    with tarfile.open(package(folder, deployment=json.dumps(deployment))) as archive:
        files = [archive.extractfile(member) for member in archive if member.name.endswith("_3.pb")]
        decoded = [launch_plan_pb2.LaunchPlan.FromString(file.read()) for file in files if file]
    return {plan.id.name: plan for plan in decoded}


def _recipe(literal: Any) -> Recipe:
    value = TypeEngine.to_python_value(
        FlyteContextManager.current_context(), Literal.from_flyte_idl(literal), Recipe
    )
    assert isinstance(value, Recipe)
    return value


def test_each_schedule_of_the_deployment_is_a_plan_with_its_recipe(
    plans: dict[str, launch_plan_pb2.LaunchPlan],
) -> None:
    expected = {
        "weekly": ("first", 72, "30 4 * * 1", ["all@example.com"]),
        "second": ("second", 5, "0 2 * * *", ["second@example.com"]),
    }
    for name, (recipe_name, approval, cron, addresses) in expected.items():
        spec = plans[f"workflows.launch_plans.{name}"].spec
        assert spec.workflow_id.name == "workflows.retraining.retrain"
        schedule = spec.entity_metadata.schedule
        assert schedule.cron_schedule.schedule == cron
        assert schedule.kickoff_time_input_arg == "kickoff_time"
        assert spec.concurrency_policy.max == 1
        # Flyte fills in the time of the kickoff; everything else is fixed.
        assert list(spec.fixed_inputs.literals) == ["recipe"]
        assert list(spec.default_inputs.parameters) == ["kickoff_time"]
        recipe = _recipe(spec.fixed_inputs.literals["recipe"])
        assert (recipe.name, recipe.promotion.approval) == (recipe_name, approval)
        (notification,) = spec.entity_metadata.notifications
        kind = notification.email if name == "second" else notification.slack
        assert list(kind.recipients_email) == addresses


def test_the_manual_plan_has_a_default_recipe_and_no_schedule(
    plans: dict[str, launch_plan_pb2.LaunchPlan],
) -> None:
    spec = plans["workflows.launch_plans.manual"].spec
    assert spec.workflow_id.name == "workflows.post_training.post_train_by_name"
    assert not spec.entity_metadata.HasField("schedule")
    assert list(spec.fixed_inputs.literals) == []
    parameters = spec.default_inputs.parameters
    # Scalars, which the launch form shows.
    assert parameters["recipe"].default.scalar.primitive.string_value == "glyph"
    assert parameters["approval_hours"].default.scalar.primitive.float_value == 72


def test_the_manual_plan_shows_a_recipe_of_the_users(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\nseed: 3\n")
    monkeypatch.setenv("EBBFLOW_RECIPE", str(file))
    text = launch_plans._name_default_recipe()
    assert "\n" not in text
    assert read_recipe(recipe=text, approval_hours=0.0) == load_recipe(file)


@pytest.mark.parametrize("form", ["name", "text", "uri"])
def test_a_recipe_is_read_by_its_name_its_text_or_its_uri(form: str, tmp_path: Path) -> None:
    file = ROOT / "workflows" / "recipes" / "glyph.yaml"
    recipe = {"name": "glyph", "text": file.read_text(), "uri": file.as_uri()}[form]
    assert read_recipe(recipe=recipe, approval_hours=0.0) == GLYPH
    assert read_recipe(recipe=recipe, approval_hours=5.0).promotion.approval == 5
    promotion = GLYPH.promotion.model_copy(update={"approval": 1.0})
    asking = write_recipe_text(GLYPH.model_copy(update={"promotion": promotion}))
    assert read_recipe(recipe=asking, approval_hours=5.0).promotion.approval == 1


def test_an_unknown_recipe_names_the_known_ones() -> None:
    with pytest.raises(RecipeError, match=r"recipe = 'glif': give the URI .* glyph, "):
        read_recipe.task_function(recipe="glif", approval_hours=0.0)


def test_the_launch_plans_have_a_recipe_and_a_workflow_alone_asks_for_one(
    plans: dict[str, launch_plan_pb2.LaunchPlan],
) -> None:
    # A schedule that lacks an input fails without a word.
    assert len(plans) == 9
    for name, plan in plans.items():
        parameters = dict(plan.spec.default_inputs.parameters)
        parameters.pop("approval_hours", None)
        parameters.pop("kickoff_time", None)
        assert {*parameters, *plan.spec.fixed_inputs.literals} == {"recipe"}
        assert all(
            parameter.required == (not name.startswith("workflows.launch_plans."))
            for parameter in parameters.values()
        )


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


def test_called_in_python_the_manual_plan_runs_its_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []

    def begin(recipe: Recipe) -> TrackedRun:
        begun.append(recipe)
        raise Started

    monkeypatch.setattr(start_run, "_task_function", begin)
    with pytest.raises(Started):
        launch_plans.manual()
    assert [recipe.promotion.approval for recipe in begun] == [72]


def test_the_recipe_of_nightly_is_named_when_registering(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("EBBFLOW_RECIPE", raising=False)
    assert launch_plans._list_schedules() == []
    assert "no schedule is registered: list schedules in the deployment file" in caplog.text
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\noutput: s3://bucket/runs\npromotion: {approval: 5}\n")
    monkeypatch.setenv("EBBFLOW_RECIPE", str(file))
    (schedule,) = launch_plans._list_schedules()
    recipe = launch_plans._read_scheduled_recipe(schedule)
    assert (schedule.name, recipe.name, recipe.promotion.approval) == ("nightly", "mine", 5)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("output: runs\n", "output = 'runs' of .*mine.yaml is on the disk of this machine"),
        ("output: s3://b/r\nprompts: {source: signs.txt}\n", "prompts = '.*signs.txt' of .*mine"),
        (
            "output: s3://b/r\nstages: [{kind: offline, algorithm: {name: diffusion_dpo},"
            " pairs: signs.txt}]\n",
            "pairs or data = '.*signs.txt' of .*mine",
        ),
    ],
)
def test_a_schedule_that_would_always_fail_is_refused_when_registering(
    text: str, problem: str, tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    (tmp_path / "signs.txt").write_text("")
    with pytest.raises(RecipeError, match=f"schedule nightly: {problem}"):
        launch_plans._read_scheduled_recipe(ScheduleConfig(name="nightly", recipe=str(file)))


@pytest.mark.parametrize(
    ("prompts", "warns"),
    [
        ("{source: s3://b/p.txt}", True),
        ("{mixture: [{source: ebbflow:datasets/signs/prompts.txt}, {source: s3://b/p.txt}]}", True),
        ("{source: s3://b/p.txt, held_out_source: s3://b/judged.txt, held_out: 128}", False),
        ("{source: ebbflow:datasets/signs/prompts.txt}", False),
        ("{}", False),
    ],
)
def test_a_schedule_that_fails_once_its_prompt_file_changes_warns_when_registering(
    prompts: str, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"output: s3://b/r\nprompts: {prompts}\n")
    launch_plans._read_scheduled_recipe(ScheduleConfig(name="nightly", recipe=str(file)))
    warning = r"schedule nightly: .* of s3://b/p\.txt itself.*set prompts\.held_out_source"
    assert bool(re.search(warning, caplog.text)) == warns
    assert warns or not caplog.text


# --- approval

EVALUATION = make_evaluation({"reward": 0.5})
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
    what it waits for; those that run at the same time by their names.
    """
    names: dict[str, str] = {}
    waiting = {node.id: node for node in spec.nodes}
    while waiting:
        ready = [
            node for node in waiting.values() if not set(node.upstream_node_ids) & set(waiting)
        ]
        ready_names = {}
        for node in ready:
            del waiting[node.id]
            gate = node.gate_node
            ready_names[node.id] = (
                gate.signal.signal_id if gate else node.task_node.reference_id.name.rsplit(".")[-1]
            )
        names |= dict(sorted(ready_names.items(), key=lambda item: item[1]))
    return list(names.values())


def test_on_a_cluster_a_person_is_asked_between_two_reports(inputs: dict[str, Any]) -> None:
    spec = _compiled(inputs)
    asked = [
        "register_policy",
        "write_report",
        "request_approval",
        "promotion",
        "watch_approval",
        "promote_policy",
        "write_report",
    ]
    assert _order(spec) == asked
    (gate,) = [node for node in spec.nodes if node.gate_node]
    assert gate.metadata.timeout == timedelta(hours=49)
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
