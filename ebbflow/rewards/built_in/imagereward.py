"""``imagereward``: a BLIP that reads the prompt while it looks at the image, trained on human
rankings (2304.05977).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ebbflow.recipe.pretrained import PretrainedSourceConfig
from ebbflow.rewards.network import Blocks, Files, NetworkReward, PretrainedRewardConfig

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from ebbflow.rewards.base import Reward
    from ebbflow.rewards.network import Score

CHECKPOINT = "ImageReward.pt"
TEXT_CONFIG = "med_config.json"
MEAN = 0.16717362830052426
DEVIATION = 1.0333394966054072
"""Of the head's output on the training set."""
MAX_TOKENS = 35
BLIP_TOKENS = ["[DEC]", "[ENC]"]
"""Which BLIP adds to BERT's vocabulary, in this order; only a prompt that spells them out holds
them.
"""
HEAD_WIDTH = 64
"""Of every attention head of BLIP's image encoder; the checkpoint does not say it."""
NAMES = {
    r"^cls_token": "embeddings.class_embedding",
    r"^pos_embed": "embeddings.position_embedding",
    r"^patch_embed\.proj": "embeddings.patch_embedding",
    r"^norm\.": "post_layernorm.",
    r"^blocks\.": "encoder.layers.",
    r"\.norm([12])\.": r".layer_norm\1.",
    r"\.attn\.qkv\.": ".self_attn.qkv.",
    r"\.attn\.proj\.": ".self_attn.projection.",
}
"""From the checkpoint's names of the image encoder's weights to those of transformers; the text
encoder's are the same.
"""


TEXT_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "hidden_act",
    "layer_norm_eps",
    "pad_token_id",
)


class ImageRewardConfig(PretrainedRewardConfig):
    """ImageReward (2304.05977), raw: human preferences, standardised to mean 0 and deviation 1 on
    its own training set.
    """

    num_parameters: ClassVar[int] = 445_278_720  # BLIP, as transformers builds it
    gradient_blocks: ClassVar[Blocks] = ((24, 1024, 197),)
    name: Literal["imagereward"] = "imagereward"
    path: str | None = "zai-org/ImageReward"
    tokenizer: PretrainedSourceConfig
    """Tokenizer of the text encoder: ``google-bert/bert-base-uncased`` as a folder or a repository.
    """

    def build(self) -> Reward:
        return ImageReward(self)


@dataclass(frozen=True)
class Blip:
    """The image encoder, the text encoder that attends to its output, and the head."""

    vision: Any
    text: Any
    head: nn.Module
    tokenizer: Any

    def score_images(self, images: np.ndarray | Tensor, texts: list[str]) -> Tensor:
        """uint8 RGB [n, height, width, 3] and n prompts, each cut after 35 tokens -> float32 [n].

        Of RGB in [0, 1], [n, 3, height, width], with gradient.
        """
        import numpy as np

        from ebbflow.rewards.pixels import resize_as_bytes, resize_with_gradient

        size = self.vision.config.image_size
        if isinstance(images, np.ndarray):
            pixels = resize_as_bytes(images, size, self.vision.device)
        else:
            pixels = resize_with_gradient(images, size)
        tokens = self.tokenizer(
            texts, padding="max_length", truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
        )
        tokens = tokens.to(self.text.device)
        # The text encoder attends to the image in every layer, so that the head reads both.
        image_states = self.vision(pixels).last_hidden_state  # [n, 1 + patches, width]
        text_states = self.text(
            tokens.input_ids, tokens.attention_mask, encoder_hidden_states=image_states
        ).last_hidden_state  # [n, 35, width]
        scores: Tensor = self.head(text_states[:, 0])[:, 0]
        return (scores - MEAN) / DEVIATION


class ImageReward(NetworkReward):
    """(head(first output of the text encoder) - .167) / 1.033 (2304.05977)."""

    config: ImageRewardConfig

    def list_files(self) -> list[Files]:
        return [
            Files(self.config, (CHECKPOINT, TEXT_CONFIG)),
            Files(self.config.tokenizer, ("tokenizer.json",)),
        ]

    def load_score_function(self) -> Score:
        from transformers import BertTokenizer, BlipTextConfig, BlipTextModel

        from ebbflow.rewards.weights import (
            build_network,
            check_vocabulary,
            load_linear_head,
            read_weights,
            select_prefix,
        )

        folder, words = (files.fetch_folder() for files in self.list_files())
        checkpoint = folder / CHECKPOINT
        weights = read_weights(checkpoint)
        vision = load_vision_encoder(select_prefix(weights, "blip.visual_encoder."), checkpoint)
        # The file is in BLIP's own layout: only these of its keys are those of transformers.
        sizes = {key: json.loads((folder / TEXT_CONFIG).read_text())[key] for key in TEXT_KEYS}
        config = BlipTextConfig(**sizes, encoder_hidden_size=vision.config.hidden_size)
        text_weights = select_prefix(weights, "blip.text_encoder.")
        text = build_network(
            BlipTextModel, config, text_weights, checkpoint, add_pooling_layer=False
        )
        head = load_linear_head(select_prefix(weights, "mlp."), config.hidden_size, checkpoint)
        tokenizer = BertTokenizer.from_pretrained(words, local_files_only=True)
        tokenizer.add_tokens(BLIP_TOKENS, special_tokens=True)
        check_vocabulary(tokenizer, config.vocab_size, words)
        return Blip(vision, text, head, tokenizer).score_images


def load_vision_encoder(weights: Mapping[str, Tensor], source: Path) -> Any:
    """Build BLIP's image encoder from the checkpoint's weights, whose shapes give its sizes.

    Raises:
        RewardError: the weights are not those of a vision transformer.
    """
    from transformers import BlipVisionConfig, BlipVisionModel

    from ebbflow.rewards.weights import build_network, pick_weights, rename_weights

    patch, places, widening = pick_weights(
        weights, ("patch_embed.proj.weight", "pos_embed", "blocks.0.mlp.fc1.weight"), source
    )
    width = patch.shape[0]  # the kernel of the patch embedding is (width, 3, patch, patch)
    patch_size = patch.shape[-1]
    config = BlipVisionConfig(
        hidden_size=width,
        intermediate_size=widening.shape[0],
        num_hidden_layers=len(
            {name.split(".")[1] for name in weights if name.startswith("blocks.")}
        ),
        num_attention_heads=width // HEAD_WIDTH,
        # One position for each patch of a square image, and one for the class token.
        image_size=math.isqrt(places.shape[1] - 1) * patch_size,
        patch_size=patch_size,
        layer_norm_eps=1e-6,
    )
    return build_network(BlipVisionModel, config, rename_weights(weights, NAMES), source)
