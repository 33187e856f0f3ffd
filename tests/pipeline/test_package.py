"""What a cluster gets to see: compiled offline, typed interfaces, stable names."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flyteidl.admin import launch_plan_pb2, task_pb2, workflow_pb2
from flyteidl.core import interface_pb2, types_pb2
from flyteidl.core.dynamic_job_pb2 import DynamicJobSpec
from flyteidl.core.tasks_pb2 import TaskTemplate
from flytekit import FlyteContextManager
from flytekit.configuration import ImageConfig, SerializationSettings
from flytekit.core.context_manager import ExecutionState
from flytekit.core.type_engine import TypeEngine
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile
from pydantic import BaseModel

from ebbflow.data.records import StageRecord, TrackedRun
from ebbflow.recipe import Recipe
from ebbflow.recipe.digest import select_set_keys
from tasks.types import BaseModelArtifact, EvaluatedPolicy, TrainedPolicy
from tests.pipeline.conftest import package
from tests.pipeline.records import make_evaluation
from workflows.post_training import train_rounds

NAMES = Path(__file__).with_name("entities.txt")
MAX_BYTES = 256 * 1024
"""An eighth of what Flyte's engine reads of a closure by default."""


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package")
    recipe = folder / "mine.yaml"
    recipe.write_text("output: s3://bucket/runs\n")
    return package(folder, recipe=str(recipe))


def _files(archive: Path) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(archive) as opened:
        for member in opened.getmembers():
            content = opened.extractfile(member)
            if content is not None and member.name.endswith(".pb"):
                yield member.name, content.read()


def _tasks(archive: Path) -> Iterator[TaskTemplate]:
    for name, data in _files(archive):
        if name.endswith("_1.pb"):
            yield task_pb2.TaskSpec.FromString(data).template


def _entities(archive: Path) -> Iterator[tuple[str, interface_pb2.TypedInterface]]:
    """(kind and name, interface) of every packaged entity."""
    for task in _tasks(archive):
        yield f"task {task.id.name}", task.interface
    for name, data in _files(archive):
        if name.endswith("_2.pb"):
            workflow = workflow_pb2.WorkflowSpec.FromString(data).template
            yield f"workflow {workflow.id.name}", workflow.interface
        elif name.endswith("_3.pb"):
            plan = launch_plan_pb2.LaunchPlan.FromString(data)
            yield f"launch plan {plan.id.name}", interface_pb2.TypedInterface()


def test_names_are_the_committed_ones(archive: Path) -> None:
    # Names are public API: renaming one orphans its history and its cache.
    assert sorted(name for name, _ in _entities(archive)) == NAMES.read_text().split("\n")[:-1]


def test_what_is_computed_is_cached_for_its_run_alone(archive: Path) -> None:
    shared = {
        "tasks.train_base_model.train_base_model",
        "tasks.download_base_model.download_base_model",
    }
    never = {
        f"tasks.{name}.{name}"
        for name in (
            "conclude_retraining",
            "end_failed_run",
            "plan_retraining",
            "plan_run",
            "read_recipe",
            "request_approval",
            "start_run",
            "train_reward_model",
            "watch_approval",
            "write_report",
        )
    }
    # One of its inputs is the digest of all that the latents depend on.
    by_digest = {"tasks.encode_data.encode_data": ["run", "recipe", "base", "round", "stage"]}
    for task in _tasks(archive):
        name = task.id.name
        about = task.metadata
        ignored = list(about.cache_ignore_input_vars)
        assert about.discoverable == (name.startswith("tasks.") and name not in never), name
        if about.discoverable:
            assert about.discovery_version, name
            assert "run" in task.interface.inputs.variables, name
            shared_inputs = by_digest.get(name, ["run"] if name in shared else [])
            assert ignored == shared_inputs, name


def test_the_console_shows_whole_sentences_about_tasks_workflows_and_inputs(archive: Path) -> None:
    checked = 0
    for name, data in _files(archive):
        if name.endswith("_1.pb"):
            spec: Any = task_pb2.TaskSpec.FromString(data)
        elif name.endswith("_2.pb"):
            spec = workflow_pb2.WorkflowSpec.FromString(data)
        else:
            continue
        checked += 1
        entity = spec.template.id.name
        assert spec.description.short_description.endswith("."), entity
        assert spec.description.long_description.value.startswith(
            spec.description.short_description
        ), entity
        for key, variable in spec.template.interface.inputs.variables.items():
            assert variable.description.endswith("."), f"{entity}: add {key} to INPUTS"
    assert checked > 30


def test_interfaces_hold_no_pickle_and_no_untyped_structure(archive: Path) -> None:
    checked = 0
    for name, interface in _entities(archive):
        for variable, described in [
            *interface.inputs.variables.items(),
            *interface.outputs.variables.items(),
        ]:
            for kind in _leaves(described.type):
                checked += 1
                assert not kind.blob.format.lower().startswith("pythonpickle"), (
                    f"{name}: {variable} is a pickle"
                )
                if kind.simple == types_pb2.STRUCT:
                    assert kind.HasField("annotation"), f"{name}: {variable} is no Pydantic model"
                assert kind.simple != types_pb2.BINARY, f"{name}: {variable} is untyped"
    assert checked > 50


def _leaves(kind: types_pb2.LiteralType) -> Iterator[types_pb2.LiteralType]:
    if kind.HasField("collection_type"):
        yield from _leaves(kind.collection_type)
    elif kind.HasField("map_value_type"):
        yield from _leaves(kind.map_value_type)
    elif kind.HasField("union_type"):
        for variant in kind.union_type.variants:
            yield from _leaves(variant)
    else:
        yield kind


def test_interfaces_and_closures_are_far_below_the_limits_of_the_engine(archive: Path) -> None:
    """Flyte's engine reads at most 2 MB of a closure by default, its gateway sends at most 4 MB."""
    for name, interface in _entities(archive):
        assert interface.ByteSize() < MAX_BYTES, name
    templates = {task.id.name: task for task in _tasks(archive)}
    for name, data in _files(archive):
        if name.endswith("_2.pb"):
            spec = workflow_pb2.WorkflowSpec.FromString(data)
            # The compiled closure of a workflow has the templates of all tasks that it names.
            used = {
                node.task_node.reference_id.name or node.array_node.node.task_node.reference_id.name
                for workflow in (spec.template, *spec.sub_workflows)
                for node in workflow.nodes
            }
            tasks = sum(templates[task].ByteSize() for task in used if task in templates)
            assert len(data) + tasks < MAX_BYTES, name


def test_rounds_of_the_largest_recipe_compile_far_below_the_limits_of_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A dynamic compiles once per process, and another test may have compiled a smaller recipe.
    monkeypatch.setattr(train_rounds, "_wf", None)
    names = [f"set{index}" for index in range(8)]
    stages = [{"kind": kind, "branch": name} for name in names for kind in ("online", "offline")]
    teachers = {name: f"branch:{name}" for name in names}
    merge = {"kind": "online", "algorithm": {"name": "distillation", "teachers": teachers}}
    recipe = Recipe.model_validate(
        {
            "rounds": 20,
            "prompts": {"mixture": [{"name": name, "source": f"{name}.txt"} for name in names]},
            "branches": {name: {"prompts": [name]} for name in names},
            "stages": [*stages, merge, {"kind": "offline"}],
        }
    )
    spec = _compile_round(recipe)
    assert len(spec.nodes) > len(names)
    assert spec.ByteSize() < MAX_BYTES


def _compile_round(recipe: Recipe) -> DynamicJobSpec:
    """Compile a round as its pod does: the futures file that the engine reads."""
    folder = FlyteDirectory("s3://bucket/folder")
    policy = TrainedPolicy(folder=folder)
    evaluated = EvaluatedPolicy(
        policy=policy,
        evaluation=make_evaluation({"ocr": 0.5}),
        samples=FlyteFile("s3://bucket/samples"),
    )
    settings = SerializationSettings(
        project="p",
        domain="d",
        version="v",
        image_config=ImageConfig.auto(img_name="ebbflow:test"),
    )
    context = FlyteContextManager.current_context()
    state = context.new_execution_state().with_params(mode=ExecutionState.Mode.TASK_EXECUTION)
    builder = context.with_serialization_settings(settings).with_execution_state(state)
    with FlyteContextManager.with_context(builder) as inner:
        compiled = train_rounds.compile_into_workflow(
            inner,
            train_rounds.task_function,
            recipe=recipe,
            run=TrackedRun(
                run_id="r",
                experiment_id="1",
                tracking_uri="http://mlflow",
                folder="s3://bucket/runs/tiny-1a2b3c4d",
                recipe_digest="d",
                started_at=0.0,
            ),
            base=BaseModelArtifact(folder=folder, seconds=1.0, finished_at=1.0),
            prompts=FlyteFile("s3://bucket/prompts"),
            history=[evaluated],
            round=0,
        )
    return DynamicJobSpec.FromString(compiled.to_flyte_idl().SerializeToString())


def test_a_recipe_passes_through_flyte_with_a_default_that_its_algorithm_overrides() -> None:
    stage = {"kind": "online", "algorithm": {"name": "diffusion_nft"}}
    resolved = Recipe.model_validate({"stages": [stage]}).stages[0].sampler
    field_default = type(resolved).model_fields["steps"].get_default()
    assert resolved.steps != field_default
    stage["sampler"] = {"name": resolved.name, "steps": field_default}
    recipe = Recipe.model_validate({"stages": [stage]})
    assert recipe.stages[0].sampler.steps == field_default
    context = FlyteContextManager.current_context()
    described = TypeEngine.to_literal_type(Recipe)
    literal = TypeEngine.to_literal(context, recipe, Recipe, described)
    assert TypeEngine.to_python_value(context, literal, Recipe) == recipe


def test_a_recipe_passes_through_flyte_with_a_default_that_another_key_needs() -> None:
    recipe = Recipe.model_validate({"prompts": {"held_out_source": "f.txt", "held_out": 128}})
    assert "held_out" not in select_set_keys(recipe.prompts)
    context = FlyteContextManager.current_context()
    described = TypeEngine.to_literal_type(Recipe)
    literal = TypeEngine.to_literal(context, recipe, Recipe, described)
    assert TypeEngine.to_python_value(context, literal, Recipe) == recipe


@pytest.mark.parametrize("kind", [Recipe, StageRecord, TrainedPolicy])
def test_a_model_passes_through_flyte_unchanged(kind: type[BaseModel]) -> None:
    value = {
        Recipe: Recipe(),
        StageRecord: StageRecord(
            label="1.1 online",
            algorithm="mix_grpo",
            samples=8,
            optimizer_steps=2,
            steps=1,
            seconds={},
            alarms=[],
        ),
        TrainedPolicy: TrainedPolicy(folder=FlyteDirectory("s3://bucket/policy")),
    }[kind]
    context = FlyteContextManager.current_context()
    described = TypeEngine.to_literal_type(kind)
    literal = TypeEngine.to_literal(context, value, kind, described)
    again = TypeEngine.to_python_value(context, literal, kind)
    assert again.model_dump_json() == value.model_dump_json()
