r"""Noise a latent again that has some noise already, and what a score learns from it.

The forward process from the noise level s to t >= s, with fresh noise eps, is

    x_t = a x_s + b eps,     a = (1 - t) / (1 - s),   b^2 = t^2 - a^2 s^2

The score of x_t, whatever the distribution of x_s is, is -E[eps | x_t] / b (denoising score
matching, Vincent, 2011). So the velocity v with this score, -(x_t + (1 - t) v) / t, minimises the
mean of (1 - s)^2 (b v / t - w)^2 with

    w = (eps - b x_t / t) / (1 - t) = (1 + (1 - t) s^2 / ((1 - s)^2 t)) eps - b x_s / ((1 - s) t)

From a clean latent, s = 0, that is (v - (eps - x_0))^2: flow matching. Towards t = s, where x_t
says nothing of eps, b is 0.

Any weight leaves the minimum where it is. With (1 - s)^2 no step decides by its noise: x_s keeps
noise of its own, which x_t does not show, so that the variance of w is about s^2 / ((1 - s)^2 t^2).
Where a schedule is shifted, the first steps end near s = 1.
"""

from __future__ import annotations

from torch import Tensor


def renoise_latents(latents: Tensor, fresh: Tensor, sigma: Tensor, to: Tensor) -> Tensor:
    """Compute x_t, [N, ...].

    Args:
        latents: x_s, [N, ...].
        fresh: eps, [N, ...].
        sigma: s < 1, [N].
        to: t >= s, [N].
    """
    # x_t = a x_s + b eps
    signal, noise = _compute_scales(sigma, to)
    return _broadcast_rows(signal, latents) * latents + _broadcast_rows(noise, latents) * fresh


def compute_score_target(
    latents: Tensor, fresh: Tensor, sigma: Tensor, to: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute (beta, [N], and u, [N, ...]) with which (beta v - u)^2 is the weighted error above.

    Args:
        latents, fresh, sigma, to: as for ``renoise_latents``, with ``to`` > 0.
    """
    # beta = (1 - s) b / t, and u = (1 - s) w with the second form of w: no division by 1 - t, which
    # is 0 at pure noise.
    b_over_t = _compute_scales(sigma, to)[1] / to
    fresh_scale = 1 - sigma + (1 - to) * sigma**2 / ((1 - sigma) * to)
    target = (
        _broadcast_rows(fresh_scale, fresh) * fresh - _broadcast_rows(b_over_t, latents) * latents
    )
    return (1 - sigma) * b_over_t, target


def _compute_scales(sigma: Tensor, to: Tensor) -> tuple[Tensor, Tensor]:
    """Compute (a, b), both [N]."""
    # a = (1 - t) / (1 - s), b^2 = t^2 - a^2 s^2. At t = s rounding may leave b^2 below 0.
    signal = (1 - to) / (1 - sigma)
    return signal, (to**2 - (signal * sigma) ** 2).clamp_min(0).sqrt()


def _broadcast_rows(values: Tensor, like: Tensor) -> Tensor:
    """Return [N] as [N, 1, ...], in the type and on the device of ``like``."""
    return values.to(like).view((-1,) + (1,) * (like.ndim - 1))
