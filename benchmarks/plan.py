"""The plan's simulation against the measured modes of an online stage: ``python -m
benchmarks.plan``.

The seconds of rollouts with rewards and of training are those of the sync run in
``online_modes.json``; the simulation then says what a step of each mode takes. In those runs
rollouts and rewards share a core, so that they are one task here. The table goes to
``benchmarks/results/plan.md``.
"""

from __future__ import annotations

import json
import math
from typing import Any

from benchmarks.online_modes import MODES, WORKLOADS
from benchmarks.online_modes import RESULTS as MEASURED
from ebbflow.estimate.schedule import Schedule, Stage, TaskSeconds, simulate_stage
from ebbflow.recipe import Recipe
from ebbflow.stage import StageContext

RESULTS = MEASURED.with_name("plan.md")
HEADER = [
    "workload",
    "mode",
    "measured step s",
    "predicted step s",
    "difference",
    "training busy, measured",
    "predicted",
]


PAGE = """# The plan against measured steps

`python -m benchmarks.plan`, from the measurements in [online_modes.md](online_modes.md): one
training rank on one core, rollouts and rewards on another. The seconds of tasks are those of the
sync run, and the steps of all modes are predicted.

{table}

Training in `one_step_off` and `async` took longer than in `sync`, since both cores share caches
and memory; the plan does not know this, and it shows in the shares of busy time. Several workers
of a role have not been measured: there the plan is compared with the loop's own queue on a
virtual clock (tests/test_plan.py). No GPU has been measured.
"""


def main() -> None:
    RESULTS.write_text(format_report(compare_with_measured(json.loads(MEASURED.read_text()))))


def compare_with_measured(results: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each measured workload and mode."""
    sync = {row["workload"]: row for row in results["speed"] if row["mode"] == "sync"}
    return [row | _predict_row(row, sync[row["workload"]]) for row in results["speed"]]


def _predict_row(row: dict[str, Any], sync: dict[str, Any]) -> dict[str, Any]:
    config = _build_stage(row["workload"]).online_config
    # a request is a micro-batch of whole groups
    requests = math.ceil(config.prompts_per_step / (config.micro_batch // config.group_size))
    # Always those of the sync run, where nothing overlaps: taken from the predicted mode itself,
    # the prediction would contain what it should predict.
    seconds = TaskSeconds(
        rollout=sync["rollout_and_reward"] / requests, scoring=0.0, training=sync["training"]
    )
    # steps that rollouts may be ahead of training
    ahead = {"sync": 0, "one_step_off": 1, "async": MODES["async"].get("staleness", 0)}[row["mode"]]
    schedule: Schedule = simulate_stage(
        Stage(requests, ahead, newest=row["mode"] == "async"), seconds, 1, 1
    )
    return {
        "measured": row["step"],
        "predicted": schedule.step,
        "busy": row["training"] / row["step"],
        "predicted_busy": schedule.training,
    }


def _build_stage(workload: str) -> StageContext:
    return StageContext(
        Recipe.model_validate({"stages": [{"kind": "online", **WORKLOADS[workload]}]}), 0, 0
    )


def format_report(rows: list[dict[str, Any]]) -> str:
    """The table, in Markdown."""
    cells = [
        [
            row["workload"],
            row["mode"],
            f"{row['measured']:.2f}",
            f"{row['predicted']:.2f}",
            f"{row['predicted'] / row['measured'] - 1:+.1%}",
            f"{row['busy']:.0%}",
            f"{row['predicted_busy']:.0%}",
        ]
        for row in rows
    ]
    table = "\n".join(f"| {' | '.join(line)} |" for line in [HEADER, ["---"] * len(HEADER), *cells])
    return PAGE.format(table=table)


if __name__ == "__main__":
    main()
