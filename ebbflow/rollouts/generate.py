"""The reference rollout engine: diffusers' transformer in this process, our own denoising loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from ebbflow.flow import transition as flow
from ebbflow.flow.dpm_solver import dpm_solver_step, shorten_schedule
from ebbflow.flow.noise import SampleKeys, generate_initial_noise, generate_shared_noise
from ebbflow.flow.trajectory import Trajectory
from ebbflow.flow.unipc import UniPCHistory, unipc_step
from ebbflow.flow.windows import Plan, count_samples_per_prediction
from ebbflow.models.base import Conditioning, Model, predict
from ebbflow.recipe.choices import STOCHASTIC_SAMPLERS, SamplerConfig
from ebbflow.recipe.model import Precision
from ebbflow.training.rollout_forward import RolloutVelocities


@dataclass(frozen=True)
class Rollouts:
    """Generated samples.

    Attributes:
        latents: the final ones, fp32 [N, ...].
        trajectory: the trained steps, where a plan named some.
        velocities: those of the trained steps with their graphs, where the update goes back through
            them.
    """

    latents: Tensor
    trajectory: Trajectory | None
    velocities: RolloutVelocities = ()

    @property
    def finite_samples(self) -> np.ndarray:
        """Whether all of a sample's final latent is a number, bool [N]."""
        return find_finite_rows(self.latents)

    def move_to(self, device: torch.device) -> Rollouts:
        trajectory = self.trajectory
        if trajectory is not None:
            trajectory = Trajectory(
                **{name: values.to(device) for name, values in vars(trajectory).items()}
            )
        return Rollouts(self.latents.to(device), trajectory, self.velocities)


def find_finite_rows(latents: Tensor) -> np.ndarray:
    """Which of [N, ...] have only finite numbers, bool [N]."""
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
) -> Rollouts:
    """Denoise one sample per row of ``conditioning``.

    With a plan, its stochastic steps follow the sampler, the trained ones among them are recorded,
    and all others are deterministic: Euler's, or after the last stochastic one the plan's tail.
    Without one, every step but the last follows the sampler (its noise would stay in the image) and
    nothing is recorded. Micro-batches do not change a sample's noise; they can change the last bits
    of the arithmetic. Samples of a micro-batch that are equal before a step are predicted once
    (``count_samples_per_prediction``). ``precision`` is that of the network, the model's where it
    is left out; latents, means and log-probs are fp32 always. ``with_graph`` predicts the trained
    steps with gradient and keeps their graphs.

    Raises:
        ValueError: a plan for a deterministic sampler.
    """
    if plan is not None and not sampler.is_stochastic:
        raise ValueError(
            f"a step of the deterministic sampler {sampler.name!r} has no log-probability that a"
            f" plan could record; take one of {', '.join(STOCHASTIC_SAMPLERS)}, or leave the"
            " plan out"
        )
    parts = [slice(start, start + micro_batch) for start in range(0, len(keys), micro_batch)]
    precision = precision or model.precision
    schedule = _choose_solvers(
        model.compute_sigmas(sampler.steps).to(conditioning.device), sampler, plan
    )
    rest = (sampler, plan, precision, *schedule, with_graph)
    return join_rollouts(
        [
            _denoise_micro_batch(
                model, conditioning.select_rows(part), keys.select_slice(part), *rest
            )
            for part in parts
        ]
    )


def join_rollouts(parts: Sequence[Rollouts]) -> Rollouts:
    """The rows of all parts, whose trained steps are the same."""
    latents = torch.cat([part.latents for part in parts])
    trajectories = [part.trajectory for part in parts if part.trajectory is not None]
    if not trajectories:
        return Rollouts(latents, None)
    trajectory = replace(
        trajectories[0],
        latents=torch.cat([part.latents for part in trajectories]),
        next_latents=torch.cat([part.next_latents for part in trajectories]),
        means=torch.cat([part.means for part in trajectories]),
        log_probs=torch.cat([part.log_probs for part in trajectories]),
    )
    return Rollouts(
        latents, trajectory, tuple(chain.from_iterable(part.velocities for part in parts))
    )


def _denoise_micro_batch(
    model: Model,
    conditioning: Conditioning,
    keys: SampleKeys,
    sampler: SamplerConfig,
    plan: Plan | None,
    precision: Precision,
    sigmas: Tensor,
    solvers: Sequence[str],
    with_graph: bool,
) -> Rollouts:
    """The rollouts of one micro-batch."""
    device, conditioning = (
        conditioning.device,
        conditioning.for_precision(precision),
    )  # cast once for all steps
    trained = plan.trained if plan else ()
    noisy = {
        step
        for step, solver in enumerate(solvers)
        if sampler.is_stochastic and solver == sampler.name
    }
    counts = count_samples_per_prediction(keys.sharing, len(solvers), noisy, trained)
    distinct = {count: _find_distinct_rows(keys, conditioning, count) for count in set(counts)}
    latents = generate_initial_noise(model.latent_shape, keys).to(device)
    clean = None
    record = []
    velocities: list[Tensor] = []
    history: UniPCHistory | None = None
    for step, solver in enumerate(solvers):
        first, row, their_conditioning = distinct[counts[step]]
        different = latents[first]
        with torch.set_grad_enabled(with_graph and step in trained):
            velocity = predict(
                model, different, sigmas[step].expand(len(different)), their_conditioning, precision
            )[row]
        if solver == "dpm_solver":
            latents, clean = dpm_solver_step(latents, velocity, clean, sigmas, step)
            continue
        if solver == "unipc":
            latents, history = unipc_step(latents, velocity, history, sigmas, step)
            continue
        clean = (
            latents - sigmas[step] * velocity
        )  # the history that a tail begins with, as in MixGRPO's code
        move = flow.compute_transition(solver, latents, velocity, sigmas, step, sampler.eta)
        before = latents
        latents = move.mean
        if step in noisy:
            latents = flow.sample_next_latents(
                move, generate_shared_noise(model.latent_shape, keys, step + 1).to(device)
            )
        if step in trained:
            record.append((before, latents, move.mean, flow.compute_log_prob(move, latents)))
            velocities += [velocity] * with_graph
    if not trained:
        return Rollouts(latents, None)
    columns = [torch.stack(column, 1) for column in zip(*record, strict=True)]
    kept = (tuple(velocities),) if with_graph else ()
    return Rollouts(
        latents, Trajectory(sigmas, torch.tensor(trained, device=device), *columns), kept
    )


Rows = slice | Tensor
"""Of a batch: all of them, or those at some positions."""


def _find_distinct_rows(
    keys: SampleKeys, conditioning: Conditioning, count: int
) -> tuple[Rows, Rows, Conditioning]:
    """Of each ``count`` successive samples of a prompt one: (its row, its number for every row,
    their conditioning).
    """
    if count == 1:
        return slice(None), slice(None), conditioning
    nodes = np.stack([keys.prompt_ids, keys.find_first_siblings(count)])
    _, first, row = np.unique(nodes, axis=1, return_index=True, return_inverse=True)
    rows = torch.from_numpy(first).to(conditioning.device)
    return (
        rows,
        torch.from_numpy(row.reshape(-1)).to(conditioning.device),
        conditioning.select_rows(rows),
    )


def _choose_solvers(
    sigmas: Tensor, sampler: SamplerConfig, plan: Plan | None
) -> tuple[Tensor, list[str]]:
    """(the sigmas to use, [steps + 1], and what takes each of their steps), from the family's
    sigmas.
    """
    if not sampler.is_stochastic:
        return sigmas, [sampler.name] * sampler.steps
    stochastic = plan.stochastic if plan else range(sampler.steps - 1)
    solvers = [sampler.name if step in stochastic else "ode" for step in range(sampler.steps)]
    if plan is None or plan.tail is None:
        return sigmas, solvers
    end = plan.stochastic[-1] + 1
    tail = shorten_schedule(sigmas[end:], plan.tail)
    solvers[end:] = ["dpm_solver"] * (len(tail) - 1)
    return torch.cat([sigmas[:end], tail]), solvers
