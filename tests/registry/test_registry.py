"""The registry against a real SQLite store: one version per run, aliases move only through the gate
and never by surprise.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
import uuid
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlflow.pyfunc
import numpy as np
import pandas as pd
import pytest
import torch
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.models import Model

from ebbflow.data.images import CONDITION_COMPRESSION, encode_pngs
from ebbflow.data.prompts import Prompt
from ebbflow.data.records import Comparison, GateDecision, TrackedRun
from ebbflow.evaluation import serve
from ebbflow.models import load_model
from ebbflow.recipe import Recipe
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.registry import model_version
from ebbflow.registry.download import download_champion, download_champion_folders
from ebbflow.registry.lookup import find_champion
from ebbflow.registry.model_version import link_served_folder
from ebbflow.registry.promotion import (
    Registration,
    RegistryError,
    decline_version,
    promote_version,
    register_version,
)
from ebbflow.storage.artifacts import ArtifactError, verify_folder
from ebbflow.tracking.parent_run import start_run
from ebbflow.tracking.store import connect_to_store
from ebbflow.training.policy import Policy
from ebbflow.training.policy_metadata import (
    ITERATE,
    STATISTICS,
    PolicyMetadata,
    read_policy_metadata,
)
from tasks.files import describe_flyte

pytestmark = pytest.mark.usefixtures("few_sources")
TARGET = Comparison(
    metric="reward", champion=0.5, candidate=0.9, difference=0.4, low=0.3, high=0.5, prompts=128
)


def decision(promote: bool, reasons: list[str] | None = None) -> GateDecision:
    return GateDecision(
        promote=promote,
        candidate="1.2 offline",
        champion="before",
        target=TARGET,
        guardrails=[],
        coverage=1.0,
        reasons=reasons or ["It won."],
    )


@pytest.fixture
def name() -> str:
    return f"model-{uuid.uuid4().hex[:8]}"


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "some-base"
    folder.mkdir()
    (folder / "model_index.json").write_text("{}")
    return folder


@pytest.fixture
def client(recipe: Recipe) -> MlflowClient:
    return connect_to_store(new_run(recipe).tracking_uri)


def new_run(recipe: Recipe) -> TrackedRun:
    return start_run(recipe, f"execution-{uuid.uuid4().hex[:8]}")


def crown(
    tracked: TrackedRun,
    policy: Path,
    base: Path | None,
    lineage: dict[str, str],
    *,
    model_name: str,
    expected_champion: str | None,
) -> Registration:
    """Registered and made champion, as after a yes of the gate."""
    made = register_version(
        tracked,
        policy,
        base,
        decision(True),
        lineage,
        model_name=model_name,
        expected_champion=expected_champion,
    )
    return promote_version(
        tracked, made, {"promoted_in": "an execution"}, expected_champion=expected_champion
    )


def aliases(client: MlflowClient, name: str) -> dict[str, str]:
    return {
        alias: str(version) for alias, version in client.get_registered_model(name).aliases.items()
    }


def test_the_first_policy_becomes_champion_with_its_lineage(
    recipe: Recipe, name: str, policy: Path, base: Path, client: MlflowClient
) -> None:
    tracked = new_run(recipe)
    assert find_champion(tracked.tracking_uri, name) is None
    made = crown(
        tracked, policy, base, {"base_digest": "b" * 64}, model_name=name, expected_champion=None
    )
    assert made == Registration(model_name=name, version="1", champion=True, previous=None)
    champion = find_champion(tracked.tracking_uri, name)
    assert champion is not None
    assert (champion.version, champion.run_id, champion.base_digest) == (
        "1",
        tracked.run_id,
        "b" * 64,
    )
    assert champion.recipe_digest == recipe.digest
    tags = client.get_model_version(name, "1").tags
    assert tags["flyte.execution_id"].startswith("execution-")
    assert tags["ebbflow.promoted_in"] == "an execution"
    assert GateDecision.model_validate_json(tags["ebbflow.decision"]) == decision(True)


def test_a_version_says_in_which_image_and_with_which_flyte_it_was_made(
    recipe: Recipe, name: str, policy: Path, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLYTE_INTERNAL_IMAGE", "registry/ebbflow-base:1")
    monkeypatch.setenv("FLYTE_INTERNAL_TASK_VERSION", "v7")
    register_version(
        new_run(recipe),
        policy,
        None,
        decision(True),
        describe_flyte(),
        model_name=name,
        expected_champion=None,
    )
    tags = client.get_model_version(name, "1").tags
    assert tags["ebbflow.image"] == "registry/ebbflow-base:1"
    assert tags["ebbflow.task_version"] == "v7"
    assert tags["ebbflow.flyte_version"] == version("flytekit")


def test_registering_does_not_promote(
    recipe: Recipe, name: str, policy: Path, client: MlflowClient
) -> None:
    made = register_version(
        new_run(recipe), policy, None, decision(True), {}, model_name=name, expected_champion=None
    )
    assert made == Registration(model_name=name, version="1", champion=False, previous=None)
    assert aliases(client, name) == {"challenger": "1"}


def test_a_version_that_a_person_declines_stays_challenger_and_says_so(
    recipe: Recipe, name: str, policy: Path, client: MlflowClient
) -> None:
    tracked = new_run(recipe)
    registration = register_version(
        tracked, policy, None, decision(True), {}, model_name=name, expected_champion=None
    )
    for _ in range(2):  # a retry does the same
        declined = decline_version(tracked, registration, {"declined_in": "an execution"})
        assert declined == registration.model_copy(update={"declined": True})
    assert aliases(client, name) == {"challenger": "1"}
    tags = client.get_model_version(name, "1").tags
    assert tags["ebbflow.declined_in"] == "an execution"


def test_promotion_moves_the_aliases_and_keeps_the_old_champion(
    recipe: Recipe, name: str, policy: Path, client: MlflowClient
) -> None:
    crown(new_run(recipe), policy, None, {}, model_name=name, expected_champion=None)
    refused = register_version(
        new_run(recipe), policy, None, decision(False), {}, model_name=name, expected_champion="1"
    )
    assert refused == Registration(model_name=name, version="2", champion=False, previous=None)
    assert aliases(client, name) == {"champion": "1", "challenger": "2"}
    third = crown(new_run(recipe), policy, None, {}, model_name=name, expected_champion="1")
    assert third == Registration(model_name=name, version="3", champion=True, previous="1")
    assert aliases(client, name) == {"champion": "3", "challenger": "3", "previous": "1"}
    assert client.get_model_version(name, "3").tags["ebbflow.replaces"] == "1"


def test_a_retry_gives_the_same_version(
    recipe: Recipe, name: str, policy: Path, client: MlflowClient
) -> None:
    crown(new_run(recipe), policy, None, {}, model_name=name, expected_champion=None)
    tracked = new_run(recipe)
    first, second = (
        crown(tracked, policy, None, {}, model_name=name, expected_champion="1") for _ in range(2)
    )
    assert (
        first == second == Registration(model_name=name, version="2", champion=True, previous="1")
    )
    assert len(client.search_model_versions(f"name = '{name}'")) == 2


def test_a_late_retry_does_not_take_the_challenger_alias_back(
    recipe: Recipe, name: str, policy: Path, client: MlflowClient
) -> None:
    early = new_run(recipe)
    register_version(
        early, policy, None, decision(False), {}, model_name=name, expected_champion=None
    )
    register_version(
        new_run(recipe), policy, None, decision(False), {}, model_name=name, expected_champion=None
    )
    register_version(
        early, policy, None, decision(False), {}, model_name=name, expected_champion=None
    )
    assert aliases(client, name) == {"challenger": "2"}


@pytest.mark.parametrize("expected", [None, "2"])
def test_a_champion_that_changed_since_the_comparison_stays(
    recipe: Recipe, name: str, policy: Path, client: MlflowClient, expected: str | None
) -> None:
    crown(new_run(recipe), policy, None, {}, model_name=name, expected_champion=None)
    with pytest.raises(RegistryError, match="the champion is now 1; it stays challenger"):
        crown(new_run(recipe), policy, None, {}, model_name=name, expected_champion=expected)
    assert aliases(client, name) == {"champion": "1", "challenger": "2"}


def test_an_interrupted_promotion_is_completed_by_the_retry(
    recipe: Recipe, name: str, policy: Path, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    crown(new_run(recipe), policy, None, {}, model_name=name, expected_champion=None)
    tracked = new_run(recipe)
    move = MlflowClient.set_registered_model_alias

    def broken(self: MlflowClient, model: str, alias: str, version: str) -> None:
        if alias == "champion":
            raise MlflowException("the database went away")
        move(self, model, alias, version)

    with monkeypatch.context() as outage:
        outage.setattr(MlflowClient, "set_registered_model_alias", broken)
        with pytest.raises(RegistryError, match="the database went away"):
            crown(tracked, policy, None, {}, model_name=name, expected_champion="1")
    assert aliases(client, name)["champion"] == "1"
    again = crown(tracked, policy, None, {}, model_name=name, expected_champion="1")
    assert again == Registration(model_name=name, version="2", champion=True, previous="1")


def test_a_store_that_cannot_be_read_is_not_mistaken_for_no_champion(
    recipe: Recipe, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise MlflowException("the database went away")

    monkeypatch.setattr(MlflowClient, "get_model_version_by_alias", away)
    with pytest.raises(RegistryError, match="could not look up the champion"):
        find_champion(new_run(recipe).tracking_uri, name)


def test_a_full_disk_is_said_without_the_statement_that_it_stopped() -> None:
    parameters = "', '".join(str(number) for number in range(1000))
    full = MlflowException(
        "(sqlite3.OperationalError) database or disk is full\n[SQL: INSERT INTO model_versions]"
        f"\n[parameters: ('{parameters}')]"
    )
    with (
        pytest.raises(RegistryError) as error,
        model_version.raise_registry_errors("register", "sqlite:///x"),
    ):
        raise full
    assert str(error.value) == (
        "could not register in sqlite:///x: (sqlite3.OperationalError) database or disk is full."
        " Free space where the store is. Run the task again: it resumes"
    )


def test_a_full_disk_is_one_line_however_many_files_were_copied() -> None:
    full = os.strerror(errno.ENOSPC)
    files = [(f"/from/{n}", f"/to/{n}", f"[Errno 28] {full}: '/to/{n}'") for n in range(50)]
    with (
        pytest.raises(RegistryError) as raised,
        model_version.raise_registry_errors("register", "sqlite:///x", "Again."),
    ):
        raise shutil.Error(files)
    assert str(raised.value) == (
        f"could not register in sqlite:///x: /to/0: {full}. Free space where the store is. Again."
    )


def test_a_folder_without_policy_is_refused(recipe: Recipe, name: str, tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match="no policy folder"):
        crown(new_run(recipe), tmp_path, None, {}, model_name=name, expected_champion=None)


def test_a_long_verdict_still_fits_a_tag(
    recipe: Recipe, name: str, policy: Path, client: MlflowClient
) -> None:
    long = decision(False, reasons=["x" * 9000])
    register_version(
        new_run(recipe), policy, None, long, {}, model_name=name, expected_champion=None
    )
    assert '"promote":false' in client.get_model_version(name, "1").tags["ebbflow.decision"]


@pytest.mark.parametrize("create", ["create_logged_model", "create_model_version"])
def test_a_creation_that_was_not_answered_is_not_there_twice(
    recipe: Recipe, name: str, policy: Path, monkeypatch: pytest.MonkeyPatch, create: str
) -> None:
    """MLflow's client asks again, as for a run."""
    once = getattr(MlflowClient, create)
    tracked = new_run(recipe)

    def twice(self: MlflowClient, *arguments: Any, **named: Any) -> Any:
        once(self, *arguments, **named)
        time.sleep(0.01)  # logged models are distinguished by the millisecond
        return once(self, *arguments, **named)

    monkeypatch.setattr(MlflowClient, create, twice)
    first = register_version(
        tracked, policy, None, decision(False), {}, model_name=name, expected_champion=None
    )
    monkeypatch.undo()
    assert (
        register_version(
            tracked, policy, None, decision(False), {}, model_name=name, expected_champion=None
        )
        == first
    )
    client = connect_to_store(tracked.tracking_uri)
    assert first.version == "1"
    assert [
        int(version.version) for version in client.search_model_versions(f"name = '{name}'")
    ] == [1]
    assert (
        len(
            client.search_logged_models(
                [tracked.experiment_id], f"tags.`ebbflow.run_id` = '{tracked.run_id}'"
            )
        )
        == 1
    )


@pytest.mark.parametrize(
    "flavor",
    [{}, {"python_function": {"model_path": "model.pkl"}}, {"python_function": {"data": "data"}}],
)
def test_a_champion_that_somebody_else_made_is_named(
    recipe: Recipe, name: str, tmp_path: Path, flavor: dict[str, Any]
) -> None:
    tracked = new_run(recipe)
    client = connect_to_store(tracked.tracking_uri)
    (tmp_path / "other").mkdir()
    Model(flavors=flavor).save(str(tmp_path / "other" / "MLmodel"))
    client.create_registered_model(name)
    client.create_model_version(name, (tmp_path / "other").as_uri())
    client.set_registered_model_alias(name, "champion", "1")
    champion = find_champion(tracked.tracking_uri, name)
    assert champion is not None
    with pytest.raises(
        RegistryError,
        match="has no policy/policy.json, so Ebbflow did not register it; move the alias",
    ):
        download_champion(champion, tmp_path / "champion")


def test_the_champion_comes_back_as_it_was_registered(
    recipe: Recipe, name: str, policy: Path, base: Path, tmp_path: Path
) -> None:
    tracked = new_run(recipe)
    crown(tracked, policy, base, {}, model_name=name, expected_champion=None)
    champion = find_champion(tracked.tracking_uri, name)
    assert champion is not None
    data = download_champion(champion, tmp_path / "champion")
    assert contents(data / "policy") == contents(policy)
    assert (data / "base" / "model_index.json").is_file()
    assert not (data / "policy").is_symlink()
    assert not [
        path
        for path in tmp_path.joinpath("champion").rglob("*")
        if path.suffix in {".pkl", ".pickle"}
    ]


CONFIGS = {
    "full": PolicyConfig(ema={}),
    "lora": PolicyConfig(train="lora", rank=4, alpha=8, ema={}),
}


def in_training(base_folder: Path, folder: Path, config: PolicyConfig) -> Path:
    """A policy folder as a stage leaves it behind for the next one: three sets of parameters that
    differ, and statistics.
    """
    policy = Policy(load_model(base_folder), config, seed=0)
    for name in ("old", "ema"):
        policy.snapshot_copy(name)
        with torch.no_grad():
            for value in policy.parameters.values():
                value += 0.01
    metadata = PolicyMetadata(
        base_digest="b" * 64,
        recipe_digest="r" * 64,
        config=config,
        version=3,
        copies=("old", ITERATE),
    )
    policy.save_folder(folder, metadata, statistics={"of": "prompts"})
    return folder


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_what_only_training_reads_is_not_registered(
    recipe: Recipe, name: str, base_folder: Path, tmp_path: Path, config: PolicyConfig
) -> None:
    trained = in_training(base_folder, tmp_path / "trained", config)
    before = contents(trained)
    tracked = new_run(recipe)
    crown(tracked, trained, None, {}, model_name=name, expected_champion=None)
    champion = find_champion(tracked.tracking_uri, name)
    assert champion is not None
    served = download_champion(champion, tmp_path / "champion") / "policy"
    verify_folder(served)
    assert read_policy_metadata(served) == read_policy_metadata(trained).model_copy(
        update={"copies": ()}
    )
    found = contents(served)
    dropped = {STATISTICS, "old/parameters.safetensors", f"{ITERATE}/parameters.safetensors"}
    assert found.keys() == before.keys() - dropped
    made_anew = {"policy.json", "manifest.json", "COMMIT"}
    assert {path: found[path] for path in found.keys() - made_anew} == {
        path: before[path] for path in found.keys() - made_anew
    }
    assert not [path for path in served.rglob("*") if path.is_symlink()]
    assert contents(trained) == before

    loaded, expected = (Policy(load_model(base_folder), config, seed=0) for _ in range(2))
    loaded.load_folder(served)
    expected.load_folder(trained)
    for key, value in expected.parameters.items():
        assert torch.equal(loaded.parameters[key], value)


def test_the_same_policy_is_served_with_the_same_commit(base_folder: Path, tmp_path: Path) -> None:
    for name in ("one", "other"):
        trained = in_training(base_folder, tmp_path / name, CONFIGS["full"])
        link_served_folder(trained, tmp_path / f"{name}-served")
    assert verify_folder(tmp_path / "one-served") == verify_folder(tmp_path / "other-served")


def test_a_damaged_policy_gets_no_new_commit(
    recipe: Recipe, name: str, base_folder: Path, tmp_path: Path
) -> None:
    trained = in_training(base_folder, tmp_path / "trained", CONFIGS["lora"])
    (trained / "old" / "parameters.safetensors").write_bytes(b"")
    with pytest.raises(ArtifactError, match="does not match its manifest"):
        link_served_folder(trained, tmp_path / "served")
    with pytest.raises(RegistryError, match="does not match its manifest"):
        crown(new_run(recipe), trained, None, {}, model_name=name, expected_champion=None)


def test_the_registered_model_renders_with_seeds(
    recipe: Recipe,
    name: str,
    policy: Path,
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def generate_images(
        base: Path, policy: Path, prompts: list[Prompt], seeds: list[int]
    ) -> list[serve.GeneratedImage]:
        assert (base / "model_index.json").is_file()
        assert (policy / "policy.json").is_file()
        texts = [
            f"{p.prompt}/{p.negative_prompt}/{p.image == png}/{seed}"
            for p, seed in zip(prompts, seeds, strict=True)
        ]
        return [serve.GeneratedImage(text.encode()) for text in texts]

    (png,) = encode_pngs(np.zeros((1, 8, 8, 3), np.uint8), CONDITION_COMPRESSION)
    monkeypatch.setattr(serve, "generate_images", generate_images)
    monkeypatch.setattr(serve, "load_served_model", lambda base, policy: None)
    tracked = new_run(recipe)
    crown(tracked, policy, base, {}, model_name=name, expected_champion=None)
    champion = find_champion(tracked.tracking_uri, name)
    assert champion is not None
    model = mlflow.pyfunc.load_model(
        str(download_champion(champion, tmp_path / "champion").parents[1])
    )
    rows = pd.DataFrame(
        {
            "prompt": ["AB", "CD"],
            "seed": [5, 6],
            "negative_prompt": ["dull", None],
            "image": [png, None],
        }
    )
    assert model.predict(rows)["image"].tolist() == [b"AB/dull/True/5", b"CD//False/6"]
    assert model.predict(pd.DataFrame({"prompt": ["AB"]}))["image"].tolist() == [b"AB//False/0"]


def test_a_large_base_model_is_only_referred_to(
    recipe: Recipe,
    name: str,
    policy: Path,
    base_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        model_version, "MAX_STORED_BASE", model_version.count_folder_bytes(base_folder) - 1
    )
    tracked = new_run(recipe)
    crown(
        tracked,
        policy,
        base_folder,
        {"base_digest": verify_folder(base_folder)},
        model_name=name,
        expected_champion=None,
    )
    champion = find_champion(tracked.tracking_uri, name)
    assert champion is not None
    found, its_policy = download_champion_folders(champion, tmp_path / "champion", base_folder)
    assert found == base_folder
    assert not (its_policy.parent / "base").exists()


def test_a_model_without_its_base_says_so(
    recipe: Recipe, name: str, policy: Path, tmp_path: Path
) -> None:
    tracked = new_run(recipe)
    crown(tracked, policy, None, {}, model_name=name, expected_champion=None)
    champion = find_champion(tracked.tracking_uri, name)
    assert champion is not None
    with pytest.raises(Exception, match="registered without its base model"):
        mlflow.pyfunc.load_model(str(download_champion(champion, tmp_path / "champion").parents[1]))
