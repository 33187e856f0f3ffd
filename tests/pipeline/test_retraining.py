"""Nights of a schedule, whose training is replaced: the seed, what counts as a change, and where
the policy starts.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from flytekit import FlyteContextManager
from flytekit.configuration import Image, ImageConfig, SerializationSettings
from flytekit.core.context_manager import ExecutionState
from flytekit.core.type_engine import TypeEngine
from flytekit.models.dynamic_job import DynamicJobSpec
from flytekit.models.literals import LiteralMap
from flytekit.types.directory import FlyteDirectory
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from ebbflow.data.records import Champion, GateDecision, Registration, TrackedRun
from ebbflow.recipe import Recipe
from ebbflow.storage.artifacts import verify_folder
from ebbflow.tracking.parent_run import RETRAINED_FROM, finish_run
from ebbflow.tracking.parent_run import start_run as open_parent_run
from ebbflow.training.policy import Policy
from ebbflow.training.policy_io import open_model
from ebbflow.training.policy_metadata import PolicyMetadata, has_weights, read_policy_metadata
from tasks import plan_retraining as planning
from tasks.import_policy import import_policy
from tasks.types import BaseModelArtifact
from tests.pipeline.test_launch_plans import TARGET
from workflows import retraining

FIRST_NIGHT = datetime(2026, 11, 25, 2, tzinfo=UTC)
DECISION = GateDecision(
    promote=False,
    candidate="1.1 online",
    champion="v1",
    target=TARGET,
    guardrails=[],
    coverage=1.0,
    reasons=["The reward did not rise."],
)


class Nights:
    """Nights of the schedule's workflow; ``trained`` has the recipes of those that trained."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.prompts = folder / "prompts.txt"
        self.prompts.write_text("a\nb\n")
        self.settings: dict[str, Any] = {
            "output": str(folder / "runs"),
            "prompts": {"source": str(self.prompts)},
        }
        self.trained: list[Recipe] = []
        self.champion = "1"
        self.count = 0
        monkeypatch.setattr(retraining, "post_train", self._post_train)
        monkeypatch.setattr("ebbflow.registry.lookup.find_champion", self._find_champion)

    def run(self) -> str:
        """Run the next night; return its outcome."""
        self.count += 1
        kickoff = FIRST_NIGHT + timedelta(days=self.count - 1)
        outcome = retraining.retrain(
            recipe=Recipe.model_validate(self.settings), kickoff_time=kickoff
        )
        assert isinstance(outcome, str)
        return outcome

    def _find_champion(self, tracking_uri: str, model_name: str) -> Any:
        return Champion(
            tracking_uri=tracking_uri,
            model_name=model_name,
            version=self.champion,
            run_id="",
            recipe_digest="",
            base_digest="",
        )

    def _post_train(self, recipe: Recipe) -> Any:
        self.trained.append(recipe)
        run = open_parent_run(recipe, None)
        finish_run(run, "FINISHED")
        return _Result(run)


class _Result:
    decision = DECISION
    registration = Registration(model_name="m", version="2", champion=False, previous=None)

    def __init__(self, run: TrackedRun) -> None:
        self.run = run


@pytest.fixture
def nights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nights:
    return Nights(tmp_path, monkeypatch)


def test_a_night_has_the_time_of_its_kickoff_as_seed_and_says_what_came_out(nights: Nights) -> None:
    outcome = nights.run()
    assert [recipe.seed for recipe in nights.trained] == [int(FIRST_NIGHT.timestamp())]
    assert outcome.startswith("m version 2 stays challenger: The reward did not rise. (")
    assert outcome.endswith("/report.html)")


def test_a_night_without_a_change_trains_nothing_and_says_so(
    nights: Nights, caplog: pytest.LogCaptureFixture
) -> None:
    nights.run()
    with caplog.at_level(logging.INFO):
        outcome = nights.run()
    assert len(nights.trained) == 1
    assert outcome.startswith("nothing changed since run glyph-seed")
    assert "champion (1) are the same; nothing was trained" in outcome
    assert outcome in caplog.text


@pytest.mark.parametrize("changed", ["prompts", "pairs", "champion", "recipe", "code"])
def test_a_change_of_any_input_trains_again_with_another_seed(
    changed: str, nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = nights.prompts.with_name("pairs.jsonl")
    pairs.write_text("{}\n")
    nights.settings["stages"] = [
        {"kind": "offline", "algorithm": {"name": "diffusion_dpo"}, "pairs": str(pairs)}
    ]
    nights.run()
    if changed == "prompts":
        nights.prompts.write_text("a\nb\nc\n")
    elif changed == "pairs":
        pairs.write_text("{}\n{}\n")
    elif changed == "champion":
        nights.champion = "2"
    elif changed == "recipe":
        nights.settings["max_failed_share"] = 0.1
    else:
        monkeypatch.setattr(planning, "CODE", (Path(__file__),))
    nights.run()
    seeds = [recipe.seed for recipe in nights.trained]
    assert [later - earlier for earlier, later in zip(seeds, seeds[1:], strict=False)] == [86400]


def test_random_prompts_are_new_every_night(nights: Nights) -> None:
    nights.settings.pop("prompts")
    nights.run()
    nights.run()
    assert len(nights.trained) == 2


def test_a_night_that_failed_is_tried_again(
    nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(recipe: Recipe) -> Any:
        raise RuntimeError("the pod was lost")

    with monkeypatch.context() as patched:
        patched.setattr(retraining, "post_train", fail)
        with pytest.raises(RuntimeError, match="the pod was lost"):
            nights.run()
    nights.run()
    assert len(nights.trained) == 1


def test_a_night_whose_store_does_not_answer_at_its_end_keeps_its_outcome(
    nights: Nights, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    set_tag = MlflowClient.set_tag

    def fail_at_the_end(client: MlflowClient, run_id: str, key: str, value: Any) -> None:
        if key == RETRAINED_FROM:
            raise MlflowException("Read timed out")
        set_tag(client, run_id, key, value)

    with monkeypatch.context() as patched:
        patched.setattr(MlflowClient, "set_tag", fail_at_the_end)
        outcome = nights.run()
    assert outcome.startswith("m version 2 stays challenger: ")
    assert "the next night trains even if nothing changes: Read timed out" in caplog.text
    nights.run()
    assert len(nights.trained) == 2


@pytest.mark.parametrize("has_champion", [True, False])
def test_training_starts_from_the_champion_or_from_the_base_model_while_there_is_none(
    has_champion: bool, base_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe.model_validate(
        {"output": str(tmp_path / "runs"), "policy": {"train": "lora", "start": "champion"}}
    )
    trained = tmp_path / "data" / "policy"
    policy = Policy(open_model(recipe, base_folder), recipe.policy, 0)
    with torch.no_grad():
        for parameter in policy.parameters.values():
            parameter.fill_(0.25)
    policy.save_folder(
        trained,
        PolicyMetadata(
            base_digest=verify_folder(base_folder), recipe_digest="d", config=recipe.policy
        ),
    )
    version = Champion(
        tracking_uri="", model_name="m", version="7", run_id="", recipe_digest="", base_digest=""
    )
    monkeypatch.setattr(
        "ebbflow.registry.lookup.find_champion", lambda *_: version if has_champion else None
    )
    monkeypatch.setattr("ebbflow.registry.download.download_champion", lambda *_: tmp_path / "data")
    base = BaseModelArtifact(folder=FlyteDirectory(str(base_folder)), seconds=0.0, finished_at=0.0)
    run = open_parent_run(recipe, None)
    started = import_policy.task_function(recipe=recipe, run=run, base=base)
    folder = Path(started.folder.path)
    assert read_policy_metadata(folder).start == ("models:/m/7" if has_champion else None)
    assert has_weights(folder) == has_champion
    if has_champion:
        policy.load_folder(folder)
        parameters = [parameter.clone() for parameter in policy.parameters.values()]
        policy.load_folder(trained)
        pairs = zip(parameters, policy.parameters.values(), strict=True)
        assert all(torch.equal(started, champion) for started, champion in pairs)


@pytest.mark.parametrize("unchanged", ["", "nothing changed"])
def test_on_a_cluster_a_night_is_the_pipeline_or_nothing(unchanged: str) -> None:
    retraining.train_if_changed._wf = None
    image = Image("default", "ebbflow", "test")
    settings = SerializationSettings(ImageConfig(image, [image]), "project", "domain", "version")
    context = FlyteContextManager.current_context().with_serialization_settings(settings).build()
    assert context.execution_state
    state = context.execution_state.with_params(mode=ExecutionState.Mode.TASK_EXECUTION)
    inputs = {"recipe": Recipe(), "inputs_digest": "d", "unchanged": unchanged}
    with FlyteContextManager.with_context(context.with_execution_state(state)) as context:
        types = retraining.train_if_changed.python_interface.inputs
        spec = retraining.train_if_changed.dispatch_execute(
            context, TypeEngine.dict_to_literal_map(context, inputs, types)
        )
    if unchanged:
        assert isinstance(spec, LiteralMap)
        assert spec.literals["o0"].scalar.primitive.string_value == unchanged
        return
    assert isinstance(spec, DynamicJobSpec)
    (pipeline,) = spec.subworkflows
    assert pipeline.id.name == "workflows.post_training.post_train"
    # Its failure node sets the run in MLflow FAILED, also inside of a night.
    assert pipeline.failure_node.task_node.reference_id.name.endswith("end_failed_run")
    tasks = [node.task_node for node in spec.nodes if node.task_node]
    assert [task.reference_id.name for task in tasks] == [
        "tasks.conclude_retraining.conclude_retraining"
    ]
