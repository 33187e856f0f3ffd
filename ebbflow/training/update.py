"""One optimiser step, for every algorithm: predict, lose, guard, step, and let the copies
follow."""

from __future__ import annotations

import math
import re
import warnings
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ebbflow.algorithms.base import CopyName, RowMetrics, mean_per_row
from ebbflow.algorithms.reference import compute_penalty, compute_penalty_weight
from ebbflow.algorithms.registry import find_algorithm
from ebbflow.flow.training_sigmas import list_schedule_points
from ebbflow.models.base import predict, predict_checkpointed
from ebbflow.recipe.stages import OnlineStageConfig, StageConfig
from ebbflow.stage import choose_drift_stride, teacher_copy_name
from ebbflow.training.batches import ForwardInputs, RowBatch, split_into_passes
from ebbflow.training.distributed import all_reduce_max
from ebbflow.training.fake_score import FakeScore
from ebbflow.training.gradients import (
    TrainingError,
    compute_gradient_norm,
    get_world_size,
    sum_over_processes,
)
from ebbflow.training.matching import MatchingBatch
from ebbflow.training.optimizer import AnyOptimizer, build_optimizer, set_learning_rate
from ebbflow.training.policy import Policy
from ebbflow.training.policy_metadata import PolicyMetadata, Progress, resume_progress

NOT_IN_A_METRIC = re.compile(r"[^A-Za-z0-9_.-]")
"""What the name of a prompt set may have, as it may be that of a file, and the name of a metric
should not.
"""
FIRST_LOSS_SCALE = 2.0**16
"""Factor of the loss in float16; halved, and the passes repeated, whenever a gradient overflows: no
step is skipped.
"""


class PolicyUpdater:
    """A policy that a stage trains: its optimiser, the optimiser steps taken, and the alarms that
    went off.

    Attributes:
        updates: optimiser steps of this stage.
        num_updates: all that the stage will take, where that is known: offline stages count their
            batches.
        rollout_updates: of them, those before the samples that are trained on now were generated.
        steps: rollout steps of this stage.
        drift: mean (v - v_base)^2 when it was last measured.
        fake: the fake score network, where the algorithm trains one beside the policy.
        alarms: what a person should look at, a line each.
        drifted: whether the drift alarm went off.
    """

    def __init__(
        self,
        policy: Policy,
        stage: StageConfig,
        metadata: PolicyMetadata | None = None,
        optimizer: AnyOptimizer | None = None,
    ) -> None:
        """``metadata``: of the policy folder that the stage starts from, where there is one.

        Raises:
            TrainingError: the sampler's schedule has no sigma that the algorithm may draw.
            RecipeError: the optimiser cannot be made as the recipe has it.
        """
        self.policy = policy
        self.stage = stage
        self.version = metadata.version if metadata else 0
        self.before = (
            resume_progress(metadata, stage.algorithm_name)
            if metadata
            else Progress(algorithm=stage.algorithm_name)
        )
        self.algorithm = find_algorithm(stage.algorithm)
        self.hyper = stage.hyper_parameters
        _require_drawable_sigmas(policy, stage)
        self.optimizer: AnyOptimizer = optimizer or build_optimizer(policy, stage.optimizer)
        lr_factor = stage.algorithm_kind.fake_score_lr_factor(self.hyper)
        self.fake: FakeScore | None = None
        if lr_factor is not None:
            self.fake = FakeScore(policy, stage.optimizer, lr_factor)
        # Gradients of means over many latent elements are below what float16 can hold.
        self.loss_scale = FIRST_LOSS_SCALE if policy.model.precision == "float16" else 1.0
        self.updates = self.steps = 0
        self.num_updates = (
            stage.steps * stage.updates_per_step if isinstance(stage, OnlineStageConfig) else None
        )
        self.drift = 0.0
        self.alarms: list[str] = []
        self.drifted = False
        self.start_rollout()

    @property
    def sampler_sigmas(self) -> Tensor:
        """The sigmas of the stage's sampler, [steps + 1], in the size that the model draws now."""
        return self.policy.model.compute_sigmas(self.stage.sampler.steps)

    @property
    def progress(self) -> Progress:
        """How far the algorithm has come, earlier stages included."""
        done = {
            "steps": self.before.steps + self.steps,
            "updates": self.before.updates + self.updates,
        }
        return self.before.model_copy(update=done)

    def update_fake_score(self, batch: MatchingBatch, passes: int) -> dict[str, float]:
        """Take one optimiser step of the fake score, before the policy's (``FakeScore.update``)."""
        assert self.fake, "the algorithm trains one"
        set_learning_rate(
            self.fake.optimizer, self.stage.optimizer.schedule, self.updates, self.num_updates
        )
        return self.fake.update_fake_score(batch, passes)

    def start_rollout(self) -> None:
        """Remember the policy as it is, where the loss compares it with later ones: it made the
        samples of the next updates.
        """
        self.rollout_updates = self.updates
        if "rollout" in self.algorithm.copies(self.hyper):
            self.policy.snapshot_copy("rollout")

    def finish_step(self) -> None:
        """Count a rollout step; where a copy generates the rollouts, the copies follow now, once
        all of them were learnt from.
        """
        self.steps += 1
        if self.algorithm.generates != "current":
            self._update_following_copies(self.progress.steps)

    def update_policy(
        self, batch: RowBatch, passes: int, prompt_sets: Mapping[int, str] | None = None
    ) -> dict[str, float]:
        """Take one optimiser step on the mean loss over all rows of all processes.

        Args:
            batch: this process's share of the rows.
            passes: forward-backward passes, the same number on every process (they communicate in
                each).
            prompt_sets: the set of each prompt, by its id, where prompt sets have their own
                teachers.

        Returns:
            The algorithm's metrics, averaged over the rows, and the gradient's.

        Raises:
            TrainingError: the loss or the gradient is not finite; the parameters and their copies
                are as they were.
        """
        total = int(sum_over_processes(torch.tensor(len(batch.inputs), device=batch.weight.device)))
        taught = self._group_rows_by_teacher(batch, prompt_sets or {})
        done = self._run_passes(batch, split_into_passes(batch.group_index, passes), total, taught)
        means = done.average_metrics(total)
        norm = compute_gradient_norm(self.policy)
        while (
            self.loss_scale > 1
            and not torch.isfinite(norm)
            and all(map(math.isfinite, means.values()))
        ):
            self.loss_scale /= 2
            done = self._run_passes(
                batch, split_into_passes(batch.group_index, passes), total, taught
            )
            means = done.average_metrics(total)
            norm = compute_gradient_norm(self.policy)
        # Both are the same on every process, so all of them stop here together.
        if not (torch.isfinite(norm) and all(math.isfinite(value) for value in means.values())):
            raise _build_non_finite_error(done, batch, means, norm, self.policy)
        torch.nn.utils.clip_grads_with_norm_(
            self.policy.parameters.values(), self.stage.optimizer.max_grad_norm, norm
        )
        set_learning_rate(
            self.optimizer, self.stage.optimizer.schedule, self.updates, self.num_updates
        )
        self.optimizer.step()
        self.updates += 1
        self.drift = means.setdefault("velocity_drift", self.drift)
        if self.algorithm.generates == "current":
            self._update_following_copies(self.progress.updates)
        if self.policy.config.ema:
            self.policy.blend_copy(
                "ema", self.policy.config.ema.decay_after_step(self.version + self.updates)
            )
        means |= done.average_teacher_metrics(taught)
        once = total // self.policy.context_parallel  # each row
        metrics = (
            means
            | _compute_gradient_metrics(norm, done.first_norm, passes, once)
            | {"lr": self.optimizer.param_groups[0]["lr"]}
        )
        return metrics | self._check_drift(self.drift)

    def _group_rows_by_teacher(
        self, batch: RowBatch, prompt_sets: Mapping[int, str]
    ) -> dict[str, Tensor]:
        """The rows that each teacher teaches, by its copy, where prompt sets have their own;
        nothing where one teaches all.
        """
        copies = sorted(
            copy for copy in self.policy.copies if copy.startswith(teacher_copy_name(""))
        )
        own = (
            [teacher_copy_name(prompt_sets[prompt_id]) for prompt_id in batch.keys.prompt_ids]
            if copies
            else []
        )
        rows = {copy: [row for row, name in enumerate(own) if name == copy] for copy in copies}
        return {
            copy: torch.tensor(found, dtype=torch.int64, device=batch.weight.device)
            for copy, found in rows.items()
        }

    def _run_passes(
        self, batch: RowBatch, slices: list[slice], total: int, taught: Mapping[str, Tensor]
    ) -> _PassResults:
        """Forward and backward over every part; the gradients are left in the parameters."""
        # FSDP averages gradients over processes; this weight makes the result the mean over all
        # rows however they are dealt out. Processes that share tokens have the gradient of their
        # own ones, and each counts the row.
        weight = self.loss_scale * get_world_size() * self.policy.context_parallel / total
        self.optimizer.zero_grad(set_to_none=True)
        copies = self._predict_copies(batch, slices, taught)
        anchor = self._predict_anchor(batch.inputs, slices, copies)
        base = copies.get("reference")
        watched = (
            choose_drift_stride(self.updates, len(slices)) if base is None else 1
        )  # all rows where it costs nothing
        if base is None and watched:
            base = _predict_velocities_of_copy(
                self.policy, "reference", batch.inputs, [slice(0, None, watched)]
            )
        done = _PassResults()
        for part in slices:
            velocity = batch.inputs.predicted.pop(part.start, None)
            if velocity is None:
                velocity = _predict_velocity(self.policy, batch.inputs, part)
            velocity.retain_grad()
            compared = {name: values[part] for name, values in copies.items()}
            if (
                "rollout" in self.algorithm.copies(self.hyper) and "rollout" not in copies
            ):  # no weight has moved since
                compared["rollout"] = velocity.detach()
            loss, metrics = self._compute_loss(
                batch, part, velocity, compared, None if anchor is None else anchor[part]
            )
            self.policy.set_gradient_reduction(
                part in (slices[0], slices[-1])
            )  # of the first alone, for the norm below
            (loss.sum() * weight).backward()
            done.add_pass(loss, metrics, velocity)
            if base is not None and watched:
                done.add_drift(velocity, base, part.start, watched)
            if part == slices[0] and len(slices) > 1:
                norm = compute_gradient_norm(self.policy, self.loss_scale)
                done.first_norm = norm * total / sum_over_processes(loss.new_tensor(len(loss)))
        if self.loss_scale != 1:
            torch._foreach_div_(
                [p.grad for p in self.policy.parameters.values() if p.grad is not None],
                self.loss_scale,
            )
        return done

    def _compute_loss(
        self,
        batch: RowBatch,
        part: slice,
        velocity: Tensor,
        copies: Mapping[CopyName, Tensor],
        anchor: Tensor | None,
    ) -> tuple[Tensor, RowMetrics]:
        """The loss of each row with its weight and the penalty for leaving ``anchor``, and the
        metrics of each row.
        """
        rows = replace(
            batch.build_rows(part, velocity, copies),
            advantage_clip=self.stage.advantages.clip or math.inf,
        )
        loss, metrics = self.algorithm.loss(rows, self.hyper)
        for name, values in {"loss": loss, **metrics}.items():
            if values.shape != rows.advantage.shape:
                raise TrainingError(
                    f"{self.stage.algorithm_name} gives {name!r} the shape {list(values.shape)} for"
                    f" {len(rows.advantage)} rows; an algorithm gives a value for each row and"
                    " takes no mean"
                )
        loss = loss * batch.weight[part]
        if anchor is not None:
            divergence = compute_penalty(self.stage.reference, rows, velocity, anchor)
            loss = loss + compute_penalty_weight(self.stage.reference, rows) * divergence
            metrics = metrics | {"kl/reference": divergence}
        return loss, metrics

    def _predict_copies(
        self, batch: RowBatch, slices: list[slice], taught: Mapping[str, Tensor]
    ) -> dict[CopyName, Tensor]:
        """The predictions of the copies that the loss needs, for every row; of several teachers
        that of each row's own.
        """
        needed = set(self.algorithm.copies(self.hyper))
        if self.stage.reference.weight > 0 and not self.stage.reference.needs_guidance:
            needed.add("reference")
        if self.updates == self.rollout_updates:
            needed.discard("rollout")
        # In the same order on every process: a swap communicates.
        return {
            name: (
                _predict_velocities_of_teachers(self.policy, taught, batch.inputs_of(name), slices)
                if name == "teacher" and taught
                else _predict_velocities_of_copy(self.policy, name, batch.inputs_of(name), slices)
            )
            for name in sorted(needed)
        }

    def _predict_anchor(
        self, inputs: ForwardInputs, slices: list[slice], copies: Mapping[CopyName, Tensor]
    ) -> Tensor | None:
        """What the reference penalty pulls to, at every point; None without a penalty."""
        reference = self.stage.reference
        if reference.needs_guidance:
            return _predict_velocities_of_copy(
                self.policy, "reference", inputs.with_guidance(reference.guidance), slices
            )
        return copies["reference"] if reference.weight > 0 else None

    def _update_following_copies(self, count: int) -> None:
        for name in self.algorithm.list_following_copies(self.hyper):
            if decay := self.algorithm.follows.get(name):
                self.policy.blend_copy(name, decay(self.hyper, count))

    def _check_drift(self, drift: float) -> dict[str, float]:
        """Whether the policy has drifted too far; the first time is worth a warning."""
        too_far = drift > self.stage.drift_alarm
        if too_far and not self.drifted:
            self.drifted = True
            self.alarms.append(
                f"velocity drift {drift:.3g} above drift_alarm = {self.stage.drift_alarm:g} after"
                f" {self.updates} optimiser steps"
            )
            warnings.warn(
                f"{self.alarms[-1]}: the policy leaves the base model behind, which is how gamed"
                " rewards begin; look at the samples and the guardrails, and raise"
                " reference.weight or lower optimizer.lr",
                stacklevel=3,
            )
        return {"alarm/velocity_drift": float(too_far)}


def _require_drawable_sigmas(policy: Policy, stage: StageConfig) -> None:
    """Check that a loss that draws from the sampler's sigmas finds some, before rollouts are paid
    for.
    """
    sigmas = stage.algorithm_kind.sigmas_to_draw(stage.hyper_parameters)
    if sigmas is None or sigmas.kind != "schedule":
        return
    try:
        list_schedule_points(sigmas, policy.model.compute_sigmas(stage.sampler.steps))
    except ValueError as error:
        raise TrainingError(str(error)) from None


@dataclass
class _PassResults:
    """What the passes over one batch leave behind, one entry per row of this process.

    Attributes:
        rows: loss and metrics, each a list of [m] tensors.
        gradient_is_finite: of the loss with respect to the velocity of each row, a list of bool
            [m].
        first_norm: of the gradient of the first part alone, scaled to a mean.
        drift: mean (v - v_base)^2 of the rows where the base's prediction is known, a list of [m].
    """

    rows: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    gradient_is_finite: list[Tensor] = field(default_factory=list)
    first_norm: Tensor = field(default_factory=lambda: torch.tensor(0.0))
    drift: list[Tensor] = field(default_factory=list)

    def add_pass(self, loss: Tensor, metrics: RowMetrics, velocity: Tensor) -> None:
        for name, values in (metrics | {"loss": loss}).items():
            self.rows[name].append(values.detach())
        assert velocity.grad is not None
        self.gradient_is_finite.append(velocity.grad.flatten(1).isfinite().all(1))

    def add_drift(self, velocity: Tensor, base: Tensor, start: int, watched: int) -> None:
        """Note the drift of the part that begins at row ``start``; ``base`` is known at every row
        that ``watched`` divides.
        """
        own = velocity.detach()[-start % watched :: watched]
        first = math.ceil(start / watched)
        self.drift.append(mean_per_row((own - base[first : first + len(own)]) ** 2))

    def average_metrics(self, total: int) -> dict[str, float]:
        """Over the rows of all processes."""
        names = sorted(self.rows)
        sums = torch.stack([torch.cat(self.rows[name]).double().sum() for name in names])
        drift = (
            {"velocity_drift": _mean_over_processes(torch.cat(self.drift)).item()}
            if self.drift
            else {}
        )
        return dict(zip(names, (sum_over_processes(sums) / total).tolist(), strict=True)) | drift

    def average_teacher_metrics(self, taught: Mapping[str, Tensor]) -> dict[str, float]:
        """``kl/teacher`` of the rows of each teacher, over all processes; none where it has no
        rows.
        """
        means = {}
        for copy, rows in taught.items() if "kl/teacher" in self.rows else ():
            divergence = torch.cat(self.rows["kl/teacher"]).double()[rows]
            total, count = sum_over_processes(
                torch.stack([divergence.sum(), divergence.new_tensor(len(rows))])
            ).tolist()
            if count:
                prompt_set = copy.removeprefix(teacher_copy_name(""))
                means[f"kl/teacher/{NOT_IN_A_METRIC.sub('_', prompt_set)}"] = total / count
        return means

    def describe_first_non_finite_row(self, batch: RowBatch) -> str | None:
        """The first row of this process that is not finite, with what is wrong with it."""
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


def _predict_velocity(policy: Policy, inputs: ForwardInputs, part: slice | Tensor) -> Tensor:
    forward = predict_checkpointed if inputs.checkpointed and torch.is_grad_enabled() else predict
    return forward(policy.model, *inputs.model_arguments(part))


def _predict_velocities_of_copy(
    policy: Policy, copy: CopyName, inputs: ForwardInputs, slices: list[slice]
) -> Tensor:
    """Predictions of a policy copy over some parts: one swap of the parameters for all of them."""
    with policy.use_copy(copy), policy.keep_gathered():
        return torch.cat([_predict_velocity(policy, inputs, part) for part in slices])


def _predict_velocities_of_teachers(
    policy: Policy, taught: Mapping[str, Tensor], inputs: ForwardInputs, slices: list[slice]
) -> Tensor:
    """Predictions of each row's own teacher: of a teacher for its rows alone, in parts of the usual
    size.

    Sharded processes communicate in every pass, so all of them take as many: one without rows left
    predicts its first again.
    """
    size = max(part.stop - part.start for part in slices)
    found = []
    for copy, rows in taught.items():
        passes = all_reduce_max(math.ceil(len(rows) / size))
        with policy.use_copy(copy), policy.keep_gathered():
            for part in rows.tensor_split(passes) if passes else ():
                velocity = _predict_velocity(policy, inputs, part if len(part) else slice(0, 1))
                found += [velocity] if len(part) else []
    order = torch.cat(list(taught.values())).argsort()
    return torch.cat(found)[order]


def _compute_gradient_metrics(
    norm: Tensor, first_norm: Tensor, passes: int, total: int
) -> dict[str, float]:
    """The norm before clipping, and how much single samples disagree.

    ``grad_variance`` estimates the trace of the per-row covariance of the gradient from the norms
    of a small and of the whole batch, (|g_small|^2 - |g|^2) / (1/B_small - 1/B) (An Empirical Model
    of Large-Batch Training, 1812.06162, A.1). One step's value is noisy and may be negative: look
    at its average.
    """
    metrics = {"grad_norm": norm.item()}
    if passes > 1:
        small = total / passes
        metrics["grad_variance"] = (first_norm.item() ** 2 - norm.item() ** 2) / (
            1 / small - 1 / total
        )
    return metrics


def _build_non_finite_error(
    done: _PassResults, batch: RowBatch, means: dict[str, float], norm: Tensor, policy: Policy
) -> TrainingError:
    """The error that names the first row that is not finite, or, where all rows are fine, the
    parameters.
    """
    wrong = done.describe_first_non_finite_row(batch)
    if wrong is None and not all(math.isfinite(value) for value in means.values()):
        wrong = "a row of another process"
    if wrong is None:
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


def _mean_over_processes(values: Tensor) -> Tensor:
    """The mean over the values of all processes."""
    total = sum_over_processes(
        torch.stack([values.double().sum(), values.new_tensor(len(values)).double()])
    )
    return total[0] / total[1]
