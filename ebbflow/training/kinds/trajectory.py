"""Trajectory: a row for each (sample, trained denoising step) of a stochastic rollout, with its
log-probability under the policy in training and under the old one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from ebbflow.recipe.choices import WINDOW_KEYS, WindowConfig
from ebbflow.training.kinds.base import StepSamples, TrainableKind

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from ebbflow.algorithms.base import Algorithm, TrajectoryRows
    from ebbflow.recipe.stages import StageConfig
    from ebbflow.training.batches import RowBatch, SampleGroups


class TrajectoryKind(TrainableKind):
    """Steps of a fresh trajectory: online stages, a stochastic sampler, a window of its steps."""

    name: ClassVar = "trajectory"
    default_penalty: ClassVar = "kl"
    records_trajectory: ClassVar = True
    splits_latents: ClassVar = True

    def check_stage(self, stage: StageConfig) -> None:
        name = stage.algorithm_name
        sampler = stage.sampler
        window = stage.window
        if stage.reference.adaptive and stage.advantages.clip is None:
            raise ValueError(
                "reference.adaptive weighs with shares of advantages.clip, which is null; give"
                " advantages.clip a number such as 5"
            )
        if not sampler.is_stochastic:
            raise ValueError(
                f"{name} needs the log-probabilities of a stochastic sampler and {sampler.name!r}"
                " has none; set sampler.name to flow_sde, dance_sde or cps, or algorithm.name to"
                " diffusion_nft"
            )
        if stage.reference.needs_guidance:
            raise ValueError(
                f"reference.guidance = {stage.reference.guidance:g} is for algorithms on final"
                f" latents, whose policy is unguided; {name} guides policy and base model by"
                " model.guidance: leave it out"
            )
        if window is None:
            raise ValueError(
                f"{name} trains on a window of the denoising steps; leave 'window' out for the"
                " default one"
            )
        _check_window(window, sampler.steps)
        if not stage.guidance_in_loss and stage.correction is not None:
            raise ValueError(
                "guidance_in_loss: false takes the ratio against the policy without guidance, and"
                " 'correction' would compare it with guided rollouts; leave 'correction' out, or"
                " guidance_in_loss at true"
            )
        if not sampler.facts.log_prob_is_density:
            _check_use_of_densities(stage)

    def list_trained_groups(self, step: StepSamples, groups: SampleGroups) -> SampleGroups:
        import numpy as np

        assert step.trajectory is not None, "the rollouts of such an algorithm are recorded"
        samples = np.concatenate(groups)
        keep = np.ones(step.trajectory.log_probs.shape[:2], np.bool_)  # (N, W)
        if step.trajectory.keep is not None:
            keep = step.trajectory.keep.numpy()
        numbers = np.arange(keep.size).reshape(keep.shape)
        # Each row is a group of its own, [[row], [row], ...]: losses on trajectories compare no
        # rows. Those that the correction rejected are left out here, so that they count in no mean.
        return list(numbers[samples][keep[samples]][:, None])

    def find_samples(self, step: StepSamples, positions: np.ndarray) -> np.ndarray:
        assert step.trajectory is not None
        return positions // len(step.trajectory.steps)

    def build_batch(
        self, step: StepSamples, groups: SampleGroups, passes: int
    ) -> tuple[RowBatch, dict[str, float]]:
        import numpy as np
        import torch

        from ebbflow.training.batches import build_trajectory_batch
        from ebbflow.training.rollout_forward import reuse_rollout_forward

        assert step.trajectory is not None
        rows = np.concatenate(groups)  # row n is step n % W of sample n // W
        if step.velocities:
            rows.sort()  # in the order of the rollout, whose passes are those of the update
        batch = build_trajectory_batch(
            step.trajectory,
            step.conditioning,
            torch.from_numpy(step.advantages),
            step.keys,
            step.updater.stage.sampler,
            rows,
            torch.from_numpy(step.sample_index),
        )
        if step.penalty_factor is not None:
            # A sample's factor is that of all its rows.
            factor = step.penalty_factor[self.find_samples(step, rows)]
            batch = replace(batch, penalty_factor=torch.from_numpy(factor).to(batch.weight.device))
        if step.velocities:
            batch = reuse_rollout_forward(batch, rows, step.velocities)
        return batch, {}

    def summarise_first_update(self, metrics: Mapping[str, float]) -> dict[str, float]:
        from ebbflow.algorithms.loss_terms import compute_dead_share

        if "ratio/deviation" not in metrics:
            return {}  # a user's own loss need not report its ratio
        return {
            "ratio/first_deviation": metrics["ratio/deviation"],
            "ratio/first_dead_share": compute_dead_share(metrics),
        }

    def build_trial_rows(
        self, groups: list[np.ndarray], algorithm: Algorithm, hyper: Any
    ) -> tuple[TrajectoryRows, Tensor]:
        import torch

        from ebbflow.algorithms.base import TrajectoryRows
        from ebbflow.flow.sampler import (
            compute_log_prob,
            compute_transition,
            sample_next_latents,
        )
        from ebbflow.training.trial import SAMPLER, STEPS, TrialInputs

        inputs = TrialInputs.sample(groups)
        latents = inputs.sample_noise()
        velocity = inputs.sample_noise().requires_grad_()
        sigmas = torch.linspace(1, 0, STEPS + 1)
        steps = torch.arange(len(inputs.group_index)) % (STEPS - 1)  # not the last: it has no noise
        # The first update after a rollout: the ratio is 1, and its gradient is not 0.
        old = compute_transition(SAMPLER, latents, velocity.detach(), sigmas, steps)
        step = compute_transition(SAMPLER, latents, velocity, sigmas, steps)
        next_latents = sample_next_latents(old, inputs.sample_noise())
        copies = {
            copy: compute_transition(SAMPLER, latents, inputs.move_away(velocity), sigmas, steps)
            for copy in algorithm.copies(hyper)
        }
        rows = TrajectoryRows(
            transition=step,
            log_prob=compute_log_prob(step, next_latents),
            old_mean=old.mean if hyper.compares_means else None,
            old_log_prob=compute_log_prob(old, next_latents),
            copies=copies,
            advantage=inputs.advantage,
        )
        return rows, velocity


def _check_window(window: WindowConfig, denoising_steps: int) -> None:
    used = WINDOW_KEYS[window.kind]
    reach = window.start + window.size
    end = window.limit * denoising_steps
    if "size" in used and reach >= denoising_steps:
        raise ValueError(
            f"the window's start + size = {reach} must be below sampler.steps = {denoising_steps}: "
            "the last step is deterministic; take a smaller window or more steps"
        )
    if "limit" in used and window.start >= end:
        raise ValueError(
            f"a {window.kind} window would never move: its start = {window.start} must be below"
            f" limit * sampler.steps = {end:g}; start earlier, raise limit, or take kind fixed"
        )


def _check_use_of_densities(stage: StageConfig) -> None:
    """Check that nothing takes log-probs for densities that leave out 1 / (2 b^2), as the published
    ones of CPS do: no threshold on them has a unit.
    """
    name = stage.algorithm_name
    sampler = stage.sampler.name
    if stage.hyper_parameters.needs_density:
        raise ValueError(
            f"{name} needs log-probs that are densities, and those of {sampler} leave out 1"
            " / (2 b^2); set sampler.name to flow_sde or dance_sde, or algorithm.name to mix_grpo"
        )
    for key in ("weights", "reject"):
        value = getattr(stage.correction, key, "none")
        if value != "none":
            raise ValueError(
                f"correction.{key} = {value!r} compares densities, and the log-probs of"
                f" {sampler} are none; set correction.{key} to none, or sampler.name to flow_sde or"
                " dance_sde"
            )


TRAJECTORY = TrajectoryKind()
