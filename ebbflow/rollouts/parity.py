"""The gate in front of another rollout engine: the same noise must give the log-probs that the
training policy has.

The engine generates a few samples and the policy replays them, step by step. All steps but the last
are stochastic there and recorded, whatever window the stage trains on, and where its own sampler is
deterministic Flow-SDE stands in for it: then algorithms that learn without trajectories are gated
on the same numbers, of the same network at the same noise levels. Decoding is not compared.

A LoRA whose second factors are still zero changes nothing, so a gate before the first update says
little of how the engine takes weights; it can be asked again after it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ebbflow.flow.noise import SampleKeys, generate_initial_noise
from ebbflow.flow.sampler import Transition
from ebbflow.flow.trajectory import Trajectory
from ebbflow.flow.transition import compute_log_prob, compute_transition
from ebbflow.flow.windows import Plan
from ebbflow.models.base import Conditioning, predict
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.recipe.stages import StageConfig
from ebbflow.training.policy import Policy

SIGMAS_APART = 1e-6
UNCLIPPED_BAR = 1e-3


class ParityError(RuntimeError):
    """An engine does not generate what the training policy would: says how far off it is, where,
    and how to fix it.
    """


def compute_parity_bar(stage: StageConfig, dims: int) -> float:
    """The stage's ``parity.bar`` for latents of ``dims`` elements; left out, how far off 1 its
    ratio has a gradient.
    """
    return stage.parity.bar or stage.hyper_parameters.ratio_range(dims) or UNCLIPPED_BAR


def plan_parity_samples(sampler: SamplerConfig) -> tuple[SamplerConfig, Plan]:
    """How the gate's samples are generated, for a stage's sampler."""
    every = tuple(range(sampler.steps - 1))
    stochastic = (
        sampler if sampler.is_stochastic else SamplerConfig(name="flow_sde", steps=sampler.steps)
    )
    return stochastic, Plan(every, every)


@torch.no_grad()
def measure_parity(
    policy: Policy,
    trajectory: Trajectory,
    conditioning: Conditioning,
    keys: SampleKeys,
    sampler: SamplerConfig,
    bar: float,
    micro_batch: int = 64,
) -> dict[str, float]:
    """How far a trajectory, generated as ``plan_parity_samples`` says, is from the policy as it is
    now.

    ``parity/log_prob_max`` and ``_mean`` of |log-prob of the engine - log-prob of the policy|;
    ``parity/worst_step``, where the largest is; and ``parity/mean_shift``, the largest root mean
    square of (mu of the engine - mu of the policy) / b, which tells more: in a log-prob, a mean
    over many elements, small shifts cancel.

    Raises:
        ParityError: the noise, the schedule or the log-probs are others.
    """
    # Before the log-probs: with other noise they would differ, too, and the error would send the
    # reader to the weights.
    _check_same_start(policy, trajectory, keys, sampler)
    steps = trajectory.steps.tolist()
    deltas = []  # of each step, [N]
    shifts = []  # of each step, [N]
    for column, step in enumerate(steps):
        move = _replay_step(policy, trajectory, conditioning, column, step, sampler, micro_batch)
        # log p of the recorded move under the policy, less what the engine said of it.
        deltas.append(
            compute_log_prob(move, trajectory.next_latents[:, column])
            - trajectory.log_probs[:, column]
        )
        # In units of the step's own noise, b: 1 would be a shift as large as the noise.
        shifts.append(
            ((trajectory.means[:, column] - move.mean) / move.std)
            .flatten(1)
            .square()
            .mean(1)
            .sqrt()
        )
    delta = torch.stack(deltas, 1).abs()
    # ``argmax`` finds a NaN first, so a log-prob that is no number is the worst one.
    sample, column = divmod(int(delta.argmax()), len(steps))
    metrics = {
        "parity/log_prob_max": delta[sample, column].item(),
        "parity/log_prob_mean": delta.mean().item(),
        "parity/worst_step": float(steps[column]),
        "parity/mean_shift": torch.stack(shifts, 1).max().item(),
    }
    # Not ``> bar``, which a NaN would pass.
    if not metrics["parity/log_prob_max"] <= bar:
        where = (
            f"denoising step {steps[column]}, prompt {keys.prompt_ids[sample]}, sample"
            f" {keys.samples[sample]}"
        )
        raise ParityError(
            _describe_mismatch(metrics, where, f"{len(keys)} samples at {len(steps)} steps", bar)
        )
    return metrics


def _describe_mismatch(metrics: dict[str, float], where: str, extent: str, bar: float) -> str:
    return (
        "the engine's log-probs are not those of the training policy on the same noise: they"
        f" differ by up to {metrics['parity/log_prob_max']:.2e} ({where}), by"
        f" {metrics['parity/log_prob_mean']:.2e} on average over {extent}, and parity.bar is"
        f" {bar:.2e}; the means of its steps differ by up to {metrics['parity/mean_shift']:.2e} of"
        " their standard deviation. Check that it was given the policy's weights, and"
        " rollout_precision; raise parity.bar where the stage's correction is to make up for it;"
        " or set engine: diffusers"
    )


def _check_same_start(
    policy: Policy, trajectory: Trajectory, keys: SampleKeys, sampler: SamplerConfig
) -> None:
    """The same bytes of x_T, and the family's schedule."""
    sigmas = policy.model.compute_sigmas(sampler.steps)
    engine_sigmas = trajectory.sigmas.cpu()
    same_shape = engine_sigmas.shape == sigmas.shape
    if not same_shape or not torch.allclose(engine_sigmas, sigmas, rtol=0, atol=SIGMAS_APART):
        raise ParityError(
            f"the engine denoises along the sigmas {engine_sigmas.tolist()}, the policy's model"
            f" along {sigmas.tolist()}"
        )
    start = generate_initial_noise(policy.model.latent_shape, keys)
    if not torch.equal(trajectory.latents[:, 0].cpu(), start):
        raise ParityError(
            f"the engine starts from other noise than {len(keys)} samples of seed {keys.seed} have:"
            " their bytes differ. Its environment and the trainer's must have the same version of"
            " Ebbflow"
        )


def _replay_step(
    policy: Policy,
    trajectory: Trajectory,
    conditioning: Conditioning,
    column: int,
    step: int,
    sampler: SamplerConfig,
    micro_batch: int,
) -> Transition:
    """A recorded step under the policy."""
    latents = trajectory.latents[:, column]
    sigma = trajectory.sigmas[step]
    # In micro-batches like the engine's, because their size can change the last bits.
    velocity: list[Tensor] = []
    for start in range(0, len(latents), micro_batch):
        part = slice(start, start + micro_batch)
        rows = latents[part]
        velocity.append(
            predict(policy.model, rows, sigma.expand(len(rows)), conditioning.select_rows(part))
        )
    return compute_transition(
        sampler.name, latents, torch.cat(velocity), trajectory.sigmas, step, sampler.eta
    )
