"""How an online stage runs: who does its work, on what, and what it logs apart from the
training."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from ebbflow.recipe.base import Strict

MODES = {
    "sync": "every step trains on rollouts of the policy as it is",
    "one_step_off": (
        "while a step trains, the rollouts of the next are generated with the weights that it"
        " started from"
    ),
    "async": (
        "rollouts run up to 'staleness' steps ahead, with the newest weights at each of their"
        " parts; older ones are dropped"
    ),
}
Mode = Literal["sync", "one_step_off", "async"]
Role = Literal["training", "rollout", "reward"]


class WorkersConfig(Strict):
    """The number of workers of one role, and the share of a machine that each gets under
    ``placement: ray``."""

    count: int = Field(1, ge=1)
    cpus: float = Field(1, gt=0)
    """CPU cores per worker. Several workers may share a core by fractions."""
    gpus: float = Field(0, ge=0)
    """GPUs per worker. Several workers may share a GPU by fractions."""
    cores: list[int] | None = Field(None, min_length=1)
    """Pin these workers to the CPU cores with these numbers. Default: no pinning."""


class ResourcesConfig(Strict):
    """The workers of an online stage. With ``placement: in_process`` only ``reward.count`` may be
    above 1."""

    training: WorkersConfig = WorkersConfig()
    rollout: WorkersConfig = WorkersConfig()
    reward: WorkersConfig = WorkersConfig()


class ScoringConfig(Strict):
    """Time-out and retries of rewards in an online stage. Scores that fail in the end are masked
    and counted (``max_failed_share``)."""

    timeout: float = Field(600, gt=0)
    """Seconds for the images of one part of a step."""
    retries: int = Field(2, ge=0)
    """Retries after a time-out, an error or the death of a worker."""


class ValidationConfig(Strict):
    """Validation on fixed prompts with fixed noise, before the first step and during the stage."""

    every: int = Field(10, ge=1)
    """Steps between two validations."""
    prompts: int = Field(16, ge=1)
    """Number of validation prompts; the first ones are used."""
    best: bool = False
    """End with the policy of the best validation instead of the last one. Only steps with a
    checkpoint count."""


class DumpsConfig(Strict):
    """Dumps of rollouts for inspection: images, and a JSON line for each with prompt, target,
    scores, policy version and seed."""

    every: int = Field(10, ge=1)
    """Steps between two dumps."""
    samples: int = Field(16, ge=1)
    """Images per dump, the first ones of the step."""


class ProfileConfig(Strict):
    """Profiles of some steps: traces of torch's profiler and the memory of GPUs, for the first task
    of the step on each worker."""

    steps: list[int] = Field([1], min_length=1)
    """Indices of the steps, from zero."""
    roles: list[Role] = Field(["training", "rollout"], min_length=1)


class PromptFilterConfig(Strict):
    """Filter of training prompts: the stage scores them once with the policy that it starts from,
    and drops those outside the limits."""

    prompts: int | None = Field(None, ge=1)
    """Number of prompts to try, chosen at random. The stage trains on those that remain. Default:
    all."""
    samples: int = Field(4, ge=2)
    """Samples per prompt, generated and scored as in training."""
    min_reward: float | None = None
    max_reward: float | None = None
    """Keep prompts whose mean reward (the weighted sum) lies in [``min_reward``,
    ``max_reward``]."""
    min_std: float = Field(0.0, ge=0)
    """Keep prompts whose samples have at least this standard deviation of rewards."""

    @model_validator(mode="after")
    def _check_filter_has_effect(self) -> PromptFilterConfig:
        if self.min_reward is None and self.max_reward is None and not self.min_std:
            raise ValueError(
                "it leaves nothing out; give min_reward, max_reward or min_std, or leave"
                " prompt_filter out"
            )
        if (
            self.min_reward is not None
            and self.max_reward is not None
            and self.min_reward > self.max_reward
        ):
            raise ValueError(
                f"min_reward = {self.min_reward:g} is above max_reward = {self.max_reward:g}; raise"
                " the second"
            )
        return self


CURRICULA = {
    "spread": (
        "the standard deviation of its samples' rewards, which is what advantages come from"
        " (2408.15099)"
    ),
    "low_reward": "how far its mean reward is below the best mean so far (Kimi k1.5, 2501.12599)",
}


class CurriculumConfig(Strict):
    """Sample prompts by their rewards so far, instead of in turn. Prompts without rewards count as
    much as the best."""

    weight: Literal["spread", "low_reward"] = Field(
        "spread", description="; ".join(f"{name}: {text}" for name, text in CURRICULA.items()) + "."
    )
    floor: float = Field(0.1, gt=0, le=1)
    """Smallest weight of a prompt, as a share of the largest, so that every prompt comes back."""
    rate: float = Field(0.5, gt=0, le=1)
    """Weight of the newest group in the running mean and standard deviation of a prompt."""


class OnlineConfig(Strict):
    """How an online stage runs, apart from what it learns and how."""

    mode: Mode = Field(
        "sync", description="; ".join(f"{name}: {text}" for name, text in MODES.items()) + "."
    )
    staleness: int = Field(1, ge=1)
    """With mode ``async``: the number of optimisation steps that the policy may be ahead of the
    rollouts that it trains on."""
    placement: Literal["in_process", "ray"] = "in_process"
    """``in_process``: everything in one process. ``ray``: training, rollouts and rewards have
    workers of their own, as Ray actors."""
    resources: ResourcesConfig = ResourcesConfig()
    prompt_filter: PromptFilterConfig | None = None
    curriculum: CurriculumConfig | None = None
    rollout_timeout: float = Field(3600, gt=0)
    """With ``placement: ray``: seconds for the rollouts of one part of a step. A worker that takes
    longer is replaced."""
    scoring: ScoringConfig = ScoringConfig()
    validation: ValidationConfig | None = None
    dumps: DumpsConfig | None = None
    profile: ProfileConfig | None = None
    statistics_alarm: float | None = Field(2.0, gt=0)
    """Warn, and tell the report, when an image statistic (entropy, edges, brightness ...) of a
    step's samples differs from the first step's by more than this number of its standard
    deviations, beyond chance. ``null``: no warning."""

    def is_profiled(self, role: Role, step: int) -> bool:
        """Whether the work of a role for a step is profiled."""
        return (
            self.profile is not None and role in self.profile.roles and step in self.profile.steps
        )

    @model_validator(mode="after")
    def _check_workers_of_process(self) -> OnlineConfig:
        if self.placement == "ray":
            return self
        alone: tuple[Role, ...] = ("training", "rollout")
        if several := [role for role in alone if getattr(self.resources, role).count > 1]:
            raise ValueError(
                f"resources.{several[0]}.count above 1 needs processes of their own; set placement:"
                " ray, or leave it at 1"
            )
        for role, workers in self.resources:
            if shares := [
                key
                for key in ("cpus", "gpus", "cores")
                if vars(workers)[key] != vars(WorkersConfig())[key]
            ]:
                raise ValueError(
                    f"resources.{role}.{shares[0]} is for processes of their own; set placement:"
                    " ray, or leave it out"
                )
        if self.profile and "reward" in self.profile.roles:
            raise ValueError(
                "profile.roles has 'reward', which is scored during the rollouts, and torch has one"
                " profiler per process; set placement: ray, or leave 'reward' out"
            )
        return self

    @model_validator(mode="after")
    def _check_staleness_of_mode(self) -> OnlineConfig:
        if self.mode != "async" and self.staleness != 1:
            raise ValueError(
                f"staleness = {self.staleness} is for mode: async; mode {self.mode!r} has none to"
                " choose, leave it out"
            )
        return self
