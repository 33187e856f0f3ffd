"""The typed records that pass between stages. Imports nothing heavy: tasks and workflows name these
types while they register.
"""

from __future__ import annotations

from typing import Any

from ebbflow.recipe.base import Strict
from ebbflow.recipe.gate_policy import GatePolicy


class Distribution(Strict):
    """How a metric is distributed over the held-out prompts."""

    spread: float
    """Standard deviation of the prompts' means."""
    worst_tenth: float
    """Mean of the lowest tenth of the prompts' means."""
    best_of: float | None
    """Mean over the prompts with several samples of their best one; null where no prompt has
    several.
    """


class CategoryMeans(Strict):
    """Means over the held-out prompts that share a value of a column of their file.

    Example:
        >>> CategoryMeans(column="tag", value="counting", prompts=80, means={"geneval": 0.62})
    """

    column: str
    value: str
    prompts: int
    """How many there are."""
    means: dict[str, float]
    """Of every metric, as ``Evaluation.held_out``."""


class Evaluation(Strict):
    """Means over fixed prompts with fixed noise; the samples are in a table
    (``schema.evaluation_schema``).

    Example:
        >>> Evaluation(
        ...     label="1.1 online",
        ...     policy_version=40,
        ...     held_out={"reward": 0.71, "ocr": 0.71},
        ...     validation={"reward": 0.69, "ocr": 0.69},
        ...     coverage=1.0,
        ...     velocity_drift=0.003,
        ...     seconds={"sampling": 12.5, "scoring": 3.1},
        ... )
    """

    label: str
    """Which policy: ``before``, ``1.1 online``, ``1.2 offline`` ..., or the champion's name."""
    policy_version: int
    """Optimiser steps since the base model."""
    held_out: dict[str, float]
    """Mean of every metric (reward, ocr, exact_match, guardrails) over the held-out prompts."""
    validation: dict[str, float]
    coverage: float
    """Share of the held-out prompts whose reward is a finite number."""
    velocity_drift: float
    """Mean of (v - v_base)^2 on the policy's own samples, noised to fixed sigmas."""
    seconds: dict[str, float]
    """Wall time by phase: sampling, scoring."""
    statistics: dict[str, float] = {}
    """Mean of every statistic of the images (entropy, brightness, diversity ...) over the held-out
    prompts.
    """
    look: int = 0
    """Whose noise the held-out samples have: that of the run's look (``TrackedRun.look``)."""
    distributions: dict[str, Distribution] = {}
    """Spread, worst tenth and best of several samples, of every metric of ``held_out``."""
    categories: list[CategoryMeans] = []
    """Of benchmarks that tell kinds of prompts apart (``ebbflow.evaluation.categories``). No
    decision depends on them.
    """
    samples_digest: str = ""
    """sha256 of the file with the table of samples."""
    policy_digest: str = ""
    """sha256 of the policy folder (its COMMIT)."""
    reward_weights: dict[str, str] = {}
    """What the rewards and guardrails were loaded from: sha256 of files and folders, commits of
    repositories (``storage.identity.digest_named_weights``).
    """

    def __str__(self) -> str:
        means = ", ".join(f"{name} {value:.3f}" for name, value in self.held_out.items())
        return f"{self.label}: {means} (held out)"


class Comparison(Strict):
    """Paired difference candidate - champion of one metric, with its confidence interval [low,
    high].

    Example:
        >>> Comparison(
        ...     metric="reward",
        ...     champion=0.58,
        ...     candidate=0.71,
        ...     difference=0.13,
        ...     low=0.09,
        ...     high=0.17,
        ...     prompts=256,
        ... )
    """

    metric: str
    champion: float
    candidate: float
    difference: float
    low: float
    high: float
    prompts: int
    """Prompts that both sides scored."""
    tolerance: float | None = None
    """How far the mean of a guardrail may fall, on the scale of its scores; None where nothing of
    the kind is asked.
    """
    p_value: float | None = None
    """Of "no gain", or, with a tolerance, of "a fall by the tolerance or more"; None where it was
    not tested.
    """
    disaster_p_value: float | None = None
    """Of "no gain" of the reward if a prompt that was not seen fell as far as scores can."""


class Look(Strict):
    """A look of the gate at the held-out prompts, in the ledger of the registered model.

    Example:
        >>> Look(number=3, error=0.05 / 52, spent=3 * 0.05 / 52, budget=0.05)
    """

    number: int
    """From one, over all looks for the registered model."""
    error: float
    """The p-value below which this look may promote: its share of the budget."""
    spent: float
    """Of the budget, by the looks of the last 365 days, this one included."""
    budget: float
    """Probability of a false promotion in a year (``promotion.error_budget``)."""


class GateDecision(Strict):
    """The gate's decision."""

    promote: bool
    candidate: str
    champion: str
    target: Comparison
    guardrails: list[Comparison]
    statistics: list[Comparison] = []
    """Image statistics that were tested."""
    look: Look | None = None
    """What this decision spent of the error budget; None for the gate of a branch, which has
    none.
    """
    anchor: str | None = None
    """What the candidate was also compared with; None where that is the champion itself."""
    anchored: list[Comparison] = []
    """The reward and the guardrails against the anchor."""
    promoted_reward: float | None = None
    """The champion's reward in the look that promoted it, which is too high by the luck of having
    been chosen; ``target.champion`` is of new samples. None where it is unknown.
    """
    coverage: float
    reasons: list[str]
    """One sentence per rule: what passed, or what failed."""
    policy: GatePolicy | None = None
    """What was pinned to the registered model; None before its first promotion."""
    held_out_digest: str = ""
    """Of the texts of the held-out prompts (``data.twins.digest_held_out``)."""
    reward_weights: dict[str, str] = {}
    """What the rewards and guardrails were loaded from (``Evaluation.reward_weights``)."""

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        """Short: ``pyflyte run`` prints its outputs."""
        return [
            ("promote", self.promote),
            ("candidate", self.candidate),
            ("champion", self.champion),
        ]


class StageRecord(Strict):
    """What a training stage did; kept in the policy folder that it produced.

    Example:
        >>> StageRecord(
        ...     label="1.1 online",
        ...     algorithm="mix_grpo",
        ...     samples=5120,
        ...     optimizer_steps=40,
        ...     steps=20,
        ...     seconds={"rollout": 410.0, "scoring": 55.0, "training": 620.0},
        ... )
    """

    label: str
    algorithm: str
    samples: int
    """Images generated for training."""
    optimizer_steps: int
    steps: int = 0
    """Training steps: those of an online stage, or the optimiser steps of an offline one."""
    seconds: dict[str, float]
    """Wall time by phase: rollout, scoring, training ..."""
    alarms: list[str] = []
    """What a person should check before the policy is used."""


class TrackedRun(Strict):
    """The parent MLflow run of an execution: what a task needs to find it.

    Example:
        >>> TrackedRun(
        ...     run_id="0a1b2c3d4e5f60718293a4b5c6d7e8f9",
        ...     experiment_id="1",
        ...     tracking_uri="http://mlflow:5000",
        ...     folder="s3://bucket/runs/glyph-0a1b2c3d",
        ...     recipe_digest="9f86d081884c7d65",
        ...     started_at=1764000000.0,
        ... )
    """

    run_id: str
    experiment_id: str
    tracking_uri: str
    folder: str
    """Path or URI of the run's report and summary: ``<output>/<recipe name>-<first 8 characters of
    the run id>``.
    """
    recipe_digest: str
    started_at: float
    """Seconds since 1970."""
    name: str = ""
    """Of the run in the UI."""
    experiment: str = ""
    sinks: list[str] = []
    """Where its curves go besides MLflow."""
    look: int = 0
    """Looks that the gate had taken at the registered model when the run began: the key of the
    noise of its held-out samples.
    """

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        """Short: ``pyflyte run`` prints its outputs."""
        return [("run_id", self.run_id), ("folder", self.folder)]


class Registration(Strict):
    """A policy in the registry.

    Example:
        >>> Registration(model_name="ebbflow-glyph", version="7", champion=True, previous="6")
    """

    model_name: str
    version: str
    champion: bool
    """Whether it holds the alias ``champion``."""
    previous: str | None
    """The version that was champion before."""
    declined: bool = False
    """Whether a person was asked for approval and said no."""


class Champion(Strict):
    """The version that holds the alias ``champion``, with its lineage."""

    tracking_uri: str
    model_name: str
    version: str
    run_id: str
    recipe_digest: str
    base_digest: str
    """Digest of the base model that the policy was trained from; empty when it was registered
    without this tag.
    """
    promoted_reward: float | None = None
    """Its reward in the look that promoted it; None where that is unknown."""
