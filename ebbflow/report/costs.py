"""What a run costs: GPU-hours, core-hours and money of its parts, and for a point of reward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

POINT = 0.01
"""Of the held-out reward: what the money is divided by."""
OTHER = "bookkeeping"
"""The part with the nodes of no stage: prompts, the gate, the registry, the report."""


class Machines(NamedTuple):
    """What a node of a run occupies while it runs."""

    gpus: float
    cores: float


class Prices(NamedTuple):
    """Money for an hour of a GPU and of a core; 0 where it is unknown."""

    gpu_hour: float = 0.0
    core_hour: float = 0.0
    currency: str = "USD"


class CostRow(NamedTuple):
    """What a part of a run costs."""

    part: str
    gpu_hours: float
    core_hours: float
    money: float


class Ledger(NamedTuple):
    """What a run costs, by its parts.

    Attributes:
        currency: of the money; empty where no price is known.
        gain: held-out reward of the candidate minus that of the start; None where one is unknown.
    """

    rows: Sequence[CostRow]
    currency: str
    gain: float | None

    @property
    def total(self) -> CostRow:
        """The sum of all parts."""
        return CostRow(
            "total",
            sum(row.gpu_hours for row in self.rows),
            sum(row.core_hours for row in self.rows),
            sum(row.money for row in self.rows),
        )

    def divide_by_points(self) -> CostRow | None:
        """Return the cost of a point (.01) of held-out reward; None where the reward did not
        rise.
        """
        if self.gain is None or self.gain <= 0:
            return None
        points = self.gain / POINT
        _, gpu_hours, core_hours, money = self.total
        return CostRow("per point", gpu_hours / points, core_hours / points, money / points)

    def list_metrics(self) -> dict[str, float]:
        """List the sums as metrics of the run."""
        _, gpu_hours, core_hours, money = self.total
        metrics = {"cost/gpu_hours": gpu_hours, "cost/core_hours": core_hours}
        if self.currency:
            metrics["cost/money"] = money
        return metrics

    def summarise(self) -> dict[str, Any]:
        """Return the ledger for ``summary.json``."""
        rows = {row.part: row for row in (*self.rows, self.total)}
        per_point = self.divide_by_points()
        if per_point:
            rows["per point"] = per_point
        return {
            "currency": self.currency,
            "parts": {
                name: {
                    "gpu_hours": round(row.gpu_hours, 6),
                    "core_hours": round(row.core_hours, 6),
                    "money": round(row.money, 4),
                }
                for name, row in rows.items()
            },
        }


def build_ledger(
    nodes: Mapping[str, tuple[float, float]],
    stages: Sequence[str],
    find_machines: Callable[[str], Machines],
    prices: Prices,
    gain: float | None,
) -> Ledger:
    """Add up what the nodes of a run occupied, from their clocks.

    Example:
        A node "1.1 online" of 1,800 seconds on 2 GPUs and 8 cores costs 1 GPU-hour and 4
        core-hours; with GPUs at 2.5 and cores at .05 an hour that is 2.7.

    Args:
        nodes: start and end of each node, seconds, by name. Nodes that ran side by side count each;
            of one that was resumed, the pause counts, too, as MLflow keeps its first start.
        stages: labels of the stages, in the order of the run.
        find_machines: what a node occupies.
    """
    parts: dict[str, list[float]] = {name: [0.0, 0.0] for name in ("base model", *stages)}
    parts |= {"evaluations": [0.0, 0.0], OTHER: [0.0, 0.0]}
    for name, (start, end) in nodes.items():
        machines = find_machines(name)
        # Clocks of two machines may differ by more than a short node takes.
        hours = max(0.0, end - start) / 3600
        sums = parts[find_part(name, stages)]
        sums[0] += hours * machines.gpus
        sums[1] += hours * machines.cores
    rows = [
        CostRow(part, gpus, cores, gpus * prices.gpu_hour + cores * prices.core_hour)
        for part, (gpus, cores) in parts.items()
        if gpus or cores
    ]
    # Zero money would read as "free".
    has_price = bool(prices.gpu_hour or prices.core_hour)
    return Ledger(rows, prices.currency if has_price else "", gain)


def find_part(node: str, stages: Sequence[str]) -> str:
    """Find the part of a run that a node belongs to.

    Example:
        "1.2 offline scoring 0" belongs to the stage "1.2 offline", "before evaluation" to the
        evaluations.
    """
    if node.endswith(" evaluation"):
        return "evaluations"
    if node == "base model":
        return node
    for stage in stages:
        if node == stage or node.startswith(f"{stage} "):
            return stage
    return OTHER
