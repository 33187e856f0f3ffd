"""``hpsv3``: Human Preference Score v3, a Qwen2-VL-7B with a head that reads one special token
(2508.03789).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from ebbflow.recipe.model import Precision
from ebbflow.recipe.pretrained import PretrainedSourceConfig
from ebbflow.rewards.network import QWEN_FILES, Blocks, Files, NetworkReward, PretrainedRewardConfig

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from ebbflow.rewards.base import Reward
    from ebbflow.rewards.network import Score
    from ebbflow.rewards.qwen2_vl import JudgingQwen

CHECKPOINT = "HPSv3.safetensors"
TOKEN = "<|Reward|>"
HEAD = (0, 3, 5)
"""The linear layers of the head by their published numbers; the others are ReLUs and a dropout."""
PIXELS = 256 * 28 * 28
"""Every image is resized to about so many, its shape kept."""


class HpsV3Config(PretrainedRewardConfig):
    """Human preference under HPSv3 (2508.03789), raw: it has no fixed range."""

    # Qwen2-VL-7B without its head for words, as transformers builds it.
    num_parameters: ClassVar[int] = 7_748_610_610
    # The vision transformer; and Qwen2-7B, which reads 256 tokens of the image, the question and
    # the prompt.
    gradient_blocks: ClassVar[Blocks] = ((32, 1280, 1024), (28, 3584, 900))
    name: Literal["hpsv3"] = "hpsv3"
    path: str | None = "MizzenAI/HPSv3"
    processor: PretrainedSourceConfig
    """Configuration and tokenizer of the network: ``Qwen/Qwen2-VL-7B-Instruct`` as a folder or a
    repository.
    """
    precision: Precision = "bfloat16"
    """Precision of the network; bfloat16 as published. The head stays in float32."""
    batch: int = Field(4, ge=1)
    """Images per forward pass."""

    def build(self) -> Reward:
        return HpsV3(self)


class HpsV3(NetworkReward):
    """The mean mu of the two outputs (mu, sigma) of the head (2508.03789).

    Special tokens that a prompt spells out are left out of it; the published code reads them as
    such.
    """

    config: HpsV3Config

    def list_files(self) -> list[Files]:
        return [Files(self.config, (CHECKPOINT,)), Files(self.config.processor, QWEN_FILES)]

    def load_score_function(self) -> Score:
        from ebbflow.rewards.qwen2_vl import JudgingQwen, build_linear_head, load_backbone
        from ebbflow.rewards.weights import read_weights

        checkpoint, processor = (files.fetch_folder() for files in self.list_files())
        source = checkpoint / CHECKPOINT
        weights = read_weights(source)
        model, tokenizer = load_backbone(
            weights, processor, source, (TOKEN,), self.config.precision
        )
        head = build_linear_head(weights, HEAD, source, model.device)
        return partial(_compute_scores, JudgingQwen(model, head, tokenizer, (TOKEN,)))


def _compute_scores(judge: JudgingQwen, images: np.ndarray | Tensor, texts: list[str]) -> Tensor:
    from ebbflow.rewards.qwen2_vl import resize_to_patch_grid
    from ebbflow.rewards.templates import fill_template

    vision = judge.model.config.vision_config
    pixels = resize_to_patch_grid(
        images, PIXELS, PIXELS, vision.patch_size * vision.spatial_merge_size, judge.model.device
    )
    # Qwen2-VL takes a picture for a video of twice the same frame: (n, 2, 3, height, width).
    frames = pixels[:, None].expand(-1, vision.temporal_patch_size, -1, -1, -1)
    questions = [fill_template("hpsv3", judge.remove_special_tokens(text)) for text in texts]
    # [n, 1 token, (mu, sigma)]: the mean alone is the score.
    return judge.compute_outputs(frames, questions, "<|image_pad|>")[:, 0, 0]
