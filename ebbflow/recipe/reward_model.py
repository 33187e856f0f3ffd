"""What a reward model is trained on and how: the section ``reward_model`` of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ebbflow.recipe.base import MAX_LENGTH, NAME, Strict
from ebbflow.recipe.paths import PathText
from ebbflow.recipe.pretrained import PretrainedSourceConfig


class ClipNetworkConfig(PretrainedSourceConfig):
    """A CLIP in the Hugging Face layout, whose embeddings a linear head weighs."""

    name: Literal["clip"] = "clip"
    path: PathText | None = "openai/clip-vit-large-patch14"
    train: Literal["lora", "head"] = "lora"
    """``lora``: adapters on both towers and the head. ``head``: the head alone."""
    rank: int = Field(16, ge=1)
    """Rank of the adapters."""
    alpha: float = Field(16.0, gt=0)
    """Scale of the adapters, times their rank."""


class GlyphReaderConfig(Strict):
    """A small network for the pictures of the glyph model, which begins as a reader of rendered
    letters.
    """

    name: Literal["glyph_reader"] = "glyph_reader"
    height: int = Field(16, ge=8, le=64)
    """Height of the pictures in pixels."""
    width: int = Field(32, ge=8, le=256)
    """Width of the pictures in pixels."""
    letters: int = Field(4, ge=1)
    """Letters of every target."""


RewardNetworkConfig = Annotated[ClipNetworkConfig | GlyphReaderConfig, Field(discriminator="name")]


class RewardModelConfig(Strict):
    """A reward model that is trained on labels of people (docs/reward_models.md)."""

    name: str = Field("reward-model", pattern=NAME, max_length=MAX_LENGTH)
    """Name of the registered model in MLflow."""
    labels: list[PathText] = Field(min_length=1)
    """Files of labels, and folders in which ``ebbflow label`` has left some, at any depth."""
    network: RewardNetworkConfig = GlyphReaderConfig()
    epochs: int = Field(10, ge=1)
    """Passes over the labels."""
    batch: int = Field(32, ge=1)
    """Labels per update."""
    lr: float = Field(1e-3, gt=0)
    """Learning rate of AdamW."""
    weight_decay: float = Field(0.01, ge=0)
    held_out: float = Field(0.2, gt=0, lt=1)
    """Share of the prompts whose labels are not trained on. A prompt stays on its side when labels
    are added, unless a spelling of it that is trained on is new."""
    queue: int = Field(200, ge=1)
    """Pairs that a turn of the flywheel leaves for people to label (docs/flywheel.md)."""
    hacked: PathText | None = None
    """Pairs of honest (``chosen``) and hacked (``rejected``) pictures. The gate refuses a reward
    model that prefers the hacked ones."""
    confidence: float = Field(0.95, gt=0.5, lt=1)
    """Of the intervals of the report and of the gate."""
