"""The closed forms that the golden vectors are computed from, in NumPy float64: nothing of Ebbflow,
torch or autograd is used.

A form takes a case, whose inputs and settings are its attributes, and returns the expected values;
its docstring is the equation that the vectors file carries. x: latents [N, ...], v: velocity = eps
- x0, sigma' and dt = sigma' - sigma < 0: of the next step, b: standard deviation of a step,
mean(.): over the elements of a row. Gradients are of the mean loss, by complex steps: Im f(x + ih)
/ h has no cancellation, so h = 1e-30 makes them exact to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.conformance_batch_forms import (
    group_advantages,
    rollout_correction,
    rollout_divergence,
)

Values = dict[str, Any]

# Sampler steps: latents, velocity and noise [N, ...], sigmas [steps + 1], falling to 0. Formulas
# with the arXiv number of their source; none is copied from the code under test.


def ode_step(c: Any) -> Values:
    """x' = x + dt v"""
    return {"next_latents": c.latents + (c.sigmas[c.step + 1] - c.sigmas[c.step]) * c.velocity}


def flow_sde_step(c: Any) -> Values:
    """mu = x (1 + s^2 dt / (2 sigma)) + v (1 + s^2 (1 - sigma) / (2 sigma)) dt, b = s sqrt|dt|, x'
    = mu + b z (2505.05470)

    s = eta sqrt(sigma / (1 - sigma)), with the second sigma of the schedule in 1 - sigma where
    sigma = 1; log_prob = mean(-(recorded - mu)^2 / (2 b^2) - log b - log(2 pi) / 2)
    """
    sigma = c.sigmas[c.step]
    dt = c.sigmas[c.step + 1] - c.sigmas[c.step]
    # s is infinite at sigma = 1, the first step; the published code takes the second sigma there
    s = c.eta * math.sqrt(sigma / (1 - (c.sigmas[1] if sigma == 1 else sigma)))
    mean = (
        c.latents * (1 + s**2 * dt / (2 * sigma))
        + c.velocity * (1 + s**2 * (1 - sigma) / (2 * sigma)) * dt
    )
    return _gaussian_step(c, mean, s * math.sqrt(-dt))


def dance_sde_step(c: Any) -> Values:
    """mu = x + dt (v - eta^2 / 2 score), score = -(x - (1 - sigma) x0_hat) / sigma^2, x0_hat = x -
    sigma v (2505.07818)

    b = eta sqrt|dt|, x' = mu + b z, log_prob = mean(-(recorded - mu)^2 / (2 b^2) - log b - log(2
    pi) / 2)
    """
    sigma = c.sigmas[c.step]
    dt = c.sigmas[c.step + 1] - c.sigmas[c.step]
    score = -(c.latents - (1 - sigma) * (c.latents - sigma * c.velocity)) / sigma**2
    return _gaussian_step(
        c, c.latents + dt * (c.velocity - c.eta**2 / 2 * score), c.eta * math.sqrt(-dt)
    )


def cps_step(c: Any) -> Values:
    """mu = (1 - sigma') (x - sigma v) + sigma' cos(eta pi / 2) (x + (1 - sigma) v), b = sigma'
    sin(eta pi / 2) (2509.05952)

    x' = mu + b z, log_prob = -mean((recorded - mu)^2), which is no density
    """
    sigma = c.sigmas[c.step]
    after = c.sigmas[c.step + 1]
    angle = c.eta * math.pi / 2
    clean = c.latents - sigma * c.velocity
    noise = c.latents + (1 - sigma) * c.velocity
    mean = (1 - after) * clean + after * math.cos(angle) * noise
    # without std and constants, as the published code has it
    return _gaussian_step(c, mean, after * math.sin(angle)) | {
        "log_prob": -_mean_of_rows((c.recorded - mean) ** 2)
    }


def dpm_solver_steps(c: Any) -> Values:
    """x' = (sigma' / sigma) x - alpha' (exp(-h) - 1) D, D = x0_hat + (x0_hat - x0_before) h / (2
    h_before) (2211.01095)

    DPM-Solver++ (2M, midpoint): alpha = 1 - sigma, lambda = log(alpha / sigma), h = lambda' -
    lambda, x0_hat = x - sigma v. D = x0_hat in the first step, in a step to sigma = 0 and after a
    step from sigma = 1. velocities: those of each step; path: the latents after each.
    """
    latents = c.latents
    previous_clean = None
    path = []
    # half the log of the signal-to-noise ratio, up to a constant factor; infinite at both ends
    lambdas = [
        math.inf if sigma == 0 else -math.inf if sigma == 1 else math.log((1 - sigma) / sigma)
        for sigma in c.sigmas
    ]
    h = [after - now for now, after in pairwise(lambdas)]
    for step, velocity in enumerate(c.velocities):
        # first order, where one of the two steps is infinite and the extrapolation has no meaning
        clean = target = latents - c.sigmas[step] * velocity
        if previous_clean is not None and math.isfinite(h[step]) and math.isfinite(h[step - 1]):
            target = clean + (clean - previous_clean) * h[step] / (2 * h[step - 1])
        sigma_ratio = c.sigmas[step + 1] / c.sigmas[step]
        latents = (
            sigma_ratio * latents - (1 - c.sigmas[step + 1]) * (math.exp(-h[step]) - 1) * target
        )
        previous_clean = clean
        path.append(latents)
    return {"path": np.array(path)}


# Losses on steps of a trajectory: rows [M], gradient with respect to mu


def flow_grpo_loss(c: Any) -> Values:
    """L = max(-A rho, -A clip(rho, 1 - eps, 1 + eps)), rho = exp(log_prob - old_log_prob)
    (2505.05470, 2505.07818, 2507.21802)
    """
    return _loss_and_gradient(
        lambda mean: _clipped_objective(_compute_ratio(c, mean), c.advantage, c.clip_range), c.mean
    )


def grpo_guard_loss(c: Any) -> Values:
    """L = max(-A rho, -A clip(rho, 1 - eps, 1 + eps)) / |dt|, rho = exp(mean(z (mu - mu_old)))
    (2510.22319)

    z = (x' - mu_old) / b: rho = exp((log_prob - old_log_prob + mean((mu - mu_old)^2) / (2 b^2)) b),
    each row with its own b.
    """
    z = (c.next_latents - c.old_mean) / _broadcast_rows(c.std, c.mean)
    return _loss_and_gradient(
        lambda mean: (
            _clipped_objective(
                np.exp(_mean_of_rows(z * (mean - c.old_mean))), c.advantage, c.clip_range
            )
            / -c.dt
        ),
        c.mean,
    )


def tempflow_grpo_loss(c: Any) -> Values:
    """L = w b max(-A rho, -A clip(rho, 1 - eps, 1 + eps)), rho as of Flow-GRPO (2508.04324)"""
    return _loss_and_gradient(
        lambda mean: (
            c.noise_weight
            * c.std
            * _clipped_objective(_compute_ratio(c, mean), c.advantage, c.clip_range)
        ),
        c.mean,
    )


def flow_dppo_loss(c: Any) -> Values:
    """L = -A rho, or 0 where mean((mu - mu_old)^2) / (2 b^2) >= tau and (rho > 1, A > 0 or rho < 1,
    A < 0) (2606.11025)
    """
    far = _mean_of_rows((c.mean - c.old_mean) ** 2) / (2 * c.std**2) >= c.divergence_limit
    away = (_compute_ratio(c, c.mean) - 1) * c.advantage > 0
    return _loss_and_gradient(
        lambda mean: -c.advantage * _compute_ratio(c, mean) * ~(far & away), c.mean
    )


def distillation_loss(c: Any) -> Values:
    """L = mean((mu - mu_teacher)^2) / (2 b^2), the KL of two Gaussians per element"""
    return _loss_and_gradient(
        lambda mean: _mean_of_rows((mean - c.teacher_mean) ** 2) / (2 * c.std**2), c.mean
    )


def reference_kl(c: Any) -> Values:
    """KL = mean((mu - mu_ref)^2) / (2 b^2)"""
    return _loss_and_gradient(
        lambda mean: _mean_of_rows((mean - c.reference_mean) ** 2) / (2 * c.std**2), c.mean
    )


def reference_kl_without_dt(c: Any) -> Values:
    """KL = mean((mu - mu_ref)^2) / (2 s^2), s = b / sqrt|dt| (the code of 2505.05470)"""
    return _loss_and_gradient(
        lambda mean: _mean_of_rows((mean - c.reference_mean) ** 2) / (2 * c.std**2) * -c.dt, c.mean
    )


def _compute_ratio(c: Any, mean: Any) -> Any:
    return np.exp(
        log_density(c.next_latents, mean, c.std) - log_density(c.next_latents, c.old_mean, c.std)
    )


def _clipped_objective(ratio: Any, advantage: Any, clip_range: float) -> Any:
    # np.clip and np.maximum would compare complex numbers, so the choices look at the real part.
    # A clipped row gets the constant bound, which has no imaginary part, thus no gradient.
    bounds = np.where(ratio.real > 1, 1 + clip_range, 1 - clip_range)
    free = -advantage * ratio
    bound = -advantage * np.where(np.abs(ratio.real - 1) <= clip_range, ratio, bounds)
    return np.where(free.real >= bound.real, free, bound)


# Losses on noised final latents: u = eps - x0, rows [M], gradient with respect to v


def sft_loss(c: Any) -> Values:
    """L = mean((v - u)^2)"""
    return _loss_and_gradient(lambda v: _squared_error(c, v), c.velocity)


def rwr_loss(c: Any) -> Values:
    """L = exp(A / temperature) mean((v - u)^2) (2302.12192)"""
    return _loss_and_gradient(
        lambda v: np.exp(c.advantage / c.temperature) * _squared_error(c, v), c.velocity
    )


def reference_velocity(c: Any) -> Values:
    """mean((v - v_ref)^2)"""
    return _loss_and_gradient(lambda v: _mean_of_rows((v - c.reference_velocity) ** 2), c.velocity)


def diffusion_nft_loss(c: Any) -> Values:
    """L = clip (p l+ + (1 - p) l-) / beta, l = mean((x0_hat - x0)^2) / sg max(mean|x0_hat - x0|,
    1e-5) (2509.16117)

    x0_hat = x_sigma - sigma v+-, v+ = beta v + (1 - beta) v_old, v- = (1 + beta) v_old - beta v, p
    = A / (2 clip) + 1/2 in [0, 1]; A is clamped to +-clip and then taken whole (all), where it has
    one sign (positive_only, negative_only), as 1 where positive and 0 elsewhere (one_only), or as
    its sign (binary).
    """
    # The clamp, the choice of rows and the map to p see no velocity, so they stay real.
    a = np.clip(c.advantage, -c.advantage_clip, c.advantage_clip)
    chosen = {
        "positive_only": np.maximum(a, 0),
        "negative_only": np.minimum(a, 0),
        "one_only": 1.0 * (a > 0),
        "binary": np.sign(a),
    }
    p = np.clip(chosen.get(c.advantages, a) / c.advantage_clip / 2 + 0.5, 0, 1)
    sigma = _broadcast_rows(c.sigma, c.clean)

    def squared_error(v: Any) -> Any:
        # x0_hat - x0, [M, ...]. The divisor takes real parts: sg is a stop-gradient.
        miss = (1 - sigma) * c.clean + sigma * c.noise - sigma * v - c.clean
        return _mean_of_rows(miss**2) / np.maximum(_mean_of_rows(np.abs(miss.real)), 1e-5)

    def loss_rows(v: Any) -> Any:
        better = squared_error(c.beta * v + (1 - c.beta) * c.old_velocity)
        worse = squared_error((1 + c.beta) * c.old_velocity - c.beta * v)
        return c.advantage_clip * (p * better + (1 - p) * worse) / c.beta

    return _loss_and_gradient(loss_rows, c.velocity)


def awm_loss(c: Any) -> Values:
    """gradient: of mean[-(A / clip) s + w mean((v - v_old)^2)], where the ratio exp(s - sg s) is 1
    (2509.25050)

    s = -(sigma / q) ((l + 1e-10)^q - (1e-10)^q), l = mean((v - u)^2); plain: s = -l, sigma: -sigma
    l, sigma_squared: -sigma^2 l
    """

    # 1e-10 keeps the power's derivative finite where the error is 0
    def surrogate_loss(v: Any) -> Any:
        if c.surrogate == "power":
            return -c.sigma / c.power * ((_squared_error(c, v) + 1e-10) ** c.power - 1e-10**c.power)
        return (
            -_squared_error(c, v)
            * {"plain": 1.0, "sigma": c.sigma, "sigma_squared": c.sigma**2}[c.surrogate]
        )

    def loss_rows(v: Any) -> Any:
        return -c.advantage / c.advantage_clip * surrogate_loss(v) + c.old_weight * _mean_of_rows(
            (v - c.old_velocity) ** 2
        )

    return {
        "surrogate": surrogate_loss(c.velocity),
        "gradient": _complex_step_gradient(loss_rows, c.velocity),
    }


def diffusion_dpo_loss(c: Any) -> Values:
    """L = -log sigmoid(-(beta / 2) [(e_better - e_better_ref) - (e_worse - e_worse_ref)]), e =
    mean((v - u)^2) (2311.12908)

    Rows 2i and 2i + 1 are the better and the worse sample of a pair; the loss has a value for each
    pair.
    """

    # rows [M], pairs [M / 2]
    def loss_pairs(v: Any) -> Any:
        change = _squared_error(c, v) - _squared_error(c, c.reference_velocity)
        return np.log(1 + np.exp(c.beta / 2 * (change[::2] - change[1::2])))

    return _loss_and_gradient(loss_pairs, c.velocity)


def dgpo_loss(c: Any) -> Values:
    """L = sg sigmoid(S) A d, S = mean over the group of A beta (sg d - d_ref), d = mean((v - u)^2)
    (2510.08425)

    With a clip_range, d has no gradient where A > 0 and rho > 1 + clip_range, or A <= 0 and rho < 1
    - clip_range, with rho = exp(d_old - d).
    """
    # Computed outside of loss_rows, from the real velocity: the sigmoid of the group and the mask
    # carry no gradient.
    gain = (
        c.advantage
        * c.beta
        * (_squared_error(c, c.velocity) - _squared_error(c, c.reference_velocity))
    )
    share = np.array([np.mean(gain[c.group_index == group]) for group in c.group_index])
    ratio = np.exp(_squared_error(c, c.old_velocity) - _squared_error(c, c.velocity))
    dead = np.zeros(len(ratio), bool)
    if c.clip_range is not None:
        dead = np.where(c.advantage > 0, ratio > 1 + c.clip_range, ratio < 1 - c.clip_range)

    def loss_rows(v: Any) -> Any:
        return (
            c.advantage
            * np.where(dead, _squared_error(c, v).real, _squared_error(c, v))
            / (1 + np.exp(-share))
        )

    return _loss_and_gradient(loss_rows, c.velocity)


def crd_loss(c: Any) -> Values:
    """L = (clip / beta) (beta (r - mean_group r) - (A - mean_group A) / (2 clip))^2 (2603.14128)

    r = -[mean((v - u)^2) / sg max(mean|v - u|, 1e-5) - mean((v_old - u)^2) / max(mean|v_old - u|,
    1e-5)]
    """

    # the group's mean of r does carry a gradient: values may be complex
    def center_on_group(values: Any) -> Any:
        return values - np.array([values[c.group_index == group].mean() for group in c.group_index])

    def weighted_error(v: Any) -> Any:
        return _squared_error(c, v) / np.maximum(
            _mean_of_rows(np.abs((v - (c.noise - c.clean)).real)), 1e-5
        )

    def loss_rows(v: Any) -> Any:
        miss = c.beta * center_on_group(
            weighted_error(c.old_velocity) - weighted_error(v)
        ) - center_on_group(c.advantage) / (2 * c.advantage_clip)
        return c.advantage_clip / c.beta * miss**2

    return _loss_and_gradient(loss_rows, c.velocity)


def _squared_error(c: Any, v: Any) -> Any:
    return _mean_of_rows((v - (c.noise - c.clean)) ** 2)


# What they share


def log_density(latents: Any, mean: Any, std: Any) -> Any:
    """log N(latents; mean, std^2), its mean over the elements of a row, [N]."""
    std = _broadcast_rows(std, mean)
    return _mean_of_rows(
        -((latents - mean) ** 2) / (2 * std**2) - np.log(std) - math.log(2 * math.pi) / 2
    )


def _gaussian_step(c: Any, mean: Any, std: float) -> Values:
    return {
        "mean": mean,
        "std": std,
        "next_latents": mean + std * c.noise,
        "log_prob": log_density(c.recorded, mean, std),
    }


def _mean_of_rows(values: Any) -> Any:
    """Over everything but the rows."""
    return values.reshape(len(values), -1).mean(1)


def _broadcast_rows(value: Any, like: Any) -> Any:
    """[M] against [M, ...]; a scalar as it is."""
    return np.reshape(value, (-1, *[1] * (like.ndim - 1))) if np.ndim(value) else value


def _loss_and_gradient(loss: Callable[[Any], Any], at: Any) -> Values:
    return {
        "loss": loss(at),
        "mean_loss": loss(at).mean(),
        "gradient": _complex_step_gradient(loss, at),
    }


def _complex_step_gradient(loss: Callable[[Any], Any], at: Any, h: float = 1e-30) -> Any:
    """Compute the gradient of mean(loss) by a complex step in each element. What a form computes
    from real parts carries no gradient.
    """
    # No autograd: torch's derivatives are part of what the vectors check.
    result = np.zeros(at.shape)
    for index in np.ndindex(at.shape):
        moved = at.astype(complex)
        moved[index] += 1j * h
        result[index] = loss(moved).mean().imag / h
    return result


FORMS: dict[str, Callable[[Any], Values]] = {
    form.__name__.removeprefix("group_"): form
    for form in (
        *(ode_step, flow_sde_step, dance_sde_step, cps_step, dpm_solver_steps),
        *(flow_grpo_loss, tempflow_grpo_loss, grpo_guard_loss, flow_dppo_loss, distillation_loss),
        *(
            diffusion_nft_loss,
            awm_loss,
            diffusion_dpo_loss,
            dgpo_loss,
            crd_loss,
            sft_loss,
            rwr_loss,
        ),
        *(
            reference_kl,
            reference_kl_without_dt,
            reference_velocity,
            group_advantages,
            rollout_correction,
            rollout_divergence,
        ),
    )
}
