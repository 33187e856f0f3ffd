"""``image_classifier``: the probability of a label under any image classifier of transformers, such
as one that finds unsafe pictures.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from ebbflow.rewards.base import RewardError, RewardResult
from ebbflow.rewards.network import Blocks, Files, NetworkReward, PretrainedRewardConfig

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from ebbflow.data.prompts import Prompt
    from ebbflow.rewards.base import Reward
    from ebbflow.rewards.network import Score

CLASSIFIER_FILES = ("config.json", "model*.safetensors", "preprocessor_config.json")


class ImageClassifierConfig(PretrainedRewardConfig):
    """Probability of a label under an image classifier, 0 to 1; with a threshold 1 or 0."""

    known_lowest: ClassVar[float | None] = 0.0
    num_parameters: ClassVar[int] = 85_800_194  # ViT-B/16 with two labels
    gradient_blocks: ClassVar[Blocks] = ((12, 768, 197),)
    name: Literal["image_classifier"] = "image_classifier"
    classifier_label: str = Field(min_length=1)
    """The label whose probability is the score, as the classifier's ``id2label`` writes it. Name
    the good one, such as ``normal``: larger is better."""
    threshold: float | None = Field(None, gt=0, lt=1)
    """Score 1 where the probability is at least this, and 0 below. Default: the probability."""
    below: Literal["score", "reject"] = "score"
    """``reject``: an image below the threshold has no score. Its sample is masked in training and
    counted in ``max_failed_share``, whatever the other rewards say."""

    @property
    def ignores_prompt(self) -> bool:
        return True

    @model_validator(mode="after")
    def _check_threshold(self) -> ImageClassifierConfig:
        if self.below == "reject" and self.threshold is None:
            raise ValueError("below: reject needs a 'threshold'; give the lowest probability")
        return self

    def build(self) -> Reward:
        return ImageClassifier(self)


class ImageClassifier(NetworkReward):
    """softmax(logits)[label]; sigmoid(logits)[label] where labels do not exclude each other."""

    config: ImageClassifierConfig

    def list_files(self) -> list[Files]:
        return [Files(self.config, CLASSIFIER_FILES)]

    def load_score_function(self) -> Score:
        import torch
        from transformers import AutoModelForImageClassification

        from ebbflow.rewards.pixels import (
            PROCESSOR_FILE,
            prepare_with_processor,
            scale_to_unit_range,
        )
        from ebbflow.rewards.weights import load_network

        folder = self.list_files()[0].fetch_folder()
        network = load_network(AutoModelForImageClassification, folder)
        processor = json.loads((folder / PROCESSOR_FILE).read_text())
        label = self._find_label(network.config.id2label, folder)
        # Labels that do not exclude each other have a probability each.
        has_several = network.config.problem_type == "multi_label_classification"

        def compute_probabilities(images: np.ndarray | Tensor, texts: list[str]) -> Tensor:
            if not isinstance(images, torch.Tensor):
                images = scale_to_unit_range(images, network.device)
            pixels = prepare_with_processor(images, processor)
            logits = network(pixel_values=pixels).logits  # [n, labels]
            probabilities: Tensor = logits.sigmoid() if has_several else logits.softmax(-1)
            return probabilities[:, label]

        return compute_probabilities

    def __call__(self, images: np.ndarray, prompts: Sequence[Prompt]) -> RewardResult:
        """As every network; with a threshold 1 or 0, or a failure where ``below`` rejects."""
        import numpy as np

        result = super().__call__(images, prompts)
        threshold = self.config.threshold
        if threshold is None:
            return result
        # NaN compares as not below: a failed image stays failed.
        probabilities = result.values
        is_below = probabilities < threshold
        values = np.where(np.isnan(probabilities), np.nan, (~is_below).astype(np.float64))
        failures = dict(result.failures)
        if self.config.below == "reject":
            values[is_below] = np.nan
            for index in np.flatnonzero(is_below):
                failures[int(index)] = (
                    f"P({self.config.classifier_label}) = {probabilities[index]:.3f} is below the"
                    f" threshold {threshold}"
                )
        return RewardResult(values, failures=failures)

    def score_with_gradient(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """As ``Reward.score_with_gradient``.

        Raises:
            RewardError: with a threshold, whose steps have no gradient.
        """
        if self.config.threshold is not None:
            raise RewardError(
                f"the reward {self.name!r} has a threshold, whose steps have no gradient; leave"
                " 'threshold' out, or make it a guardrail"
            )
        return super().score_with_gradient(images, prompts)

    def _find_label(self, labels: dict[int, str], folder: Path) -> int:
        for index, name in labels.items():
            if name == self.config.classifier_label:
                return int(index)
        raise RewardError(
            f"classifier_label = {self.config.classifier_label!r}: the classifier in {folder} knows"
            f" {', '.join(labels.values())}; name one of them"
        )
