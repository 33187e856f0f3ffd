"""The gate in front of another rollout engine: the same noise must give the denoising steps that
the training policy would take.

The engine generates a few samples and the policy replays them, step by step. All steps but the last
are stochastic there and recorded, whatever window the stage trains on, and where its own sampler is
deterministic Flow-SDE stands in for it: then algorithms that learn without trajectories are gated
on the same numbers, of the same network at the same noise levels. Decoding is not compared.

Three numbers decide, because each of them is blind to what another one sees:

- The shift of a step's mean in units of the step's noise, s. It is compared with the rounding error
  of the policy itself: its velocity is predicted once more, for latents that are moved by less than
  their last bit and in other micro-batches, so that no rounding stays the same. The divergence of
  two steps is D s^2 / 2 nats for D elements, so a shift that costs less than
  ``step_comparison.NEGLIGIBLE_DIVERGENCE`` passes as well.
- The engine's log-probs, against its own shift. A log-prob is a mean over D elements, in which a
  shift s cancels to s / sqrt(D): no difference of log-probs tells at D = 262,144 whether an engine
  is right, but a difference that the shift does not explain is an error in the engine's arithmetic.
- The share of the policy's weights that the engine shows: the component of the engine's step along
  what training has changed so far, which is 1 for the policy and 0 for an engine that ignores its
  adapters. Rounding has no direction, so over D elements and all steps a first update shows up far
  below the rounding of bfloat16.
"""

from __future__ import annotations

import torch

from ebbflow.flow.noise import SampleKeys, generate_initial_noise
from ebbflow.flow.windows import Plan, Trajectory
from ebbflow.models.base import Conditioning
from ebbflow.recipe.choices import ParityConfig, SamplerConfig
from ebbflow.recipe.model import Precision
from ebbflow.rollouts.step_comparison import (
    EFFECT_TOLERANCE,
    MEASURABLE,
    Source,
    StepComparison,
    compare_steps,
)
from ebbflow.training.policy import Policy

SIGMAS_APART = 1e-6


class ParityError(RuntimeError):
    """An engine does not generate what the training policy would: says how far off it is, where,
    and how to fix it.
    """


def plan_parity_samples(sampler: SamplerConfig) -> tuple[SamplerConfig, Plan]:
    """How the gate's samples are generated, for a stage's sampler."""
    every = tuple(range(sampler.steps - 1))
    stochastic = (
        sampler if sampler.is_stochastic else SamplerConfig(name="flow_sde", steps=sampler.steps)
    )
    return stochastic, Plan(every, every, with_means=True)


@torch.no_grad()
def measure_parity(
    policy: Policy,
    trajectory: Trajectory,
    conditioning: Conditioning,
    keys: SampleKeys,
    sampler: SamplerConfig,
    parity: ParityConfig,
    generates: str = "current",
    precision: Precision | None = None,
    micro_batch: int = 64,
    has_own_noise: bool = False,
) -> dict[str, float]:
    """Measure how far a trajectory, generated as ``plan_parity_samples`` says, is from the policy.

    Args:
        generates: the copy of the policy whose weights the engine has.
        precision: of the engine; default: the policy's own.
        has_own_noise: of an engine that cannot be given x_T; the steps are compared from its own.

    Returns:
        ``parity/mean_shift``, the largest shift of a step's mean; ``parity/rounding_shift``, the
        policy's own, and ``parity/worst_step``, both where the engine is closest to its limit;
        ``parity/log_prob_max`` and ``_mean`` of |log-prob of the engine - log-prob of the policy|;
        ``parity/weights_effect``, the share of what training has changed that the engine shows,
        once it has changed enough to be seen.

    Raises:
        ParityError: the noise, the schedule, the steps, the log-probs or the weights are others.
    """
    # Before the steps: with other noise they would differ, too, and the error would send the
    # reader to the weights.
    _check_same_schedule(policy, trajectory, sampler)
    # A server's own noise is in the recorded states, from which the steps are compared anyway.
    if not has_own_noise:
        _check_same_start(policy, trajectory, keys)
    precision = precision or policy.model.precision
    steps = trajectory.steps.tolist()
    comparison = compare_steps(
        policy,
        trajectory,
        sampler,
        Source(generates, conditioning),
        Source("reference", conditioning),
        precision,
        micro_batch,
        parity.max_shift,
    )
    metrics = _summarize(comparison, steps)
    _require_parity(comparison, metrics, steps, keys)
    return metrics


def _summarize(comparison: StepComparison, steps: list[int]) -> dict[str, float]:
    shifts = torch.stack(comparison.shifts, 1)  # [N, steps]
    errors = torch.stack(comparison.log_prob_errors, 1)
    relative = shifts / torch.tensor(comparison.limits).to(shifts)
    # ``argmax`` finds a NaN first, so a mean that is no number is the worst one.
    worst = int(relative.argmax()) % len(steps)
    metrics = {
        "parity/mean_shift": shifts.max().item(),
        "parity/rounding_shift": comparison.roundings[worst],
        "parity/worst_step": float(steps[worst]),
        "parity/log_prob_max": errors.max().item(),
        "parity/log_prob_mean": errors.mean().item(),
    }
    if comparison.effect.uncertainty() < MEASURABLE:
        metrics["parity/weights_effect"] = comparison.effect.share()
    return metrics


def _require_parity(
    comparison: StepComparison, metrics: dict[str, float], steps: list[int], keys: SampleKeys
) -> None:
    """Refuse an engine whose steps, log-probs or weights are not the policy's.

    Raises:
        ParityError: they are not.
    """
    extent = f"over {len(keys)} samples at {len(steps)} steps"
    effect = metrics.get("parity/weights_effect")
    # First: it names the cause of what the other numbers show.
    tolerance = max(EFFECT_TOLERANCE, comparison.effect.uncertainty())
    if effect is not None and not abs(effect - 1) <= tolerance:
        raise ParityError(
            f"the engine shows {effect:.2f} of what training has changed in the policy (1 is all of"
            f" it, 0 none; up to {tolerance:.2f} off 1 is rounding), {extent}: it generates with"
            " other weights. Check that it has applied the adapters to every layer and with their"
            " alpha, or that it has loaded the weights of this step; or set engine: diffusers"
        )
    shifts = torch.stack(comparison.shifts, 1)
    limits = torch.tensor(comparison.limits).to(shifts)
    # Not ``>``, which a NaN would pass.
    if not bool((shifts <= limits).all()):
        sample, column = divmod(int((shifts / limits).argmax()), len(steps))
        raise ParityError(
            "the engine's denoising steps are not those of the training policy on the same noise:"
            f" their means differ by {shifts[sample, column].item():.2e} standard deviations"
            f" ({_name_place(keys, sample, steps[column])}), {extent}, and"
            f" {comparison.limits[column]:.2e} would pass; the policy's own rounding moves them by"
            f" {comparison.roundings[column]:.2e}. Check that the engine was given the policy's"
            " weights, and rollout_precision; set parity.max_shift to accept a rougher engine; or"
            " set engine: diffusers"
        )
    errors = torch.stack(comparison.log_prob_errors, 1)
    error_limits = torch.stack(comparison.log_prob_limits, 1)
    if not bool((errors <= error_limits).all()):
        sample, column = divmod(int((errors / error_limits).argmax()), len(steps))
        raise ParityError(
            "the engine's log-probs are not those of its own denoising steps: they differ from the"
            f" training policy's by {errors[sample, column].item():.2e}"
            f" ({_name_place(keys, sample, steps[column])}), {extent}, and the difference of the"
            f" steps explains {error_limits[sample, column].item():.2e}. Compute them in float32,"
            " as a mean over the latent's elements (ebbflow.flow.sampler.compute_log_prob); or"
            " set engine: diffusers"
        )


def _name_place(keys: SampleKeys, sample: int, step: int) -> str:
    return f"denoising step {step}, prompt {keys.prompt_ids[sample]}, sample {keys.samples[sample]}"


def _check_same_schedule(policy: Policy, trajectory: Trajectory, sampler: SamplerConfig) -> None:
    """The family's schedule."""
    sigmas = policy.model.compute_sigmas(sampler.steps)
    engine_sigmas = trajectory.sigmas.cpu()
    same_shape = engine_sigmas.shape == sigmas.shape
    if not same_shape or not torch.allclose(engine_sigmas, sigmas, rtol=0, atol=SIGMAS_APART):
        raise ParityError(
            f"the engine denoises along the sigmas {engine_sigmas.tolist()}, the policy's model"
            f" along {sigmas.tolist()}"
        )


def _check_same_start(policy: Policy, trajectory: Trajectory, keys: SampleKeys) -> None:
    """The same bytes of x_T."""
    start = generate_initial_noise(policy.model.latent_shape, keys)
    if not torch.equal(trajectory.states[:, 0].cpu(), start):
        raise ParityError(
            f"the engine starts from other noise than {len(keys)} samples of seed {keys.seed} have:"
            " their bytes differ. Its environment and the trainer's must have the same version of"
            " Ebbflow"
        )
