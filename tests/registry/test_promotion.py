"""Promotion and rollback: one winner of a race, nothing half done, and a retry that ends as if
nothing had happened.
"""

from __future__ import annotations

import itertools
import os
import uuid
from collections import Counter
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import promotion_cases as cases
import pytest
import yaml
from click.testing import CliRunner
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from ebbflow.cli import main
from ebbflow.data.records import Registration, TrackedRun
from ebbflow.recipe import Recipe
from ebbflow.registry import lock, promotion
from ebbflow.registry.lock import LOCK, RegistryLockError
from ebbflow.registry.lookup import find_anchor, find_champion
from ebbflow.registry.model_version import CLEANED
from ebbflow.registry.promotion import (
    ROLLED_BACK,
    RegistryError,
    promote_version,
    roll_back_champion,
)
from ebbflow.tracking.parent_run import start_run
from ebbflow.tracking.store import connect_to_store, resolve_tracking_uri
from tests.forked import CONTEXT


@pytest.fixture
def uri(recipe: Recipe) -> str:
    return resolve_tracking_uri(recipe)


@pytest.fixture
def client(uri: str) -> MlflowClient:
    return connect_to_store(uri)


@pytest.fixture
def model(client: MlflowClient) -> Callable[..., str]:
    """``model(3, champion=2, previous=1)``: a registered model with so many versions, which are
    names without files.
    """

    def make(versions: int, **aliases: int) -> str:
        name = f"model-{uuid.uuid4().hex[:8]}"
        client.create_registered_model(name)
        for _ in range(versions):
            client.create_model_version(name, "file:///nowhere", tags={"ebbflow.run_id": "a run"})
        for alias, version in aliases.items():
            client.set_registered_model_alias(name, alias, str(version))
        return name

    return make


def aliases(client: MlflowClient, name: str) -> dict[str, str]:
    return {
        alias: str(version) for alias, version in client.get_registered_model(name).aliases.items()
    }


def tags(client: MlflowClient, name: str, version: int) -> dict[str, str]:
    return client.get_model_version(name, str(version)).tags


def run_all(target: Callable[..., None], arguments: list[tuple[Any, ...]]) -> None:
    started = [CONTEXT.Process(target=target, args=some) for some in arguments]
    for process in started:
        process.start()
    for process in started:
        process.join(240)
        assert process.exitcode == 0


def dies(target: Callable[..., None], *arguments: object) -> bool:
    """Whether the process was killed before it came to its end."""
    process: ForkServerProcess = CONTEXT.Process(target=target, args=arguments)
    process.start()
    process.join(120)
    assert process.exitcode in (0, -9)
    return process.exitcode == -9


# --- races


def outcomes(results: Any, racers: int, rounds: int) -> dict[int, list[tuple[int, str]]]:
    by_round: dict[int, list[tuple[int, str]]] = {}
    for _ in range(racers * rounds):
        number, version, what = results.get()
        by_round.setdefault(number, []).append((version, what))
    return by_round


def assert_one_winner(raced: list[tuple[int, str]]) -> int:
    (winner,) = [version for version, what in raced if what == "won"]
    for version, what in raced:
        if version != winner:
            assert (
                f"version {version} was compared with champion (none), but the champion is now"
                f" {winner};" in what
            )
    return winner


def test_of_promotions_that_race_exactly_one_wins(tmp_path: Path) -> None:
    racers = 3
    rounds = 100
    file = tmp_path / "registry.db"
    store = cases.SmallRegistry(file)
    store.database.execute("PRAGMA journal_mode = WAL")
    start = CONTEXT.Barrier(racers)
    results = CONTEXT.SimpleQueue()
    run_all(
        cases.race, [(file, version, rounds, start, results) for version in range(1, racers + 1)]
    )
    winners = [assert_one_winner(raced) for raced in outcomes(results, racers, rounds).values()]
    assert len(winners) == rounds
    assert len(Counter(winners)) > 1, "one always wins: they did not race"
    assert store.search_model_versions("name = 'm0'") == []
    assert all(
        store.get_model_version_by_alias(f"m{n}", "champion").version == str(w)
        for n, w in enumerate(winners)
    )


def test_of_promotions_that_race_in_mlflow_exactly_one_wins(
    client: MlflowClient, uri: str, model: Callable[..., str]
) -> None:
    names = [model(2) for _ in range(10)]
    start = CONTEXT.Barrier(2)
    results = CONTEXT.SimpleQueue()
    run_all(cases.race_in_mlflow, [(uri, names, version, start, results) for version in (1, 2)])
    for number, raced in outcomes(results, 2, len(names)).items():
        assert aliases(client, names[number]) == {"champion": str(assert_one_winner(raced))}


# --- leftovers


def leave_a_lock(client: MlflowClient, name: str, version: int) -> None:
    client.set_model_version_tag(
        name, str(version), LOCK, "against 1, left behind by a killed process"
    )


@pytest.mark.parametrize(("dead", "waiting"), [(2, 3), (3, 2)], ids=["lower", "higher"])
def test_a_lock_that_a_killed_process_left_is_named_and_its_retry_takes_it_over(
    client: MlflowClient,
    uri: str,
    model: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    dead: int,
    waiting: int,
) -> None:
    name = model(3, champion=1)
    leave_a_lock(client, name, dead)
    monkeypatch.setattr(lock, "TIMEOUT", 0.05)
    with pytest.raises(
        RegistryLockError,
        match=(
            rf"waited 0 s for version {dead}, .*delete the tag 'ebbflow.promoting' of version"
            rf" {dead}"
        ),
    ):
        promote_version(
            cases.tracked(uri=uri), cases.challenger(name, waiting), {}, expected_champion="1"
        )
    assert aliases(client, name) == {"champion": "1"}
    assert LOCK not in tags(client, name, waiting)
    assert promote_version(
        cases.tracked(uri=uri), cases.challenger(name, dead), {}, expected_champion="1"
    ).champion
    with pytest.raises(RegistryError, match=f"the champion is now {dead}"):
        promote_version(
            cases.tracked(uri=uri), cases.challenger(name, waiting), {}, expected_champion="1"
        )
    assert LOCK not in tags(client, name, dead)


def test_a_lock_of_the_champion_is_over(
    client: MlflowClient, uri: str, model: Callable[..., str]
) -> None:
    name = model(2, champion=1)
    leave_a_lock(client, name, 1)
    assert (
        promote_version(
            cases.tracked(uri=uri), cases.challenger(name, 2), {}, expected_champion="1"
        ).previous
        == "1"
    )
    assert LOCK not in tags(client, name, 1)


def test_an_attempt_that_was_believed_dead_moves_nothing(
    client: MlflowClient, uri: str, model: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had read the champion when its retry came, promoted, and another version followed."""
    name = model(3, champion=1)
    calls = iter(("get_model_version_by_alias",))

    def meanwhile(method: str) -> None:
        if method == "get_model_version" and next(calls, None):
            monkeypatch.setattr(promotion, "connect_to_store", lambda uri: client)
            promote_version(
                cases.tracked(uri=uri), cases.challenger(name, 2), {}, expected_champion="1"
            )
            promote_version(
                cases.tracked(uri=uri), cases.challenger(name, 3), {}, expected_champion="2"
            )

    monkeypatch.setattr(promotion, "connect_to_store", lambda uri: cases.Watched(client, meanwhile))
    with pytest.raises(RegistryLockError, match="another attempt took over the promotion"):
        promote_version(
            cases.tracked(uri=uri), cases.challenger(name, 2), {}, expected_champion="1"
        )
    assert aliases(client, name) == {"champion": "3", "previous": "2"}


# --- killed


def test_killed_before_any_write_a_promotion_is_completed_by_its_retry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "registry.db"
    store = cases.SmallRegistry(file)
    monkeypatch.setattr(promotion, "connect_to_store", lambda uri: store)
    ends = []
    for write in itertools.count(1):
        name = f"m{write}"
        store.set_registered_model_alias(name, "champion", "1")
        killed = dies(cases.killed_promotion, file, name, write)
        assert store.get_model_version_by_alias(name, "champion").version in "12"
        again = promote_version(
            cases.tracked(), cases.challenger(name, 2), {"promoted_in": "it"}, expected_champion="1"
        )
        assert again == Registration(model_name=name, version="2", champion=True, previous="1")
        found = [
            store.get_model_version_by_alias(name, alias).version
            for alias in ("champion", "previous")
        ]
        ends.append(
            (
                found,
                store.get_model_version(name, "2").tags,
                store.get_model_version(name, "1").tags,
            )
        )
        if not killed:
            break
    assert write > 6
    assert all(end == ends[-1] for end in ends)


def first_champion(
    client: MlflowClient, recipe: Recipe, model: Callable[..., str]
) -> tuple[TrackedRun, str]:
    return start_run(recipe, f"execution-{uuid.uuid4().hex[:8]}"), model(
        1, champion=1, challenger=1
    )


@pytest.mark.exhaustive
def test_killed_before_any_write_a_registration_is_completed_by_its_retry(
    recipe: Recipe, client: MlflowClient, model: Callable[..., str], policy: Path
) -> None:
    run, name = first_champion(client, recipe, model)
    cases.register_and_promote(run, policy, name)
    undisturbed = cases.state(client, run, name)
    assert undisturbed["aliases"] == {"champion": "2", "challenger": "2", "previous": "1"}
    assert (len(undisturbed["models"]), undisturbed["outputs"]) == (1, 1)
    assert undisturbed["own files"] == [False, True], "version 1 is a name without files"
    for write in itertools.count(2):  # the first is the one that finds the model there already
        run, name = first_champion(client, recipe, model)
        killed = dies(cases.killed_registration, run, policy, name, write)
        cases.register_and_promote(run, policy, name)
        assert cases.state(client, run, name) == undisturbed, f"killed before write {write}"
        if not killed:
            break
    assert write > 8
    run, name = first_champion(client, recipe, model)
    assert dies(cases.killed_upload, run, policy, name)
    cases.register_and_promote(run, policy, name)
    assert cases.state(client, run, name) == undisturbed


def test_a_retried_upload_writes_into_no_file_of_the_killed_one(
    recipe: Recipe,
    client: MlflowClient,
    model: Callable[..., str],
    policy: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, name = first_champion(client, recipe, model)

    def end(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "finalize_logged_model", end)
        with pytest.raises(KeyboardInterrupt):
            cases.register_and_promote(run, policy, name)
    (logged,) = client.search_logged_models(
        [run.experiment_id], f"tags.`ebbflow.run_id` = '{run.run_id}'"
    )
    location = Path(logged.artifact_location.removeprefix("file://"))
    (weights,) = location.rglob("weights.safetensors")
    # As ``ebbflow clean`` leaves the files of equal folders.
    shared = tmp_path / "of-another-version"
    os.link(weights, shared)
    shared.chmod(0o444)
    cases.register_and_promote(run, policy, name)
    assert not weights.samefile(shared)
    assert weights.read_bytes() == shared.read_bytes()


# --- a store that is away


@pytest.mark.exhaustive
def test_when_mlflow_goes_away_at_any_call_nothing_is_half_promoted(
    client: MlflowClient, uri: str, model: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes: list[str] = []
    said: set[str] = set()
    for call in itertools.count(1):
        name = model(2, champion=1)
        left = iter(range(1, call))

        def away(method: str, left: Any = left) -> None:
            if next(left, None) is None:
                raise MlflowException("the server is away")

        monkeypatch.setattr(
            promotion, "connect_to_store", lambda uri, away=away: cases.Watched(client, away)
        )
        try:
            promote_version(
                cases.tracked(uri=uri), cases.challenger(name, 2), {}, expected_champion="1"
            )
        except RegistryError as error:
            said.add(str(error).replace(name, "NAME"))
            assert aliases(client, name)["champion"] == "1"
            outcomes.append("failed")
        else:
            assert aliases(client, name) == {"champion": "2", "previous": "1"}
            outcomes.append("promoted")
        monkeypatch.setattr(promotion, "connect_to_store", lambda uri: client)
        again = promote_version(
            cases.tracked(uri=uri), cases.challenger(name, 2), {}, expected_champion="1"
        )
        assert again == Registration(model_name=name, version="2", champion=True, previous="1")
        assert aliases(client, name) == {"champion": "2", "previous": "1"}
        assert LOCK not in tags(client, name, 2)
        if next(left, None) is not None:
            break  # this time there were calls left: nothing failed
    (message,) = said
    assert "the server is away. Run the task again" in message
    assert outcomes.count("failed") > 7
    assert outcomes == sorted(outcomes), (
        "once the champion has moved, nothing calls the promotion failed"
    )


# --- rollback


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
