"""When a candidate replaces the champion."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from ebbflow.recipe.base import MAX_LENGTH, NAME, Strict, shorten_value

Tolerance = Annotated[float, Field(ge=0)]


class MarginsConfig(Strict):
    """How far each image statistic may move from the champion's. The candidate must prove that it
    moved less.

    The unit is the standard deviation of the champion's prompts (Glass's delta, an effect size).
    For the diversity within a prompt it is a share of the champion's mean. ``null``: the statistic
    is measured and not tested.
    """

    entropy: float | None = Field(2.5, gt=0)
    """Entropy of the grey levels. It falls when images become flat or clear, and rises with
    grain."""
    edge_density: float | None = Field(1.5, gt=0)
    """Share of the pixels that lie on an edge."""
    brightness: float | None = Field(1.5, gt=0)
    """Mean luma."""
    saturation: float | None = Field(1.0, gt=0)
    """Mean saturation."""
    sharpness: float | None = Field(1.0, gt=0)
    """Standard deviation of the Laplacian. Only a fall is tested, because a policy that learns to
    generate clear images raises it."""
    text_likeness: float | None = Field(1.0, gt=0)
    """Share of the image that looks like lines of text. Only a rise is tested, and only where no
    trained reward reads."""
    diversity_across_prompts: float | None = Field(1.5, gt=0)
    """Distance of an image to the nearest image of another prompt; 0 for duplicates. For each
    diversity, only a fall is tested."""
    # Below 1: a margin of the whole mean would allow a policy that draws one picture only.
    diversity_latents: float | None = Field(0.9, gt=0, lt=1)
    """Distance between the latents of a prompt's samples, as a share of the champion's mean. Where
    only one picture is right, it falls as a policy learns."""
    diversity_pixels: float | None = Field(0.9, gt=0, lt=1)
    """Distance between the thumbnails of a prompt's samples, as a share of the champion's mean."""
    diversity_features: float | None = Field(0.9, gt=0, lt=1)
    """Distance between the features of a prompt's samples, as a share of the champion's mean. It
    needs a reward or guardrail with a network."""


class GuardrailToleranceConfig(Strict):
    """How far the mean of a guardrail may fall below the champion's."""

    default: float = Field(0.1, ge=0)
    """Tolerance of every guardrail that the two keys below do not name, in standard deviations of
    the champion's prompts (Glass's delta)."""
    standard_deviations: dict[str, Tolerance] = {}
    """Tolerances of single guardrails by name, in the same unit as ``default``."""
    absolute: dict[str, Tolerance] = {}
    """Tolerances of single guardrails by name, on the scale of their scores."""

    @model_validator(mode="before")
    @classmethod
    def _reject_single_number(cls, value: Any) -> Any:
        # One number for all guardrails looks natural, and their scores have different scales.
        if isinstance(value, (int, float)):
            raise ValueError(
                "one number does not fit the scales of all guardrails; give {default: ...} in"
                f" standard deviations, or {{absolute: {{tesseract: {shorten_value(value)}}}}}"
            )
        return value

    @model_validator(mode="after")
    def _check_single_tolerance(self) -> GuardrailToleranceConfig:
        # Which of the two units should win is the user's choice.
        duplicates = sorted(self.standard_deviations.keys() & self.absolute.keys())
        if duplicates:
            raise ValueError(f"{', '.join(duplicates)} has two tolerances; keep one of them")
        return self


class PromotionConfig(Strict):
    """When the best policy of the run becomes champion."""

    model_name: str = Field("ebbflow-glyph", pattern=NAME, max_length=MAX_LENGTH)
    """Name of the registered model in MLflow."""
    guardrail_tolerance: GuardrailToleranceConfig = GuardrailToleranceConfig()
    margins: MarginsConfig = MarginsConfig()
    approval: float | None = Field(None, gt=0, le=24 * 365)
    """Hours in which a person must approve a policy that passed the gate. Without an answer in this
    time, the policy is rejected. Default: no approval is needed."""
