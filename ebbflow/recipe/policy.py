"""What is trained: all parameters or adapters, and what the policy starts from."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, model_validator

from ebbflow.recipe.algorithms import EmaScheduleConfig
from ebbflow.recipe.base import Strict
from ebbflow.recipe.pretrained import PretrainedSourceConfig

CHAMPION = "champion"
"""The value of ``policy.start`` for the registered champion."""


class PolicyConfig(Strict):
    """Which parameters are trained, and which are evaluated and served."""

    train: Literal["full", "lora"] = "full"
    """``full``: train all parameters. ``lora``: train LoRA adapters."""
    rank: int = Field(16, ge=1)
    """Rank of the adapters."""
    alpha: int = Field(16, ge=1)
    """Scale of the adapters: their product is multiplied by alpha / rank."""
    targets: list[str] | None = Field(None, min_length=1)
    """Names of the linear layers that LoRA adapts, or the ends of these names. Default: the layers
    that the model's family names."""
    layers: list[str] | None = Field(None, min_length=1)
    """Patterns (``*`` for anything) of the layers to train, such as ``"transformer_blocks.1?.*"``.
    Default: all. Under LoRA, only ``targets`` that match a pattern are trained."""
    init: Literal["gaussian", "kaiming"] = "gaussian"
    """Initialisation of LoRA's first factors. ``gaussian``: normal with a standard deviation of 1 /
    rank. ``kaiming``: uniform, as in the code of LoRA's authors. The second factors are 0, so that
    the policy starts at the base model."""
    rslora: bool = False
    """Scale adapters by alpha / sqrt(rank) instead of alpha / rank, so that their effect does not
    shrink with the rank (2312.03732)."""
    dora: bool = False
    """DoRA (2402.09353): train the magnitude of each row of an adapted weight separately from its
    direction. The result is closer to full training at low ranks, and training is slower."""
    start: PretrainedSourceConfig | Literal["champion"] | None = None
    """Start training from this policy instead of the base model: the policy folder of an earlier
    run, or a published LoRA of this base model (a file, a folder or a repository) whose rank is at
    most ``rank``. ``champion``: the champion of ``promotion.model_name`` when the run begins, or
    the base model while there is none."""
    ema: EmaScheduleConfig | None = None
    """Exponential moving average of the trained parameters, updated after every optimiser step. If
    it is set, the average is evaluated, promoted and served; training continues from the parameters
    themselves."""

    @property
    def adapter_scale(self) -> float:
        """The factor of an adapter's product (2312.03732 for rsLoRA)."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @model_validator(mode="after")
    def _check_variants_of_adapters(self) -> PolicyConfig:
        variants = {"init": self.init != "gaussian", "rslora": self.rslora, "dora": self.dora}
        used = [name for name, is_used in variants.items() if is_used]
        if self.train == "full" and used:
            raise ValueError(
                f"{', '.join(used)}: is for adapters; set train to lora, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_start_has_path(self) -> PolicyConfig:
        # The class is shared with ``model``, where no path means that the base model is trained
        # here.
        if isinstance(self.start, PretrainedSourceConfig) and not self.start.path:
            raise ValueError(
                "start needs the 'path' of a policy folder or of a LoRA; leave start out to begin"
                " at the base model"
            )
        return self
