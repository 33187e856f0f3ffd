from __future__ import annotations

import numpy as np
import pytest
import torch
from network_cases import CLIP_WIDTH, TEXTS, as_prompts, head_weights, make_reward, some_images
from safetensors.torch import save_file
from transformers import CLIPModel

from ebbflow.rewards.clip import load_clip
from ebbflow.rewards.combine import RewardError, load_reward

IMAGES = some_images()
PROMPTS = as_prompts(*TEXTS)


@pytest.fixture
def config(tmp_path):
    return make_reward("aesthetic", tmp_path)


def scores(config, **head) -> np.ndarray:
    if head:
        config = config.model_copy(update={"head": config.head.model_copy(update=head)})
    made = load_reward(config)
    assert made.explain_unavailable() is None
    return made(IMAGES, PROMPTS).values


def test_it_is_a_linear_map_of_the_unit_image_embedding(config):
    network = CLIPModel.from_pretrained(config.path)
    with torch.no_grad():
        features = network.get_image_features(
            load_clip(config.path).pixels(IMAGES)
        ).pooler_output.numpy()
    layers = head_weights(CLIP_WIDTH)
    value = features / np.linalg.norm(features, axis=1, keepdims=True)
    for number in (0, 2, 4, 6, 7):
        value = (
            value @ layers[f"layers.{number}.weight"].numpy().T
            + layers[f"layers.{number}.bias"].numpy()
        )
    assert np.allclose(scores(config), value[:, 0], rtol=0, atol=1e-6)


def test_the_head_is_a_file_or_lies_in_a_folder(config, tmp_path):
    assert np.array_equal(scores(config, path=str(tmp_path)), scores(config))
    save_file(head_weights(CLIP_WIDTH), tmp_path / "mine.safetensors")
    assert np.array_equal(scores(config, path=str(tmp_path / "mine.safetensors")), scores(config))


def test_of_two_heads_in_a_folder_the_one_without_a_pickle_is_read(config, tmp_path):
    negative = {
        name: -tensor if "layers.7" in name else tensor
        for name, tensor in head_weights(CLIP_WIDTH).items()
    }
    save_file(negative, tmp_path / "sac+logos+ava1-l14-linearMSE.safetensors")
    assert np.allclose(scores(config, path=str(tmp_path)), -scores(config))


def test_a_head_of_another_network_is_refused(config):
    torch.save(head_weights(CLIP_WIDTH + 1), config.head.path)
    with pytest.raises(
        RewardError, match=f"takes {CLIP_WIDTH + 1} features, and its network gives {CLIP_WIDTH}"
    ):
        scores(config)


def test_a_file_that_is_no_head_is_refused(config):
    torch.save(
        {
            name.replace("layers", "model"): tensor
            for name, tensor in head_weights(CLIP_WIDTH).items()
        },
        config.head.path,
    )
    with pytest.raises(RewardError, match=r"linearMSE\.pth lacks the weights 'layers\.0\.weight'"):
        scores(config)
