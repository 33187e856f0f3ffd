"""The registry against a real SQLite store: one version per run, aliases move only through the gate
and never by surprise.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.models import Model
from registry_cases import aliases, crown, decision, new_run

from ebbflow.data.records import GateDecision
from ebbflow.recipe import Recipe
from ebbflow.registry import model_version
from ebbflow.registry.download import download_champion
from ebbflow.registry.lookup import find_champion
from ebbflow.registry.promotion import (
    Registration,
    RegistryError,
    decline_version,
    register_version,
)
from ebbflow.tracking.store import connect_to_store
from tasks.files import describe_flyte

pytestmark = pytest.mark.usefixtures("few_sources")


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
