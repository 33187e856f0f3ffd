"""The denoising steps of a trajectory beside those that the training policy would take from the
same latents: how far their means are shifted, how far rounding alone shifts them, and which share
of a change they show.

``parity`` decides with these numbers whether an engine may generate for training, and
``ebbflow.certification`` reports them line by line.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from ebbflow.flow.latents import Shape, join_averages
from ebbflow.flow.sampler import Transition, broadcast_rows, compute_log_prob, compute_transition
from ebbflow.flow.windows import Trajectory
from ebbflow.models.base import DTYPES, Conditioning, predict, predict_in_float32
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.recipe.model import Precision
from ebbflow.recipe.passes import split_into_equal_passes
from ebbflow.training.policy import Policy

NEGLIGIBLE_DIVERGENCE = 1e-3
"""Nats between a step of the engine and the policy's, which no algorithm here can tell apart."""
NOISE_MULTIPLE = 3.0
"""Largest shift as a multiple of the policy's own rounding error. Two engines that round
independently are as far apart as the policy is from itself, so 1 is expected.
"""
LOG_PROB_DEVIATIONS = 6.0
"""Standard deviations of a log-prob's difference under a given shift."""
LOG_PROB_ROUNDING = 5e-6
"""Rounding error of a log-prob in float32, relative to it, or absolute below 1."""
EFFECT_TOLERANCE = 0.1
"""Largest distance of a change's share from 1 where rounding allows no smaller one."""
EFFECT_DEVIATIONS = 3.0
"""Standard deviations by which a change's share may be off by chance, if these are known."""
STEP_CORRELATION = 1.6
"""Factor of these deviations: part of the rounding, as of what the network computes of the prompt
alone, is the same in all steps, which their differences do not show.
"""
MIN_ROUNDING = 1e-9
"""Of a step, in units of its noise: divides, and is 0 where both predictions have equal bytes."""
MIN_STEPS = 3
"""Below, the difference between the steps says nothing of the uncertainty."""
MEASURABLE = 0.8
"""Above this uncertainty a change's share could not tell 0 from 1, and is left out."""


@dataclass
class ChangeEffect:
    """The component of the engine's steps along a change: of the weights, the guidance, the prompt.

    The change is predicted twice, with roundings of its own each time. In a product
    of both, and in one of the second with the engine's distance from the first, no rounding meets
    itself, so that roundings above the change leave the share without bias (the method of
    instrumental variables). An entry of the lists is a step: roundings of the time's embedding are
    the same in all samples and elements of one. It is in units of the step's rounding error, or the
    last steps, whose noise is small, would outweigh all others.

    Attributes:
        changes: the inner product of both predictions of the change.
        errors: the inner product of the change with the engine's distance from the policy.
    """

    changes: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)

    def add_step(
        self, change: Tensor, repeated_change: Tensor, error: Tensor, rounding: float
    ) -> None:
        """Add a step; each is [N, ...] in units of the step's noise, and ``rounding`` the root mean
        square of the policy's own rounding error.
        """
        unit = max(rounding, MIN_ROUNDING) ** 2
        self.changes.append((change * repeated_change).sum(dtype=torch.float64).item() / unit)
        self.errors.append((error * repeated_change).sum(dtype=torch.float64).item() / unit)

    def share(self) -> float:
        """1 where the engine shows all of the change, 0 where it shows none."""
        return 1 + sum(self.errors) / sum(self.changes)

    def uncertainty(self) -> float:
        """How far the share may be off by chance, from how much it differs between the steps (the
        jackknife); infinite where that cannot be said, as before training has changed anything.
        """
        count = len(self.changes)
        change = sum(self.changes)
        without_one = [change - step_change for step_change in self.changes]
        if count < MIN_STEPS or change <= 0 or min(without_one) <= 0:
            return math.inf
        errors = sum(self.errors)
        shares = [
            (errors - step_error) / rest
            for step_error, rest in zip(self.errors, without_one, strict=True)
        ]
        mean = sum(shares) / count
        variance = (count - 1) / count * sum((share - mean) ** 2 for share in shares)
        # A variance of few steps, or of steps of which few have most of the change, is itself
        # uncertain: as many steps with equal changes would say as much.
        effective_steps = change**2 / sum(step_change**2 for step_change in self.changes)
        deviations = STEP_CORRELATION * _compute_t_quantile(effective_steps - 1)
        return deviations * math.sqrt(variance)


def _compute_t_quantile(degrees: float) -> float:
    """Return the quantile of Student's t that is as rare as ``EFFECT_DEVIATIONS`` of a normal
    variable, to within 2 % from 3 degrees of freedom on; 13 instead of 19 for 2 and fewer.

    Gaver and Kafadar, A retrievable recipe for inverse t (The American Statistician 38, 1984).
    """
    degrees = max(2.0, degrees)
    exponent = EFFECT_DEVIATIONS**2 * (degrees - 1.5) / (degrees - 1) ** 2
    return math.sqrt(degrees * math.expm1(exponent))


@dataclass
class StepComparison:
    """What the steps of a trajectory showed; each list has an entry per step.

    Attributes:
        shifts: of the engine from the policy, root mean squares in units of the noise, [N].
        limits: the largest shift that passes.
        log_prob_errors: |log-prob of the engine - log-prob of the policy|, [N].
        log_prob_limits: what the shifts explain of them, [N].
    """

    shifts: list[Tensor] = field(default_factory=list)
    roundings: list[float] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)
    log_prob_errors: list[Tensor] = field(default_factory=list)
    log_prob_limits: list[Tensor] = field(default_factory=list)
    effect: ChangeEffect = field(default_factory=ChangeEffect)


@dataclass(frozen=True)
class Source:
    """What a velocity is predicted with.

    Attributes:
        copy: of the policy, as ``Policy.use_copy`` takes it.
        conditioning: a row for each sample.
    """

    copy: str
    conditioning: Conditioning


@torch.no_grad()
def compare_steps(
    policy: Policy,
    trajectory: Trajectory,
    sampler: SamplerConfig,
    source: Source,
    base: Source | None,
    precision: Precision | None = None,
    micro_batch: int = 64,
    max_shift: float | None = None,
) -> StepComparison:
    """Compare the recorded steps of an engine with the policy's from the same latents.

    Args:
        trajectory: with means.
        source: what the engine should have predicted with.
        base: what the change is measured from; None where nothing has changed.
        precision: of the engine; default: the policy's own.
        max_shift: as ``ParityConfig.max_shift``.
    """
    means = trajectory.means
    assert means is not None, "steps are compared by their means"
    precision = precision or policy.model.precision
    sources = [source] if base is None else [source, base]
    comparison = StepComparison()
    for column, step in enumerate(trajectory.steps.tolist()):
        latents = trajectory.states[:, trajectory.find_states()[column]]
        velocities: list[Tensor] = []
        for one in sources:
            with policy.use_copy(one.copy):
                inputs = (latents, trajectory.sigmas[step], one.conditioning)
                velocities += predict_twice(policy, *inputs, precision, micro_batch)
        moves = [
            compute_transition(
                sampler.name, latents, velocity, trajectory.sigmas, step, sampler.eta
            )
            for velocity in velocities
        ]
        std = broadcast_rows(moves[0].std, moves[0].mean)
        # In units of the step's own noise: 1 would be a shift as large as the noise.
        error = (means[:, column] - moves[0].mean) / std
        _compare_step(
            comparison,
            trajectory,
            policy.model.latent_shape,
            column,
            moves[0],
            moves[1],
            error,
            max_shift,
        )
        if base is None:
            continue
        comparison.effect.add_step(
            change=(moves[0].mean - moves[2].mean) / std,
            repeated_change=(moves[1].mean - moves[3].mean) / std,
            error=error,
            rounding=comparison.roundings[-1],
        )
    return comparison


def predict_twice(
    policy: Policy,
    latents: Tensor,
    sigma: Tensor,
    conditioning: Conditioning,
    precision: Precision,
    micro_batch: int,
) -> tuple[Tensor, Tensor]:
    """Predict in the precision of the policy or of the engine, the coarser one, and once more with
    other roundings: in other micro-batches, for latents that are moved by up to half of their last
    bit, and in float32.

    The second prediction never has the engine's 16 bits. It would round as the engine does, and an
    engine that shows all of the weights would seem to show more (``ChangeEffect``).
    """
    model = policy.model
    coarser = model.precision
    # Frozen weights beside a LoRA are stored in 16 bits, and torch does not mix both kinds of them.
    if policy.config.train == "full" or model.precision == "float32":
        coarser = max(model.precision, precision, key=lambda name: torch.finfo(DTYPES[name]).eps)
    predict_first = partial(predict, model, precision=coarser)
    predict_again = predict_first if coarser == "float32" else partial(predict_in_float32, model)
    uniform = torch.rand(latents.shape, generator=torch.Generator().manual_seed(0)).to(latents)
    moved = latents * (1 + torch.finfo(torch.float32).eps / 2 * (2 * uniform - 1))

    smaller = max(1, min(micro_batch, len(latents)) // 2)
    return (
        _predict_in_passes(predict_first, latents, sigma, conditioning, micro_batch),
        _predict_in_passes(predict_again, moved, sigma, conditioning, smaller),
    )


def _predict_in_passes(
    predict_rows: Callable[[Tensor, Tensor, Conditioning], Tensor],
    latents: Tensor,
    sigma: Tensor,
    conditioning: Conditioning,
    micro_batch: int,
) -> Tensor:
    velocity: list[Tensor] = []
    for part in split_into_equal_passes(len(latents), micro_batch):
        rows = latents[part]
        velocity.append(predict_rows(rows, sigma.expand(len(rows)), conditioning.select_rows(part)))
    return torch.cat(velocity)


def _compare_step(
    comparison: StepComparison,
    trajectory: Trajectory,
    shape: Shape,
    column: int,
    move: Transition,
    repeated: Transition,
    error: Tensor,
    max_shift: float | None,
) -> None:
    """Compare a step of the engine with the policy's; its repetition says how exact that is.

    Args:
        error: of the engine's mean, in units of the noise, [N, ...].
    """
    std = broadcast_rows(move.std, move.mean)
    dims = move.mean[0].numel()
    rounding = (repeated.mean - move.mean) / std
    shift = error.flatten(1).square().mean(1).sqrt()  # [N]
    rounding_shift = rounding.flatten(1).square().mean(1).sqrt().max().item()
    negligible = math.sqrt(2 * NEGLIGIBLE_DIVERGENCE / dims)
    comparison.shifts.append(shift)
    comparison.roundings.append(rounding_shift)
    comparison.limits.append(max_shift or max(negligible, NOISE_MULTIPLE * rounding_shift))

    next_latents = trajectory.states[:, trajectory.find_states()[column] + 1]
    log_prob = compute_log_prob(move, next_latents)  # [N]
    recorded = join_averages(trajectory.log_probs[:, column], shape)  # of the whole sample
    # With z the recorded noise and d the error, the difference is the mean of z d + d^2 / 2. A
    # log-prob that is no density, -mean((x' - mu)^2), has 2 b^2 times that.
    scale = 1.0 if move.sampler.log_prob_is_density else 2 * move.std.square()
    explained = scale * (LOG_PROB_DEVIATIONS * shift / math.sqrt(dims) + shift.square() / 2)
    comparison.log_prob_errors.append((log_prob - recorded).abs())
    comparison.log_prob_limits.append(explained + LOG_PROB_ROUNDING * log_prob.abs().clamp(min=1))
