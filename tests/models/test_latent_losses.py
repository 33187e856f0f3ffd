"""Losses of samples of several latents, on a tiny LTX-2: each has its own, and its weight."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from pipeline_cases import prompts

from ebbflow.algorithms.built_in import diffusion_nft
from ebbflow.flow.latents import NamedLatents, join_averages
from ebbflow.models import predict
from ebbflow.recipe.base import RecipeError
from ebbflow.recipe.recipe import Recipe
from ebbflow.training.latent_losses import (
    average_over_latents,
    list_latent_shares,
    select_latent,
)
from ebbflow.training.passes import TrainingError
from ebbflow.training.rollout_correction import apply_rollout_correction
from tests.training.training_cases import (
    LORA,
    NFT,
    forward_rows,
    rollout,
    trajectory_rows,
    updater_of,
)

SHAPE = NamedLatents({"video": (2, 3, 5), "sound": (2, 2)})
ROLLOUT = {"sampler": {"steps": 4}, "window": {"kind": "fixed", "start": 0, "size": 3}}


@pytest.fixture
def model(open_tiny):
    model = open_tiny("ltx2", frames=9, guidance=1.0)
    # As the glyph model has it, which the shared cases are written for.
    model.encode_texts = lambda texts: model.encode_prompts(prompts("ltx2", texts))
    return model


def velocities(updater, batch):
    """The policy's predictions, and those of the old policy moved a little away from them."""
    with torch.no_grad():
        velocity = predict(updater.policy.model, *batch.inputs.model_arguments(slice(None)))
    moved = velocity + 0.1 * torch.randn(velocity.shape, generator=torch.Generator().manual_seed(0))
    return velocity.requires_grad_(), moved


def loss_of(updater, batch):
    """(the loss of each row, its gradient at the velocity, the metrics)."""
    velocity, old = velocities(updater, batch)
    loss, metrics = updater._compute_split_loss(batch, slice(None), velocity, {"old": old})
    (gradient,) = torch.autograd.grad(loss.sum(), velocity)
    return loss.detach(), gradient, metrics


def test_elements_are_averaged_within_each_latent():
    values = torch.arange(68.0).view(2, 34)
    means = SHAPE.average_parts(values)
    assert means.tolist() == [[14.5, 31.5], [48.5, 65.5]]
    assert torch.equal(join_averages(means, SHAPE), values.mean(1))


@pytest.mark.parametrize("weights", [{}, {"sound": 3.0}, {"video": 0.0}])
def test_the_loss_is_the_weighted_average_of_the_losses_of_the_latents(model, weights):
    updater = updater_of(model, NFT, LORA, latent_weights=weights, reference={"weight": 0})
    batch = forward_rows(model, updater.stage)
    loss, gradient, metrics = loss_of(updater, batch)

    velocity, old = velocities(updater, batch)
    each = {}
    for name, part in model.latent_shape.slice_parts().items():
        rows = batch.build_rows(slice(None), velocity[:, part], {"old": old[:, part]})
        rows = dataclasses.replace(rows, clean=batch.clean[:, part], noise=batch.noise[:, part])
        each[name], _ = diffusion_nft.compute_loss(rows, updater.hyper)
        assert torch.equal(metrics[f"loss/{name}"], each[name])
    weight = {"video": 1.0, "sound": 1.0} | weights
    expected = sum(weight[name] * each[name] for name in each) / sum(weight.values())
    assert torch.allclose(loss, expected, rtol=1e-6)
    assert (each["video"] - each["sound"]).abs().max() > 1e-3  # two latents, two losses
    assert gradient[:, model.latent_shape.slice_parts()["sound"]].abs().max() > 0


@pytest.mark.parametrize("silent", ["video", "sound"])
def test_a_latent_of_weight_zero_has_no_gradient_at_its_velocity(model, silent):
    weights = {silent: 0.0}
    updater = updater_of(model, NFT, LORA, latent_weights=weights, reference={"weight": 0})
    _, gradient, metrics = loss_of(updater, forward_rows(model, updater.stage))
    parts = model.latent_shape.slice_parts()
    (other,) = parts.keys() - {silent}
    assert not gradient[:, parts[silent]].any()
    assert gradient[:, parts[other]].abs().max() > 0
    assert metrics[f"loss/{silent}"].abs().min() > 0  # measured all the same


@pytest.mark.parametrize("correction", [None, {"mode": "decoupled"}])
def test_each_latent_has_a_ratio_of_its_own_that_begins_at_one(model, correction):
    updater = updater_of(model, "mix_grpo", LORA, **ROLLOUT, correction=correction)
    trajectory, conditioning, keys = rollout(model, updater.stage.sampler)
    assert trajectory.log_probs.shape == (6, 3, 2)
    if correction:
        trajectory, metrics = apply_rollout_correction(updater, trajectory, conditioning, keys)
        assert trajectory.log_probs.shape == (6, 3, 2)
        assert trajectory.weight.shape == trajectory.keep.shape == (6, 3)
    batch = trajectory_rows(model, updater.stage, corrected=trajectory)
    metrics = updater.update_policy(batch, 3)
    for name in ("video", "sound"):
        assert metrics[f"ratio/deviation/{name}"] < 1e-5
    # The step has moved both, each by its own.
    after = updater.update_policy(batch, 3)
    moved = [after[f"ratio/deviation/{name}"] for name in ("video", "sound")]
    assert min(moved) > 0
    assert after["ratio/deviation"] == pytest.approx(sum(moved) / 2)


def test_a_batch_of_one_latent_has_its_elements_alone(model):
    updater = updater_of(model, "mix_grpo", LORA, **ROLLOUT)
    batch = trajectory_rows(model, updater.stage)
    for latent in updater.latents:
        one = select_latent(batch, latent)
        assert torch.equal(one.next_latents, batch.next_latents[:, latent.elements])
        assert torch.equal(one.old_mean, batch.old_mean[:, latent.elements])
        assert torch.equal(one.inputs.latents, batch.inputs.latents[:, latent.elements])
        assert torch.equal(one.old_log_prob, batch.old_log_prob[:, latent.index])
        assert torch.equal(one.advantage, batch.advantage)


def test_the_error_of_a_fake_score_is_averaged_over_the_latents():
    shares = list_latent_shares(SHAPE, {"sound": 3.0})
    values = torch.cat([torch.full((1, 30), 2.0), torch.full((1, 4), 10.0)], 1)
    assert average_over_latents(values, shares).tolist() == [0.25 * 2 + 0.75 * 10]
    assert average_over_latents(values, []).tolist() == [values.mean().item()]


def test_a_sample_of_one_latent_has_no_shares():
    assert list_latent_shares((4, 8, 8), {}) == []
    with pytest.raises(TrainingError, match="one latent; leave latent_weights out"):
        list_latent_shares((4, 8, 8), {"video": 1.0})
    with pytest.raises(TrainingError, match="latent_weights.audio: .* it has video, sound"):
        list_latent_shares(SHAPE, {"audio": 1.0})
    with pytest.raises(TrainingError, match="all 0"):
        list_latent_shares(SHAPE, {"video": 0.0, "sound": 0.0})


def read(weights, family="ltx2", algorithm="diffusion_nft", **stage):
    model = {"family": family, "path": "models/base"}
    if family.startswith("ltx"):
        model["frames"] = 9
    if isinstance(algorithm, str):
        algorithm = {"name": algorithm}
    stage = {"kind": "online", "algorithm": algorithm, "latent_weights": weights, **stage}
    return Recipe.model_validate(
        {
            "model": model,
            "prompts": {"source": "prompts.txt"},
            "rewards": ["jpeg_compressibility"],
            "stages": [stage],
        }
    )


@pytest.mark.parametrize(
    ("weights", "changes", "message"),
    [
        ({"audio": 1}, {}, r"stages.0.latent_weights.audio: .* it has video, sound"),
        ({"video": 0, "sound": 0}, {}, "are all 0"),
        ({"video": 1}, {"family": "sd3"}, "'sd3' is one latent; leave latent_weights out"),
        ({"video": 1}, {"algorithm": "refl"}, "refl has one loss of the whole sample"),
        ({"video": -1}, {}, "greater than or equal to 0"),
    ],
)
def test_a_recipe_rejects_weights_of_no_latent(weights, changes, message):
    with pytest.raises(RecipeError, match=message):
        read(weights, **changes)
    assert read({"sound": 2}).stages[0].latent_weights == {"sound": 2.0}


@pytest.mark.parametrize(
    ("stage", "key"),
    [
        ({"kind": "offline", "algorithm": {"name": "diffusion_dpo"}, "pairs": "p.jsonl"}, "pairs"),
        ({"kind": "offline", "algorithm": {"name": "sft"}, "data": {"path": "data"}}, "data"),
        ({"kind": "online", "anchor": {"data": {"path": "data"}, "weight": 0.1}}, "anchor"),
    ],
)
def test_a_recipe_rejects_pictures_of_files_where_samples_have_sound(stage, key):
    with pytest.raises(RecipeError, match=f"stages.0.{key} has pictures without the sound"):
        read({}, **{"algorithm": "mix_grpo"} | stage)
    # The same without sound.
    read({}, family="ltx_video", **{"algorithm": "mix_grpo"} | stage)
