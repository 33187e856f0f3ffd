"""The metadata of a policy folder: what it holds and where it comes from. Reading it needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from ebbflow.recipe.base import Strict, explain
from ebbflow.recipe.model import ModelConfig
from ebbflow.recipe.recipe import EvaluationConfig, PolicyConfig
from ebbflow.storage.artifacts import new_folder, verify

METADATA = "policy.json"
STATISTICS = "prompt_statistics.json"
AGAIN = "copy the folder again or make it again"
ITERATE = "iterate"  # the parameters themselves, where the folder's weights are their average


class PolicyError(Exception):
    """A policy folder that does not fit: names the folder, what differs and how to fix it."""


class Progress(Strict):
    """How far an algorithm has come with a policy: its schedules continue from here in the next stage that it runs."""

    algorithm: str = ""
    steps: int = 0
    """Rollout steps of online stages."""
    updates: int = 0
    """Optimiser steps."""


class PolicyMetadata(Strict):
    """``policy.json``: what a policy folder holds and where it comes from."""

    base_digest: str
    """COMMIT of the base-model folder that it was trained from."""
    recipe_digest: str
    config: PolicyConfig
    model: ModelConfig = ModelConfig()
    """The base model, and how it generates."""
    steps: int = EvaluationConfig().steps
    """Denoising steps that it is evaluated with, and served."""
    start: str | None = None
    """Where the policy came from that this one was started at, if it was not the base model."""
    version: int = 0
    """Optimiser steps since the start."""
    progress: Progress = Progress()
    """Of the last stage's algorithm."""
    copies: tuple[Annotated[str, Field(pattern=r"^[a-z]+$")], ...] = ()
    stages: tuple[str, ...] = ()
    """Labels of the stages behind it. No times: the same recipe gives the same bytes."""


def progress_of(metadata: PolicyMetadata, algorithm: str) -> Progress:
    """Where the algorithm's schedules start: where it stopped, if it was the last to train the policy."""
    return metadata.progress if metadata.progress.algorithm == algorithm else Progress(algorithm=algorithm)


def read_policy_metadata(folder: Path) -> PolicyMetadata:
    """The metadata of a committed policy folder."""
    verify(folder)
    if not (folder / METADATA).is_file():
        raise PolicyError(f"{folder} is no policy folder: it has no {METADATA}")
    try:
        return PolicyMetadata.model_validate_json((folder / METADATA).read_bytes())
    except ValidationError as error:
        raise PolicyError(
            f"{folder / METADATA} says what this Ebbflow does not know:\n{explain(error, PolicyMetadata)}"
        ) from None


def write_base_policy(
    folder: Path,
    base_digest: str,
    recipe_digest: str,
    config: PolicyConfig,
    model: ModelConfig = ModelConfig(),
    steps: int = EvaluationConfig().steps,
) -> None:
    """The policy folder of the untouched base model: version 0, no weights of its own."""
    metadata = PolicyMetadata(base_digest=base_digest, recipe_digest=recipe_digest, config=config, model=model, steps=steps)
    with new_folder(folder) as unfinished:
        (unfinished / METADATA).write_text(metadata.model_dump_json(indent=2))
