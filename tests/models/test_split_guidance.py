"""Guided predictions whose gradient does not go through the negative prompts' prediction
(``negative_gradient: false``).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pipeline_cases import EVERY, SHORT, TINY, few_tokens, guided, prompts
from torch.autograd.graph import saved_tensors_hooks

from ebbflow.models.base import ModelError, predict, predict_checkpointed, require_split_guidance
from ebbflow.models.families.glyph import GlyphModel
from ebbflow.models.pipeline import PipelineModel

GUIDED = [
    name if name in TINY else pytest.param(name, marks=pytest.mark.exhaustive)
    for name in EVERY
    if guided(name)
]


@pytest.fixture
def case(open_tiny):
    """``case("sd3")``: a model whose network is trained, and the arguments of ``predict``."""

    def build(name, **config):
        model = open_tiny(name, **few_tokens(name), **config)
        model.transformer.requires_grad_(True)
        conditioning = model.encode_prompts(prompts(name, SHORT[:2]))
        latents = torch.randn(2, *model.latent_shape, generator=torch.Generator().manual_seed(0))
        return model, latents, torch.tensor([0.95, 0.3]), conditioning

    return build


def gradient_of(model, latents, sigma, conditioning, forward=predict, **precision):
    """(prediction, gradient of a weighted sum of it over all parameters)."""
    model.transformer.zero_grad()
    velocity = forward(model, latents, sigma, conditioning, **precision)
    weight = torch.randn(velocity.shape, generator=torch.Generator().manual_seed(1))
    (velocity * weight).sum().backward()
    parameters = model.transformer.parameters()
    gradient = [p.grad.flatten() for p in parameters if p.grad is not None]
    return velocity.detach(), torch.cat(gradient).double()


def relative_difference(one, other):
    return float((one - other).norm() / other.norm())


def detach_negatives(model, monkeypatch):
    """The closed form: one pass over both, and the negative prompts' half detached."""
    mix = model._apply_guidance
    monkeypatch.setattr(
        model,
        "_apply_guidance",
        lambda prediction, negative, guidance: mix(prediction, negative.detach(), guidance),
    )


@pytest.mark.parametrize("name", GUIDED)
def test_the_gradient_is_that_of_a_detached_negative_prediction(case, monkeypatch, name):
    model, latents, sigma, conditioning = case(name)
    split = replace(conditioning, negative_gradient=False)
    usual, whole = gradient_of(model, latents, sigma, conditioning)
    velocity, gradient = gradient_of(model, latents, sigma, split)
    detach_negatives(model, monkeypatch)
    _, detached = gradient_of(model, latents, sigma, conditioning)
    assert relative_difference(velocity, usual) < 1e-4
    assert relative_difference(gradient, detached) < 1e-4
    assert relative_difference(gradient, whole) > 1e-2


def test_autocast_leaves_every_weight_its_gradient(case, monkeypatch):
    """Autocast keeps casts of weights for a whole prediction, and those of a pass without gradient
    had none before pytorch/pytorch#165068: the pass with gradient comes first.
    """
    model, latents, sigma, conditioning = case("sd3")
    split = replace(conditioning, negative_gradient=False)
    run_network = model._run_network
    with_gradient = []

    def watch(*arguments):
        with_gradient.append(torch.is_grad_enabled())
        return run_network(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(model, "_run_network", watch)
        _, gradient = gradient_of(model, latents, sigma, split, precision="bfloat16")
    assert with_gradient == [True, False]
    detach_negatives(model, monkeypatch)
    _, detached = gradient_of(model, latents, sigma, conditioning, precision="bfloat16")
    assert len(gradient) == len(detached)
    assert relative_difference(gradient, detached) < 0.05


def test_predictions_are_the_same_bits_with_and_without_gradient(case):
    """Rollouts predict without gradient and training with it: the first ratio is 1."""
    model, latents, sigma, conditioning = case("sd3")
    split = replace(conditioning, negative_gradient=False)
    with torch.no_grad():
        rollout = predict(model, latents, sigma, split)
    assert torch.equal(rollout, predict(model, latents, sigma, split).detach())


@pytest.mark.parametrize("checkpointed", ["prediction", "blocks"])
def test_a_repeated_pass_has_the_same_gradient(case, checkpointed):
    blocks = checkpointed == "blocks"
    model, latents, sigma, conditioning = case("sd3", gradient_checkpointing=blocks)
    inputs = latents, sigma, replace(conditioning, negative_gradient=False)
    plain = case("sd3")[0]
    _, expected = gradient_of(plain, *inputs)
    _, gradient = gradient_of(model, *inputs, forward=predict if blocks else predict_checkpointed)
    assert torch.equal(gradient, expected)


def test_predictions_without_negative_gradient_keep_half_for_the_backward_pass(case):
    model, latents, sigma, conditioning = case("sd3")
    model.transformer.requires_grad_(False)
    # As an adapter in the first layer: everything after it is kept.
    model.transformer.pos_embed.requires_grad_(True)

    def count_kept_bytes(inputs):
        parameters = {p.data_ptr() for p in model.transformer.parameters()}
        kept = {}

        def note(value):
            if value.data_ptr() not in parameters:
                kept[value.data_ptr(), value.shape] = value.nbytes
            return value

        with saved_tensors_hooks(note, lambda value: value):
            velocity = predict(model, latents, sigma, inputs)
        assert velocity.requires_grad
        return sum(kept.values())

    whole = count_kept_bytes(conditioning)
    half = count_kept_bytes(replace(conditioning, negative_gradient=False))
    assert half == pytest.approx(whole / 2, rel=0.05)


def test_a_family_that_takes_guidance_as_a_whole_is_refused():
    require_split_guidance(PipelineModel)
    with pytest.raises(ModelError, match="GlyphModel has no splits_guidance = True"):
        require_split_guidance(GlyphModel)
