"""HPS from an open_clip checkpoint, against open_clip's forward pass written out here with the
checkpoint's own names.
"""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from network_cases import (
    HPS_SIZE,
    TEXTS,
    as_prompts,
    clip_tokenizer,
    make_reward,
    open_clip_weights,
    some_images,
)
from torch import Tensor
from torch.nn.functional import conv2d, gelu, layer_norm, linear, normalize

from ebbflow.rewards.combine import RewardError, load_reward

WEIGHTS = open_clip_weights()
IMAGES = some_images(5, HPS_SIZE, HPS_SIZE)
MEAN = torch.tensor([0.48145466, 0.4578275, 0.40821073])
STD = torch.tensor([0.26862954, 0.26130258, 0.27577711])


def norm(features: Tensor, name: str) -> Tensor:
    return layer_norm(
        features, features.shape[-1:], WEIGHTS[f"{name}.weight"], WEIGHTS[f"{name}.bias"]
    )


def layer(features: Tensor, name: str) -> Tensor:
    return linear(features, WEIGHTS[f"{name}.weight"], WEIGHTS[f"{name}.bias"])


def transformer(features: Tensor, prefix: str, heads: int, hidden: Tensor | float) -> Tensor:
    """Two blocks over [tokens, width]; ``hidden`` is added to the attention's scores."""
    for block in (f"{prefix}transformer.resblocks.{number}" for number in range(2)):
        inner = norm(features, f"{block}.ln_1")
        mixed = linear(
            inner, WEIGHTS[f"{block}.attn.in_proj_weight"], WEIGHTS[f"{block}.attn.in_proj_bias"]
        )
        query, key, value = (
            part.unflatten(-1, (heads, -1)).transpose(0, 1) for part in mixed.chunk(3, dim=-1)
        )
        scores = query @ key.mT / math.sqrt(query.shape[-1]) + hidden
        features = features + layer(
            (scores.softmax(-1) @ value).transpose(0, 1).flatten(1), f"{block}.attn.out_proj"
        )
        features = features + layer(
            gelu(layer(norm(features, f"{block}.ln_2"), f"{block}.mlp.c_fc")), f"{block}.mlp.c_proj"
        )
    return features


def embed_image(image: np.ndarray) -> Tensor:
    pixels = ((torch.tensor(image) / 255 - MEAN) / STD).permute(2, 0, 1)[None]
    patches = conv2d(pixels, WEIGHTS["visual.conv1.weight"], stride=14).flatten(2)[0].T
    tokens = (
        torch.cat([WEIGHTS["visual.class_embedding"][None], patches])
        + WEIGHTS["visual.positional_embedding"]
    )
    tokens = transformer(norm(tokens, "visual.ln_pre"), "visual.", 3, 0.0)
    return normalize(norm(tokens[0], "visual.ln_post") @ WEIGHTS["visual.proj"], dim=0)


def embed_text(text: str) -> Tensor:
    """Padded with zeros, as open_clip pads; the feature is that of the largest token, the end."""
    ids = clip_tokenizer()(text, truncation=True, max_length=77).input_ids
    padded = torch.tensor(ids + [0] * (77 - len(ids)))
    tokens = WEIGHTS["token_embedding.weight"][padded] + WEIGHTS["positional_embedding"]
    causal = torch.full((77, 77), -torch.inf).triu(1)
    tokens = norm(transformer(tokens, "", 2, causal), "ln_final")
    return normalize(tokens[padded.argmax()] @ WEIGHTS["text_projection"], dim=0)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Never write into its folder."""
    return make_reward("hps", tmp_path_factory.mktemp("hps"))


def test_it_is_the_cosine_of_the_published_network(config):
    texts = [*TEXTS[:4], "cat " * 90]
    wanted = [
        float(embed_image(image) @ embed_text(text))
        for image, text in zip(IMAGES, texts, strict=True)
    ]
    assert np.allclose(
        load_reward(config)(IMAGES, as_prompts(*texts)).values, wanted, rtol=0, atol=1e-6
    )
    assert np.abs(wanted).max() > 0.05


def test_prompts_are_unescaped_twice(config):
    made = load_reward(config)
    plain, once, twice, other = made(
        IMAGES[[0, 0, 0, 0]],
        as_prompts("cat & sea", "cat &amp; sea", " cat &amp;amp; sea\n", "cat sea"),
    ).values
    assert plain == pytest.approx(once, abs=1e-6)
    assert plain == pytest.approx(twice, abs=1e-6)
    assert plain != pytest.approx(other, abs=1e-4)


def test_a_checkpoint_of_other_sizes_is_refused(tmp_path):
    config = make_reward("hps", tmp_path)
    file = tmp_path / "processor" / "config.json"
    said = json.loads(file.read_text())
    said["vision_config"]["num_hidden_layers"] = 1
    file.write_text(json.dumps(said))
    with pytest.raises(
        RewardError,
        match=r"HPS_v2\.1_compressed\.pt does not fit this CLIPModel: 16 weights differ",
    ):
        load_reward(config)(IMAGES, as_prompts(*TEXTS))


def test_the_tokenizer_of_another_network_is_refused(tmp_path):
    config = make_reward("hps", tmp_path)
    tokenizer = clip_tokenizer()
    tokenizer.add_tokens(["more"])
    tokenizer.save_pretrained(tmp_path / "processor")
    with pytest.raises(
        RewardError, match=f"has {len(tokenizer)} tokens and the text encoder {len(tokenizer) - 1}"
    ):
        load_reward(config)(IMAGES, as_prompts(*TEXTS))
