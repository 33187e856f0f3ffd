"""What one stage of training does: how it samples, what it learns with, and for how long."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ebbflow.recipe.algorithms import TRAJECTORY_ALGORITHMS, Algorithm, DiffusionNFT, FlowGRPO
from ebbflow.recipe.base import Strict


class Sampler(Strict):
    """How latents are denoised; the transitions are in ``ebbflow.flow.transition``."""

    name: Literal["ode", "flow_sde", "dance_sde", "cps"] = "ode"
    steps: int = Field(6, ge=2, le=1000)
    eta: float | None = Field(None, gt=0, le=2)
    """Noise level; left out: the published default of the sampler (.7, .3, .8)."""

    @model_validator(mode="after")
    def _cps_turns_at_one(self) -> Sampler:
        if self.name == "cps" and self.eta is not None and self.eta > 1:
            raise ValueError(f"eta = {self.eta}: the noise of cps, sin(eta * 90 degrees), falls again above 1; take 1 or less")
        return self


class Window(Strict):
    """Which denoising steps are stochastic and trained; one draw per optimisation step for all samples."""

    kind: Literal["all", "fixed", "random", "progressive"] = "progressive"
    """``all`` steps but the last, which is always deterministic; ``fixed`` at ``start``; ``random``: a new start at every
    optimisation step (Flow-GRPO-Fast); ``progressive``: moves by ``stride`` every ``steps_per_window`` optimisation steps and
    starts over (MixGRPO)."""
    size: int = Field(3, ge=1)
    start: int = Field(0, ge=0)
    limit: float = Field(0.5, gt=0, le=1)
    """Windows start within this share of the denoising steps: late steps carry mostly noise."""
    stride: int = Field(1, ge=1)
    steps_per_window: int = Field(10, ge=1)


class Advantages(Strict):
    """A = (R - group mean) / (std + 1e-4), clamped."""

    std: Literal["global", "group", "none"] = "global"
    clip: float = Field(5.0, gt=0)


class Optimizer(Strict):
    """AdamW with gradient clipping."""

    lr: float = Field(3e-4, ge=0, le=1)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)


class Stage(Strict):
    """What online and offline stages share."""

    algorithm: Algorithm
    sampler: Sampler = Sampler()
    window: Window | None = None
    """For algorithms that train on the steps of a trajectory; they have one by default."""
    advantages: Advantages = Advantages()
    optimizer: Optimizer = Optimizer()
    group_size: int = Field(16, ge=2)
    """Samples per prompt; advantages compare inside the group."""
    micro_batch: int = Field(64, ge=1)
    """Samples per forward and backward pass."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_follow_the_algorithm(cls, data: Any) -> Any:
        """Trajectory algorithms sample with Flow-SDE on a window unless told otherwise; the others need neither."""
        if not isinstance(data, dict):
            return data
        algorithm = data.get("algorithm", cls.model_fields["algorithm"].default)
        name = algorithm.get("name") if isinstance(algorithm, dict) else getattr(algorithm, "name", None)
        sampler = data.get("sampler", {})
        if str(name) in TRAJECTORY_ALGORITHMS and isinstance(sampler, dict):
            return {"window": {}} | data | {"sampler": {"name": "flow_sde"} | sampler}
        return data

    @model_validator(mode="after")
    def _sampler_and_window_suit_the_algorithm(self) -> Stage:
        name = self.algorithm.name
        if name not in TRAJECTORY_ALGORITHMS:
            if self.window is not None:
                raise ValueError(f"{name} trains on final latents alone; leave 'window' out")
            return self
        if self.sampler.name == "ode":
            raise ValueError(
                f"{name} needs the log-probabilities of a stochastic sampler and 'ode' has none; "
                "set sampler.name to flow_sde, dance_sde or cps, or algorithm.name to diffusion_nft"
            )
        if self.window is None:
            raise ValueError(f"{name} trains on a window of the denoising steps; leave 'window' out for the default one")
        reach = self.window.start + self.window.size
        if self.window.kind != "all" and reach >= self.sampler.steps:
            raise ValueError(
                f"the window's start + size = {reach} must be below sampler.steps = {self.sampler.steps}: "
                "the last step is deterministic; take a smaller window or more steps"
            )
        return self


class OnlineStage(Stage):
    """Fresh samples, immediate updates: rollout, score, advantages, update, repeated with the models hot."""

    kind: Literal["online"] = "online"
    algorithm: Algorithm = FlowGRPO()
    steps: int = Field(40, ge=1)
    """Rollout-and-update steps."""
    prompts_per_step: int = Field(8, ge=1)
    updates_per_step: int = Field(2, ge=1)
    """Optimiser steps per rollout batch: its samples are split into that many parts."""


class OfflineStage(Stage):
    """A large batch generated and scored once, in shards, then several epochs over it."""

    kind: Literal["offline"] = "offline"
    algorithm: Algorithm = DiffusionNFT()
    prompts: int = Field(64, ge=1)
    shards: int = Field(2, ge=1)
    """Rollout and scoring pods; prompts are dealt out evenly."""
    epochs: int = Field(2, ge=1)
    batch_size: int = Field(128, ge=1)
    """Samples per optimiser step, over all training processes."""

    @model_validator(mode="after")
    def _shards_have_prompts(self) -> OfflineStage:
        if self.shards > self.prompts:
            raise ValueError(f"{self.shards} shards for {self.prompts} prompts leave some empty; take one a prompt at most")
        if self.algorithm.name in TRAJECTORY_ALGORITHMS:
            raise ValueError(
                f"{self.algorithm.name} needs fresh trajectories: use it in an online stage, and diffusion_nft in an offline one"
            )
        return self


AnyStage = Annotated[OnlineStage | OfflineStage, Field(discriminator="kind")]
