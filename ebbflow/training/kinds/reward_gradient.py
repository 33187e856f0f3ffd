"""Reward gradient: a row for each sample, whose last denoising steps are taken again with gradient,
decoded and scored.

The samples are the policy's own, generated again for each update from the noise of the rollout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from ebbflow.recipe.algorithms import GradientConfig
from ebbflow.recipe.kinds import RowCost
from ebbflow.training.kinds.base import StepSamples, TrainableKind

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from ebbflow.algorithms.base import Algorithm, AnyRows
    from ebbflow.recipe.stages import StageConfig
    from ebbflow.training.batches import RowBatch, SampleGroups


class RewardGradientKind(TrainableKind):
    """The gradient of differentiable rewards: online stages, the sampler ``ode``."""

    name: ClassVar = "gradient"
    config_class: ClassVar = GradientConfig
    needs_reward_gradient: ClassVar = True

    def check_stage(self, stage: StageConfig) -> None:
        name = stage.algorithm_name
        hyper: Any = stage.hyper_parameters  # a GradientConfig, as ``config_class`` says
        steps = stage.sampler.steps
        if stage.sampler.name != "ode":
            raise ValueError(
                f"{name} takes the gradient through the steps of the sampler ode, and sampler.name"
                f" = {stage.sampler.name!r}; leave sampler.name out"
            )
        if hyper.steps_with_gradient > steps:
            raise ValueError(
                f"{name} takes {hyper.steps_with_gradient} steps with gradient, and sampler.steps ="
                f" {steps}; raise it"
            )
        if stage.window is not None:
            raise ValueError(
                f"{name} chooses its steps itself; leave 'window' out, or set algorithm.name to"
                " mix_grpo"
            )
        if stage.correction is not None:
            raise ValueError(
                f"{name} trains on samples of the policy as it is, which need no 'correction';"
                " leave it out"
            )
        if not stage.guidance_in_loss:
            raise ValueError(
                f"the gradient of {name} goes through guided steps; leave 'guidance_in_loss' out"
            )
        if stage.reference.penalty != "velocity" or stage.reference.needs_guidance:
            raise ValueError(
                f"the reference of {name} is its velocity as it generates; take reference.penalty ="
                " velocity and reference.guidance = 1, or leave them out"
            )

    def row_cost(self, hyper: GradientConfig, sampler_steps: int) -> RowCost:
        # The steps before are repeated without gradient: at most all of them.
        steps = hyper.steps_with_gradient
        return RowCost(with_gradient=steps, without_gradient=sampler_steps - steps)

    def build_batch(
        self, step: StepSamples, groups: SampleGroups, passes: int
    ) -> tuple[RowBatch, dict[str, float]]:
        import numpy as np

        from ebbflow.seeding import Stream, make_generator
        from ebbflow.training.reward_gradients import build_gradient_batch

        updater = step.updater
        hyper: GradientConfig = updater.hyper
        assert step.scorer is not None, "who opens a worker for this kind gives it the rewards"
        samples = np.concatenate(groups)
        # Some algorithms choose the first step with gradient at random: the same on every process,
        # and another one in every update.
        update = updater.progress.updates
        random = make_generator(
            step.keys.seed, prompt_id=0, sample=update, step=0, stream=Stream.WINDOWS
        )
        batch = build_gradient_batch(
            model=updater.policy.model,
            conditioning=step.select_conditioning(samples),
            advantage=step.select_advantages(samples),
            keys=step.keys.select_samples(samples),
            prompts=[step.prompts[sample] for sample in samples],
            sigmas=updater.sampler_sigmas,
            first_step=hyper.first_step(updater.stage.sampler.steps, random),
            steps_with_gradient=hyper.steps_with_gradient,
            score=step.scorer.score_latents_with_gradient,
            passes=passes,
        )
        return batch, {}

    def build_trial_rows(
        self, groups: list[np.ndarray], algorithm: Algorithm, hyper: Any
    ) -> tuple[AnyRows, Tensor]:
        import torch

        from ebbflow.algorithms.base import GradientRows, expand_like, mean_per_row
        from ebbflow.training.trial import TrialInputs

        inputs = TrialInputs.sample(groups)
        latents = inputs.sample_noise()
        velocity = inputs.sample_noise().requires_grad_()
        sigma = torch.full((len(inputs.advantage),), 0.3)
        rows = GradientRows(
            latents=latents,
            sigma=sigma,
            velocity=velocity,
            denoise=lambda v: latents - expand_like(sigma, v) * v,
            reward=lambda clean: -mean_per_row(clean**2),  # best at 0
            copies={copy: inputs.move_away(velocity) for copy in algorithm.copies(hyper)},
            advantage=inputs.advantage,
        )
        return rows, velocity


REWARD_GRADIENT = RewardGradientKind()
