"""What the forward-backward passes of an update leave behind: its metrics, and the error that names
what is not finite.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ebbflow.algorithms.base import RowMetrics, mean_per_row
from ebbflow.recipe.students import teacher_copy_name
from ebbflow.training.batches import RowBatch
from ebbflow.training.distributed import Ranks, sum_over_processes
from ebbflow.training.gradients import TrainingError
from ebbflow.training.policy import Policy

NOT_IN_A_METRIC = re.compile(r"[^A-Za-z0-9_.-]")
"""What the name of a prompt set may have, as it may be that of a file, and the name of a metric
should not.
"""


@dataclass
class PassResults:
    """What the passes over one batch leave behind, one entry per row of this process.

    Example: after two passes of two rows each::

        results.rows["loss"]  # [tensor([0.31, 0.28]), tensor([0.25, 0.30])]
        results.read_numbers(norm, total=4)  # ({"loss": 0.285, ...}, 0.8, 1.1)

    Attributes:
        rows: loss and metrics, each a list of [m] tensors.
        gradient_is_finite: of the loss with respect to the velocity of each row, a list of bool
            [m].
        first_norm: of the mean gradient of the first part, of each process its own or of all the
            same; None where there is one part.
        drift: mean (v - v_base)^2 of the rows where the base's prediction is known, a list of [m].
    """

    rows: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    gradient_is_finite: list[Tensor] = field(default_factory=list)
    first_norm: Tensor | None = None
    drift: list[Tensor] = field(default_factory=list)

    def add_pass(self, loss: Tensor, metrics: RowMetrics, velocity: Tensor) -> None:
        """Note what a backward pass has given; ``velocity`` has kept its gradient."""
        for name, values in (metrics | {"loss": loss}).items():
            self.rows[name].append(values.detach())
        assert velocity.grad is not None
        # Of each row, because the gradients of the parameters are sums over rows: a number that is
        # not finite in them no longer says which sample it came from.
        self.gradient_is_finite.append(velocity.grad.flatten(1).isfinite().all(1))

    def add_drift(self, velocity: Tensor, base: Tensor, start: int, stride: int) -> None:
        """Note the drift of the part that begins at row ``start``; ``base`` is known at every row
        of the batch that ``stride`` divides.
        """
        # The first watched row of the part is the first multiple of ``stride`` from ``start`` on.
        policy_velocity = velocity.detach()[-start % stride :: stride]
        first = math.ceil(start / stride)
        base_velocity = base[first : first + len(policy_velocity)]
        self.drift.append(mean_per_row((policy_velocity - base_velocity) ** 2))

    def read_numbers(self, norm: Tensor, total: int) -> tuple[dict[str, float], float, float]:
        """Return the metrics, averaged over the ``total`` rows of all processes, ``norm``, and the
        norm of the first part.

        All of them come from the device at once: each read by itself would be one more wait for it.
        """
        # One collective call for all of them, in an order that is the same on every process.
        names = sorted(self.rows)
        sums = [torch.cat(self.rows[name]).double().sum() for name in names]
        if self.drift:
            # Processes watch different numbers of rows, so their number is summed as well.
            drift = torch.cat(self.drift)
            sums += [drift.double().sum(), torch.full_like(sums[0], len(drift))]
        # Each process has measured a part, so the squares are averaged. ``to``: the gradients of
        # offloaded shards are in main memory.
        first_norm = norm if self.first_norm is None else self.first_norm
        sums.append(first_norm.to(sums[0]) ** 2 / Ranks.current().world)
        values = torch.cat([sum_over_processes(torch.stack(sums)), norm.to(sums[0])[None]])
        *numbers, first_norm_squared, norm_value = values.tolist()
        means = {name: number / total for name, number in zip(names, numbers, strict=False)}
        if self.drift:
            means["velocity_drift"] = numbers[-2] / numbers[-1]
        return means, norm_value, math.sqrt(first_norm_squared)

    def average_teacher_metrics(self, teacher_rows: Mapping[str, Tensor]) -> dict[str, float]:
        """Average ``kl/teacher`` over the rows of each teacher and all processes; a teacher without
        rows has no metric.
        """
        if "kl/teacher" not in self.rows:
            return {}  # a user's own loss need not report it
        means = {}
        for copy, rows in teacher_rows.items():
            divergence = torch.cat(self.rows["kl/teacher"]).double()[rows]
            total, count = sum_over_processes(
                torch.stack([divergence.sum(), divergence.new_tensor(len(rows))])
            ).tolist()
            if count:
                prompt_set = copy.removeprefix(teacher_copy_name(""))
                means[f"kl/teacher/{NOT_IN_A_METRIC.sub('_', prompt_set)}"] = total / count
        return means

    def describe_first_non_finite_row(self, batch: RowBatch) -> str | None:
        """Describe the first row of this process that is not finite, and what is wrong with it."""
        wrong = {name: ~torch.cat(values).isfinite() for name, values in self.rows.items()}
        wrong["the gradient"] = ~torch.cat(self.gradient_is_finite)
        rows = torch.stack(list(wrong.values())).any(0).nonzero()
        if not len(rows):
            return None
        row = int(rows[0])
        return (
            f"{', '.join(name for name, where in wrong.items() if where[row])} of"
            f" {batch.describe_row(row)}"
        )


def find_teacher_rows(
    batch: RowBatch, prompt_sets: Mapping[int, str], teacher_copies: Collection[str]
) -> dict[str, Tensor]:
    """Return the rows that each teacher teaches, by its copy, where prompt sets have their own.

    Example: {"teacher:glyphs": tensor([0, 1, 4]), "teacher:scenes": tensor([2, 3])}
    """
    teachers = [teacher_copy_name(prompt_sets[i]) for i in batch.keys.prompt_ids]
    return {
        copy: torch.tensor(
            [row for row, teacher in enumerate(teachers) if teacher == copy],
            dtype=torch.int64,
            device=batch.weight.device,
        )
        for copy in teacher_copies
    }


def compute_gradient_metrics(
    norm: float, first_norm: float, inverse_rows: float, total: int
) -> dict[str, float]:
    """Compute the norm before clipping, and how much single samples disagree.

    ``grad_variance`` estimates the trace of the per-row covariance of the gradient from the norms
    of a small and of the whole batch, (|g_small|^2 - |g|^2) / (1/B_small - 1/B) (An Empirical Model
    of Large-Batch Training, 1812.06162, A.1). One step's value is noisy and may be negative: look
    at its average.
    """
    metrics = {"grad_norm": norm}
    if inverse_rows:  # 1/B_small; one part is the whole batch, and 1/B_small - 1/B is 0
        metrics["grad_variance"] = (first_norm**2 - norm**2) / (inverse_rows - 1 / total)
    return metrics


def build_non_finite_error(
    results: PassResults, batch: RowBatch, means: Mapping[str, float], norm: Tensor, policy: Policy
) -> TrainingError:
    """Build the error that names the first row that is not finite, or, where all rows are fine, the
    parameters.
    """
    wrong = results.describe_first_non_finite_row(batch)
    if wrong is None and not all(map(math.isfinite, means.values())):
        wrong = "a row of another process"
    if wrong is None:
        # All rows are fine up to the prediction: the numbers were lost on the way back through the
        # network.
        broken = [
            name
            for name, p in policy.parameters.items()
            if p.grad is not None and not bool(p.grad.isfinite().all())
        ]
        wrong = (
            f"the gradient of {broken[0]} and {len(broken) - 1} more parameters"
            if broken
            else "the gradient"
        )
    return TrainingError(
        f"not finite: {wrong} (gradient norm {norm.item()}); the step was not taken. Lower"
        " optimizer.lr or raise reference.weight, and look at the last metrics before this step"
    )
