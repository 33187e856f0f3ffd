"""What test_promotion.py runs in processes of their own: promotions that race, hesitate, fail or
are killed.
"""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import time
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow.artifacts
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from ebbflow.data.records import Comparison, GateDecision, Registration, TrackedRun
from ebbflow.registry import lock, promotion
from ebbflow.registry.lock import LOCK, RegistryLockError
from ebbflow.registry.model_version import MODEL_FILES_DIGEST, compute_model_files_digest
from ebbflow.registry.promotion import RegistryError

WON = GateDecision(
    promote=True,
    candidate="1.1 online",
    champion="before",
    target=Comparison(
        metric="reward", champion=0.5, candidate=0.9, difference=0.4, low=0.3, high=0.5, prompts=128
    ),
    guardrails=[],
    coverage=1.0,
    reasons=["It won."],
)
WRITES = ("create_", "delete_", "finalize_", "log_", "set_")


class SmallRegistry:
    """The calls of a promotion on tags and aliases in a SQLite file: a hundred times as fast as a
    store of MLflow.
    """

    def __init__(self, file: Path) -> None:
        self.database = sqlite3.connect(file, isolation_level=None, timeout=60)
        self.database.execute(
            "CREATE TABLE IF NOT EXISTS tags (name, version, key, value, PRIMARY KEY (name,"
            " version, key))"
        )
        self.database.execute(
            "CREATE TABLE IF NOT EXISTS aliases (name, alias, version, PRIMARY KEY (name, alias))"
        )

    def get_model_version(self, name: str, version: str) -> SimpleNamespace:
        found = self.database.execute(
            "SELECT key, value FROM tags WHERE name = ? AND version = ?", (name, str(version))
        )
        return SimpleNamespace(name=name, version=str(version), tags=dict(found.fetchall()))

    def get_model_version_by_alias(self, name: str, alias: str) -> SimpleNamespace:
        found = self.database.execute(
            "SELECT version FROM aliases WHERE name = ? AND alias = ?", (name, alias)
        ).fetchone()
        if found is None:
            raise MlflowException.invalid_parameter_value(f"no {alias}")
        return self.get_model_version(name, found[0])

    def search_model_versions(self, condition: str) -> list[SimpleNamespace]:
        name = condition.split("'")[1]
        found = self.database.execute(
            "SELECT version FROM tags WHERE name = ? AND key = ?", (name, LOCK)
        ).fetchall()
        return [SimpleNamespace(version=version) for (version,) in found]

    def set_model_version_tag(self, name: str, version: str, key: str, value: str) -> None:
        self.database.execute(
            "REPLACE INTO tags VALUES (?, ?, ?, ?)", (name, str(version), key, value)
        )

    def delete_model_version_tag(self, name: str, version: str, key: str) -> None:
        self.database.execute(
            "DELETE FROM tags WHERE name = ? AND version = ? AND key = ?", (name, str(version), key)
        )

    def set_registered_model_alias(self, name: str, alias: str, version: str) -> None:
        self.database.execute("REPLACE INTO aliases VALUES (?, ?, ?)", (name, alias, str(version)))


class Watched:
    """A client that calls ``before(name of the method)`` ahead of every call."""

    def __init__(self, client: Any, before: Callable[[str], object]) -> None:
        self._client = client
        self._before = before

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        def call(*args: Any, **keywords: Any) -> Any:
            self._before(name)
            return method(*args, **keywords)

        return call


def tracked(run_id: str = "a run", experiment_id: str = "0", uri: str = "a store") -> TrackedRun:
    return TrackedRun(
        run_id=run_id,
        experiment_id=experiment_id,
        tracking_uri=uri,
        folder="runs/a",
        recipe_digest="r" * 64,
        started_at=0.0,
    )


def challenger(name: str, version: int) -> Registration:
    return Registration(model_name=name, version=str(version), champion=False, previous=None)


def race(
    file: Path,
    version: int,
    rounds: int,
    start: Barrier,
    results: SimpleQueue[tuple[int, int, str]],
) -> None:
    """One racer: in every round it waits for the others and then promotes its version of the
    round's model.
    """
    chance = random.Random(version)
    client = Watched(SmallRegistry(file), lambda _: time.sleep(chance.choice((0, 0, 0.001, 0.003))))
    promotion.connect_to_store = lambda uri: client  # type: ignore[assignment, return-value]
    lock.POLL = 0.001
    for number in range(rounds):
        start.wait(120)
        try:
            promotion.promote_version(
                tracked(), challenger(f"m{number}", version), {}, expected_champion=None
            )
            results.put((number, version, "won"))
        except (RegistryError, RegistryLockError) as error:
            results.put((number, version, str(error)))


def race_in_mlflow(
    uri: str,
    names: list[str],
    version: int,
    start: Barrier,
    results: SimpleQueue[tuple[int, int, str]],
) -> None:
    """The same against a store of MLflow."""
    for number, name in enumerate(names):
        start.wait(120)
        try:
            promotion.promote_version(
                tracked(uri=uri), challenger(name, version), {}, expected_champion=None
            )
            results.put((number, version, "won"))
        except (RegistryError, RegistryLockError) as error:
            results.put((number, version, str(error)))


def killed_before(write: int, attempt: Callable[[], object], client: Any = None) -> None:
    """Run an attempt until its ``write``-th write (counted from one), and kill the process there,
    -9.
    """
    left = write
    connect = promotion.connect_to_store

    def before(method: str) -> None:
        nonlocal left
        left -= method.startswith(WRITES)
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    promotion.connect_to_store = lambda uri: Watched(client or connect(uri), before)  # type: ignore[assignment, return-value]
    attempt()


def killed_promotion(file: Path, name: str, write: int) -> None:
    def attempt() -> None:
        promotion.promote_version(
            tracked(), challenger(name, 2), {"promoted_in": "it"}, expected_champion="1"
        )

    killed_before(write, attempt, SmallRegistry(file))


def register_and_promote(run: TrackedRun, policy: Path, name: str) -> Registration:
    made = promotion.register_version(
        run, policy, None, WON, {}, model_name=name, expected_champion="1"
    )
    return promotion.promote_version(run, made, {"promoted_in": "it"}, expected_champion="1")


def killed_registration(run: TrackedRun, policy: Path, name: str, write: int) -> None:
    killed_before(
        write,
        lambda: promotion.register_version(
            run, policy, None, WON, {}, model_name=name, expected_champion="1"
        ),
    )


def killed_upload(run: TrackedRun, policy: Path, name: str) -> None:
    """Killed when one of the model's files has arrived, as half of its bytes."""
    upload = MlflowClient.log_model_artifacts

    def half(self: MlflowClient, model_id: str, local_dir: str) -> None:
        for file in [path for path in Path(local_dir).rglob("*") if path.is_file()]:
            if file.name == "weights.safetensors":
                file.write_bytes(file.read_bytes()[:32])
            else:
                file.unlink()
        upload(self, model_id, local_dir)
        os.kill(os.getpid(), signal.SIGKILL)

    MlflowClient.log_model_artifacts = half  # type: ignore[method-assign]
    register_and_promote(run, policy, name)


def state(client: MlflowClient, run: TrackedRun, name: str) -> dict[str, Any]:
    """All that the registry and the run know of a promotion, without what differs between two
    runs."""
    versions = sorted(
        client.search_model_versions(f"name = '{name}'"), key=lambda version: int(version.version)
    )
    models = client.search_logged_models(
        [run.experiment_id], f"tags.`ebbflow.run_id` = '{run.run_id}'"
    )
    own = {"ebbflow.run_id", "flyte.execution_id", "mlflow.modelVersions", MODEL_FILES_DIGEST}
    outputs = client.get_run(run.run_id).outputs
    linked = [model.tags.get("mlflow.modelVersions", "").replace(name, "NAME") for model in models]
    folders = [
        Path(mlflow.artifacts.download_artifacts(model.artifact_location)) for model in models
    ]
    return {
        "aliases": {
            alias: str(version)
            for alias, version in client.get_registered_model(name).aliases.items()
        },
        "versions": [
            {key: text for key, text in version.tags.items() if key not in own}
            for version in versions
        ],
        "models": [(str(model.status), sorted(model.tags.keys() - own)) for model in models],
        "linked": linked,
        "outputs": len(outputs.model_outputs) if outputs else 0,
        "files": [_files(folder) for folder in folders],
        "own files": [
            version.tags.get(MODEL_FILES_DIGEST) in map(compute_model_files_digest, folders)
            for version in versions
        ],
    }


def _files(folder: Path) -> dict[str, int | None]:
    """Sizes by path; MLflow's own files name the run and the time."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size if "data" in path.parts else None
        for path in found
    }
