"""Evaluations for the gate to decide on: scores per prompt, with failures and without."""

from __future__ import annotations

import pyarrow as pa

from ebbflow.data.records import Evaluation, GateDecision
from ebbflow.data.schema import build_evaluation_schema
from ebbflow.evaluation.gate import decide_by_gate
from ebbflow.recipe import Recipe

PROMPTS = 24
ABSOLUTE = {"guardrail_tolerance": {"absolute": {"tesseract": 0.02, "similarity": 0.02}}}
RECIPE = Recipe.model_validate({"evaluation": {"resamples": 500}, "promotion": ABSOLUTE})


def samples(reward: float, prompts: int = PROMPTS, **guardrails: float | None) -> pa.Table:
    """Rewards that vary around a mean, so that intervals have a width; guardrails are constant."""
    rows = [
        {
            "prompt_id": i,
            "sample": 0,
            "split": "held_out",
            "prompt": "p",
            "target": "T",
            "image": b"",
        }
        | {"reward": reward + 0.1 * (-1) ** i * (reward > 0.6), **guardrails}
        for i in range(prompts)
    ]
    return pa.Table.from_pylist(rows, schema=build_evaluation_schema(["reward", *guardrails]))


def evaluation(label: str, coverage: float = 1.0) -> Evaluation:
    return Evaluation(
        label=label,
        policy_version=0,
        held_out={},
        validation={},
        coverage=coverage,
        velocity_drift=0.0,
        seconds={},
    )


def decision(candidate: pa.Table, champion: pa.Table, coverage: float = 1.0) -> GateDecision:
    return decide_by_gate(
        RECIPE, evaluation("1.1 online", coverage), evaluation("before"), candidate, champion
    )


BEFORE = {"tesseract": 0.30, "similarity": 0.80}


def without(
    table: pa.Table,
    metric: str,
    rows: int,
    failure: str = "tesseract: timed out",
    target: str | None = "T",
) -> pa.Table:
    """The first ``rows`` prompts failed the metric."""
    changed = [
        row | {metric: None, "failure": failure, "target": target} if index < rows else row
        for index, row in enumerate(table.to_pylist())
    ]
    return pa.Table.from_pylist(changed, schema=table.schema)


MANY = 128
