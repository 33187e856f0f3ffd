"""``novelty``: how far an image lies from the nearest other one of its prompt.

    d_i = min over j != i of 1 - cos(e_i, e_j)

e: features of the image, the class token of a vision transformer such as DINOv3. Source: eq. 8 of
GARDO (2512.24138), whose code pools the features of timm's DINOv3; here a folder of transformers.
Without a network, e is the image itself, scaled down.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ebbflow.recipe.rewards import Scored
from ebbflow.rewards.base import RewardResult
from ebbflow.rewards.network import Files, PretrainedReward, PretrainedRewardConfig

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from ebbflow.data.prompts import Prompt
    from ebbflow.rewards.base import Reward

NETWORK_FILES = ("config.json", "model*.safetensors", "preprocessor_config.json")
WITHOUT_EFFECT = r"^(pooler|classifier)\."
"""Weights of a network that its class token does not depend on."""
THUMBNAIL = 32
"""Pixels of the longer edge of an image that is compared without a network."""


class NoveltyConfig(PretrainedRewardConfig):
    """Distance of an image to the nearest other one of its prompt, 0 for a duplicate, to 2."""

    known_lowest: ClassVar[float | None] = 0.0
    num_parameters: ClassVar[int] = 303_129_600  # DINOv3 ViT-L/16, as transformers builds it
    name: Literal["novelty"] = "novelty"

    @property
    def ignores_prompt(self) -> bool:
        return True

    @property
    def scores(self) -> Scored:
        return "groups"

    @property
    def network_bytes(self) -> int:
        return super().network_bytes if self.path else 0

    def build(self) -> Reward:
        return Novelty(self)


class Novelty(PretrainedReward):
    """The distance to the nearest neighbour among the images of a prompt."""

    scores = "groups"

    def list_files(self) -> list[Files]:
        return [Files(self.config, NETWORK_FILES)] if self.config.path else []

    def load_score_function(self) -> Any:
        """Load the vision transformer; return the function from images to their class tokens."""
        from transformers import AutoModel

        from ebbflow.rewards.pixels import (
            PROCESSOR_FILE,
            prepare_with_processor,
            scale_to_unit_range,
        )
        from ebbflow.rewards.weights import load_network

        folder = self.list_files()[0].fetch_folder()
        network = load_network(AutoModel, folder, WITHOUT_EFFECT)
        processor = json.loads((folder / PROCESSOR_FILE).read_text())

        def compute_class_tokens(images: np.ndarray, texts: list[str]) -> Tensor:
            pixels = prepare_with_processor(scale_to_unit_range(images, network.device), processor)
            # [n, tokens, D]; the first token is that of the class, and the only one of the image.
            tokens: Tensor = network(pixel_values=pixels).last_hidden_state
            return tokens[:, 0]

        return compute_class_tokens

    def __call__(self, images: np.ndarray, prompts: Sequence[Prompt]) -> RewardResult:
        """Score the images of one prompt, at least two."""
        # A network sees what a picture shows, pixels only where it is light and dark.
        if self.config.path:
            features = self._score_in_batches(images, prompts)
        else:
            features = _shrink_images(images)
        return RewardResult(measure_nearest_distances(features))


def measure_nearest_distances(features: np.ndarray) -> np.ndarray:
    """Measure the cosine distance of each row to the nearest other one, float64 [N].

    Example:
        [[1, 0], [0, 2], [3, 3]] gives 1 - cos(45 degrees) = .293 three times.

    Args:
        features: [N, D], N at least 2. A row of zeros is at right angles to all others.
    """
    import numpy as np

    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    # No division by 0: a row of zeros stays one.
    unit = features / np.maximum(lengths, np.finfo(np.float64).tiny)
    distances = 1 - (unit @ unit.T).clip(-1, 1)  # [N, N]
    # Nobody is its own neighbour.
    np.fill_diagonal(distances, np.inf)
    nearest: np.ndarray = distances.min(1)
    return nearest


def _shrink_images(images: np.ndarray) -> np.ndarray:
    """Return images, uint8 RGB [N, height, width, 3], scaled down, float64 [N, D]."""
    import cv2
    import numpy as np

    height, width = images.shape[1:3]
    share = min(1.0, THUMBNAIL / max(height, width))
    size = max(1, round(width * share)), max(1, round(height * share))
    # INTER_AREA averages all pixels of an area: grain makes no image a new one.
    small = [cv2.resize(image, size, interpolation=cv2.INTER_AREA) for image in images]
    return np.asarray(small, np.float64).reshape(len(images), -1)
