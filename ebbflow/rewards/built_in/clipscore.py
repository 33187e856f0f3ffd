"""``clipscore``: how near the prompt and the image lie to each other under a CLIP."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from ebbflow.rewards.network import CLIP_FILES, Blocks, ClipReward, Files, PretrainedRewardConfig

if TYPE_CHECKING:
    from ebbflow.rewards.base import Reward
    from ebbflow.rewards.network import Score


class ClipScoreConfig(PretrainedRewardConfig):
    """Cosine between prompt and image under CLIP (2104.08718), about .15 to .4."""

    num_parameters: ClassVar[int] = 427_616_513  # CLIP-L, as transformers builds it
    gradient_blocks: ClassVar[Blocks] = ((24, 1024, 257),)
    name: Literal["clipscore"] = "clipscore"
    path: str | None = "openai/clip-vit-large-patch14"

    def build(self) -> Reward:
        return ClipScore(self)


class ClipScore(ClipReward):
    """cos(image, prompt); CLIPScore (2104.08718) is 2.5 times its positive part."""

    def list_files(self) -> list[Files]:
        return [Files(self.config, CLIP_FILES)]

    def load_score_function(self) -> Score:
        return self.load_clip_model().compute_cosines
