"""Branches in the graph: they wait for nothing but what is before them, and hand on a policy that
passed their gate.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pyarrow as pa
import pytest
from flytekit import FlyteContextManager
from flytekit.configuration import Image, ImageConfig, SerializationSettings
from flytekit.core.context_manager import ExecutionState
from flytekit.core.type_engine import TypeEngine
from flytekit.models.dynamic_job import DynamicJobSpec
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from ebbflow.data.records import Comparison, Evaluation, GateDecision, StageRecord, TrackedRun
from ebbflow.evaluation import gate, gate_scores
from ebbflow.recipe import Recipe
from ebbflow.stage import StageContext
from ebbflow.storage.tables import write_table
from ebbflow.tracking import child_run, nodes
from ebbflow.training.policy_metadata import read_policy_metadata
from tasks import distill_branches_ray
from tasks.branches import add_branch_stages, first_logged_step, locate_teachers
from tasks.choose_specialist import choose_specialist
from tasks.files import open_checkpoints
from tasks.types import BaseModelArtifact, EvaluatedPolicy, SpecialistPolicy, TrainedPolicy
from tests.pipeline.conftest import run_pipeline
from workflows.post_training import train_branch, train_rounds

NAMES = ("words", "signs")
TEACHERS = {name: f"branch:{name}" for name in NAMES}
ONLINE: dict[str, Any] = {
    "kind": "online",
    "steps": 2,
    "prompts_per_step": 2,
    "group_size": 4,
    "micro_batch": 8,
    "updates_per_step": 2,
    "algorithm": {"name": "mix_grpo", "clip_range": 1e-3},
    "sampler": {"name": "flow_sde", "steps": 6},
    "window": {"kind": "fixed", "size": 2},
}
MERGE = ONLINE | {"algorithm": {"name": "distillation", "teachers": TEACHERS}}
SETTINGS: dict[str, Any] = {
    "prompts": {
        "validation": 112,
        "held_out": 12,
        "mixture": [{"name": name, "source": f"{name}.txt"} for name in NAMES],
    },
    "branches": {name: {"prompts": [name]} for name in NAMES},
    "stages": [
        ONLINE | {"branch": "words"},
        ONLINE | {"branch": "words"},
        ONLINE | {"branch": "signs"},
        MERGE,
    ],
}


@pytest.fixture
def recipe() -> Recipe:
    return Recipe.model_validate(SETTINGS)


def policy(folder: Path, steps: int = 0, label: str = "1.1 online") -> TrainedPolicy:
    record = StageRecord(
        label=label,
        algorithm="mix_grpo",
        samples=1,
        optimizer_steps=1,
        seconds={},
        alarms=["earlier"],
    )
    (folder / "metrics.json").write_text("[]")
    metrics = FlyteFile(str(folder / "metrics.json"))
    return TrainedPolicy(
        folder=FlyteDirectory(str(folder)), record=record, metrics=metrics, global_step=steps
    )


def evaluated(folder: Path, label: str, reward: float) -> EvaluatedPolicy:
    means = {"reward": reward}
    evaluation = Evaluation(
        label=label,
        policy_version=1,
        held_out=means,
        validation=means,
        coverage=1,
        velocity_drift=0,
        seconds={},
    )
    table = folder / f"{label}.parquet"
    write_table(table, pa.schema([("reward", pa.float64())]), [], {})
    return EvaluatedPolicy(
        policy=policy(folder, label=label), evaluation=evaluation, samples=FlyteFile(str(table))
    )


def decision(promote: bool, candidate: str = "after") -> GateDecision:
    target = Comparison(
        metric="reward", champion=0, candidate=0, difference=0, low=0, high=0, prompts=2
    )
    reasons = [
        "Coverage is full.",
        "The reward rose." if promote else f"{gate.REFUSED}no proven gain.",
    ]
    return GateDecision(
        promote=promote,
        candidate=candidate,
        champion="before",
        target=target,
        guardrails=[],
        coverage=1,
        reasons=reasons,
    )


@pytest.fixture
def run(tmp_path: Path) -> TrackedRun:
    return TrackedRun(
        run_id="r",
        experiment_id="e",
        tracking_uri="",
        folder=str(tmp_path),
        recipe_digest="d",
        started_at=0.0,
    )


def compiled(dynamic: Any, inputs: dict[str, Any]) -> DynamicJobSpec:
    """A dynamic as its pod compiles it."""
    dynamic._wf = None
    image = Image("default", "ebbflow", "test")
    settings = SerializationSettings(ImageConfig(image, [image]), "project", "domain", "version")
    context = FlyteContextManager.current_context().with_serialization_settings(settings).build()
    assert context.execution_state
    state = context.execution_state.with_params(mode=ExecutionState.Mode.TASK_EXECUTION)
    with FlyteContextManager.with_context(context.with_execution_state(state)) as context:
        literals = TypeEngine.dict_to_literal_map(context, inputs, dynamic.python_interface.inputs)
        spec = dynamic.dispatch_execute(context, literals)
    assert isinstance(spec, DynamicJobSpec)
    return spec


def graph(spec: DynamicJobSpec) -> list[tuple[str, set[str]]]:
    """(task, tasks that it waits for) of every node, by numbered short names."""
    names = {
        node.id: f"{node.task_node.reference_id.name.rsplit('.')[-1]} {index}"
        for index, node in enumerate(spec.nodes)
    }
    return [
        (names[node.id], {names[before] for before in node.upstream_node_ids})
        for node in spec.nodes
    ]


def test_branches_are_parallel_nodes_and_the_merge_waits_for_all(
    recipe: Recipe, run: TrackedRun, tmp_path: Path
) -> None:
    base = BaseModelArtifact(folder=FlyteDirectory(str(tmp_path)), seconds=0, finished_at=0)
    (tmp_path / "prompts.parquet").write_text("")
    given = {
        "recipe": recipe,
        "run": run,
        "base": base,
        "prompts": FlyteFile(str(tmp_path / "prompts.parquet")),
    }
    history = [evaluated(tmp_path, "before", 0.1)]
    assert graph(compiled(train_rounds, given | {"history": history, "round": 0})) == [
        ("train_branch 0", set()),
        ("train_branch 1", set()),
        ("distill_branches 2", {"train_branch 0", "train_branch 1"}),
        ("evaluate_policy 3", {"distill_branches 2"}),
        ("train_rounds 4", {"evaluate_policy 3"}),
    ]
    assert graph(
        compiled(train_branch, given | {"policy": policy(tmp_path), "round": 0, "branch": "words"})
    ) == [
        ("select_prompts 0", set()),
        ("evaluate_branch 1", {"select_prompts 0"}),
        ("train_online 2", {"select_prompts 0"}),
        ("evaluate_branch 3", {"select_prompts 0", "train_online 2"}),
        ("train_online 4", {"select_prompts 0", "train_online 2"}),
        ("evaluate_branch 5", {"select_prompts 0", "train_online 4"}),
        (
            "choose_specialist 6",
            {"select_prompts 0", "evaluate_branch 1", "evaluate_branch 3", "evaluate_branch 5"},
        ),
    ]


@pytest.mark.parametrize(("promote", "chosen"), [(True, "best"), (False, "before")])
def test_a_branch_hands_on_what_its_gate_passed(
    recipe: Recipe,
    run: TrackedRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    promote: bool,
    chosen: str,
) -> None:
    compared: list[Any] = []

    def score(
        view: Recipe,
        prompts: Path,
        evaluations: dict[str, Evaluation],
        samples: dict[str, Path],
        targets: dict[str, Path],
    ) -> dict[str, Evaluation]:
        compared.append([prompts.name, *evaluations])
        for side, target in targets.items():
            target.write_bytes(samples[side].read_bytes())
        return {
            side: one.model_copy(update={"label": f"{one.label} scored anew"})
            for side, one in evaluations.items()
        }

    def decide(
        view: Recipe, candidate: Evaluation, champion: Evaluation, *samples: pa.Table
    ) -> GateDecision:
        compared.extend([view.prompts.prompt_set_labels, candidate.label, champion.label])
        return decision(promote)

    monkeypatch.setattr(gate_scores, "score_tables_together", score)
    monkeypatch.setattr(gate_scores, "refuse_unequal_scores", lambda decided, *_: decided)
    monkeypatch.setattr(gate, "decide_by_gate", decide)
    monkeypatch.setattr(nodes, "log_decision", lambda *_: None)
    monkeypatch.setattr(child_run, "log_system_metrics", lambda *_: nullcontext())
    monkeypatch.setattr(child_run, "RunLogger", lambda *_: MagicMock())
    history = [
        evaluated(folder(tmp_path, name), name, reward)
        for name, reward in (("before", 0.9), ("best", 0.8), ("last", 0.7))
    ]
    prompts = tmp_path / "prompts.parquet"
    prompts.write_text("")
    found = choose_specialist.task_function(
        recipe=recipe,
        run=run,
        prompts=FlyteFile(str(prompts)),
        round=0,
        branch="words",
        history=history,
    )
    sides = ["prompts.parquet", "candidate", "champion"]
    assert compared == [sides, ["words"], "best scored anew", "before scored anew"]
    assert Path(found.policy.folder.path).name == chosen
    assert [stage.record.label for stage in found.stages] == ["best", "last"]


def folder(parent: Path, name: str) -> Path:
    (parent / name).mkdir()
    return parent / name


def test_a_stage_learns_from_the_policies_of_branches(recipe: Recipe, tmp_path: Path) -> None:
    teachers = {"words": "branch:words", "signs": "s3://bucket/signs"}
    merge = MERGE | {"algorithm": {"name": "distillation", "teachers": teachers}}
    branches = {"words": {"prompts": ["words"]}}
    recipe = Recipe.model_validate(
        SETTINGS | {"branches": branches, "stages": [ONLINE | {"branch": "words"}, merge]}
    )
    specialists = [
        SpecialistPolicy(
            branch="words", policy=policy(folder(tmp_path, "words")), decision=decision(True)
        )
    ]
    located = locate_teachers(StageContext(recipe, 0, 1), specialists)
    assert located == {
        "teacher:words": str(tmp_path / "words"),
        "teacher:signs": "s3://bucket/signs",
    }


def test_actors_find_the_policies_of_branches(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def train(*given: Any) -> TrainedPolicy:
        seen.append(given[-1])
        return policy(tmp_path)

    monkeypatch.setattr(distill_branches_ray, "train_stage_on_ray", train)
    found = [
        SpecialistPolicy(
            branch=name, policy=policy(folder(tmp_path, name)), decision=decision(True)
        )
        for name in NAMES
    ]
    shared = dict.fromkeys(("run", "base", "policy", "prompts"))
    distill_branches_ray.distill_branches_ray.task_function(
        recipe=recipe, **shared, round=0, stage=3, specialists=found
    )
    assert seen == [{f"teacher:{name}": str(tmp_path / name) for name in NAMES}]


def test_a_refused_branch_is_an_alarm_of_what_learns_from_it(tmp_path: Path) -> None:
    refused, passed = (
        SpecialistPolicy(branch=name, policy=policy(tmp_path), decision=decision(name == "signs"))
        for name in NAMES
    )
    record = add_branch_stages(policy(tmp_path), [refused, passed]).record
    assert record
    assert record.alarms == [
        "earlier",
        "branch words teaches with the policy that it began with. Refused: no proven gain.",
    ]


def test_what_the_stages_of_branches_did_is_kept_for_the_report(tmp_path: Path) -> None:
    stages = {name: policy(tmp_path, label=f"1.1 online {name}").finished_stages for name in NAMES}
    specialists = [
        SpecialistPolicy(
            branch=name, policy=policy(tmp_path), decision=decision(True), stages=stages[name]
        )
        for name in NAMES
    ]
    found = add_branch_stages(policy(tmp_path, label="1.3 online"), specialists).finished_stages
    assert [stage.record.label for stage in found] == [
        "1.1 online words",
        "1.1 online signs",
        "1.3 online",
    ]


def test_curves_of_branches_are_not_mixed(recipe: Recipe, tmp_path: Path) -> None:
    steps = [
        first_logged_step(StageContext(recipe, 0, stage), policy(tmp_path, 7)) for stage in range(4)
    ]
    assert steps == [None, None, None, 7]


def test_a_branch_leaves_the_checkpoints_of_others_alone(
    recipe: Recipe, run: TrackedRun, tmp_path: Path
) -> None:
    for stage in range(4):
        (tmp_path / "checkpoints" / recipe.stage_label(0, stage).replace(" ", "-")).mkdir(
            parents=True
        )
    open_checkpoints(run, StageContext(recipe, 0, 1))
    left = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert left == {"1.2-online-words", "1.3-online-signs", "1.4-online"}


@pytest.mark.exhaustive
def test_specialists_become_one_policy(workplace: Path) -> None:
    """From prompts to promotion, with two branches and their merge."""
    for name, first in zip(NAMES, "AN", strict=True):
        texts = [f"{first}{chr(65 + a)}{chr(65 + b)}{first}" for a in range(12) for b in range(8)]
        (workplace / f"{name}.txt").write_text("".join(f'"{text}"\n' for text in texts))
    done = run_pipeline(workplace, SETTINGS | {"evaluation": {"steps": 3, "samples": 1}})
    assert done.returncode == 0, done.stdout + done.stderr
    (summary,) = (workplace / "runs").glob("*/summary.json")
    made = {path.name for path in (summary.parent / "nodes").iterdir()}
    assert {
        "1.1-online-words",
        "1.2-online-words",
        "1.3-online-signs",
        "1.4-online",
        "1.4-online-evaluation",
    } <= made
    assert {
        "1-words",
        "1-signs",
        "1-words-before-evaluation",
        "1.3-online-signs-evaluation",
    } <= made
    merged = read_policy_metadata(summary.parent / "nodes" / "1.4-online" / "policy")
    assert (merged.stages, set(merged.teachers)) == (("1.4 online",), set(NAMES))
    of_branch = read_policy_metadata(summary.parent / "nodes" / "1.2-online-words" / "policy")
    assert of_branch.stages == ("1.1 online words", "1.2 online words")
    numbers = json.loads(summary.read_text())
    assert numbers["candidate"] == "1.4 online"
    assert {"1.1 online words", "1.2 online words", "1.3 online signs", "1.4 online"} <= set(
        numbers["seconds"]
    )
