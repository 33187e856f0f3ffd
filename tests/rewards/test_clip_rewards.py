from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from network_cases import (
    CLIP_WIDTH,
    PREPROCESSOR,
    TEXTS,
    as_prompts,
    clip_tokenizer,
    make_reward,
    some_images,
    write_clip,
)
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import CLIPModel, CLIPTokenizer

from ebbflow.recipe.registry import configure_reward
from ebbflow.rewards.clip import load_clip
from ebbflow.rewards.combine import RewardError, load_reward

IMAGES = some_images()
PROMPTS = as_prompts(*TEXTS)
MEAN = np.array(PREPROCESSOR["image_mean"])
STD = np.array(PREPROCESSOR["image_std"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny CLIP. Never write into it."""
    folder = tmp_path_factory.mktemp("clip")
    write_clip(folder)
    return folder


@torch.no_grad()
def logits(folder) -> np.ndarray:
    """exp(logit scale) * cosine of every image and its text, one by one, by transformers' own
    forward pass.
    """
    model = CLIPModel.from_pretrained(folder)
    tokenizer = CLIPTokenizer.from_pretrained(folder)
    values = []
    for image, text in zip(IMAGES, TEXTS, strict=True):
        height, width = image.shape[:2]
        small = np.asarray(
            Image.fromarray(image).resize((28 * width // height, 28), Image.Resampling.BICUBIC)
        )
        left = (small.shape[1] - 28) // 2
        pixels = (small[:, left : left + 28] / 255 - MEAN) / STD
        tokens = tokenizer(text, return_tensors="pt")
        output = model(
            **tokens, pixel_values=torch.tensor(pixels, dtype=torch.float32).permute(2, 0, 1)[None]
        )
        values.append(float(output.logits_per_image))
    return np.array(values)


def test_clipscore_is_the_cosine_and_pickscore_its_multiple(folder):
    scale = float(load_file(folder / "model.safetensors")["logit_scale"].exp())
    clipscore = load_reward(configure_reward("clipscore", path=str(folder)))(IMAGES, PROMPTS).values
    pickscore = load_reward(configure_reward("pickscore", path=str(folder)))(IMAGES, PROMPTS).values
    assert np.allclose(clipscore, logits(folder) / scale, rtol=0, atol=1e-6)
    assert np.allclose(pickscore, logits(folder) / 26, rtol=0, atol=1e-6)
    assert np.abs(clipscore).max() > 0.05


def test_a_long_prompt_is_cut_and_keeps_its_end(folder):
    clip = load_clip(folder)
    long = "cat " * 75
    longer = "cat " * 75 + "and whatever follows it"
    ids = clip_tokenizer()(longer, truncation=True, max_length=77).input_ids
    assert len(ids) == 77
    assert ids[-1] == clip_tokenizer().eos_token_id
    three = clip.embed_texts([long, longer, "cat " * 74])
    assert torch.equal(three[0], three[1])
    assert not torch.allclose(three[0], three[2], atol=1e-4)


def test_embeddings_are_unit_vectors(folder):
    clip = load_clip(folder)
    for embeddings in (clip.embed_images(IMAGES), clip.embed_texts(TEXTS)):
        assert embeddings.shape == (5, CLIP_WIDTH)
        assert torch.allclose(embeddings.norm(dim=-1), torch.ones(5))


def test_one_clip_serves_every_reward_that_names_it(folder):
    assert load_clip(folder) is load_clip(folder)
    model = load_clip(folder).model
    assert not model.training
    assert not any(weight.requires_grad for weight in model.parameters())


def test_weights_in_half_precision_are_scored_in_float32(folder, tmp_path):
    write_clip(tmp_path)
    halved = {
        name: weight.half() for name, weight in load_file(folder / "model.safetensors").items()
    }
    save_file(halved, tmp_path / "model.safetensors", {"format": "pt"})
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**said, "dtype": "float16"}))
    assert {weight.dtype for weight in load_clip(tmp_path).model.parameters()} == {torch.float32}
    values = load_reward(configure_reward("clipscore", path=str(tmp_path)))(IMAGES, PROMPTS).values
    assert np.allclose(
        values,
        load_reward(configure_reward("clipscore", path=str(folder)))(IMAGES, PROMPTS).values,
        rtol=0,
        atol=5e-3,
    )


def test_positions_that_older_files_hold_do_no_harm(folder, tmp_path):
    write_clip(tmp_path)
    older = load_file(folder / "model.safetensors") | {
        "text_model.embeddings.position_ids": torch.arange(77)[None]
    }
    save_file(older, tmp_path / "model.safetensors", {"format": "pt"})
    values = load_reward(configure_reward("clipscore", path=str(tmp_path)))(IMAGES, PROMPTS).values
    assert np.array_equal(
        values, load_reward(configure_reward("clipscore", path=str(folder)))(IMAGES, PROMPTS).values
    )


def _lost(weights):
    del weights["visual_projection.weight"]


def _added(weights):
    weights["vision_model.encoder.layers.2.layer_norm1.weight"] = torch.ones(60)


def _reshaped(weights):
    weights["visual_projection.weight"] = torch.ones(CLIP_WIDTH, 61)


@pytest.mark.parametrize("change", [_lost, _added, _reshaped])
def test_weights_of_another_network_are_refused(change, tmp_path):
    write_clip(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        RewardError, match=r"does not fit this CLIPModel: 1 weights differ, first .*(visual|vision)"
    ):
        load_reward(configure_reward("clipscore", path=str(tmp_path)))(IMAGES, PROMPTS)


def test_a_pickle_in_the_place_of_the_weights_is_not_read(tmp_path):
    write_clip(tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    half = (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00002.safetensors")
    made = load_reward(configure_reward("pickscore", path=str(tmp_path)))
    with pytest.raises(RewardError, match="'pickscore' cannot be loaded: .*model.safetensors"):
        made(IMAGES, PROMPTS)
    half.unlink()
    assert "holds no model*.safetensors" in str(made.explain_unavailable())


def test_another_tokenizer_and_a_broken_file_are_named(tmp_path):
    config = make_reward("clipscore", tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(RewardError, match="the reward 'clipscore' cannot be loaded: .*config.json"):
        load_reward(config)(IMAGES, PROMPTS)
    weights = load_file(tmp_path / "model.safetensors")
    name = "text_model.embeddings.token_embedding.weight"
    save_file(
        weights | {name: weights[name][:-1].clone()},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    said["text_config"]["vocab_size"] -= 1
    (tmp_path / "config.json").write_text(json.dumps(said))
    tokens = len(clip_tokenizer())
    with pytest.raises(RewardError, match=f"has {tokens} tokens and the text encoder {tokens - 1}"):
        load_reward(config)(IMAGES, PROMPTS)


def test_the_features_of_a_clip_reward_are_its_image_embeddings(folder):
    clipscore = load_reward(configure_reward("clipscore", path=str(folder), batch=2))
    with torch.no_grad():
        expected = load_clip(folder).embed_images(IMAGES).numpy()
    assert np.allclose(clipscore.compute_features(IMAGES), expected, rtol=0, atol=1e-6)
