"""``aesthetic``: LAION's predictor of how people rate an image, from its CLIP embedding alone: the prompt does not count.

https://github.com/christophschuhmann/improved-aesthetic-predictor
"""

from __future__ import annotations

from pathlib import Path

from ebbflow.recipe import rewards as recipe
from ebbflow.rewards.clip import CLIP_FILES, load_clip
from ebbflow.rewards.network import Files, NetworkReward, Score, load_head, read_weights

HEAD = "sac+logos+ava1-l14-linearMSE"
"""The published predictor of CLIP ViT-L/14: five linear layers and nothing between them, on embeddings of length 1."""


class Aesthetic(NetworkReward):
    """head(unit image embedding): the expected mean rating, 1 to 10."""

    config: recipe.AestheticConfig

    def files(self) -> list[Files]:
        clip = Files(self.config, CLIP_FILES)
        return [clip] if self._head_is_a_file() else [clip, Files(self.config.head, (f"{HEAD}.*",))]

    def load(self) -> Score:
        clip = load_clip(self.files()[0].folder())
        source = self._head_file()
        head = load_head(read_weights(source), clip.model.config.projection_dim, source)
        return lambda images, texts: head(clip.embed_images(images))[:, 0]

    def _head_is_a_file(self) -> bool:
        return self.config.head.path is not None and Path(self.config.head.path).is_file()

    def _head_file(self) -> Path:
        if self._head_is_a_file():
            return Path(str(self.config.head.path))
        folder = self.files()[1].folder()
        return max(folder.glob(f"{HEAD}.*"))  # .safetensors, where both are there, comes after .pth
