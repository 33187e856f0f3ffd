"""ImageReward from its checkpoint, against BLIP's forward pass written out here with the
checkpoint's own names.
"""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from network_cases import (
    BERT_WORDS,
    BLIP_SIZE,
    BLIP_WIDTH,
    MED_CONFIG,
    as_prompts,
    blip_weights,
    make_reward,
    some_images,
)
from torch import Tensor
from torch.nn.functional import conv2d, gelu, layer_norm, linear

from ebbflow.rewards.combine import RewardError, load_reward

WEIGHTS = blip_weights()
IMAGES = some_images(4, BLIP_SIZE, BLIP_SIZE)
TEXTS = ["cat", "a dog", "birds, 3 & 4", "x" * 60]
TOKENS = {
    "cat": ["c", "##a", "##t"],
    "a dog": ["a", "d", "##o", "##g"],
    "birds, 3 & 4": ["b", "##i", "##r", "##d", "##s", ",", "3", "&", "4"],
    "x" * 60: ["x", *["##x"] * 32],
}
"""What remains of 35 tokens beside the first and the last."""
EYE = "blip.visual_encoder"
READ = "blip.text_encoder"
MEAN = torch.tensor([0.48145466, 0.4578275, 0.40821073])
STD = torch.tensor([0.26862954, 0.26130258, 0.27577711])


def layer(features: Tensor, name: str) -> Tensor:
    return linear(features, WEIGHTS[f"{name}.weight"], WEIGHTS[f"{name}.bias"])


def norm(features: Tensor, name: str, eps: float) -> Tensor:
    return layer_norm(
        features, features.shape[-1:], WEIGHTS[f"{name}.weight"], WEIGHTS[f"{name}.bias"], eps
    )


def attend(query: Tensor, key: Tensor, value: Tensor, heads: int) -> Tensor:
    """[tokens, width] each."""
    query, key, value = (
        part.unflatten(-1, (heads, -1)).transpose(0, 1) for part in (query, key, value)
    )
    return (
        ((query @ key.mT / math.sqrt(query.shape[-1])).softmax(-1) @ value)
        .transpose(0, 1)
        .flatten(1)
    )


def see(image: np.ndarray) -> Tensor:
    """[patches + 1, width]"""
    pixels = ((torch.tensor(image) / 255 - MEAN) / STD).permute(2, 0, 1)[None]
    name = f"{EYE}.patch_embed.proj"
    patches = (
        conv2d(pixels, WEIGHTS[f"{name}.weight"], WEIGHTS[f"{name}.bias"], stride=16)
        .flatten(2)[0]
        .T
    )
    tokens = torch.cat([WEIGHTS[f"{EYE}.cls_token"][0], patches]) + WEIGHTS[f"{EYE}.pos_embed"][0]
    for block in (f"{EYE}.blocks.{number}" for number in range(2)):
        mixed = layer(norm(tokens, f"{block}.norm1", 1e-6), f"{block}.attn.qkv")
        tokens = tokens + layer(
            attend(*mixed.chunk(3, dim=-1), heads=BLIP_WIDTH // 64), f"{block}.attn.proj"
        )
        tokens = tokens + layer(
            gelu(layer(norm(tokens, f"{block}.norm2", 1e-6), f"{block}.mlp.fc1")),
            f"{block}.mlp.fc2",
        )
    return norm(tokens, f"{EYE}.norm", 1e-6)


def read(text: str, seen: Tensor) -> Tensor:
    """The first output, without any padding: [width]."""
    ids = torch.tensor([BERT_WORDS.index(token) for token in ["[CLS]", *TOKENS[text], "[SEP]"]])
    places = WEIGHTS[f"{READ}.embeddings.position_embeddings.weight"][: len(ids)]
    tokens = norm(
        WEIGHTS[f"{READ}.embeddings.word_embeddings.weight"][ids] + places,
        f"{READ}.embeddings.LayerNorm",
        1e-12,
    )
    for block in (f"{READ}.encoder.layer.{number}" for number in range(2)):
        for part in ("attention", "crossattention"):
            source = tokens if part == "attention" else seen
            parts = (
                layer(of, f"{block}.{part}.self.{name}")
                for name, of in (("query", tokens), ("key", source), ("value", source))
            )
            mixed = layer(
                attend(*parts, heads=MED_CONFIG["num_attention_heads"]),
                f"{block}.{part}.output.dense",
            )
            tokens = norm(mixed + tokens, f"{block}.{part}.output.LayerNorm", 1e-12)
        wide = gelu(layer(tokens, f"{block}.intermediate.dense"))
        tokens = norm(
            layer(wide, f"{block}.output.dense") + tokens, f"{block}.output.LayerNorm", 1e-12
        )
    return tokens[0]


def published(image: np.ndarray, text: str) -> float:
    feature = read(text, see(image))
    for number in (0, 2, 4, 6, 7):
        feature = layer(feature, f"mlp.layers.{number}")
    return (float(feature) - 0.16717362830052426) / 1.0333394966054072


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Never write into its folder."""
    return make_reward("imagereward", tmp_path_factory.mktemp("imagereward"))


def test_it_is_the_score_of_the_published_network(config):
    wanted = [published(image, text) for image, text in zip(IMAGES, TEXTS, strict=True)]
    assert np.allclose(
        load_reward(config)(IMAGES, as_prompts(*TEXTS)).values, wanted, rtol=0, atol=5e-6
    )
    assert np.ptp(wanted) > 0.1


def test_a_prompt_is_cut_after_35_tokens(config):
    made = load_reward(config)
    shorter, long, longer = made(
        IMAGES[[0, 0, 0]], as_prompts("x" * 32, "x" * 33, "x" * 33 + " and more")
    ).values
    assert long == pytest.approx(longer, abs=1e-6)
    assert long != pytest.approx(shorter, abs=1e-4)


def test_the_tokens_that_blip_added_are_known(config):
    made = load_reward(config)
    first, second, spelled = made(
        IMAGES[[0, 0, 0]], as_prompts("a [ENC]", "a [DEC]", "a ENC")
    ).values
    assert len({round(value, 4) for value in (first, second, spelled)}) == 3


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    config = make_reward("imagereward", tmp_path)
    torch.save(
        {name.replace("blip.", ""): tensor for name, tensor in WEIGHTS.items()},
        tmp_path / "ImageReward.pt",
    )
    with pytest.raises(
        RewardError, match=r"ImageReward\.pt lacks the weights 'patch_embed\.proj\.weight'"
    ):
        load_reward(config)(IMAGES, as_prompts(*TEXTS))


def test_a_text_encoder_of_other_sizes_is_refused(tmp_path):
    config = make_reward("imagereward", tmp_path)
    (tmp_path / "med_config.json").write_text(json.dumps(MED_CONFIG | {"num_hidden_layers": 1}))
    with pytest.raises(RewardError, match=r"does not fit this BlipTextModel: 26 weights differ"):
        load_reward(config)(IMAGES, as_prompts(*TEXTS))
    (tmp_path / "med_config.json").write_text("{}")
    with pytest.raises(RewardError, match="'imagereward' cannot be loaded: KeyError: 'vocab_size'"):
        load_reward(config)(IMAGES, as_prompts(*TEXTS))


def test_the_tokenizer_of_another_network_is_refused(tmp_path):
    config = make_reward("imagereward", tmp_path)
    file = tmp_path / "tokenizer" / "tokenizer.json"
    said = json.loads(file.read_text())
    del said["model"]["vocab"]["##9"]
    file.write_text(json.dumps(said))
    size = MED_CONFIG["vocab_size"]
    with pytest.raises(RewardError, match=f"has {size - 1} tokens and the text encoder {size}"):
        load_reward(config)(IMAGES, as_prompts(*TEXTS))
