"""The reference rollout engine: diffusers' transformer in this process, our own denoising loop."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ebbflow.data.sounds import Sounds
from ebbflow.flow.host_values import copy_ahead, expand_sigma, read_on_host, to_device
from ebbflow.flow.noise import INITIAL, SampleKeys, generate_shared_noise
from ebbflow.flow.sampler import (
    Sampler,
    SolverHistory,
    compute_log_prob,
    compute_transition,
    find_sampler,
    sample_next_latents,
)
from ebbflow.flow.windows import Plan, Trajectory, count_samples_per_prediction, shorten_schedule
from ebbflow.models.base import Conditioning, Model, device_of, predict
from ebbflow.models.sound import decode_sounds
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.recipe.model import Precision
from ebbflow.recipe.passes import split_into_equal_passes
from ebbflow.recipe.rollout_cache import FeatureCacheConfig, Quantization
from ebbflow.recipe.samplers import STOCHASTIC_SAMPLERS
from ebbflow.rollouts.feature_cache import cache_features
from ebbflow.rollouts.quantization import quantize_linears
from ebbflow.training.object_messages import gather_objects
from ebbflow.training.rollout_forward import RolloutVelocities

if TYPE_CHECKING:
    # Not loaded in an engine's own process, which generates without them.
    from ebbflow.stage import StageContext
    from ebbflow.training.policy import Policy

TAIL_SOLVER = "dpm_solver"
"""Takes the fewer steps after the window of a plan with a tail, as in MixGRPO-Flash."""


@dataclass(frozen=True)
class Rollouts:
    """Generated samples.

    Example:
        64 samples of latents [16, 64, 64] with 3 trained steps: ``latents`` is [64, 16, 64, 64],
        ``trajectory.states`` [64, 4, 16, 64, 64] and ``trajectory.log_probs`` [64, 3].

    Attributes:
        latents: the final ones, fp32 [N, ...].
        trajectory: the trained steps, where a plan named some.
        velocities: those of the trained steps with their graphs, where the update goes back through
            them.
        sounds: of the samples, where a reward scores them.
    """

    latents: Tensor
    trajectory: Trajectory | None
    velocities: RolloutVelocities = ()
    sounds: Sounds | None = None

    def move_to(self, device: torch.device) -> Rollouts:
        """Return the same rollouts on a device; velocities stay where their graphs are."""
        if self.latents.device == device:
            return self
        trajectory = self.trajectory
        if trajectory is not None:
            columns = trajectory.list_columns().items()
            trajectory = Trajectory(**{name: values.to(device) for name, values in columns})
        return replace(self, latents=self.latents.to(device), trajectory=trajectory)


class DenoisingSteps(NamedTuple):
    """What happens at each denoising step.

    Attributes:
        sigmas: the whole schedule, descending to 0, [steps + 1].
        solvers: what takes each of the steps.
        stochastic: the steps that get noise; their solver is the stage's own sampler.
    """

    sigmas: Tensor
    solvers: Sequence[Sampler]
    stochastic: frozenset[int]


class DistinctRows(NamedTuple):
    """The samples of a micro-batch that differ, where several are equal before a step.

    Example:
        Samples 0 to 3 of prompt 7 share their first noise in pairs: ``first`` is [0, 2],
        ``row_of_sample`` [0, 0, 1, 1], and the network predicts 2 rows instead of 4.

    Attributes:
        first: positions of the first sample of each set of equal ones, integer [D].
        row_of_sample: for every sample the row of its set, integer [N] with values below D.
        conditioning: that of the first ones, D rows.
    """

    first: Tensor
    row_of_sample: Tensor
    conditioning: Conditioning


def find_finite_rows(latents: Tensor) -> np.ndarray:
    """Return which of [N, ...] have only finite numbers, bool [N]."""
    return latents.isfinite().flatten(1).all(1).cpu().numpy()


@torch.no_grad()
def generate_samples(
    model: Model,
    conditioning: Conditioning,
    keys: SampleKeys,
    sampler: SamplerConfig,
    plan: Plan | None = None,
    micro_batch: int = 64,
    precision: Precision | None = None,
    with_graph: bool = False,
    cache: FeatureCacheConfig | None = None,
) -> Rollouts:
    """Denoise one sample per row of ``conditioning``.

    With a plan, its stochastic steps follow the sampler, the trained ones among them are recorded,
    and all others are deterministic: Euler's, or after the last stochastic one the plan's tail.
    Without one, every step but the last follows the sampler (its noise would stay in the image) and
    nothing is recorded. Micro-batches are of equal size, at most ``micro_batch``. They change no
    sample's noise, but can change the last bits of the arithmetic. Samples of one that are equal
    before a step are predicted once (``count_samples_per_prediction``).

    Args:
        precision: that of the network, by default the model's; latents, means and log-probs are
            fp32 always.
        with_graph: whether to predict the trained steps with gradient and keep their graphs.
        cache: of features, for faster samples that approximate the model's; each micro-batch has
            a state of its own, and which steps it skips depends on all rows of the micro-batch.

    Raises:
        ValueError: a plan for a deterministic sampler, or with a cache.
        ModelError: the cache does not fit the network.
    """
    if plan is not None and cache is not None:
        raise ValueError(
            "the log-probabilities of a plan are those of the network, and the cache"
            f" {cache.name!r} approximates it; leave one of them out"
        )
    if plan is not None and find_sampler(sampler.name).eta is None:
        raise ValueError(
            f"a step of the deterministic sampler {sampler.name!r} has no log-probability that a"
            f" plan could record; take one of {', '.join(STOCHASTIC_SAMPLERS)}, or leave the"
            " plan out"
        )
    precision = precision or model.precision
    sigmas = to_device(model.compute_sigmas(sampler.steps), conditioning.device)
    # Chosen once, for all micro-batches: they are the same for every sample.
    steps = _choose_solvers(sigmas, sampler, plan)
    parts = []
    for part in split_into_equal_passes(len(conditioning), micro_batch):
        part_conditioning = conditioning.select_rows(part)
        part_keys = keys.select_samples(part)
        cached: AbstractContextManager[None] = nullcontext()
        if cache is not None:
            cached = cache_features(model, cache, len(steps.solvers), precision)
        with cached:
            parts.append(
                _denoise_micro_batch(
                    model, part_conditioning, part_keys, sampler, steps, plan, precision, with_graph
                )
            )
    return join_rollouts(parts)


def join_rollouts(parts: Sequence[Rollouts]) -> Rollouts:
    """Return the rows of all parts, whose trained steps are the same."""
    latents = torch.cat([part.latents for part in parts])
    trajectories = [part.trajectory for part in parts if part.trajectory is not None]
    if not trajectories:
        return Rollouts(latents, None)
    means = [part.means for part in trajectories if part.means is not None]
    # ``sigmas`` and ``steps`` have no row per sample, so those of the first part stand for all.
    trajectory = replace(
        trajectories[0],
        states=torch.cat([part.states for part in trajectories]),
        means=torch.cat(means) if means else None,
        log_probs=torch.cat([part.log_probs for part in trajectories]),
    )
    velocities = tuple(chain.from_iterable(part.velocities for part in parts))
    return Rollouts(latents, trajectory, velocities)


def _denoise_micro_batch(
    model: Model,
    conditioning: Conditioning,
    keys: SampleKeys,
    sampler: SamplerConfig,
    steps: DenoisingSteps,
    plan: Plan | None,
    precision: Precision,
    with_graph: bool,
) -> Rollouts:
    """Denoise the samples of one micro-batch from pure noise to images."""
    sigmas = steps.sigmas
    trained = plan.trained if plan else ()
    conditioning = conditioning.for_precision(precision)  # cast once for all steps
    # Samples that share noise are equal before some steps, and are predicted once there.
    distinct_rows: dict[int, DistinctRows] = {}
    if keys.sharing:
        distinct_rows = _find_distinct_rows(keys, conditioning, steps, trained)

    noises = _generate_noises(model.latent_shape, keys, steps.stochastic, sigmas.device)
    latents = next(noises)  # [N, ...]
    history: SolverHistory | None = None
    recorded: dict[str, list[Tensor]] = defaultdict(list)  # columns of the trajectory
    velocities: list[Tensor] = []
    for step, solver in enumerate(steps.solvers):
        with torch.set_grad_enabled(with_graph and step in trained):
            if step in distinct_rows:
                rows = distinct_rows[step]
                velocity = _predict_distinct_rows(model, latents, sigmas, step, rows, precision)
            else:
                sigma = expand_sigma(sigmas, step, len(latents))
                velocity = predict(model, latents, sigma, conditioning, precision)  # [N, ...]

        if step not in steps.stochastic:
            latents, history = solver.advance(latents, velocity, sigmas, step, history)
            continue

        transition = compute_transition(sampler.name, latents, velocity, sigmas, step, sampler.eta)
        next_latents = sample_next_latents(transition, next(noises))
        if step in trained:
            # The state before a step is that after the one before, if that was trained, too.
            if step - 1 not in trained:
                recorded["states"].append(latents)
            recorded["states"].append(next_latents)
            log_prob = compute_log_prob(transition, next_latents, model.latent_shape)
            recorded["log_probs"].append(log_prob)
            if plan and plan.with_means:
                recorded["means"].append(transition.mean)
            if with_graph:
                velocities.append(velocity)
        # As in MixGRPO's code, a multistep tail begins with the last stochastic step as history.
        if steps.solvers[step + 1].multistep:
            history = SolverHistory(latents, latents - sigmas[step] * velocity)
        latents = next_latents

    if not trained:
        return Rollouts(latents, None)
    columns = {name: torch.stack(values, 1) for name, values in recorded.items()}
    trajectory = Trajectory(sigmas, to_device(torch.tensor(trained), sigmas.device), **columns)
    return Rollouts(latents, trajectory, (tuple(velocities),) if with_graph else ())


def _generate_noises(
    shape: Sequence[int], keys: SampleKeys, stochastic: Iterable[int], device: torch.device
) -> Iterator[Tensor]:
    """Yield the initial noise and that of each stochastic step on a device, float32 [N, *shape]; a
    thread generates the next one meanwhile, so that the network does not wait for it.
    """
    indices = [step + 1 for step in sorted(stochastic)]
    with ThreadPoolExecutor(1) as thread:
        pending = thread.submit(generate_shared_noise, shape, keys, INITIAL)
        for following in indices:
            noise = pending.result()
            # The one after ``following`` waits until this one is taken: two are held at most.
            pending = thread.submit(generate_shared_noise, shape, keys, following)
            yield copy_ahead(noise, device)
        yield copy_ahead(pending.result(), device)


def _predict_distinct_rows(
    model: Model,
    latents: Tensor,
    sigmas: Tensor,
    step: int,
    rows: DistinctRows,
    precision: Precision,
) -> Tensor:
    """Predict the velocity of each sample, [N, ...], with one prediction for those that are equal
    before the step.
    """
    distinct_latents = latents[rows.first]  # [D, ...], D < N
    sigma = expand_sigma(sigmas, step, len(distinct_latents))
    velocity = predict(model, distinct_latents, sigma, rows.conditioning, precision)
    return velocity[rows.row_of_sample]


def _find_distinct_rows(
    keys: SampleKeys, conditioning: Conditioning, steps: DenoisingSteps, trained: Sequence[int]
) -> dict[int, DistinctRows]:
    """Find the samples that differ before each of the steps before which some are equal."""
    samples_per_prediction = count_samples_per_prediction(
        keys.sharing, len(steps.solvers), steps.stochastic, trained
    )
    # Few numbers differ, so the rows are found once for each number and not once for each step.
    rows = {}
    for count in set(samples_per_prediction) - {1}:
        nodes = np.stack([keys.prompt_ids, keys.find_first_siblings(count)])  # [2, N]
        _, first, row_of_sample = np.unique(nodes, axis=1, return_index=True, return_inverse=True)
        device = conditioning.device
        positions = to_device(torch.from_numpy(first), device)
        rows[count] = DistinctRows(
            positions,
            # NumPy 2.0 alone gives the inverse another shape.
            torch.from_numpy(row_of_sample.reshape(-1)).to(device),
            conditioning.select_rows(positions),
        )
    return {step: rows[count] for step, count in enumerate(samples_per_prediction) if count > 1}


def _choose_solvers(sigmas: Tensor, sampler: SamplerConfig, plan: Plan | None) -> DenoisingSteps:
    """Choose what takes each step, from the family's ``sigmas``, [steps + 1]."""
    chosen = find_sampler(sampler.name)
    if chosen.eta is None:
        return DenoisingSteps(sigmas, [chosen] * sampler.steps, frozenset())
    # Without the last step, whose noise would stay in the image.
    stochastic = frozenset(plan.stochastic if plan else range(sampler.steps - 1))
    solvers = [chosen] * sampler.steps
    # The steps after the last stochastic one are taken by a faster solver, on fewer sigmas. All the
    # steps before keep their index and their sigma.
    if plan is not None and plan.tail is not None:
        end = plan.stochastic[-1] + 1
        schedule = read_on_host(sigmas)
        tail = shorten_schedule(schedule[end:], plan.tail)
        solvers[end:] = [find_sampler(TAIL_SOLVER)] * (len(tail) - 1)
        sigmas = to_device(torch.cat([schedule[:end], tail]), sigmas.device)
    return DenoisingSteps(sigmas, solvers, stochastic)


class Diffusers:
    """The reference engine: diffusers' network in this process, under our own denoising loop.

    Args:
        policy: the parameters that generate; the policy that trains needs no ``load``.
        generates: which copy of the policy generates.
        with_graph: as of ``generate_samples``, for samples that are recorded.
    """

    def __init__(
        self,
        ctx: StageContext,
        policy: Policy,
        generates: str = "current",
        with_graph: bool = False,
    ) -> None:
        self.policy = policy
        self.generates = generates
        self.with_graph = with_graph
        self.micro_batch = ctx.config.micro_batch
        self.precision = ctx.config.rollout_precision

    def load(self, weights: Mapping[str, Tensor]) -> None:
        self.policy.assign_parameters(weights)

    def generate(
        self,
        conditioning: Conditioning,
        keys: SampleKeys,
        sampler: SamplerConfig,
        plan: Plan | None = None,
        cache: FeatureCacheConfig | None = None,
        quantization: Quantization | None = None,
        with_sound: bool = False,
    ) -> tuple[Rollouts, np.ndarray]:
        """As the protocol; ``cache`` as of ``generate_samples``, for samples to train on, and the
        network quantised likewise; with the sounds of the samples where something scores them.

        Raises:
            ValueError: a plan, whose log-probs must be those of the network, with either.
            ModelError: the network cannot generate so.
        """
        model = self.policy.model
        if plan is not None and quantization is not None:
            raise ValueError(
                "the log-probabilities of a plan are those of the network, and"
                f" {quantization!r} rounds it; leave one of them out"
            )
        # Requests carry their conditioning on the CPU, as they travel between processes.
        conditioning = conditioning.to(device_of(model))
        # A trajectory is compared with the predictions of training: it must come from the same
        # products.
        merged = nullcontext() if plan else self.policy.merge_adapters(self.precision)
        rounded: AbstractContextManager[None] = nullcontext()
        if quantization is not None:
            rounded = quantize_linears(model, quantization)
        # Read at every call, because a validation may have it generate with another copy.
        with (
            self.policy.use_copy(self.generates),
            merged,
            rounded,
        ):
            rollouts = generate_samples(
                model,
                conditioning,
                keys,
                sampler,
                plan,
                self.micro_batch,
                self.precision,
                self.with_graph,
                cache,
            )
        if with_sound:
            rollouts = replace(rollouts, sounds=decode_sounds(model, rollouts.latents))
        # As many at once as were denoised: a convolution may take another kernel for another batch
        # size, as on Intel CPUs.
        slices = split_into_equal_passes(len(rollouts.latents), self.micro_batch)
        parts = [rollouts.latents[part] for part in slices]
        if self.policy.context_parallel > 1:
            return rollouts, np.concatenate(self._decode_on_ranks(parts))
        return rollouts, np.concatenate([model.decode_latents(part) for part in parts])

    def _decode_on_ranks(self, parts: Sequence[Tensor]) -> list[np.ndarray]:
        """Decode parts of latents with the ranks that share their tokens: all of them have the
        whole latents, and each decodes some parts.
        """
        num_ranks = self.policy.context_parallel
        place = self.policy.ranks.rank % num_ranks
        decoded = [self.policy.model.decode_latents(part) for part in parts[place::num_ranks]]
        of_ranks = gather_objects(decoded, self.policy.row_group)
        return [of_ranks[index % num_ranks][index // num_ranks] for index in range(len(parts))]

    def close(self) -> None:
        """There is nothing outside this process."""
