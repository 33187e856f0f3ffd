"""Generate images with a registered policy; the MLflow model flavour calls this."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from ebbflow.data.images import encode_png
from ebbflow.data.prompts import Prompt
from ebbflow.flow.noise import SampleKeys
from ebbflow.models import Model, load_model
from ebbflow.models.encoding import encode_once
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.rollouts.generate import generate
from ebbflow.training.policy import Policy
from ebbflow.training.policy_metadata import ALLOW_CODE, read_policy_metadata, require_allowed_code, require_base


def generate_images(base: Path, policy: Path, prompts: list[Prompt], seeds: list[int]) -> list[bytes]:
    """One PNG per prompt (animated for a video), by the deterministic sampler with the steps that the policy was evaluated with.

    An image depends on its own prompt and seed only, not on the rest of the batch. ``EBBFLOW_ALLOW_CODE`` names code that the
    policy may name, separated by commas.

    Raises:
        ArtifactError: a folder is not what was committed.
        PolicyError: the policy was trained from another base model, or names code that is not allowed.
    """
    model, sampler = _loaded(base, policy), SamplerConfig(name="ode", steps=read_policy_metadata(policy).steps)
    encode, images = encode_once(model, prompts), []
    for prompt, seed in zip(prompts, seeds, strict=True):
        latents = generate(model, encode([prompt]), SampleKeys(seed, [0], [0]), sampler).latents
        images += encode_png(model.decode(latents))
    return images


@lru_cache(maxsize=1)
def _loaded(base: Path, policy: Path) -> Model:
    """The model with the policy's weights, cached for the next call."""
    metadata = read_policy_metadata(policy)
    require_base(metadata, base, policy)
    require_allowed_code(metadata, policy, os.environ.get(ALLOW_CODE, "").split(","))
    model = load_model(base, metadata.model)
    Policy(model, metadata.config, seed=0).load(policy)
    return model
