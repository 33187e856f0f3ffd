"""Data that somebody else made: images or videos with captions, for supervised fine-tuning."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from ebbflow.recipe.algorithms import PublishedSetting, SigmaConfig
from ebbflow.recipe.base import Strict
from ebbflow.recipe.paths import PathText

DDRL = (
    "nvidia-cosmos/cosmos-rl"
    " configs/cosmos-predict2-5/cosmos-predict2-5-2b-720-reason-embedding-ddrl.toml"
)
DDRL_DEFAULTS = "nvidia-cosmos/cosmos-rl cosmos_rl/policy/config/wfm/__init__.py"


class BucketsConfig(Strict):
    """Sizes of about the area of the model's own size, one for each aspect ratio. A picture goes to
    the size with the nearest aspect ratio."""

    step: int = Field(64, ge=8)
    """Heights and widths are multiples of this, in pixels."""
    max_aspect_ratio: float = Field(2.0, ge=1, le=8)
    """Largest ratio of the long side to the short one. Pictures beyond it are cropped to it."""


class DataConfig(Strict):
    """Images or videos with captions (datasets/README.md)."""

    path: PathText = Field(min_length=1)
    """Folder of pictures with captions, or a .parquet file of images with captions. Both may be
    URIs."""
    caption_dropout: float = Field(0.1, ge=0, le=1)
    """Share of the captions that are replaced by the empty prompt, drawn again in each epoch, so
    that classifier-free guidance keeps working (2207.12598)."""
    buckets: BucketsConfig | None = None
    """Aspect-ratio buckets. Default: one size, that of ``model``; pictures are scaled to cover it,
    and what stands out is cropped."""
    frames_per_second: float = Field(16.0, gt=0)
    """Rate at which a model of videos takes the frames of a video, from its beginning."""


class AnchorConfig(Strict):
    """Data anchor (DDRL, 2512.04332): each optimiser step also trains on captioned pictures. loss
    <- loss + ``weight`` mean((v - u)^2)."""

    paper: ClassVar = "2512.04332"
    published: ClassVar = {
        "anchor.weight": PublishedSetting(0.01, DDRL, "data_beta"),
        "anchor.batch_size": PublishedSetting(
            1,
            DDRL,
            "for each GPU, of which there are hundreds",
            deviation="the size of a run follows the machines, not the method",
        ),
        "anchor.data.caption_dropout": PublishedSetting(
            0.2,
            DDRL,
            deviation="that of stages on data, where 2207.12598 found .1 to .2 alike",
        ),
        "noise levels": PublishedSetting(
            "the level and the noise of the rollout step",
            DDRL_DEFAULTS,
            "use_rl_sigma_and_noise",
            deviation="algorithms on final latents have no rollout step",
            ours="drawn by anchor.sigma",
        ),
    }

    data: DataConfig
    weight: float = Field(0.01, gt=0)
    """Weight of the loss on data, ``data_beta`` of DDRL's published recipes."""
    batch_size: int = Field(16, ge=1)
    """Pictures per optimiser step, over all training processes."""
    sigma: SigmaConfig = SigmaConfig(kind="schedule")
    """Distribution of the noise levels, one for each picture and step. ``schedule``: the 1,000
    levels of the family's own schedule."""
