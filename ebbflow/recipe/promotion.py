"""When a candidate replaces the champion."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from ebbflow.recipe.base import MAX_LENGTH, NAME, Strict, shorten_value

MAX_TOLERANCE = 2.0
"""Standard deviations: a guardrail that may fall further guards nothing."""
MAX_ABSOLUTE_TOLERANCE = 1000.0
MAX_MARGIN = 10.0
Tolerance = Annotated[float, Field(ge=0, le=MAX_TOLERANCE)]
AbsoluteTolerance = Annotated[float, Field(ge=0, le=MAX_ABSOLUTE_TOLERANCE)]


class MarginsConfig(Strict):
    """How far each image statistic may move from the champion's. The candidate must prove that it
    moved less.

    The unit is the standard deviation of the champion's prompts (Glass's delta, an effect size).
    For the diversity within a prompt it is a share of the champion's mean. ``null``: the statistic
    is measured and not tested.
    """

    # The two widest moves of the honest runs of ``benchmarks.reward_hacking``, both of one that
    # learned to the end, were a rise of the entropy by 2.6 and a fall of the diversity across
    # prompts by 1.4; the planted run that nothing but the latter refuses fell by 1.65.
    entropy: float | None = Field(3.0, gt=0, le=MAX_MARGIN)
    """Entropy of the grey levels. It falls when images become flat or clear, and rises with
    grain."""
    edge_density: float | None = Field(1.5, gt=0, le=MAX_MARGIN)
    """Share of the pixels that lie on an edge."""
    brightness: float | None = Field(1.5, gt=0, le=MAX_MARGIN)
    """Mean luma."""
    saturation: float | None = Field(1.0, gt=0, le=MAX_MARGIN)
    """Mean saturation."""
    sharpness: float | None = Field(1.0, gt=0, le=MAX_MARGIN)
    """Standard deviation of the Laplacian. Only a fall is tested, because a policy that learns to
    generate clear images raises it."""
    text_likeness: float | None = Field(1.0, gt=0, le=MAX_MARGIN)
    """Share of the image that looks like lines of text. Only a rise is tested, and only where no
    trained reward reads."""
    diversity_across_prompts: float | None = Field(1.75, gt=0, le=MAX_MARGIN)
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
    """How far the mean of a guardrail may fall below the champion's. The candidate must prove that
    it fell less."""

    default: float = Field(0.4, ge=0, le=MAX_TOLERANCE)
    """Tolerance of every guardrail that the two keys below do not name, in standard deviations of
    the champion's prompts (Glass's delta)."""
    standard_deviations: dict[str, Tolerance] = {}
    """Tolerances of single guardrails by name, in the same unit as ``default``."""
    absolute: dict[str, AbsoluteTolerance] = {}
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
    error_budget: float = Field(0.05, gt=0, le=0.5)
    """Probability that the gate may promote, in a year, any candidate that is no better than the
    champion. Every look of the gate spends a part of it."""
    looks_per_year: int = Field(52, ge=1, le=10_000)
    """Number of runs a year that the budget is shared by: 52 for one a week, 365 for one a night.
    The more there are, the larger a gain must be to be proven."""
    anchor_tolerance: float | None = Field(0.5, ge=0)
    """How far the reward and every guardrail may lie below the anchor in all, in standard
    deviations of the anchor's prompts. The anchor is the last version that a person approved, or
    else the base model. ``null``: no comparison with the anchor."""
    approval: float | None = Field(None, gt=0, le=24 * 365)
    """Hours in which a person must approve a policy that passed the gate. Without an answer in this
    time, the policy is rejected. Default: no approval is needed."""
