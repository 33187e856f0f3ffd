"""Renders prompts with a registered policy; what the MLflow model flavour calls."""

from __future__ import annotations

from pathlib import Path

from ebbflow.data.prompts import Prompt
from ebbflow.models import load_model
from ebbflow.recipe.choices import Sampler
from ebbflow.recipe.recipe import Evaluation
from ebbflow.rollouts.generate import SampleKeys, generate
from ebbflow.rollouts.images import encode_png
from ebbflow.training.policy import Policy, read_card


def drawn(text: str) -> Prompt:
    """A prompt that is no row of a table."""
    return Prompt(prompt_id=0, prompt=text, negative_prompt="", target=None, source="", split="", metadata="{}")


def generate_images(base: Path, policy: Path, prompts: list[str], seeds: list[int]) -> list[bytes]:
    """One PNG per prompt, by the deterministic sampler with the recipe's default number of steps.

    The image depends on its prompt and its seed alone, not on the others beside it.
    """
    card = read_card(policy)
    model = load_model(base, card.model)
    Policy(model, card.config, seed=0).load(policy)
    sampler = Sampler(name="ode", steps=Evaluation().steps)
    images = []
    for prompt, seed in zip(prompts, seeds, strict=True):
        keys = SampleKeys(seed, [0], [0])
        images += encode_png(model.decode(generate(model, model.encode([drawn(prompt)]), keys, sampler).latents))
    return images
