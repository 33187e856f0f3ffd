"""What an algorithm is: a pure function from typed rows to a loss for each, and a statement of what
it needs.

A *row* is one entry of the loss. Trajectory algorithms have a row per (sample, trained denoising
step), forward-process algorithms one per (sample, draw of sigma and noise), algorithms on the
gradient of the reward and those that match distributions one per sample (Direct-Align one per
sample and branch). The update averages over the rows, weighs them where rollouts are corrected,
adds the reference penalty, and names a row that is not finite: no algorithm does any of this
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from ebbflow.recipe.algorithms import AlgorithmConfig, SurrogateConfig
from ebbflow.recipe.choices import ADVANTAGE_CLIP

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from ebbflow.algorithms.advantages import AdvantageResult
    from ebbflow.flow.sampler import Transition

# The policies that a loss can ask for besides the one that is trained.
CopyName = Literal[
    "reference",
    "old",
    "sampling",
    "teacher",
    "rollout",
    "fake",
    "recent",
    "surrogate",
    "surrogate_old",
    "guided_reference",
]
"""``rollout``: the policy as it was before the first update on the samples, of a step online, of
the stage offline. ``fake``: the fake score network of distribution matching. ``surrogate``: the
denoiser that learns the reward of a few-step student (``SurrogateRows``), and ``surrogate_old`` its
moving average; ``fake`` and ``surrogate`` are the copies that are trained. ``recent``: the policy
at the last reset of the reference (``ReferenceConfig.is_reset``). ``guided_reference``: what the
reference predicts under guidance, where the penalty pulls there; no loss asks for it.
"""
FollowingName = Literal["old", "sampling", "fake", "recent", "surrogate", "surrogate_old"]
FOLLOWING: tuple[FollowingName, ...] = get_args(FollowingName)
"""The copies that move with the training, each by the schedule of the algorithm that keeps it;
``fake`` and ``surrogate`` are trained, and ``recent`` is renewed by a rule. The others stand still.
"""
SURROGATE: tuple[FollowingName, ...] = ("surrogate", "surrogate_old")
"""What an algorithm with a surrogate reward has; both start at the teacher."""
Decay: TypeAlias = Callable[[Any, int], float]
RowMetrics: TypeAlias = "dict[str, Tensor]"
"""Metrics by name, a value for each row: [M]."""


@dataclass(frozen=True)
class TrajectoryRows:
    """M rows of a policy-gradient loss.

    Example:
        Two samples of Stable Diffusion 3 at 512 x 512 with a window of the steps 2 to 4 are M = 6
        rows, a sample's steps one after another: ``transition.mean`` [6, 16, 64, 64], ``log_prob``
        [6], and ``advantage`` = [1.2, 1.2, 1.2, -.7, -.7, -.7].

    Attributes:
        transition: the step under the policy being trained, with gradient.
        log_prob: [M] of the recorded next latents, with gradient.
        old_mean: [M, ...], mu under the policy that the ratio is against; None unless the class of
            the hyper-parameters has ``compares_means``, as rollouts keep it only then.
        old_log_prob: [M], under the same policy.
        copies: the step under each policy copy that the algorithm asked for.
        advantage: [M].
        advantage_clip: ``advantages.clip``; every advantage lies within plus and minus this.
        penalty_factor: [M], of the reference penalty of each row, where the algorithm gates it.
    """

    transition: Transition
    log_prob: Tensor
    old_mean: Tensor | None
    old_log_prob: Tensor
    copies: Mapping[CopyName, Transition]
    advantage: Tensor
    advantage_clip: float = ADVANTAGE_CLIP
    penalty_factor: Tensor | None = None


@dataclass(frozen=True)
class ForwardRows:
    """M rows of a forward-process loss.

    Example:
        Two pairs of Diffusion-DPO with one draw of sigma and noise each are M = 4 rows:
        ``group_index`` = [0, 0, 1, 1], ``sigma`` = [.7, .7, .2, .2], ``noise[0]`` equal to
        ``noise[1]``, ``advantage`` = [1., -1., .4, -.4], ``clean`` and ``velocity`` [4, 16, 64,
        64], and ``copies["reference"]`` like ``velocity``.

    Attributes:
        clean: x0, [M, ...].
        noise: eps, [M, ...].
        sigma: [M]; the network saw (1 - sigma) x0 + sigma eps.
        velocity: under the policy being trained, with gradient, [M, ...].
        copies: the velocity under each policy copy that the algorithm asked for.
        advantage: [M].
        advantage_clip: ``advantages.clip``; every advantage lies within plus and minus this.
        group_index: integer [M], ascending; equal for rows of one pair or group, which share sigma,
            and with ``shared_noise`` the noise, and are all here.
    """

    clean: Tensor
    noise: Tensor
    sigma: Tensor
    velocity: Tensor
    copies: Mapping[CopyName, Tensor]
    advantage: Tensor
    group_index: Tensor
    advantage_clip: float = ADVANTAGE_CLIP


@dataclass(frozen=True)
class GradientRows:
    """M rows of a loss on the gradient of the reward, one per sample.

    Example:
        DRaFT-2 on 4 samples of a sampler with 50 steps: ``latents`` are those before step 48, and
        ``denoise(velocity)`` takes this step and step 49. ``reward`` of its result is [4], and its
        backward pass reaches ``velocity``.

    Attributes:
        latents: x before the first denoising step with gradient, [M, ...], without gradient.
        sigma: [M], there.
        velocity: under the policy being trained, there, with gradient, [M, ...].
        denoise: from ``velocity`` to the latents after this step and all that follow, with
            gradient, [M, ...].
        reward: from final latents [M, ...] to the weighted sum of the rewards of their images, with
            gradient, [M].
        copies: the velocity under each policy copy that the algorithm asked for.
        advantage: [M].
        advantage_clip: ``advantages.clip``; every advantage lies within plus and minus this.
    """

    latents: Tensor
    sigma: Tensor
    velocity: Tensor
    denoise: Callable[[Tensor], Tensor]
    reward: Callable[[Tensor], Tensor]
    copies: Mapping[CopyName, Tensor]
    advantage: Tensor
    advantage_clip: float = ADVANTAGE_CLIP

    @property
    def predicted_clean(self) -> Tensor:
        """The predicted clean latents x - sigma v, with gradient, [M, ...]."""
        return self.latents - expand_like(self.sigma, self.velocity) * self.velocity


@dataclass(frozen=True)
class DirectAlignRows:
    """M rows of a loss on the gradient of the reward of recovered samples, one per sample and
    branch.

    Example:
        One sample with both branches is M = 2 rows with the same ``clean``, ``noise`` and
        ``end_sigma``: ``sigma`` = [.8714, .8286], ``end_sigma`` = [.85, .85]. The first row ends
        below the sigma where it starts (denoising), the second above it (inversion).

    Attributes:
        clean: x0, the final latents of the rollout, [M, ...].
        noise: eps, the noise that the rollout started from, [M, ...].
        sigma: [M]; the network saw (1 - sigma) x0 + sigma eps.
        end_sigma: [M], where the step with gradient ends: below ``sigma`` in the denoising branch,
            above it in the inversion branch.
        velocity: under the policy being trained, at ``sigma``, with gradient, [M, ...].
        rewards: from final latents [M, ...] to the weighted sums of the rewards of their images
            with gradient, [M] each: of the prompts after the positive and after the negative word.
        copies: the velocity under each policy copy that the algorithm asked for.
        advantage: [M].
        advantage_clip: ``advantages.clip``; every advantage lies within plus and minus this.
    """

    clean: Tensor
    noise: Tensor
    sigma: Tensor
    end_sigma: Tensor
    velocity: Tensor
    rewards: Callable[[Tensor], tuple[Tensor, Tensor]]
    copies: Mapping[CopyName, Tensor]
    advantage: Tensor
    advantage_clip: float = ADVANTAGE_CLIP

    @property
    def recovered_latents(self) -> Tensor:
        """The clean latents that one Euler step to ``end_sigma`` and the known noise give, with
        gradient, [M, ...].

        (x + (sigma' - sigma) v - sigma' eps) / (1 - sigma') of x = (1 - sigma) x0 + sigma eps,
        which is x0 + (sigma' - sigma) / (1 - sigma') (v - (eps - x0)).
        """
        # The second form of the equation: where v is exact, eps - x0, it gives x0 without rounding.
        factor = (self.end_sigma - self.sigma) / (1 - self.end_sigma)
        return self.clean + expand_like(factor, self.clean) * (
            self.velocity - (self.noise - self.clean)
        )


@dataclass(frozen=True)
class MatchingRows:
    """M rows of a loss that matches the distribution of a few-step student to that of its teacher,
    one per sample.

    Example:
        Two samples of a student with 4 steps, one trained at its first step and one at its third:
        ``sigma`` = [1., .5], ``latents`` and ``velocity`` [2, 16, 64, 64] are there.
        ``noised_sigma`` = [.31, .84] are the levels to which their samples were noised, and
        ``copies["teacher"]`` and ``copies["fake"]`` are velocities at ``noised``.

    Attributes:
        latents: x before one of the student's denoising steps, [M, ...], without gradient.
        sigma: [M], there.
        velocity: under the policy being trained, there, with gradient, [M, ...].
        noised: the student's sample, noised again, [M, ...], without gradient.
        noised_sigma: [M], there.
        copies: the velocity at ``noised`` under ``teacher`` (with guidance, if the stage says so)
            and ``fake``.
        advantage: [M].
        advantage_clip: ``advantages.clip``.
        rewarded_clean: with a surrogate reward, x0 as the surrogate predicts it (with guidance, if
            the stage says so) at the student's sample, noised to a level of its own, [M, ...].
        base_clean: x0 as the teacher predicts it there without guidance, [M, ...].
    """

    latents: Tensor
    sigma: Tensor
    velocity: Tensor
    noised: Tensor
    noised_sigma: Tensor
    copies: Mapping[CopyName, Tensor]
    advantage: Tensor
    advantage_clip: float = ADVANTAGE_CLIP
    rewarded_clean: Tensor | None = None
    base_clean: Tensor | None = None

    @property
    def predicted_clean(self) -> Tensor:
        """The predicted clean latents x - sigma v, with gradient, [M, ...]."""
        return self.latents - expand_like(self.sigma, self.velocity) * self.velocity


@dataclass(frozen=True)
class SurrogateRows:
    """M rows of the loss of a surrogate reward: ends of a few-step student's steps, noised again.

    Example:
        Two groups of three samples, the first at the end of the second step of four, the second at
        that of the last: ``group_index`` = [0, 0, 0, 1, 1, 1], ``step_share`` = [.5, .5, .5, 1.,
        1., 1.]. A group has one step, one noise level and one noise.

    Attributes:
        velocity: under the surrogate, with gradient, [M, ...].
        target: the velocity that has the score of the fresh noise, which the surrogate is compared
            with, [M, ...].
        teacher: the velocity under the teacher, without guidance, [M, ...].
        old: that under the surrogate's moving average, [M, ...].
        step_share: [M], (number of the student's step, from one) / (its steps).
        advantage: [M].
        group_index: integer [M], ascending; equal for the samples of a prompt, which are all here.
        advantage_clip: ``advantages.clip``.
    """

    velocity: Tensor
    target: Tensor
    teacher: Tensor
    old: Tensor
    step_share: Tensor
    advantage: Tensor
    group_index: Tensor
    advantage_clip: float = ADVANTAGE_CLIP


AnyRows: TypeAlias = TrajectoryRows | ForwardRows | GradientRows | DirectAlignRows | MatchingRows


@dataclass(frozen=True)
class StepScores:
    """The scores of the N samples of a step, as ``Algorithm.reshape`` gets them.

    Example:
        Two prompts with two samples each, trained on ``ocr`` and scored by ``aesthetic``, too::

            StepScores(
                reward=np.array([1.0, 0.5, 0.0, np.nan]),
                columns={
                    "ocr": np.array([1.0, 0.5, 0.0, np.nan]),
                    "aesthetic": np.array([5.1, 5.4, 4.9, np.nan]),
                },
                prompt_ids=np.array([3, 3, 8, 8]),
            )

    Attributes:
        reward: float64 [N], the weighted sum of the trained rewards; NaN where scoring failed.
        columns: float64 [N] of every reward, whatever its weight, and of their metrics.
        prompt_ids: integer [N].
    """

    reward: np.ndarray
    columns: Mapping[str, np.ndarray]
    prompt_ids: np.ndarray


Reshape: TypeAlias = "Callable[[AdvantageResult, StepScores, Any, dict[str, Any]], AdvantageResult]"


# Which samples are trained on, and which of them must stay together: single ones, pairs or whole
# groups (``Algorithm.select``). numpy is imported inside: recipes read this file.


def select_kept_samples(
    advantage: np.ndarray, keep: np.ndarray, prompt_ids: np.ndarray, config: Any
) -> list[np.ndarray]:
    """Return every kept sample as a group of its own."""
    return list(keep.nonzero()[0][:, None])


def select_all_samples(
    advantage: np.ndarray, keep: np.ndarray, prompt_ids: np.ndarray, config: Any
) -> list[np.ndarray]:
    """Return every sample as a group of its own, whatever its reward said."""
    import numpy as np

    return list(np.arange(len(keep))[:, None])


def select_groups(
    advantage: np.ndarray, keep: np.ndarray, prompt_ids: np.ndarray, config: Any
) -> list[np.ndarray]:
    """Return the kept samples of each prompt, by ascending prompt id.

    Example:
        keep = [True, True, False, True] with prompt_ids = [7, 3, 7, 7] gives [[1], [0, 3]].
    """
    import numpy as np

    kept = np.flatnonzero(keep)
    # Sorted once, not searched for each prompt: a file of pairs has as many prompts as pairs.
    by_prompt = kept[np.argsort(prompt_ids[kept], kind="stable")]
    _, starts = np.unique(prompt_ids[by_prompt], return_index=True)
    # The first start is 0, so the first part is empty.
    return np.split(by_prompt, starts)[1:]


def select_all_groups(
    advantage: np.ndarray, keep: np.ndarray, prompt_ids: np.ndarray, config: Any
) -> list[np.ndarray]:
    """Return all samples of each prompt, by ascending prompt id, whatever their rewards said."""
    import numpy as np

    return select_groups(advantage, np.ones_like(keep), prompt_ids, config)


@dataclass(frozen=True)
class Algorithm:
    """One algorithm; its hyper-parameters' class says in a line what it does and which rows and
    stages are its own.

    Example:
        def compute_loss(rows: ForwardRows, config: MineConfig) -> tuple[Tensor, RowMetrics]:
            error = compute_flow_matching_error(rows, rows.velocity)
            return config.scale * rows.advantage * error, {"mine/error": error}

        ALGORITHM = Algorithm(MineConfig, compute_loss)

    Attributes:
        config: the class of its hyper-parameters.
        loss: (rows, hyper-parameters) -> (loss of each row [M], metrics of each row).
        copies: the policy copies whose predictions the loss needs, given its hyper-parameters.
        select: (advantage [N], keep [N], prompt ids [N], hyper-parameters) -> the groups to train
            on, each the indices of samples whose rows must stay together; by default every kept
            sample by itself.
        follows: for each copy that moves with the training, (hyper-parameters, step from one) -> d
            of copy <- d copy + (1 - d) theta. Where a copy generates, all of them follow after
            every rollout step, elsewhere after every optimiser step. A copy without an entry stays
            as it was at the start.
        generates: which policy makes the rollouts: the one that is trained, or one of the copies
            that follow it.
        reshape: (advantages of a step, its scores, hyper-parameters, what it remembers) -> the
            advantages to train on. Scores are ``StepScores``. What it remembers is a dictionary of
            JSON values, which it changes in place and checkpoints keep.
        surrogate_loss: (``SurrogateRows``, hyper-parameters) -> (loss of each row [M], metrics of
            each row) of the surrogate reward of a few-step student, of a ``SurrogateConfig``; None
            without one.
    """

    config: type[AlgorithmConfig]
    loss: Callable[[Any, Any], tuple[Tensor, RowMetrics]]
    # Functions of the hyper-parameters and not sets: a weight of 0 needs no copy, and a copy costs
    # the memory of the trained parameters.
    copies: Callable[[Any], frozenset[CopyName]] = lambda config: frozenset()
    select: Callable[[np.ndarray, np.ndarray, np.ndarray, Any], list[np.ndarray]] = (
        select_kept_samples
    )
    follows: Mapping[FollowingName, Decay] = field(default_factory=dict)
    generates: Literal["current"] | FollowingName = "current"
    reshape: Reshape | None = None
    surrogate_loss: Callable[[SurrogateRows, Any], tuple[Tensor, RowMetrics]] | None = None

    def __post_init__(self) -> None:
        if issubclass(self.config, SurrogateConfig) != (self.surrogate_loss is not None):
            raise ValueError(
                f"{self.config.__name__}: an algorithm has a surrogate_loss if, and only if, its"
                " hyper-parameters derive from SurrogateConfig; give both or none"
            )

    def list_following_copies(self, config: Any) -> tuple[FollowingName, ...]:
        """List the copies that the policy of a stage has because the algorithm asks for them, and
        that may follow it.
        """
        used = {self.generates, *self.copies(config)}
        if self.surrogate_loss is not None:
            used |= {*SURROGATE}
        return tuple(name for name in FOLLOWING if name in used)


def mean_per_row(values: Tensor) -> Tensor:
    """Average over everything but the rows, [M]."""
    return values.flatten(1).mean(1)


def expand_like(values: Tensor, like: Tensor) -> Tensor:
    """Return [M] as [M, 1, ...], which broadcasts over the rows of ``like``."""
    return values.view((-1,) + (1,) * (like.ndim - 1))


def compute_gaussian_kl(step: Transition, mean: Tensor | None) -> Tensor:
    """Compute the KL between the step and one with the same std and another mean, per latent
    element: mean((mu - mean)^2) / (2 b^2), [M].

    Raises:
        ValueError: ``mean`` is None, as rollouts did not record it.
    """
    if mean is None:
        raise ValueError(
            "the loss compares old_mean, which rollouts did not record; add compares_means:"
            " ClassVar = True to the class of the algorithm's hyper-parameters"
        )
    # The true std b, dt included, for every sampler. Public code often divides by 2 s^2 here, which
    # is |dt| times as much (``ebbflow.algorithms.loss_terms`` has it by name).
    return mean_per_row((step.mean - mean) ** 2) / (2 * step.std**2)


def compute_flow_matching_error(rows: ForwardRows, velocity: Tensor) -> Tensor:
    """Compute mean((v - u)^2) with the target u = eps - x0, [M]."""
    return mean_per_row((velocity - (rows.noise - rows.clean)) ** 2)


def compute_missing_reward(reward: Tensor, target: float | None) -> tuple[Tensor, Tensor]:
    """Compute the loss max(0, t - r) of rewards, [M], and 1 where it has a gradient, [M]; -r
    without a target t.
    """
    if target is None:
        return -reward, reward.new_ones(reward.shape)
    return (target - reward).clamp_min(0), (reward < target).float()


def compute_group_mean(values: Tensor, group_index: Tensor) -> Tensor:
    """Compute the mean of [M] values over the rows of the same group, at every row, [M]."""
    # Groups counted from 0, as a micro-batch may begin with any of them. Equal ids are neighbours,
    # so a group begins where the id changes.
    index = (group_index.diff(prepend=group_index[:1]) != 0).cumsum(0)
    count = index.bincount()
    total: Tensor = values.new_zeros(len(count)).index_add(0, index, values)
    means: Tensor = total / count
    return means[index]
