"""One optimiser step, for every algorithm: predict, compute the loss, check that it is finite,
step, and let the policy copies follow.

``PolicyUpdater.update_policy`` is the step, ``_run_passes`` its gradient accumulation. M is the
rows of a process, m those of one pass.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ebbflow.algorithms.base import CopyName, RowMetrics
from ebbflow.algorithms.loss_terms import compute_penalty
from ebbflow.algorithms.registry import find_algorithm
from ebbflow.flow.training_sigmas import list_schedule_points
from ebbflow.recipe.correction_rules import resolve_correction
from ebbflow.recipe.stages import OnlineStageConfig, StageConfig
from ebbflow.recipe.students import teacher_copy_name
from ebbflow.training.batches import ForwardInputs, RowBatch, split_into_passes
from ebbflow.training.drift import choose_drift_stride
from ebbflow.training.latent_losses import (
    LatentShare,
    join_latent_losses,
    list_latent_shares,
    select_latent,
)
from ebbflow.training.optimizer import AnyOptimizer, build_optimizer, set_learning_rate
from ebbflow.training.passes import (
    PassResults,
    RowCounts,
    TrainingError,
    add_gradient,
    build_non_finite_error,
    compute_gradient_metrics,
    compute_gradient_norm,
    count_rows,
    find_teacher_rows,
    predict_velocities_of_copy,
    predict_velocities_of_teachers,
    predict_velocity,
)
from ebbflow.training.policy import Policy
from ebbflow.training.policy_metadata import PolicyMetadata, Progress
from ebbflow.training.trained_copy import CopyBatch, TrainedCopy

FIRST_LOSS_SCALE = 2.0**16
"""Factor of the loss in float16; halved, and the passes repeated, whenever a gradient overflows: no
step is skipped.
"""


class Anchor(Protocol):
    """A second loss of each optimiser step, on rows of its own."""

    def encode_captions(self, updater: PolicyUpdater) -> None:
        """Encode the captions of the next optimiser step as far as they are not encoded, together
        with every process.
        """

    def add_gradient(self, updater: PolicyUpdater, scale: float) -> Tensor:
        """Add the gradient of the weighted loss, times ``scale``, to that of the parameters, on
        every process; return the loss without its weight, over all processes.
        """


class PolicyUpdater:
    """A policy that a stage trains: its optimiser, the optimiser steps taken, and the alarms that
    went off.

    Attributes:
        updates: optimiser steps of this stage.
        num_updates: all that the stage will take, where that is known: offline stages count their
            batches.
        before: how far the algorithm had come with the policy before this stage.
        rollout_updates: ``updates`` when the step began whose samples are trained on now.
        steps: rollout steps of this stage.
        drift: mean (v - v_base)^2 when it was last measured.
        reset_step: ``steps`` at the last reset of the reference.
        is_reset_due: whether the policy has left the reference too far behind since.
        trained_copies: the copies that the algorithm trains beside the policy, by name.
        alarms: what a person should look at, a line each.
        drifted: whether the drift alarm went off.
        correction: of the rollouts of an online stage; None for none.
        anchor: the loss on data beside the algorithm's; None for none.
    """

    def __init__(
        self,
        policy: Policy,
        stage: StageConfig,
        metadata: PolicyMetadata | None = None,
        optimizer: AnyOptimizer | None = None,
    ) -> None:
        """Build the optimisers, and remember the policy as it is.

        Args:
            metadata: of the policy folder that the stage starts from, where there is one.
            optimizer: default: the one of the stage's recipe.

        Raises:
            TrainingError: the sampler's schedule has no sigma that the algorithm may draw.
            RecipeError: the optimiser cannot be made as the recipe has it.
        """
        self.policy = policy
        self.stage = stage
        self.version = metadata.version if metadata else 0
        # The schedules of an algorithm go on where it stopped, if it was the last to train the
        # policy; another algorithm begins with its own from zero.
        self.before = Progress(algorithm=stage.algorithm_name)
        if metadata and metadata.progress.algorithm == stage.algorithm_name:
            self.before = metadata.progress
        self.algorithm = find_algorithm(stage.algorithm)
        # Any: the kind of the algorithm says which class they have (``config_class``).
        self.hyper: Any = stage.hyper_parameters
        # What the reference penalty pulls to: a copy, under guidance where the stage says so.
        self.reference_copy: CopyName = stage.reference.copy_name
        self.guides_reference = stage.reference.needs_guidance
        self.correction = resolve_correction(stage, policy.model.precision)
        # Of prompt sets that have teachers of their own.
        self.teacher_copies = sorted(map(teacher_copy_name, getattr(self.hyper, "teachers", {})))
        # Empty where a sample is one latent, or the loss is of the whole sample.
        self.latents: list[LatentShare] = []
        if stage.algorithm_kind.splits_latents:
            self.latents = list_latent_shares(policy.model.latent_shape, stage.latent_weights)
        _require_drawable_sigmas(policy, stage)
        self.optimizer: AnyOptimizer = optimizer or build_optimizer(policy, stage.optimizer)
        beside = stage.algorithm_kind.list_trained_copies(self.hyper, stage.optimizer)
        self.trained_copies = {name: TrainedCopy(policy, name, beside[name]) for name in beside}
        # Gradients of means over many latent elements are below what float16 can hold, so the loss
        # is multiplied before the backward pass and the gradients are divided after it.
        self.loss_scale = FIRST_LOSS_SCALE if policy.model.precision == "float16" else 1.0
        self.updates = 0
        self.steps = 0
        self.num_updates: int | None = None
        if isinstance(stage, OnlineStageConfig):
            self.num_updates = stage.steps * stage.updates_per_step
        self.drift = 0.0
        self.reset_step = 0
        self.is_reset_due = False
        self.alarms: list[str] = []
        self.drifted = False
        self.anchor: Anchor | None = None
        self.anchor_loss = torch.zeros(())
        self.start_rollout()

    @property
    def sampler_sigmas(self) -> Tensor:
        """The sigmas of the stage's sampler, [steps + 1], in the size that the model generates
        now.
        """
        return self.policy.model.compute_sigmas(self.stage.sampler.steps)

    @property
    def progress(self) -> Progress:
        """How far the algorithm has come, earlier stages included."""
        counts = {
            "steps": self.before.steps + self.steps,
            "updates": self.before.updates + self.updates,
        }
        return self.before.model_copy(update=counts)

    def train_copy(self, name: CopyName, batch: CopyBatch, passes: int) -> dict[str, float]:
        """Take one optimiser step of a trained copy, before the policy's (``TrainedCopy``)."""
        copy = self.trained_copies[name]
        set_learning_rate(
            copy.optimizer, self.stage.optimizer.schedule, self.updates, self.num_updates
        )
        return copy.take_step(batch, passes, self.progress.updates + 1)

    def start_rollout(self) -> None:
        """Remember the policy as it is, before the updates on the samples of a step: some losses
        compare it with the policy after the first of them.
        """
        self.rollout_updates = self.updates
        if "rollout" in self.algorithm.copies(self.hyper):
            self.policy.snapshot_copy("rollout")

    def finish_step(self) -> dict[str, float]:
        """Count a rollout step, after its last update; return whether it reset the reference, where
        the stage resets it.
        """
        self.steps += 1
        # A copy that generates must stay the same for all samples of a step, so it follows here and
        # not after every optimiser step.
        if self.algorithm.generates != "current":
            self._update_following_copies(self.progress.steps)
        reference = self.stage.reference
        if not reference.is_reset:
            return {}
        every = reference.reset_every
        is_due = self.is_reset_due or (every and self.steps - self.reset_step >= every)
        if is_due:
            # Now and not at the next step's start: a checkpoint between them has the new one.
            self.policy.snapshot_copy(reference.copy_name)
            self.reset_step = self.steps
            self.is_reset_due = False
        return {"reference/reset": float(bool(is_due))}

    def update_policy(
        self,
        batch: RowBatch,
        passes: int,
        prompt_sets: Mapping[int, str] | None = None,
        num_repeats: int = 1,
    ) -> dict[str, float]:
        """Take one optimiser step on the mean loss over all rows of all processes.

        Args:
            batch: this process's share of the rows.
            passes: forward-backward passes, the same number on every process (they communicate in
                each).
            prompt_sets: the set of each prompt, by its id, where prompt sets have their own
                teachers.
            num_repeats: processes that have the same rows, all of which the metrics count.

        Returns:
            The algorithm's metrics, averaged over the rows, and the gradient's.

        Raises:
            TrainingError: the loss or the gradient is not finite; the parameters and their copies
                are as they were.
        """
        slices = split_into_passes(batch.group_index, passes)
        counts = count_rows(self.policy, slices, num_repeats, batch.weight.device)
        teacher_rows: Mapping[str, Tensor] = {}
        if self.teacher_copies and prompt_sets:
            teacher_rows = find_teacher_rows(batch, prompt_sets, self.teacher_copies)

        # Gradients of the mean loss. In float16 they may overflow: then all passes are repeated
        # with half the loss scale, on the same rows, so that a step is slower but never skipped. A
        # loss that is not finite itself is no overflow, and no scale helps.
        while True:
            results = self._run_passes(batch, slices, counts, teacher_rows)
            norm = compute_gradient_norm(self.policy)
            means, norm_value, first_norm = results.read_numbers(norm, counts.total)
            loss_is_finite = all(map(math.isfinite, means.values()))
            if math.isfinite(norm_value) or not loss_is_finite or self.loss_scale <= 1:
                break
            self.loss_scale /= 2

        # The guard stands before the optimiser step: afterwards parameters and moments would be
        # spoilt. Norm and means are the same on every process, so all of them stop here together.
        if not (math.isfinite(norm_value) and loss_is_finite):
            raise build_non_finite_error(results, batch, means, norm, self.policy)
        self._take_optimizer_step(norm)
        self._note_due_reset(means)
        # Not every update measures the drift; those that do not report the last value.
        self.drift = means.setdefault("velocity_drift", self.drift)
        # Processes that share the tokens of a row, or have the same rows, each count it.
        num_distinct_rows = counts.total // (self.policy.context_parallel * num_repeats)
        return (
            means
            | results.average_teacher_metrics(teacher_rows)
            | compute_gradient_metrics(norm_value, first_norm, counts.inverse, num_distinct_rows)
            | {"lr": self.optimizer.param_groups[0]["lr"]}
            | ({"anchor/loss": float(self.anchor_loss)} if self.anchor else {})
            | self._check_drift(self.drift)
        )

    def _note_due_reset(self, means: Mapping[str, float]) -> None:
        """Note that the reference is to be renewed, where its penalty is above the limit."""
        # The same on every process, as the mean is; the reset itself waits for the end of the step,
        # so that all updates of a step have one reference.
        limit = self.stage.reference.reset_above
        if limit is not None and means.get("kl/reference", 0.0) > limit:
            self.is_reset_due = True

    def _take_optimizer_step(self, norm: Tensor) -> None:
        """Clip the gradients, change the parameters, and let the copies that follow them follow."""
        torch.nn.utils.clip_grads_with_norm_(
            self.policy.parameters.values(), self.stage.optimizer.max_grad_norm, norm
        )
        set_learning_rate(
            self.optimizer, self.stage.optimizer.schedule, self.updates, self.num_updates
        )
        self.optimizer.step()
        self.updates += 1

        if self.algorithm.generates == "current":
            self._update_following_copies(self.progress.updates)
        ema = self.policy.config.ema
        if ema:
            self.policy.blend_copy("ema", ema.decay_after_step(self.version + self.updates))

    def _run_passes(
        self,
        batch: RowBatch,
        slices: list[slice],
        counts: RowCounts,
        teacher_rows: Mapping[str, Tensor],
    ) -> PassResults:
        """Accumulate the gradients of every slice of rows in the parameters."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.anchor:
            # Now that no gradient takes memory: the text encoders need some.
            self.anchor.encode_captions(self)

        # What needs no gradient comes first, for all slices at once, so that each copy is swapped
        # in and out once.
        copies = self._predict_copies(batch, slices, teacher_rows)
        # Where the loss needs the base model anyway, the drift is measured at all rows.
        base_velocity = copies.get("reference")
        drift_stride = 1
        if base_velocity is None:
            base_velocity, drift_stride = self._predict_base(batch.inputs, slices)

        compute_loss = self._compute_split_loss if self.latents else self._compute_loss
        results = PassResults()
        for part in slices:
            # An update that goes back through the rollout's own passes has its predictions. They
            # are removed, because their graph is freed by the backward pass: a repeated pass
            # predicts again.
            velocity = batch.inputs.predicted.pop(part.start, None)
            if velocity is None:
                velocity = predict_velocity(self.policy, batch.inputs, part)
            velocity.retain_grad()  # tells which row's gradient is not finite
            copy_velocities = {name: values[part] for name, values in copies.items()}
            if "rollout" in self.algorithm.copies(self.hyper) and "rollout" not in copies:
                # No weight has moved since the rollout: its prediction is the policy's own.
                copy_velocities["rollout"] = velocity.detach()
            loss, metrics = compute_loss(batch, part, velocity, copy_velocities)
            norm = add_gradient(
                self.policy,
                loss,
                counts,
                self.loss_scale,
                is_first=part == slices[0],
                is_last=part == slices[-1],
            )
            if norm is not None:
                results.first_norm = norm
            results.add_pass(loss, metrics, velocity)
            if base_velocity is not None:
                results.add_drift(velocity, base_velocity, part.start, drift_stride)
        if self.anchor:
            self.policy.set_gradient_reduction(True)
            self.anchor_loss = self.anchor.add_gradient(self, self.loss_scale)
            self.policy.average_gradients()
        if self.loss_scale != 1:
            gradients = [p.grad for p in self.policy.parameters.values() if p.grad is not None]
            torch._foreach_div_(gradients, self.loss_scale)
        return results

    def _compute_loss(
        self,
        batch: RowBatch,
        part: slice,
        velocity: Tensor,
        copies: Mapping[CopyName, Tensor],
    ) -> tuple[Tensor, RowMetrics]:
        """Return the loss of each row with its weight and the reference penalty, and the metrics of
        each row, all [m].

        Args:
            part: the m rows.
            velocity: of the policy there, [m, ...], with its graph.
            copies: of the policy copies there, [m, ...].
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
        # The correction weighs the algorithm's term alone, not the penalty.
        loss = loss * batch.weight[part]
        if self.stage.reference.weight > 0:
            target: CopyName = "guided_reference" if self.guides_reference else self.reference_copy
            divergence, weight = compute_penalty(
                self.stage.reference, rows, velocity, copies[target], self.reference_copy
            )
            loss = loss + weight * divergence
            metrics = metrics | {"kl/reference": divergence}
        return loss, metrics

    def _compute_split_loss(
        self,
        batch: RowBatch,
        part: slice,
        velocity: Tensor,
        copies: Mapping[CopyName, Tensor],
    ) -> tuple[Tensor, RowMetrics]:
        """Return what ``_compute_loss`` returns, of samples of several latents: over the loss of
        each latent.
        """
        losses = []
        metrics = []
        for latent in self.latents:
            loss, latent_metrics = self._compute_loss(
                select_latent(batch, latent),
                part,
                velocity[:, latent.elements],
                {name: values[:, latent.elements] for name, values in copies.items()},
            )
            losses.append(loss)
            metrics.append(latent_metrics)
        return join_latent_losses(self.latents, losses, metrics)

    def _predict_copies(
        self, batch: RowBatch, slices: list[slice], teacher_rows: Mapping[str, Tensor]
    ) -> dict[CopyName, Tensor]:
        """Return the predictions of the copies that the loss and the reference penalty need,
        [M, ...] each. Of several teachers it is the prediction of each row's own.
        """
        reference = self.stage.reference
        needed = set(self.algorithm.copies(self.hyper))
        if reference.weight > 0 and not self.guides_reference:
            needed.add(self.reference_copy)
        if self.updates == self.rollout_updates:
            needed.discard("rollout")  # it is the policy itself, until a weight moves
        velocities: dict[CopyName, Tensor] = {}
        for name in sorted(needed):  # in the same order on every process: a swap communicates
            inputs = batch.inputs_of(name)
            if name == "teacher" and teacher_rows:
                velocities[name] = predict_velocities_of_teachers(
                    self.policy, teacher_rows, inputs, slices
                )
            else:
                velocities[name] = predict_velocities_of_copy(self.policy, name, inputs, slices)
        if self.guides_reference:
            # A guided reference is another prediction than the copy's: that is without guidance.
            guided = batch.inputs.with_guidance(reference.guidance, reference.guidance_2)
            velocities["guided_reference"] = predict_velocities_of_copy(
                self.policy, self.reference_copy, guided, slices
            )
        return velocities

    def _predict_base(
        self, inputs: ForwardInputs, slices: list[slice]
    ) -> tuple[Tensor | None, int]:
        """Return what the base model predicts at every n-th row, and n, to measure the drift of the
        policy; None in updates that do not measure it.
        """
        stride = choose_drift_stride(self.updates, len(slices))
        if stride is None:
            return None, 1
        rows = [slice(0, None, stride)]
        return predict_velocities_of_copy(self.policy, "reference", inputs, rows), stride

    def _update_following_copies(self, count: int) -> None:
        for name in self.algorithm.list_following_copies(self.hyper):
            decay = self.algorithm.follows.get(name)
            if decay is not None:  # else it stays as it was at the start of the stage
                self.policy.blend_copy(name, decay(self.hyper, count))

    def _check_drift(self, drift: float) -> dict[str, float]:
        """Report whether the policy has drifted too far, and warn the first time."""
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
    """Check that a loss that samples from the schedule's sigmas finds some, before rollouts are
    paid for.
    """
    sigmas = stage.algorithm_kind.sigmas_to_draw(stage.hyper_parameters)
    if sigmas is None or sigmas.kind != "schedule":
        return
    try:
        list_schedule_points(sigmas, policy.model.compute_sigmas(stage.sampler.steps))
    except ValueError as error:
        raise TrainingError(str(error)) from None
