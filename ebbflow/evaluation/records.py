"""What an evaluation and the gate say, as typed records that travel between stages."""

from __future__ import annotations

from ebbflow.recipe.base import Strict


class Evaluation(Strict):
    """Means over fixed prompts with fixed noise; the samples behind them are a table (``evaluation_schema``)."""

    label: str
    """Which policy: ``before``, ``1.1 online``, ``1.2 offline`` ..., or the champion's name."""
    policy_version: int
    """Optimiser steps since the base model."""
    held_out: dict[str, float]
    """Mean of every metric (reward, ocr, exact_match, guards) over the held-out prompts."""
    validation: dict[str, float]
    coverage: float
    """Share of the held-out prompts whose reward is a finite number."""
    velocity_drift: float
    """Mean of (v - v_base)^2 along the policy's own held-out trajectories."""
    seconds: dict[str, float]
    """Wall time by phase: sampling, scoring."""


class Comparison(Strict):
    """Paired difference candidate - champion of one metric with its bootstrap interval."""

    metric: str
    champion: float
    candidate: float
    difference: float
    low: float
    high: float
    prompts: int
    """Prompts that both sides scored."""


class Verdict(Strict):
    """The gate's decision."""

    promote: bool
    candidate: str
    champion: str
    target: Comparison
    guards: list[Comparison]
    coverage: float
    reasons: list[str]
    """One sentence for every rule: what held, or what kept the candidate back."""


class StageRecord(Strict):
    """What a training stage did; kept in the policy folder it produced."""

    label: str
    algorithm: str
    samples: int
    """Images generated for training."""
    optimizer_steps: int
    seconds: dict[str, float]
    """Wall time by phase: rollout, scoring, training ..."""
