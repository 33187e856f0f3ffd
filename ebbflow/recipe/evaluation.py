"""How policies are evaluated."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, ValidationError, model_validator

from ebbflow.recipe.base import Strict
from ebbflow.recipe.choices import SAMPLER_HELP, SamplerConfig
from ebbflow.recipe.model import ModelConfig, resize_model
from ebbflow.recipe.plugins import validate_name_or_path
from ebbflow.recipe.samplers import SAMPLERS


class EvaluationConfig(Strict):
    """Evaluation on fixed prompts and fixed noise. The promoted policy is served with the same
    sampler and size."""

    steps: int = Field(10, ge=2, le=1000)
    """Number of denoising steps."""
    sampler: Annotated[str, validate_name_or_path(*SAMPLERS)] = Field(
        "ode",
        description=SAMPLER_HELP,
    )
    eta: float | None = Field(None, gt=0, le=2)
    """Noise level of a stochastic sampler. Default: the published value of the sampler."""
    height: int | None = Field(None, ge=8)
    """Height of the images, in pixels. Default: ``model.height``. With a larger one, a policy that
    trains on small images is evaluated on large ones."""
    width: int | None = Field(None, ge=8)
    """Width of the images, in pixels. Default: ``model.width``."""
    micro_batch: int = Field(64, ge=1)
    """Samples per forward pass."""
    samples: int = Field(4, ge=1, le=64)
    """Number of samples of each of the ``repeated_prompts``. All other prompts have one sample."""
    repeated_prompts: int | None = Field(None, ge=0)
    """Number of held-out prompts with several ``samples``; the first ones are used. Default: all.
    More samples let the gate prove smaller gains, and measure the diversity of a prompt's images
    and the score of the best one. A smaller number makes evaluations shorter."""
    confidence: float = Field(0.95, ge=0.8, lt=1)
    """Confidence level of the intervals in the report, and of the gate's tests of guardrails and
    anchor. For the reward the gate has an error budget (``promotion.error_budget``)."""
    resamples: int = Field(10_000, ge=100)
    """Number of bootstrap resamples of a test of the image statistics."""

    @model_validator(mode="after")
    def _check_sampler(self) -> EvaluationConfig:
        try:
            # Building it runs the checks of a sampler, on the keys that stand flat in this section.
            _ = self.sampler_with_steps
        except ValidationError as error:
            # Only the reason: pydantic would add a place inside of ``SamplerConfig``, which the
            # recipe does not have here.
            raise ValueError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None
        return self

    @property
    def sampler_with_steps(self) -> SamplerConfig:
        """The sampler with its steps."""
        return SamplerConfig(name=self.sampler, steps=self.steps, eta=self.eta)

    def evaluated_model(self, model: ModelConfig) -> ModelConfig:
        """A base model as it generates in an evaluation."""
        return resize_model(model, self.height, self.width)


DRIFT_SIGMAS = (0.25, 0.5, 0.75, 1.0)
"""The noise levels at which an evaluation compares the policy's velocity with the base model's."""
