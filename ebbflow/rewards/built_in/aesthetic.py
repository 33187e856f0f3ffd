"""``aesthetic``: LAION's predictor of how people rate an image, from its CLIP embedding alone: the
prompt does not count.

https://github.com/christophschuhmann/improved-aesthetic-predictor
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from ebbflow.recipe.pretrained import PretrainedSourceConfig
from ebbflow.rewards.network import CLIP_FILES, Blocks, ClipReward, Files, PretrainedRewardConfig

if TYPE_CHECKING:
    from ebbflow.rewards.base import Reward
    from ebbflow.rewards.network import Score

HEAD = "sac+logos+ava1-l14-linearMSE"
"""The published predictor of CLIP ViT-L/14: five linear layers and nothing between them, on
embeddings of length 1.
"""


class AestheticConfig(PretrainedRewardConfig):
    """LAION's aesthetic predictor on CLIP-L image embeddings, raw, about 1 to 10; it never sees the
    prompt.
    """

    num_parameters: ClassVar[int] = 427_616_513  # CLIP-L, as transformers builds it
    gradient_blocks: ClassVar[Blocks] = ((24, 1024, 257),)
    name: Literal["aesthetic"] = "aesthetic"
    path: str | None = "openai/clip-vit-large-patch14"
    head: PretrainedSourceConfig
    """Head of the predictor, ``sac+logos+ava1-l14-linearMSE`` as .pth or .safetensors: the file, or
    a folder or repository with it.
    """

    @property
    def ignores_prompt(self) -> bool:
        return True

    def build(self) -> Reward:
        return Aesthetic(self)


class Aesthetic(ClipReward):
    """head(unit image embedding): the expected mean rating, 1 to 10."""

    config: AestheticConfig

    def list_files(self) -> list[Files]:
        # A file needs no search by name: it is what the recipe says.
        clip = Files(self.config, CLIP_FILES)
        return [clip] if self._is_head_file() else [clip, Files(self.config.head, (f"{HEAD}.*",))]

    def load_score_function(self) -> Score:
        from ebbflow.rewards.weights import load_linear_head, read_weights

        clip = self.load_clip_model()
        source = self._fetch_head_file()
        head = load_linear_head(read_weights(source), clip.model.config.projection_dim, source)
        # (n, width) -> (n, 1) -> (n,); the texts have no part in it.
        return lambda images, texts: head(clip.embed_images(images))[:, 0]

    def _is_head_file(self) -> bool:
        return self.config.head.path is not None and Path(self.config.head.path).is_file()

    def _fetch_head_file(self) -> Path:
        if self._is_head_file():
            return Path(str(self.config.head.path))
        folder = self.list_files()[1].fetch_folder()
        # Where both files are there: .safetensors comes after .pth.
        return max(folder.glob(f"{HEAD}.*"))
