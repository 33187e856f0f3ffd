"""Rollbacks of a champion: to which version they lead, and what they leave alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import promotion_cases as cases
import pytest
import yaml
from click.testing import CliRunner
from mlflow import MlflowClient
from registry_cases import aliases, tags

from ebbflow.cli import main
from ebbflow.data.records import Registration
from ebbflow.recipe import Recipe
from ebbflow.registry import promotion
from ebbflow.registry.lock import LOCK
from ebbflow.registry.lookup import find_anchor, find_champion
from ebbflow.registry.model_version import CLEANED
from ebbflow.registry.promotion import (
    ROLLED_BACK,
    RegistryError,
    promote_version,
    roll_back_champion,
)


def test_rollback_brings_the_previous_champion_back(
    client: MlflowClient, uri: str, model: Callable[..., str]
) -> None:
    name = model(3, champion=1)
    promote_version(cases.tracked(uri=uri), cases.challenger(name, 2), {}, expected_champion="1")
    assert roll_back_champion(uri, name) == Registration(
        model_name=name, version="1", champion=True, previous="2"
    )
    assert aliases(client, name) == {"champion": "1", "previous": "2"}
    assert tags(client, name, 1)["ebbflow.replaces"] == "2"
    assert tags(client, name, 2)[ROLLED_BACK].startswith("to version 1, 20")
    assert LOCK not in tags(client, name, 1)
    # the gate of the next run
    champion = find_champion(uri, name)
    assert champion is not None
    assert champion.version == "1"
    assert (
        promote_version(
            cases.tracked(uri=uri), cases.challenger(name, 3), {}, expected_champion="1"
        ).previous
        == "1"
    )


def test_the_anchor_is_the_last_version_that_a_person_chose(
    client: MlflowClient, uri: str, model: Callable[..., str]
) -> None:
    name = model(4, champion=1)
    assert find_anchor(uri, name) is None
    approved = {"approved_in": "local", "anchored": "2026-01-01T00:00:00+00:00"}
    promote_version(
        cases.tracked(uri=uri), cases.challenger(name, 2), approved, expected_champion="1"
    )
    promote_version(cases.tracked(uri=uri), cases.challenger(name, 3), {}, expected_champion="2")

    def anchor() -> str | None:
        found = find_anchor(uri, name)
        return found.version if found else None

    assert anchor() == "2", "nobody was asked about 3"
    roll_back_champion(uri, name, to="4")
    assert anchor() == "4"
    roll_back_champion(uri, name)
    assert anchor() == "2", "a version that was rolled back is no anchor"
    roll_back_champion(uri, name)
    assert anchor() == "4", "the rollback was undone, and with it the loss of the anchor"


def test_a_second_rollback_takes_the_first_one_back(
    client: MlflowClient, uri: str, model: Callable[..., str]
) -> None:
    name = model(2, champion=2, previous=1)
    roll_back_champion(uri, name)
    assert roll_back_champion(uri, name).version == "2"
    assert aliases(client, name) == {"champion": "2", "previous": "1"}


def test_a_run_that_compared_with_the_version_rolled_back_is_refused(
    uri: str, model: Callable[..., str]
) -> None:
    name = model(3, champion=2, previous=1)
    roll_back_champion(uri, name)
    with pytest.raises(RegistryError, match="compared with champion 2, but the champion is now 1"):
        promote_version(
            cases.tracked(uri=uri), cases.challenger(name, 3), {}, expected_champion="2"
        )


def test_a_retry_does_not_bring_back_what_was_rolled_back(
    client: MlflowClient, uri: str, model: Callable[..., str]
) -> None:
    name = model(2, champion=1)
    promote_version(cases.tracked(uri=uri), cases.challenger(name, 2), {}, expected_champion="1")
    roll_back_champion(uri, name)
    with pytest.raises(RegistryError, match="has been rolled back .*--to 2"):
        promote_version(
            cases.tracked(uri=uri), cases.challenger(name, 2), {}, expected_champion="1"
        )
    assert aliases(client, name) == {"champion": "1", "previous": "2"}
    assert roll_back_champion(uri, name, "2").champion


def test_a_version_whose_weights_were_deleted_before_its_approval_is_not_promoted(
    client: MlflowClient, uri: str, model: Callable[..., str]
) -> None:
    name = model(2, champion=1)
    client.set_model_version_tag(name, "2", CLEANED, "2026-11-25T02:00:00Z")
    with pytest.raises(RegistryError, match="version 2 were deleted by `ebbflow clean`"):
        promote_version(
            cases.tracked(uri=uri), cases.challenger(name, 2), {}, expected_champion="1"
        )
    assert aliases(client, name) == {"champion": "1"}


def test_rollback_after_a_promotion_that_was_cut_short(
    client: MlflowClient, uri: str, model: Callable[..., str]
) -> None:
    name = model(3, champion=1)
    promote_version(cases.tracked(uri=uri), cases.challenger(name, 2), {}, expected_champion="1")
    client.set_registered_model_alias(
        name, "previous", "2"
    )  # what a promotion of version 3 writes before the champion
    assert roll_back_champion(uri, name).version == "1"


@pytest.mark.parametrize(
    ("aliases_before", "to", "reason"),
    [
        ({}, None, "has no champion"),
        ({"champion": 1}, None, "version 1 is champion and replaced none"),
        (
            {"champion": 2, "previous": 1},
            "9",
            "has no version 9; .*--to, such as 1 \\(previous\\), 2, 3",
        ),
        ({"champion": 2, "previous": 1}, "2", "version 2 is the champion already"),
    ],
)
def test_a_rollback_to_nowhere_changes_nothing(
    client: MlflowClient,
    uri: str,
    model: Callable[..., str],
    aliases_before: dict[str, int],
    to: str | None,
    reason: str,
) -> None:
    name = model(3, **aliases_before)
    with pytest.raises(RegistryError, match=reason):
        roll_back_champion(uri, name, to)
    assert aliases(client, name) == {
        alias: str(version) for alias, version in aliases_before.items()
    }


def test_after_a_champion_was_deleted_by_hand_a_person_names_the_next(
    client: MlflowClient, uri: str, model: Callable[..., str]
) -> None:
    name = model(3, champion=3, previous=2)
    client.delete_model_version(name, "3")
    with pytest.raises(
        RegistryError,
        match=r"deleted by hand; name .* --to. Versions: 1, 2 \(previous\)",
    ):
        roll_back_champion(uri, name)
    assert roll_back_champion(uri, name, "2").version == "2"
    assert aliases(client, name)["champion"] == "2"


def test_a_version_without_weights_does_not_become_champion(
    client: MlflowClient, uri: str, model: Callable[..., str]
) -> None:
    name = model(3, champion=2, previous=1)
    client.set_model_version_tag(name, "3", "ebbflow.cleaned", "2026-11-25T02:00:00Z")
    with pytest.raises(RegistryError, match=r"version 3 were deleted by `ebbflow clean` \(2026-11"):
        roll_back_champion(uri, name, "3")
    # Nor after an approval that took longer than the weights were kept.
    with pytest.raises(RegistryError, match="version 3 were deleted by `ebbflow clean`"):
        promote_version(
            cases.tracked(uri=uri), cases.challenger(name, 3), {}, expected_champion="2"
        )
    assert aliases(client, name) == {"champion": "2", "previous": "1"}


def test_a_champion_that_moves_during_a_rollback_stays(
    client: MlflowClient, uri: str, model: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = model(3, champion=2, previous=1)

    def meanwhile(method: str) -> None:
        if method == "set_model_version_tag":
            client.set_registered_model_alias(name, "champion", "3")

    monkeypatch.setattr(promotion, "connect_to_store", lambda uri: cases.Watched(client, meanwhile))
    with pytest.raises(RegistryError, match="was 2 and is now 3; nothing was rolled back"):
        roll_back_champion(uri, name)
    assert aliases(client, name) == {"champion": "3", "previous": "1"}


def test_the_command_rolls_back_where_the_recipe_says(
    recipe: Recipe, client: MlflowClient, model: Callable[..., str], tmp_path: Path
) -> None:
    name = model(2, champion=2, previous=1)
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump({"output": recipe.output, "promotion": {"model_name": name}}))
    done = CliRunner().invoke(main, ["rollback", str(file)])
    assert (done.exit_code, done.output.splitlines()[0]) == (
        0,
        f"{name}: version 1 is champion again and replaces version 2",
    )
    assert aliases(client, name) == {"champion": "1", "previous": "2"}
    done = CliRunner().invoke(main, ["rollback", str(file), "--to", "1"])
    assert (done.exit_code, done.output) == (
        1,
        f"'{name}' version 1 is the champion already; nothing was changed\n",
    )


def test_the_command_makes_no_store(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump({"output": str(tmp_path / "runs")}))
    done = CliRunner().invoke(main, ["rollback", str(file)])
    assert done.exit_code == 1
    assert "no MLflow store at" in done.output
    assert not (tmp_path / "runs").exists()
