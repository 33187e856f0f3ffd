"""Promotions: one winner of a race, nothing half done, and a retry that ends as if
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
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from registry_cases import aliases, tags

from ebbflow.data.records import Registration, TrackedRun
from ebbflow.recipe import Recipe
from ebbflow.registry import lock, promotion
from ebbflow.registry.lock import LOCK, RegistryLockError
from ebbflow.registry.promotion import RegistryError, promote_version
from ebbflow.tracking.parent_run import start_run
from tests.forked import CONTEXT


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
