"""``pickscore``: the CLIP-H of Pick-a-Pic, trained on human choices between images (2305.01569)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from ebbflow.rewards.network import CLIP_FILES, Blocks, ClipReward, Files, PretrainedRewardConfig

if TYPE_CHECKING:
    from ebbflow.rewards.base import Reward
    from ebbflow.rewards.network import Score

UNIT = 26.0
"""What Flow-GRPO (2505.05470) divides PickScore by, to bring it near 1."""


class PickScoreConfig(PretrainedRewardConfig):
    """logit scale * cosine / 26 of a CLIP-H trained on human choices (2305.01569), about .75 to
    .9."""

    num_parameters: ClassVar[int] = 986_109_441  # CLIP-H, as transformers builds it
    gradient_blocks: ClassVar[Blocks] = ((32, 1280, 257),)
    name: Literal["pickscore"] = "pickscore"
    path: str | None = "yuvalkirstain/PickScore_v1"

    def build(self) -> Reward:
        return PickScore(self)


class PickScore(ClipReward):
    """exp(logit scale) * cos(image, prompt) / 26 (2305.01569, scaled as in 2505.05470)."""

    def list_files(self) -> list[Files]:
        return [Files(self.config, CLIP_FILES)]

    def load_score_function(self) -> Score:
        clip = self.load_clip_model()
        # A learned number, about 100, so the scale is part of the published score.
        scale = clip.model.logit_scale.exp() / UNIT
        return lambda images, texts: scale * clip.compute_cosines(images, texts)
