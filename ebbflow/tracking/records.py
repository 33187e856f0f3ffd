"""What tracking says to the rest of the pipeline, as typed records. Imports no MLflow, so that workflows can name them."""

from __future__ import annotations

from ebbflow.recipe.base import Strict


class TrackedRun(Strict):
    """The parent run of an execution: what a task needs to find it again."""

    run_id: str
    experiment_id: str
    tracking_uri: str
    folder: str
    """Where this run's report and summary go: ``<output>/<recipe name>-<first 8 characters of the run id>``."""
    recipe_digest: str
    started_at: float
    """Seconds since 1970."""


class Registration(Strict):
    """What became of a policy in the registry."""

    model_name: str
    version: str
    champion: bool
    """Whether it holds the alias ``champion``."""
    previous: str | None
    """The version that it replaced as champion."""


class Champion(Strict):
    """The version that holds the alias ``champion``, with its lineage."""

    tracking_uri: str
    model_name: str
    version: str
    run_id: str
    recipe_digest: str
    base_digest: str
    """What the policy was trained from; empty when it was registered without this tag."""
