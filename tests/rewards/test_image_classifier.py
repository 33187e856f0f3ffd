"""Any image classifier of transformers as a reward, a guardrail and a filter of samples."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from network_cases import as_prompts, some_images
from pydantic import ValidationError
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil

from ebbflow.recipe import Recipe
from ebbflow.recipe.registry import configure_reward
from ebbflow.rewards.base import RewardError
from ebbflow.rewards.combine import load_reward, load_scorer
from ebbflow.rewards.pixels import prepare_with_processor

LABELS = {0: "normal", 1: "unsafe", 2: "odd"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classifier")
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=16,
        patch_size=8,
        id2label=LABELS,
        label2id={name: index for index, name in LABELS.items()},
        initializer_range=0.5,
    )
    ViTForImageClassification(config).save_pretrained(folder)
    ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(folder)
    return folder


def build(folder, **keys):
    keys = {"classifier_label": "normal", "path": str(folder)} | keys
    return load_reward(configure_reward("image_classifier", **keys))


def test_pixels_are_those_of_the_published_processing(folder):
    images = some_images()
    processor = ViTImageProcessorPil.from_pretrained(folder)
    expected = processor(list(images), return_tensors="pt").pixel_values
    scaled = torch.tensor(images).permute(0, 3, 1, 2).float() / 255
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    # The published processing rounds resized pixels to bytes: half of 1 / 255, over a deviation
    # of .5.
    assert (prepare_with_processor(scaled, settings) - expected).abs().max() < 0.008


def test_scores_are_the_probabilities_of_the_label_with_gradient(folder):
    images = some_images()
    prompts = as_prompts(*"abcde")
    pixels = torch.tensor(images).permute(0, 3, 1, 2).float() / 255
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    network = ViTForImageClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = network(prepare_with_processor(pixels, settings)).logits.softmax(-1).numpy()
    for index, label in LABELS.items():
        values = build(folder, classifier_label=label)(images, prompts).values
        assert values == pytest.approx(expected[:, index], abs=1e-5)
    pixels.requires_grad_()
    scores = build(folder).score_with_gradient(pixels, prompts)
    assert scores.detach().numpy() == pytest.approx(expected[:, 0], abs=1e-5)
    (gradient,) = torch.autograd.grad(scores.sum(), pixels)
    assert gradient.abs().sum() > 0


def test_a_threshold_makes_steps_and_may_reject(folder):
    images = some_images()
    prompts = as_prompts(*"abcde")
    probabilities = build(folder)(images, prompts).values
    threshold = float(np.median(probabilities))
    is_below = probabilities < threshold
    assert is_below.sum() == 2
    steps = build(folder, threshold=threshold)
    assert (steps(images, prompts).values == ~is_below).all()
    with pytest.raises(RewardError, match="no gradient"):
        steps.score_with_gradient(torch.zeros(1, 3, 16, 16), prompts[:1])
    rejected = build(folder, threshold=threshold, below="reject")(images, prompts)
    assert (np.isnan(rejected.values) == is_below).all()
    assert set(rejected.failures) == set(np.flatnonzero(is_below))
    assert "below the threshold" in next(iter(rejected.failures.values()))
    with pytest.raises(ValidationError, match="needs a 'threshold'"):
        configure_reward("image_classifier", classifier_label="x", below="reject")


def test_as_a_filter_it_masks_samples_and_as_a_guardrail_it_only_watches(folder):
    images = some_images()
    prompts = as_prompts(*"abcde")
    probabilities = build(folder)(images, prompts).values
    keys = {"name": "image_classifier", "classifier_label": "normal", "path": str(folder)}
    keys |= {"threshold": float(np.median(probabilities)), "below": "reject"}
    size = {"name": "jpeg_compressibility"}
    filtering = Recipe.model_validate({"rewards": [size, keys], "guardrails": []})
    table = load_scorer(filtering.rewards, ())(images, prompts)
    assert (table.scored_rows == (probabilities >= keys["threshold"])).all()
    watching = Recipe.model_validate({"rewards": [size], "guardrails": [keys]})
    table = load_scorer(watching.rewards, watching.guardrails)(images, prompts)
    assert table.scored_rows.all()


def test_an_unknown_label_or_processing_is_explained(folder, tmp_path):
    images, prompts = some_images(1), as_prompts("a")
    with pytest.raises(RewardError, match="knows normal, unsafe, odd"):
        build(folder, classifier_label="nsfw")(images, prompts)
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"resample": 5}))
    with pytest.raises(RewardError, match="resample 5"):
        build(tmp_path)(images, prompts)


def test_a_classifier_that_crops_sees_the_middle(folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    file = tmp_path / "preprocessor_config.json"
    crop = {"size": {"shortest_edge": 16}, "do_center_crop": True, "crop_size": 16}
    file.write_text(json.dumps(json.loads(file.read_text()) | crop))
    images = some_images(2, height=16, width=40)
    reward = build(tmp_path)
    changed = images.copy()
    changed[:, :, :10] = 0
    prompts = as_prompts("a", "b")
    assert reward(images, prompts).values == pytest.approx(reward(changed, prompts).values)
    changed[:, :, 20] = 0
    assert (reward(images, prompts).values != reward(changed, prompts).values).all()
