"""Our forward passes that wait nowhere compute what diffusers' own compute, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_lumina2 import Lumina2RotaryPosEmbed
from pipeline_cases import few_tokens, prompts

from ebbflow.models.base import Conditioning

Results = tuple[torch.Tensor, dict[str, torch.Tensor]]


def run_with_gradient(model: Any, conditioning: Conditioning, latents: torch.Tensor) -> Results:
    """(the velocity, the gradients of all parameters of the network)."""
    network = model.transformer.requires_grad_(True)
    network.zero_grad()
    velocity = model.predict_velocity(latents, torch.tensor([0.3, 0.8]), conditioning)
    velocity.square().mean().backward()
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in network.named_parameters()
        if parameter.grad is not None
    }
    return velocity.detach(), gradients


def use_published_forward(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the network compute as diffusers has it."""
    network = model.transformer
    if model.config.family == "lumina2":
        monkeypatch.setattr(network.rope_embedder, "__class__", Lumina2RotaryPosEmbed)
        return
    published = type(network).forward

    def forward(hidden_states: torch.Tensor, **inputs: Any) -> Any:
        if model.config.family == "qwen_image_21":
            # A place for each four tokens of the image, after those of the prompt.
            text_tokens = inputs["encoder_hidden_states"].shape[1]
            places = hidden_states.shape[1] // 4
            inputs["img_mask"] = torch.arange(text_tokens + places)[None] >= text_tokens
            inputs["img_mask"] = inputs["img_mask"].expand(len(hidden_states), -1)
        return published(network, hidden_states, **inputs)

    monkeypatch.setattr(network, "forward", forward)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", ["lumina2", "hunyuan_video_15", "qwen_image_21"])
def test_forward_without_waits_equals_that_of_diffusers(open_tiny, monkeypatch, name, checkpointed):
    settings = few_tokens(name)
    model = open_tiny(
        name, height=64, width=96, gradient_checkpointing=checkpointed, guidance=1.0, **settings
    )
    wanted = prompts(name)[:2]
    conditioning = model.encode_prompts(wanted)
    if name == "lumina2":  # whose system prompt alone fills the tiny text encoder
        conditioning["mask"][1, 20:] = False
    assert len(set(conditioning["mask"].sum(1).tolist())) == 2, "prompts of different lengths"
    latents = torch.randn(2, *model.latent_shape, generator=torch.Generator().manual_seed(0))
    velocity, gradients = run_with_gradient(model, conditioning, latents)
    use_published_forward(model, monkeypatch)
    expected, expected_gradients = run_with_gradient(model, conditioning, latents)
    assert torch.equal(velocity, expected)
    for key, gradient in gradients.items():
        assert torch.equal(gradient, expected_gradients[key]), key
    missing = {key: value for key, value in expected_gradients.items() if key not in gradients}
    assert all(key.startswith("image_embedder.") for key in missing), sorted(missing)
    assert not any(value.any() for value in missing.values())
