"""Registrations as after a yes of the gate, and what the registry then knows of a version."""

from __future__ import annotations

import uuid
from pathlib import Path

from mlflow import MlflowClient

from ebbflow.data.records import Comparison, GateDecision, TrackedRun
from ebbflow.recipe import Recipe
from ebbflow.registry.promotion import Registration, promote_version, register_version
from ebbflow.tracking.parent_run import start_run


def aliases(client: MlflowClient, name: str) -> dict[str, str]:
    return {
        alias: str(version) for alias, version in client.get_registered_model(name).aliases.items()
    }


def tags(client: MlflowClient, name: str, version: int) -> dict[str, str]:
    return client.get_model_version(name, str(version)).tags


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


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


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
