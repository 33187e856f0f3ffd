"""The forward-backward passes of an update: what the policy and its copies predict at the rows of a
loss, the gradient of a pass, and what the passes leave behind: metrics, and the error that names
what is not finite.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ebbflow.algorithms.base import CopyName, RowMetrics, mean_per_row
from ebbflow.models.base import predict, predict_checkpointed
from ebbflow.recipe.students import teacher_copy_name
from ebbflow.training.batches import ForwardInputs, RowBatch
from ebbflow.training.distributed import Ranks, all_reduce_max, sum_over_processes
from ebbflow.training.policy import Policy

NOT_IN_A_METRIC = re.compile(r"[^A-Za-z0-9_.-]")
"""What the name of a prompt set may have, as it may be that of a file, and the name of a metric
should not.
"""


class TrainingError(Exception):
    """Training that must not go on: names the sample, the step and the row, and what to change."""


def predict_velocity(policy: Policy, inputs: ForwardInputs, part: slice | Tensor) -> Tensor:
    """Predict at some rows with the policy as it is, with gradient where that is on."""
    forward = predict_checkpointed if inputs.checkpointed and torch.is_grad_enabled() else predict
    return forward(policy.model, *inputs.model_arguments(part))


def predict_velocities_of_copy(
    policy: Policy, copy: CopyName, inputs: ForwardInputs, slices: list[slice]
) -> Tensor:
    """Predict with a policy copy over some parts: one swap of the parameters for all of them."""
    with policy.use_copy(copy), policy.keep_gathered():
        return torch.cat([predict_velocity(policy, inputs, part) for part in slices])


def predict_velocities_of_teachers(
    policy: Policy,
    teacher_rows: Mapping[str, Tensor],
    inputs: ForwardInputs,
    slices: list[slice],
) -> Tensor:
    """Predict each row with its own teacher: a teacher for its rows alone, in parts of the usual
    size.
    """
    size = max(part.stop - part.start for part in slices)
    velocities = []
    for copy, rows in teacher_rows.items():
        # Sharded processes communicate in every pass, so all of them take as many: one without rows
        # left predicts its first again, and throws that away.
        passes = all_reduce_max(math.ceil(len(rows) / size))
        if not passes:
            continue  # the same on every process
        with policy.use_copy(copy), policy.keep_gathered():
            for part in rows.tensor_split(passes):
                if len(part):
                    velocities.append(predict_velocity(policy, inputs, part))
                else:
                    predict_velocity(policy, inputs, slice(0, 1))
    # From the order of teachers back to the order of rows.
    order = torch.cat(list(teacher_rows.values())).argsort()
    return torch.cat(velocities)[order]


class RowCounts(NamedTuple):
    """The rows of an update on all processes, and those whose gradient is measured by itself: the
    first pass. Where a process has the whole gradient of its rows, that is its own first pass,
    which costs no message; otherwise it is the first pass of all processes.

    Example: two replicas with 4 and 2 rows in one pass each are ``RowCounts(6, 8, 3 / 8)`` on the
    first of them: gradients are twice the share of the total, and (1/4 + 1/2) / 2 is 3/8.

    Attributes:
        total: rows of all passes of all processes, over which the loss is averaged.
        measured: what the gradient of the first pass, times ``total``, has to be divided by to be
            the mean over its rows.
        inverse: the mean of one over the distinct rows of what is measured; 0 where that is all.
    """

    total: int
    measured: float
    inverse: float


def count_rows(
    policy: Policy, slices: Sequence[slice], num_repeats: int, device: torch.device
) -> RowCounts:
    """Count the rows of all processes, in one message.

    Args:
        slices: the rows of each pass of this process.
        num_repeats: as of ``PolicyUpdater.update_policy``.
    """
    num_first = slices[0].stop - slices[0].start
    values = [float(slices[-1].stop), float(num_first), 1 / num_first]
    world = policy.ranks.world
    if world > 1:
        values = sum_over_processes(
            torch.tensor(values, dtype=torch.float64, device=device)
        ).tolist()
    total, measured, inverse = values
    num_parts = len(slices)
    if policy.has_whole_gradients:
        num_parts *= world // num_repeats
        measured = policy.gradient_factor * num_first
        inverse /= world
    else:
        # Processes that share the tokens of a row, or have the same rows, each count it.
        inverse = policy.context_parallel * num_repeats / measured
    return RowCounts(int(total), measured, inverse if num_parts > 1 else 0.0)


def add_gradient(
    policy: Policy,
    loss: Tensor,
    counts: RowCounts,
    loss_scale: float,
    *,
    is_first: bool,
    is_last: bool,
) -> Tensor | None:
    """Add the gradient of a pass to that of the passes before it; after the last one it is averaged
    over the processes.

    Args:
        loss: of each row of the pass on this process, [m].
        loss_scale: the factor that keeps gradients in float16 from underflow.

    Returns:
        The norm of the mean gradient of the rows that are measured (``RowCounts``); None for all
        passes but the first, and where one pass is all.
    """
    is_measured = is_first and counts.inverse > 0
    reduces = is_last or (is_measured and not policy.has_whole_gradients)
    # Adapters' gradients are summed over processes in the last pass, not in every one.
    policy.set_gradient_reduction(reduces)
    # The mean over ALL rows, not the mean of the passes' means: passes and processes may have
    # different numbers of rows, and a row must count the same in each.
    (loss.sum() * (loss_scale * policy.gradient_factor / counts.total)).backward()
    norm = None
    if is_measured and policy.has_whole_gradients:
        norm = compute_gradient_norm(policy, loss_scale)
    if reduces:
        policy.average_gradients()
    if is_measured and norm is None:
        norm = compute_gradient_norm(policy, loss_scale)
    return None if norm is None else norm * counts.total / counts.measured


def compute_gradient_norm(policy: Policy, scale: float = 1.0) -> Tensor:
    """Compute the norm of gradients that are ``scale`` times too large."""
    gradients = [p.grad for p in policy.parameters.values() if p.grad is not None]
    if scale != 1:
        gradients = list(torch._foreach_div(gradients, scale))
    norm = torch.nn.utils.get_total_norm(gradients)
    # Under FSDP2 this is a DTensor of partial norms; ``full_tensor`` adds them up over the ranks.
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


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
