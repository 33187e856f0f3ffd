"""``hps``: Human Preference Score v2.1, a CLIP-H trained on human choices and published as an
open_clip checkpoint.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from ebbflow.recipe.pretrained import PretrainedSourceConfig
from ebbflow.rewards.network import Blocks, Files, NetworkReward, PretrainedRewardConfig

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from ebbflow.rewards.base import Reward
    from ebbflow.rewards.clip import Clip
    from ebbflow.rewards.network import Score

CHECKPOINT = "HPS_v2.1_compressed.pt"
NAMES = {
    r"^visual\.transformer\.resblocks": "vision_model.encoder.layers",
    r"^transformer\.resblocks": "text_model.encoder.layers",
    r"^visual\.proj$": "visual_projection.weight",
    r"^text_projection$": "text_projection.weight",
    r"^visual\.conv1": "vision_model.embeddings.patch_embedding",
    r"^visual\.class_embedding": "vision_model.embeddings.class_embedding",
    r"^visual\.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    r"^visual\.ln_pre": "vision_model.pre_layrnorm",  # as transformers spells it
    r"^visual\.ln_post": "vision_model.post_layernorm",
    r"^positional_embedding": "text_model.embeddings.position_embedding.weight",
    r"^token_embedding": "text_model.embeddings.token_embedding",
    r"^ln_final": "text_model.final_layer_norm",
    r"\.attn\.": ".self_attn.",
    r"\.ln_([12])\.": r".layer_norm\1.",
    r"\.mlp\.c_fc\.": ".mlp.fc1.",
    r"\.mlp\.c_proj\.": ".mlp.fc2.",
}
"""From open_clip's names to those of transformers."""


class HpsConfig(PretrainedRewardConfig):
    """Cosine between prompt and image under HPS v2.1 (2306.09341), about .2 to .35."""

    num_parameters: ClassVar[int] = 986_109_441  # CLIP-H, as transformers builds it
    # ViT-H/14: 32 blocks of width 1280 on 16 x 16 patches and the class token.
    gradient_blocks: ClassVar[Blocks] = ((32, 1280, 257),)
    name: Literal["hps"] = "hps"
    path: str | None = "xswu/HPSv2"
    processor: PretrainedSourceConfig
    """Configuration and tokenizer of CLIP-H: ``laion/CLIP-ViT-H-14-laion2B-s32B-b79K`` as a folder
    or a repository.
    """

    def build(self) -> Reward:
        return Hps(self)


class Hps(NetworkReward):
    """cos(image, prompt) (2306.09341). The published code computes it in half precision, this in
    float32.

    Prompts are unescaped as there (``&amp;`` is ``&``); other repairs of broken Unicode, by the
    package ftfy, are left out.
    """

    config: HpsConfig

    def list_files(self) -> list[Files]:
        return [
            Files(self.config, (CHECKPOINT,)),
            Files(self.config.processor, ("config.json", "tokenizer.json")),
        ]

    def load_score_function(self) -> Score:
        from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

        from ebbflow.models.base import default_device
        from ebbflow.rewards.clip import Clip
        from ebbflow.rewards.pixels import letterbox_as_floats, letterbox_with_gradient
        from ebbflow.rewards.weights import build_network, check_vocabulary, read_weights

        checkpoint, processor = (files.fetch_folder() for files in self.list_files())
        config = CLIPConfig.from_pretrained(processor, local_files_only=True)
        tokenizer = CLIPTokenizer.from_pretrained(processor, local_files_only=True)
        check_vocabulary(tokenizer, config.text_config.vocab_size, processor)
        weights = convert_open_clip_weights(read_weights(checkpoint / CHECKPOINT))
        model = build_network(CLIPModel, config, weights, checkpoint / CHECKPOINT)
        # As numbers, as HPSv2 does; the processor of transformers rounds to bytes. Letterboxed: a
        # crop of a frame of 704 x 1280 pixels would hide 45 % of it.
        size = config.vision_config.image_size
        pixels = partial(letterbox_as_floats, size=size, device=default_device())
        differentiable = partial(letterbox_with_gradient, size=size)
        return partial(_compute_cosines, Clip(model, tokenizer, pixels, differentiable))


def _compute_cosines(clip: Clip, images: np.ndarray | Tensor, texts: list[str]) -> Tensor:
    # Twice, as CLIP's first tokenizer did: its training texts had come from web pages.
    return clip.compute_cosines(
        images, [html.unescape(html.unescape(text)).strip() for text in texts]
    )


def convert_open_clip_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of an open_clip ViT, by the names that ``transformers.CLIPModel`` has for
    them.

    open_clip keeps the three projections of an attention in one matrix, and the last projections
    transposed.
    """
    from ebbflow.rewards.weights import rename_weights

    converted: dict[str, Tensor] = {}
    for name, tensor in rename_weights(weights, NAMES).items():
        if ".in_proj_" in name:
            # (3 * width, width), or (3 * width,) of a bias: queries, keys, values.
            for part, rows in zip("qkv", tensor.chunk(3), strict=True):
                converted[name.replace("in_proj_", f"{part}_proj.")] = rows.contiguous()
        elif name in ("visual_projection.weight", "text_projection.weight"):
            # open_clip multiplies from the right, x @ projection; a linear layer x @ weight.T.
            converted[name] = tensor.T.contiguous()
        else:
            converted[name] = tensor
    return converted
