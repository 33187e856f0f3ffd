r"""Noises a latent again that has some noise already, and what a score learns from it.

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
    """x_t, [N, ...], of latents x_s at ``sigma`` < 1 and ``fresh`` noise, both [N, ...]; sigma <=
    ``to``, both [N].
    """
    kept, added = _compute_scales(sigma, to)
    return _broadcast_rows(kept, latents) * latents + _broadcast_rows(added, latents) * fresh


def compute_score_target(
    latents: Tensor, fresh: Tensor, sigma: Tensor, to: Tensor
) -> tuple[Tensor, Tensor]:
    """(beta, [N], and u, [N, ...]) of the same, with ``to`` > 0: (beta v - u)^2 is the weighted
    error above.
    """
    beta = _compute_scales(sigma, to)[1] / to
    of_fresh = 1 - sigma + (1 - to) * sigma**2 / ((1 - sigma) * to)
    return (1 - sigma) * beta, _broadcast_rows(of_fresh, fresh) * fresh - _broadcast_rows(
        beta, latents
    ) * latents


def _compute_scales(sigma: Tensor, to: Tensor) -> tuple[Tensor, Tensor]:
    """(a, b), both [N]."""
    kept = (1 - to) / (1 - sigma)
    return kept, (to**2 - (kept * sigma) ** 2).clamp_min(0).sqrt()


def _broadcast_rows(values: Tensor, like: Tensor) -> Tensor:
    return values.to(like).view(-1, *[1] * (like.ndim - 1))
