"""Direct-Align (2509.06942): a row for each (sample, branch), recovered with gradient from final
latents and the noise that they came from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from ebbflow.recipe.algorithms import DirectAlignConfig, GradientConfig
from ebbflow.recipe.kinds import RowCost
from ebbflow.training.kinds.base import StepSamples
from ebbflow.training.kinds.reward_gradient import RewardGradientKind

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from ebbflow.algorithms.base import Algorithm, DirectAlignRows
    from ebbflow.training.batches import RowBatch, SampleGroups


class DirectAlignKind(RewardGradientKind):
    """The gradient of differentiable rewards on the samples of the rollout: unlike
    ``RewardGradientKind`` it repeats no denoising step.
    """

    name: ClassVar = "direct_align"
    config_class: ClassVar = DirectAlignConfig
    trains_on_any_samples: ClassVar = True

    def rows_per_entry(self, hyper: DirectAlignConfig) -> int:
        return hyper.rows_per_sample

    def row_cost(self, hyper: GradientConfig, sampler_steps: int) -> RowCost:
        return RowCost(with_gradient=hyper.steps_with_gradient)

    def build_batch(
        self, step: StepSamples, groups: SampleGroups, passes: int
    ) -> tuple[RowBatch, dict[str, float]]:
        import numpy as np

        from ebbflow.training.direct_align import build_direct_align_batch

        updater = step.updater
        hyper: DirectAlignConfig = updater.hyper
        assert step.scorer is not None, "who opens a worker for this kind gives it the rewards"
        # Each row is a group of its own, so the groups of the update do not matter any more.
        samples = np.concatenate(groups)
        batch = build_direct_align_batch(
            model=updater.policy.model,
            clean=step.latents[samples].to(step.conditioning.device),
            conditioning=step.select_conditioning(samples),
            advantage=step.select_advantages(samples),
            keys=step.keys.select_samples(samples),
            prompts=[step.prompts[sample] for sample in samples],
            config=hyper,
            update=updater.progress.updates,
            # Called by the loss, for the rows of a pass at a time.
            score=step.scorer.score_latents_with_gradient,
        )
        return batch, {}

    def build_trial_rows(
        self, groups: list[np.ndarray], algorithm: Algorithm, hyper: Any
    ) -> tuple[DirectAlignRows, Tensor]:
        import torch

        from ebbflow.algorithms.base import DirectAlignRows, mean_per_row
        from ebbflow.training.trial import TrialInputs

        inputs = TrialInputs.sample(groups)
        velocity = inputs.sample_noise().requires_grad_()
        sigma = torch.full((len(inputs.advantage),), hyper.max_sigma)
        rows = DirectAlignRows(
            clean=inputs.sample_noise(),
            noise=inputs.sample_noise(),
            sigma=sigma,
            end_sigma=torch.full_like(sigma, hyper.min_sigma),  # the denoising branch
            velocity=velocity,
            rewards=lambda clean: (-mean_per_row(clean**2), -mean_per_row(clean**2) / 2),
            copies={copy: inputs.move_away(velocity) for copy in algorithm.copies(hyper)},
            advantage=inputs.advantage,
        )
        return rows, velocity


DIRECT_ALIGN = DirectAlignKind()
