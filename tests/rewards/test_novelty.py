"""``novelty``: the distance of an image to the nearest other one of its prompt, in features of a
vision transformer or of thumbnails.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from network_cases import as_prompts, some_images
from transformers import BitImageProcessorPil, Dinov2Config, Dinov2Model

from ebbflow.recipe import Recipe, RecipeError
from ebbflow.recipe.registry import configure_reward
from ebbflow.rewards.base import RewardError
from ebbflow.rewards.built_in.novelty import measure_nearest_distances
from ebbflow.rewards.combine import Scorer, load_reward, load_scorer

ABOUT = np.sqrt(0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dino")
    torch.manual_seed(0)
    config = Dinov2Config(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
        initializer_range=0.5,
    )
    Dinov2Model(config).save_pretrained(folder)
    BitImageProcessorPil(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}
    ).save_pretrained(folder)
    return folder


def test_distances_are_cosines_to_the_nearest_other_row():
    # Angles of 0, 90 and 45 degrees: the third is 45 degrees from both of the others.
    features = np.array([[1.0, 0.0], [0.0, 2.0], [3.0, 3.0]])
    np.testing.assert_allclose(measure_nearest_distances(features), 1 - ABOUT, atol=1e-12)
    features = np.array([[1.0, 0.0], [5.0, 0.0], [-1.0, 0.0], [0.0, 0.0]])
    np.testing.assert_allclose(measure_nearest_distances(features), [0, 0, 1, 1], atol=1e-12)


def test_a_duplicate_has_no_novelty_and_prompts_are_apart():
    images = np.full((6, 8, 8, 3), 255, np.uint8)
    images[1, :4] = 0
    images[5, :, :4] = 0  # of the second prompt, whose other two are white
    reward = load_reward(configure_reward("novelty"))
    scorer = Scorer(((reward, 1.0),))
    prompts = [replace(p, prompt_id=p.prompt_id // 3) for p in as_prompts(*"aaabbb")]
    values = scorer(images, prompts).reward
    # Half of the pixels of a white image are black: its cosine to the white ones is sqrt(1 / 2).
    np.testing.assert_allclose(values, [0, 1 - ABOUT, 0, 0, 0, 1 - ABOUT], atol=1e-12)


def test_features_are_the_class_token_of_the_network(folder):
    images = some_images()
    reward = load_reward(configure_reward("novelty", path=str(folder), batch=2))
    processor = BitImageProcessorPil.from_pretrained(folder)
    pixels = processor(list(images), return_tensors="pt").pixel_values
    with torch.no_grad():
        tokens = Dinov2Model.from_pretrained(folder)(pixel_values=pixels).pooler_output
    expected = measure_nearest_distances(tokens.double().numpy())
    # The published processing rounds resized pixels to bytes.
    found = reward(images, as_prompts(*["x"] * len(images))).values
    np.testing.assert_allclose(found, expected, atol=0.02)
    assert expected.max() > 0.1


def test_a_reward_of_weight_0_scores_and_is_not_trained_on():
    prompts = [replace(p, prompt_id=0) for p in as_prompts(*"aaaa")]
    images = some_images()[:4]
    rewards = [
        configure_reward("jpeg_compressibility", weight=2.0),
        configure_reward("novelty", weight=0),
    ]
    scorer = load_scorer(rewards, ())
    table = scorer(images, prompts)
    assert scorer.reward_weights == {"jpeg_compressibility": 2.0}
    np.testing.assert_array_equal(table.reward, 2 * table.metrics["jpeg_compressibility"])
    assert np.isfinite(table.metrics["novelty"]).all()


def test_a_failure_of_a_reward_of_weight_0_leaves_the_sum():
    images = some_images()[:2]
    prompts = [replace(p, prompt_id=index) for index, p in enumerate(as_prompts(*"ab"))]
    jpeg = load_reward(configure_reward("jpeg_compressibility"))
    alone = Scorer(((jpeg, 2.0),))(images, prompts)
    # A group of one image has no other image to be unlike.
    novelty = load_reward(configure_reward("novelty"))
    table = Scorer(((jpeg, 2.0), (novelty, 0.0)))(images, prompts)
    assert np.isnan(table.metrics["novelty"]).all()
    assert all("novelty" in reason for reason in table.failures)
    np.testing.assert_array_equal(table.reward, alone.reward)


def test_gradients_are_asked_of_trained_rewards_alone():
    recognizer = load_reward(configure_reward("recognizer"))
    novelty = load_reward(configure_reward("novelty"))
    Scorer(((recognizer, 1.0), (novelty, 0.0))).require_gradients("draft")
    with pytest.raises(RewardError, match="'novelty' has none"):
        Scorer(((recognizer, 1.0), (novelty, 0.5))).require_gradients("draft")


def test_scores_of_weight_0_do_not_take_the_place_of_a_trained_reward():
    sets = [{"name": name, "source": f"{name}.txt"} for name in ("words", "signs")]

    def read_mixture(rewards, **prompts):
        mixture = {"mixture": sets} | prompts
        Recipe.model_validate({"prompts": mixture, "rewards": rewards, "guardrails": []})

    words = {"name": "ocr", "prompts": ["words"]}
    watched = {"name": "jpeg_compressibility", "weight": 0}
    with pytest.raises(RecipeError, match="none of them scores the prompt set signs"):
        read_mixture([words, watched])
    both = [words, {"name": "similarity", "prompts": ["signs"]}]
    read_mixture([*both, watched])
    with pytest.raises(RecipeError, match=r"each names prompt sets, and prompts\.held_out_source"):
        read_mixture([*both, watched], held_out_source="kept.txt", held_out=40)
    # An evaluation has no scores of rewards that compare.
    with pytest.raises(RecipeError, match="an evaluation scores single images"):
        Recipe.model_validate({"rewards": ["novelty", watched], "guardrails": []})


def read(rewards, **stage):
    stage = {"kind": "online", "algorithm": {"name": "gardo"}} | stage
    return Recipe.model_validate({"rewards": rewards, "stages": [stage]})


def test_recipes_without_the_scores_that_an_algorithm_reads_are_rejected():
    with pytest.raises(RecipeError, match="every weight is 0, so that nothing is trained on"):
        read([{"name": "ocr", "weight": 0}])
    with pytest.raises(RecipeError, match="gardo reads the scores of 'aesthetic'.*weight: 0"):
        read(["ocr"])
    read(
        ["ocr", {"name": "similarity", "weight": 0}, {"name": "novelty", "weight": 0}],
        algorithm={"name": "gardo", "auxiliary": ["similarity"]},
    )
    read(["ocr"], algorithm={"name": "gardo", "auxiliary": ["exact_match"], "diversity": None})
