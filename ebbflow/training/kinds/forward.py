"""Forward process: a row for each (sample, draw of sigma and noise): final latents, noised again.

Only final latents and advantages are needed, so any sampler generates them, and an offline stage
can store them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from ebbflow.recipe.algorithms import ForwardConfig, SigmaConfig
from ebbflow.training.kinds.base import StepSamples, TrainableKind

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from ebbflow.algorithms.base import Algorithm, ForwardRows
    from ebbflow.flow.noise import SampleKeys
    from ebbflow.models.base import Conditioning
    from ebbflow.recipe.stages import StageConfig
    from ebbflow.training.batches import ForwardBatch, RowBatch, SampleGroups
    from ebbflow.training.update import PolicyUpdater


class ForwardKind(TrainableKind):
    """Noised final latents: online and offline stages, any sampler, no log-probs."""

    name: ClassVar = "forward"
    config_class: ClassVar = ForwardConfig
    can_be_offline: ClassVar = True
    trains_on_any_samples: ClassVar = True
    is_unguided: ClassVar = True
    splits_latents: ClassVar = True

    def check_stage(self, stage: StageConfig) -> None:
        name = stage.algorithm_name
        if stage.window is not None:
            raise ValueError(
                f"{name} trains on final latents alone; leave 'window' out, or set algorithm.name"
                " to mix_grpo"
            )
        if stage.correction is not None:
            raise ValueError(
                f"{name} has no log-probs for a correction to compare; leave 'correction' out, or"
                " set algorithm.name to mix_grpo"
            )
        if not stage.guidance_in_loss:
            raise ValueError(
                f"the loss of {name} is without guidance always; leave 'guidance_in_loss' out"
            )
        if stage.reference.penalty != "velocity":
            raise ValueError(
                f"reference.penalty = {stage.reference.penalty!r} compares the steps of a"
                f" trajectory and {name} has none; take velocity, or leave it out"
            )

    def rows_per_entry(self, hyper: ForwardConfig) -> int:
        return hyper.noise_levels

    def sigmas_to_draw(self, hyper: ForwardConfig) -> SigmaConfig:
        return hyper.sigma

    def build_batch(
        self, step: StepSamples, groups: SampleGroups, passes: int
    ) -> tuple[RowBatch, dict[str, float]]:
        import numpy as np

        # [[0, 5], [16, 17]] becomes the samples [0, 5, 16, 17] in the groups [0, 0, 1, 1].
        samples = np.concatenate(groups)
        group_index = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        batch = self.build_offline_batch(
            step.updater,
            step.latents[samples].to(step.conditioning.device),
            step.select_conditioning(samples),
            step.select_advantages(samples),
            step.keys.select_samples(samples),
            group_index,
            epoch=0,  # online samples are trained on once
        )
        return batch, {}

    def build_offline_batch(
        self,
        updater: PolicyUpdater,
        clean: Tensor,
        conditioning: Conditioning,
        advantage: Tensor,
        keys: SampleKeys,
        group_index: np.ndarray,
        epoch: int,
    ) -> ForwardBatch:
        from ebbflow.training.batches import build_forward_batch

        return build_forward_batch(
            clean,
            conditioning,
            advantage,
            keys,
            group_index,
            updater.hyper,
            updater.sampler_sigmas,
            visit=epoch,
        )

    def build_trial_rows(
        self, groups: list[np.ndarray], algorithm: Algorithm, hyper: Any
    ) -> tuple[ForwardRows, Tensor]:
        import torch

        from ebbflow.algorithms.base import ForwardRows
        from ebbflow.training.trial import TrialInputs

        # As in real rows, samples of a group share sigma, and the noise if the algorithm says so.
        inputs = TrialInputs.sample(groups)
        index = inputs.group_index
        noise_index = index if hyper.shared_noise else torch.arange(len(index))
        velocity = inputs.sample_noise().requires_grad_()
        rows = ForwardRows(
            clean=inputs.sample_noise(),
            noise=inputs.sample_noise()[noise_index],
            sigma=torch.linspace(0.1, 0.9, len(groups))[index],
            velocity=velocity,
            copies={copy: inputs.move_away(velocity) for copy in algorithm.copies(hyper)},
            advantage=inputs.advantage,
            group_index=index,
        )
        return rows, velocity


FORWARD = ForwardKind()
