"""Distribution matching: a row for each sample, at one of a few-step student's own steps and where
its sample is noised again.

A fake score network is trained on the same samples before each update of the student.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

from ebbflow.recipe.algorithms import MatchingConfig, SigmaConfig, SurrogateConfig
from ebbflow.recipe.kinds import RowCost, TrainedCopyConfig
from ebbflow.training.kinds.base import StepSamples, TrainableKind

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from ebbflow.algorithms.base import Algorithm, CopyName, MatchingRows
    from ebbflow.recipe.optimizer_config import OptimizerConfig
    from ebbflow.recipe.stages import StageConfig
    from ebbflow.training.batches import RowBatch, SampleGroups
    from ebbflow.training.matching import MatchingBatch, StudentSteps
    from ebbflow.training.update import PolicyUpdater


class MatchingKind(TrainableKind):
    """Distillation of a many-step teacher into a few-step student: online stages."""

    name: ClassVar = "matching"
    config_class: ClassVar = MatchingConfig
    is_unguided: ClassVar = True
    trains_student: ClassVar = True
    splits_latents: ClassVar = True

    def check_stage(self, stage: StageConfig) -> None:
        name = stage.algorithm_name
        hyper: Any = stage.hyper_parameters  # a MatchingConfig, as ``config_class`` says
        sampler = stage.sampler.name
        if hyper.along_trajectory and sampler != "ode":
            raise ValueError(
                f"{name} matches the ends of deterministic steps, and sampler.name = {sampler!r};"
                " take ode, or the algorithm dmd2"
            )
        for key in ("sigma", "surrogate_sigma"):
            sigma = getattr(hyper, key, None)
            if hyper.along_trajectory and sigma is not None and sigma.kind == "schedule":
                raise ValueError(
                    f"{name} noises samples to the levels of a step, and algorithm.{key}.kind ="
                    " 'schedule' has none but the ends of it, which say nothing; take uniform or"
                    f" logit_normal, or leave algorithm.{key} out"
                )
        if stage.sampler.facts.multistep:
            raise ValueError(
                f"{name} trains a student in single steps, and {sampler!r} needs the step before;"
                " set sampler.name to cps or ode"
            )
        if stage.window is not None or stage.correction is not None:
            raise ValueError(
                f"{name} takes the student's steps itself; leave 'window' and 'correction' out"
            )
        if not stage.guidance_in_loss:
            raise ValueError(
                f"the student of {name} is without guidance always; leave 'guidance_in_loss' out"
            )
        if stage.reference.penalty != "velocity":
            raise ValueError(
                f"reference.penalty = {stage.reference.penalty!r} compares the steps of a"
                f" trajectory and {name} has none; take velocity, or leave it out"
            )

    def sigmas_to_draw(self, hyper: MatchingConfig) -> SigmaConfig:
        return hyper.sigma

    def guides_teacher(self, hyper: MatchingConfig) -> bool:
        return hyper.largest_guidance > 1

    def row_cost(self, hyper: MatchingConfig, sampler_steps: int) -> RowCost:
        # The student's steps without gradient, and the second pass of a guided teacher.
        with_gradient = 1 + hyper.fake_updates
        without_gradient = sampler_steps + int(hyper.guidance > 1)
        if isinstance(hyper, SurrogateConfig):
            # The surrogate learns from a pass of its own, beside its average's and the teacher's;
            # the student asks the surrogate, with guidance twice, and the teacher.
            with_gradient += 1
            without_gradient += 4 + int(hyper.surrogate_guidance > 1)
        return RowCost(with_gradient, without_gradient)

    def list_trained_copies(
        self, hyper: MatchingConfig, optimizer: OptimizerConfig
    ) -> dict[CopyName, TrainedCopyConfig]:
        lr = optimizer.lr * hyper.fake_lr_factor
        copies: dict[CopyName, TrainedCopyConfig] = {
            "fake": TrainedCopyConfig(optimizer.model_copy(update={"lr": lr}))
        }
        if isinstance(hyper, SurrogateConfig):
            keys = {
                "lr": optimizer.lr * hyper.surrogate_lr_factor,
                "betas": hyper.surrogate_betas,
            }
            copies["surrogate"] = TrainedCopyConfig(
                optimizer.model_copy(update=keys), hyper.surrogate_old
            )
        return copies

    def latents_per_row(self, hyper: MatchingConfig, sampler_steps: int) -> int:
        # Latents and velocity at each of the student's steps; the noised sample and its target. A
        # surrogate has its own of these, two predictions there, and two for the student.
        return 2 * sampler_steps + (8 if isinstance(hyper, SurrogateConfig) else 2)

    def build_batch(
        self, step: StepSamples, groups: SampleGroups, passes: int
    ) -> tuple[RowBatch, dict[str, float]]:
        import numpy as np

        from ebbflow.training.matching import (
            FakeScoreBatch,
            build_matching_batch,
            sample_student_steps,
        )

        updater = step.updater
        hyper: MatchingConfig = updater.hyper
        samples = np.concatenate(groups)
        advantage = step.select_advantages(samples)
        student = sample_student_steps(
            updater.policy,
            step.select_conditioning(samples),
            step.keys.select_samples(samples),
            updater.stage.sampler,
            updater.sampler_sigmas,
            passes,
        )
        # The fake score first: the student's gradient is the difference to what it says now.
        # Each update of the fake score, and then that of the student, draws its own step, noise
        # level and noise.
        metrics: dict[str, list[float]] = {}
        for draw in range(hyper.fake_updates):
            batch = build_matching_batch(student, advantage, hyper, draw)
            rows = FakeScoreBatch(batch, updater.latents)
            for name, value in updater.train_copy("fake", rows, passes).items():
                metrics.setdefault(name, []).append(value)
        means = {name: fmean(values) for name, values in metrics.items()}
        batch = build_matching_batch(student, advantage, hyper, hyper.fake_updates)
        if isinstance(hyper, SurrogateConfig):
            batch, surrogate_metrics = self._train_surrogate(
                updater, student, batch, groups, advantage, passes
            )
            means |= surrogate_metrics
        return batch, means

    def _train_surrogate(
        self,
        updater: PolicyUpdater,
        student: StudentSteps,
        batch: MatchingBatch,
        groups: SampleGroups,
        advantage: Tensor,
        passes: int,
    ) -> tuple[MatchingBatch, dict[str, float]]:
        """Train the surrogate reward on the groups; return the student's rows with what it says
        then, and the metrics of its training.
        """
        import math

        import numpy as np

        from ebbflow.training.surrogate import add_surrogate_reward, build_surrogate_batch

        hyper: Any = updater.hyper
        policy = updater.policy
        loss = updater.algorithm.surrogate_loss
        assert loss is not None, "an algorithm whose hyper-parameters are a SurrogateConfig has one"
        # Before the student, which then follows what the surrogate has just learnt.
        rows = build_surrogate_batch(
            policy,
            student,
            # [[0, 5], [16, 17]] becomes [0, 0, 1, 1].
            np.repeat(np.arange(len(groups)), [len(group) for group in groups]),
            advantage,
            hyper,
            hyper.fake_updates + 1,
            passes,
            lambda surrogate_rows: loss(surrogate_rows, hyper),
            updater.stage.advantages.clip or math.inf,
            updater.latents,
        )
        metrics = updater.train_copy("surrogate", rows, passes)
        # Draws of their own: the fake score has had 0 to fake_updates - 1, the student the next.
        batch = add_surrogate_reward(policy, batch, student, hyper, hyper.fake_updates + 2, passes)
        return batch, metrics

    def build_trial_rows(
        self, groups: list[np.ndarray], algorithm: Algorithm, hyper: Any
    ) -> tuple[MatchingRows, Tensor]:
        import torch

        from ebbflow.algorithms.base import MatchingRows
        from ebbflow.training.trial import TrialInputs

        inputs = TrialInputs.sample(groups)
        velocity = inputs.sample_noise().requires_grad_()
        rows = MatchingRows(
            latents=inputs.sample_noise(),
            sigma=torch.ones(len(inputs.advantage)),  # the first step
            velocity=velocity,
            noised=inputs.sample_noise(),
            noised_sigma=torch.linspace(0.1, 0.9, len(inputs.advantage)),
            copies={copy: inputs.sample_noise() for copy in algorithm.copies(hyper)},
            advantage=inputs.advantage,
        )
        if isinstance(hyper, SurrogateConfig):
            rows = replace(
                rows, rewarded_clean=inputs.sample_noise(), base_clean=inputs.sample_noise()
            )
        return rows, velocity


MATCHING = MatchingKind()
