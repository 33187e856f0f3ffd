"""A turn of the flywheel is killed again and again and started again: it ends with the reward
model, the policies and the queue of one that nothing happened to.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow import MlflowClient

from ebbflow.models.glyph_training import recognizer
from ebbflow.storage.disk import sha256_of_file
from tests.faults.again_cases import start_script, wait_until
from tests.glyph_stages import small_stage
from tests.reward_training.reward_label_cases import make_answers, write_rows

pytestmark = pytest.mark.exhaustive
RECIPE: dict[str, Any] = {
    "name": "fly",
    "output": "runs",
    "model": {"training": {"steps": 3, "batch": 4}},
    "prompts": {"count": 100, "validation": 8, "held_out": 24},
    "reward_model": {
        "name": "taste",
        "labels": ["labels.parquet"],
        "epochs": 4,
        "lr": 3.0e-3,
        "held_out": 0.4,
        "queue": 40,
    },
    "rewards": [{"name": "model", "uri": "models:/taste@champion"}],
    "guardrails": [],
    "stages": [
        small_stage(
            {
                "kind": "online",
                "steps": 2,
                "prompts_per_step": 2,
                "group_size": 4,
                "micro_batch": 8,
                "checkpoints": {"every": 1},
            }
        )
    ],
    "evaluation": {"steps": 3, "samples": 1},
    "promotion": {"model_name": "fly-policy"},
}
DEATHS = [
    "ebbflow.reward_training.train:_save_checkpoint:2:after",
    # The reward model is trained and not registered, then registered and not champion.
    "mlflow:MlflowClient.create_model_version:1",
    "mlflow:MlflowClient.set_registered_model_alias:2",
    # It is champion, and no tag says so.
    "mlflow:MlflowClient.set_registered_model_alias:1:after",
    "ebbflow.evaluation.evaluate:evaluate_folder:1:after",
    "ebbflow.training.update:PolicyUpdater.update_policy:2",
    "ebbflow.registry.promotion:create_version:1",
    # The run is over, the turn is not.
    "ebbflow.reward_training.queue:encode_pngs:2",
]


def turn(folder: Path, death: str) -> str:
    return wait_until(folder, start_script(folder, ["turn", "recipe.yaml"], death), death)


def prepare_folder(folder: Path) -> Path:
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    write_rows(folder / "labels.parquet", make_answers(120))
    return folder


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = prepare_folder(tmp_path_factory.mktemp("undisturbed"))
    turn(folder, "")
    return folder


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = prepare_folder(tmp_path_factory.mktemp("disturbed"))
    for death in [*DEATHS, ""]:
        turn(folder, death)
    return folder


@pytest.fixture(scope="module", autouse=True)
def reader_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A reader of four letters that was trained for a quarter of its steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        folder = recognizer.cache_folder() / recognizer._cache_key(16, 32, 4)
        recognizer.train_recognizer(16, 32, 4, folder, steps=100)
        yield


def connect(folder: Path) -> MlflowClient:
    uri = f"sqlite:///{folder}/runs/mlflow.db"
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def test_one_reward_model_with_the_same_bytes_is_champion(
    undisturbed: Path, disturbed: Path
) -> None:
    tags = []
    for folder in (undisturbed, disturbed):
        (version,) = connect(folder).search_model_versions("name = 'taste'")
        champion = connect(folder).get_model_version_by_alias("taste", "champion")
        assert champion.version == version.version
        tags.append({key: version.tags[key] for key in version.tags if "digest" in key})
        assert "ebbflow.replaces" in version.tags
        # Of the training only its lock is left.
        left = [path.name for path in folder.glob("runs/reward_models/taste/*/*")]
        assert left == [".lock"]
    assert tags[0] == tags[1]


def test_a_turn_has_one_run_however_often_it_was_killed(undisturbed: Path, disturbed: Path) -> None:
    for folder in (undisturbed, disturbed):
        (run,) = connect(folder).search_runs(
            [experiment.experiment_id for experiment in connect(folder).search_experiments()],
            "tags.`ebbflow.role` = 'execution'",
        )
        assert run.info.status == "FINISHED"
        assert len(list(folder.glob("runs/fly-*"))) == 1
        assert not list(folder.glob("runs/queues/fly/turn*"))


def test_policies_have_the_same_weights(undisturbed: Path, disturbed: Path) -> None:
    # Not the whole folders: the pinned recipe, whose digest they have, names the folder's store.
    weights = [
        {
            sha256_of_file(path)
            for path in folder.glob("runs/fly-*/nodes/1.1-online/policy/**/*.safetensors")
        }
        for folder in (undisturbed, disturbed)
    ]
    assert len(weights[0]) == 1
    assert weights[0] == weights[1]


@pytest.mark.parametrize("name", ["queue.parquet", "prompts.jsonl"])
def test_the_next_turn_has_the_same_bytes(undisturbed: Path, disturbed: Path, name: str) -> None:
    contents = [
        (folder / "runs" / "queues" / "fly" / name).read_bytes()
        for folder in (undisturbed, disturbed)
    ]
    assert contents[0]
    assert contents[0] == contents[1]
