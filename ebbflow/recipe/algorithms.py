"""The hyper-parameters of each algorithm, with their source. The losses are in ``ebbflow.algorithms``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ebbflow.recipe.base import Strict


class FlowGRPO(Strict):
    """Clipped policy gradient on the denoising steps of a window (Flow-GRPO 2505.05470, MixGRPO 2507.21802)."""

    name: Literal["flow_grpo"] = "flow_grpo"
    clip_range: float = Field(1e-3, gt=0, lt=1)
    """Clip of the ratio. Log-probs are means over the latent's elements, so it follows their number: 1e-3
    for 512 elements, 1e-4 to 1e-6 for the latents of large models."""
    reference_weight: float = Field(0.02, ge=0)
    """Weight of the KL to the base model, mean((mu - mu_ref)^2) / (2 b^2)."""


class DiffusionNFT(Strict):
    """Forward-process contrast of an implicit better and worse policy (DiffusionNFT 2509.16117)."""

    name: Literal["diffusion_nft"] = "diffusion_nft"
    beta: float = Field(0.1, gt=0, le=1)
    """How far the implicit policies stand from the old one: 1 in the paper, .1 for OCR."""
    reference_weight: float = Field(1e-4, ge=0)
    """Weight of mean((v - v_ref)^2)."""
    noise_levels: int = Field(2, ge=1)
    """Draws of (sigma, noise) per sample and pass."""
    old_policy_decay: float = Field(0.9, ge=0, lt=1)
    """Largest decay of the old policy, old <- d old + (1 - d) theta after every optimiser step ..."""
    old_policy_decay_steps: int = Field(10, ge=0)
    """... reached linearly from 0 over this many optimiser steps."""


TRAJECTORY_ALGORITHMS = {"flow_grpo"}
"""Those that need the log-probabilities of stochastic denoising steps; all others need final latents alone."""

Algorithm = Annotated[FlowGRPO | DiffusionNFT, Field(discriminator="name")]
