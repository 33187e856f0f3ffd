"""``videoalign``: VideoReward of VideoAlign, a Qwen2-VL-2B that rates whole videos at three special
tokens (2501.13918).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from ebbflow.recipe.model import Precision
from ebbflow.recipe.pretrained import PretrainedSourceConfig
from ebbflow.recipe.rewards import Scored
from ebbflow.rewards.base import Reward, RewardError, RewardResult
from ebbflow.rewards.network import QWEN_FILES, Files, PretrainedReward, PretrainedRewardConfig

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from ebbflow.data.prompts import Prompt
    from ebbflow.rewards.network import Score
    from ebbflow.rewards.qwen2_vl import JudgingQwen

CHECKPOINT = "checkpoint-*/model.pth"
SETTINGS = "model_config.json"
Dimension = Literal["visual", "motion", "alignment"]
DIMENSIONS: dict[Dimension, str] = {"visual": "VQ", "motion": "MQ", "alignment": "TA"}
"""What is rated, under its published name, in the order of the published tokens."""
TOKENS = tuple(f"<|{name}_reward|>" for name in DIMENSIONS.values())
MIN_PIXELS = 128 * 28 * 28
"""Of a frame after it is resized, its shape kept; the checkpoint says how many at most."""
MIN_FRAMES = 4
MAX_FRAMES = 768


class VideoAlignConfig(PretrainedRewardConfig):
    """Quality, motion and text alignment of videos under VideoReward (2501.13918): a sum of
    z-scores, about -6 to 6.
    """

    # Qwen2-VL-2B without its head for words, as transformers builds it.
    num_parameters: ClassVar[int] = 2_208_563_200
    name: Literal["videoalign"] = "videoalign"
    path: str | None = "KwaiVGI/VideoReward"
    processor: PretrainedSourceConfig
    """Configuration and tokenizer of the network: ``Qwen/Qwen2-VL-2B-Instruct`` as a folder or a
    repository.
    """
    frame_rate: float = Field(gt=0)
    """Frame rate of the videos, in frames per second: 16 for Wan 2.1, 24 for Wan 2.2 5B and
    HunyuanVideo, 25 for LTX-Video. The network sees two frames of each second.
    """
    dimensions: list[Dimension] = Field(list(DIMENSIONS), min_length=1)
    """Dimensions whose sum is the score. All three are metrics."""
    precision: Precision = "bfloat16"
    """Precision of the network; bfloat16 as published. The head stays in float32."""
    batch: int = Field(2, ge=1)
    """Videos per forward pass."""

    @property
    def scores(self) -> Scored:
        return "videos"

    def build(self) -> Reward:
        return VideoAlign(self)


class VideoAlign(PretrainedReward):
    """The sum over the dimensions of (rating - mean) / deviation, with the published means and
    deviations (``use_norm``).

    Special tokens that a prompt spells out are left out of it; the published code reads them as
    such.
    """

    scores = "videos"

    config: VideoAlignConfig

    def list_files(self) -> list[Files]:
        return [
            Files(self.config, (CHECKPOINT, SETTINGS)),
            Files(self.config.processor, QWEN_FILES),
        ]

    def __call__(self, videos: np.ndarray, prompts: Sequence[Prompt]) -> RewardResult:
        """Score whole videos.

        Raises:
            HubError: the network cannot be fetched.
            RewardError: its files are not the published ones.
        """
        import numpy as np

        # [N, 3]; an empty batch comes back as [0], which the reshape makes [0, 3].
        ratings = self._score_in_batches(videos, prompts).reshape(-1, len(DIMENSIONS))
        columns = {name: ratings[:, index] for index, name in enumerate(DIMENSIONS)}
        total = np.sum([columns[name] for name in self.config.dimensions], axis=0)
        failures = {
            int(row): f"the network gave {ratings[row].tolist()}"
            for row in np.flatnonzero(~np.isfinite(total))
        }
        total[list(failures)] = np.nan
        metrics = {
            f"{self.name}_{name}": np.where(np.isfinite(values), values, np.nan)
            for name, values in columns.items()
        }
        return RewardResult(total, metrics, failures)

    def load_score_function(self) -> Score:
        from ebbflow.rewards.qwen2_vl import JudgingQwen, load_backbone
        from ebbflow.rewards.weights import (
            build_plain_head,
            merge_lora_weights,
            pick_weights,
            read_weights,
        )

        folder, processor = (files.fetch_folder() for files in self.list_files())
        settings = _read_settings(folder / SETTINGS)
        # The newest by its number: as text, "checkpoint-9000" is above "checkpoint-11352".
        source = max(
            folder.glob(CHECKPOINT), key=lambda path: int(path.parent.name.rpartition("-")[2])
        )
        lora = settings["peft_lora_config"]
        weights = merge_lora_weights(
            read_weights(source), lora["lora_alpha"] / lora["lora_r"], source
        )
        model, tokenizer = load_backbone(weights, processor, source, TOKENS, self.config.precision)
        (outputs,) = pick_weights(weights, ("rm_head.weight",), source)
        head = build_plain_head(outputs, model.device)
        return partial(
            _compute_ratings,
            JudgingQwen(model, head, tokenizer, TOKENS),
            settings,
            self.config.frame_rate,
        )


def _read_settings(path: Path) -> dict[str, Any]:
    """What the checkpoint was trained with.

    Raises:
        RewardError: it is not a VideoReward with three special tokens.
    """
    try:
        settings: dict[str, Any] = json.loads(path.read_bytes())
        data = settings["data_config"]
        lora = settings["peft_lora_config"]
        known = (
            data["prompt_template_type"] == "detailed_special"
            and data["sample_type"] == "uniform"
            and data["num_frames"] is None
            and settings["model_config"]["reward_token"] == "special"
            and not lora["use_rslora"]
            and all(
                f"{name}_{part}" in settings["inference_config"]
                for name in DIMENSIONS.values()
                for part in ("mean", "std")
            )
        )
        # Only whether they are numbers that can be computed with; their use comes later.
        _ = data["fps"] * data["max_frame_pixels"] * lora["lora_alpha"] / lora["lora_r"]
    except (ValueError, TypeError, KeyError, ZeroDivisionError):
        known = False
    if not known:
        raise RewardError(
            f"{path} is not that of the published VideoReward; take the file that comes with the"
            " checkpoint"
        )
    return settings


def _compute_ratings(
    judge: JudgingQwen,
    settings: Mapping[str, Any],
    frame_rate: float,
    videos: np.ndarray | Tensor,
    texts: list[str],
) -> Tensor:
    """Return z-scores of uint8 videos [n, frames, height, width, 3]: [n, dimensions]."""
    import torch

    from ebbflow.rewards.qwen2_vl import resize_to_patch_grid
    from ebbflow.rewards.templates import fill_template

    vision = judge.model.config.vision_config
    data = settings["data_config"]
    scale = settings["inference_config"]
    assert not isinstance(videos, torch.Tensor)  # the reward declares no gradient
    sampled = videos[:, select_seen_frames(videos.shape[1], frame_rate, data["fps"])]
    factor = vision.patch_size * vision.spatial_merge_size
    # Frames are resized as images, (n * T, H, W, 3), and then put into their videos again.
    pixels = resize_to_patch_grid(
        sampled.reshape(-1, *videos.shape[2:]),
        MIN_PIXELS,
        data["max_frame_pixels"],
        factor,
        judge.model.device,
    ).unflatten(0, sampled.shape[:2])
    questions = [fill_template("videoalign", judge.remove_special_tokens(text)) for text in texts]
    # [n, tokens, 1], or [n, tokens, tokens] of a head with an output for each token, of which each
    # token's own is taken.
    outputs = judge.compute_outputs(pixels, questions, "<|video_pad|>")
    ratings = outputs.diagonal(dim1=1, dim2=2) if outputs.shape[2] > 1 else outputs[:, :, 0]
    mean, deviation = (
        torch.tensor(
            [scale[f"{name}_{part}"] for name in DIMENSIONS.values()], device=ratings.device
        )
        for part in ("mean", "std")
    )
    return (ratings - mean) / deviation


def select_seen_frames(count: int, frame_rate: float, wanted_rate: float) -> np.ndarray:
    """Return the indices of the frames that are looked at: evenly spaced from the first to the
    last, an even number, as published.

    Raises:
        RewardError: there is one frame.
    """
    import numpy as np

    if count < 2:
        raise RewardError("videoalign scores videos of two frames or more; raise model.frames")
    # Even numbers: the network merges two frames into one step of time.
    max_frames = min(MAX_FRAMES, count) // 2 * 2
    num_frames = 2 * round(min(max(count / frame_rate * wanted_rate, MIN_FRAMES), max_frames) / 2)
    return np.linspace(0, count - 1, num_frames).round().astype(int)
