"""What training asks of a kind of algorithm: rows of a loss from the samples of a step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ebbflow.recipe.base import RecipeError
from ebbflow.recipe.kinds import AlgorithmKind, find_kind

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from ebbflow.algorithms.base import Algorithm, AnyRows
    from ebbflow.data.prompts import Prompt
    from ebbflow.flow.noise import SampleKeys
    from ebbflow.flow.windows import Trajectory
    from ebbflow.models.base import Conditioning
    from ebbflow.rewards.combine import Scorer
    from ebbflow.training.batches import RowBatch, SampleGroups
    from ebbflow.training.rollout_forward import RolloutVelocities
    from ebbflow.training.update import PolicyUpdater


@dataclass(frozen=True)
class StepSamples:
    """The N samples of a training step, and what the rows of its updates are built with.

    Example: 8 prompts with 16 samples each have ``keys`` and ``advantages`` of 128 entries, 8 rows
    of ``conditioning``, and ``sample_index`` = [0] * 16 + [1] * 16 + ...

    An update trains on some of its groups of positions::

        groups = [np.array([0, 5]), np.array([16, 17])]  # chosen by ``algorithm.select``
        batch, metrics = kind.build_batch(step, groups, passes=1)

    Attributes:
        updater: the policy and how far its training has come.
        keys: of the noise of each sample, [N].
        prompts: [N].
        conditioning: one row for each different prompt, on the policy's device.
        sample_index: integer [N], the row of ``conditioning`` of each sample.
        advantages: [N]; of a tree [N, W], of each trained step; where each of K latents has its own
            [N, 1, K].
        latents: the final ones, [N, ...].
        penalty_factor: float32 [N], of the reference penalty of each sample; None for 1.
        trajectory: the recorded steps after the rollout correction, where the kind records them.
        velocities: of the rollout with their graphs, where the update goes back through them.
        scorer: the rewards, where the kind needs their gradient.
    """

    updater: PolicyUpdater
    keys: SampleKeys
    prompts: Sequence[Prompt]
    conditioning: Conditioning
    sample_index: np.ndarray
    advantages: np.ndarray
    latents: Tensor
    trajectory: Trajectory | None = None
    velocities: RolloutVelocities = ()
    scorer: Scorer | None = None
    penalty_factor: np.ndarray | None = None

    # torch is imported inside: recipes read this file through the kinds, and need no tensors.

    def select_conditioning(self, samples: np.ndarray) -> Conditioning:
        """Return the conditioning of some samples, a row for each."""
        import torch

        return self.conditioning.select_rows(torch.from_numpy(self.sample_index[samples]))

    def select_advantages(self, samples: np.ndarray) -> Tensor:
        """Return the advantages of some samples, [n] or of each of K latents [n, K], where the
        policy is.
        """
        import torch

        advantages = self.advantages[samples]
        if advantages.ndim == 3:
            advantages = advantages[:, 0]
        return torch.from_numpy(advantages).to(self.conditioning.device)


class TrainableKind(AlgorithmKind):
    """A kind of algorithm, whole: what recipes and estimates ask, and what training does with it.

    ``docs/extending.md`` has an example. Hyper-parameters (``step.updater.hyper``) are of the
    kind's ``config_class``.
    """

    def list_trained_groups(self, step: StepSamples, groups: SampleGroups) -> SampleGroups:
        """Return what of an update's sample groups is trained: groups of positions in the step's
        samples, or of rows where the kind counts in rows.
        """
        return groups

    def find_samples(self, step: StepSamples, positions: np.ndarray) -> np.ndarray:
        """Return the sample of each position in ``list_trained_groups``."""
        return positions

    @abstractmethod
    def build_batch(
        self, step: StepSamples, groups: SampleGroups, passes: int
    ) -> tuple[RowBatch, dict[str, float]]:
        """Build the rows of an update.

        Args:
            groups: this process's share of ``list_trained_groups``.
            passes: forward-backward passes of the update, the same number on every process.

        Returns:
            The rows, and the metrics of what was trained before them (the fake score).
        """

    def build_offline_batch(
        self,
        updater: PolicyUpdater,
        clean: Tensor,
        conditioning: Conditioning,
        advantage: Tensor,
        keys: SampleKeys,
        group_index: np.ndarray,
        epoch: int,
    ) -> RowBatch:
        """Build the rows of a batch of an offline stage, where ``can_be_offline``.

        Args:
            clean: final latents, [N, ...]; all other arguments cover the N samples, too.
            group_index: integer [N], ascending; samples of a group stay together.
            epoch: how often these samples were trained on before.
        """
        raise NotImplementedError(f"algorithms of kind {self.name!r} cannot train offline")

    def summarise_first_update(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return what the step reports of its first update, before the policy has moved."""
        return {}

    @abstractmethod
    def build_trial_rows(
        self, groups: list[np.ndarray], algorithm: Algorithm, hyper: Any
    ) -> tuple[AnyRows, Tensor]:
        """Build random rows to try a loss with (``ebbflow.training.trial``).

        Args:
            groups: positions of samples, as ``algorithm.select`` returned them.

        Returns:
            The rows, and the prediction in them, which needs a gradient.
        """


def trainable_kind(name: str) -> TrainableKind:
    """Return a kind by its name or path, as training needs it.

    Raises:
        RecipeError: there is none, or it has no rows to train on.
    """
    kind = find_kind(name)
    if not isinstance(kind, TrainableKind):
        raise RecipeError(
            f"kind = {name!r} builds no rows; derive it from"
            " ebbflow.training.kinds.base.TrainableKind"
        )
    return kind
