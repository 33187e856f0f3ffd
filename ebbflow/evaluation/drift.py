"""How far a policy's predictions are from its base model's, on samples of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from ebbflow.flow.noise import SampleKeys, generate_noise
from ebbflow.models import Model, predict
from ebbflow.models.base import Conditioning, device_of
from ebbflow.recipe.evaluation import DRIFT_SIGMAS
from ebbflow.seeding import Stream
from ebbflow.training.policy import Policy


@torch.no_grad()
def sum_drift(
    model: Model, policy: Policy, keys: SampleKeys, latents: Tensor, conditioning: Conditioning
) -> tuple[float, int]:
    """Sum (v - v_base)^2 over the finite ones of a micro-batch of the policy's own samples, noised
    to ``DRIFT_SIGMAS`` with the noise of ``keys``; return the sum and their number.

    Args:
        latents: the samples, fp32 [N, ...] on any device.
    """
    # A micro-batch at a time: velocities of all samples would be larger than the samples.
    clean = latents.to(device_of(model))
    eps = generate_noise(
        model.latent_shape, keys.seed, keys.prompt_ids, keys.samples, stream=Stream.TRAINING
    ).to(clean)
    # The same points for both: the difference is that of the weights alone.
    current = _predict_velocities(model, clean, eps, conditioning)
    with policy.use_copy("reference"):
        base = _predict_velocities(model, clean, eps, conditioning)
    squares = (current - base) ** 2
    # Some samples may be broken: they are in the table as failures, and the others count.
    finite = squares[squares.isfinite()]
    return float(finite.double().sum()), finite.numel()


def _predict_velocities(
    model: Model, clean: Tensor, eps: Tensor, conditioning: Conditioning
) -> Tensor:
    """Predict the velocities of noised samples, [len(DRIFT_SIGMAS), N, ...]."""
    velocities = []
    for sigma in DRIFT_SIGMAS:
        noisy = (1 - sigma) * clean + sigma * eps
        level = torch.full((len(noisy),), sigma, device=clean.device)
        velocities.append(predict(model, noisy, level, conditioning))
    return torch.stack(velocities)
