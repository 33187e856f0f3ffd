"""The keys of an online stage beyond those of every stage, in four groups.

A group is a base class of ``OnlineStageConfig``: its keys stand flat in the YAML of the stage, and
``ebbflow keys`` prints its heading above them.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from ebbflow.recipe.base import Strict
from ebbflow.recipe.choices import TreeConfig
from ebbflow.recipe.plugins import describe_choices

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
PLACEMENTS = {
    "in_process": "everything runs in one process, on one GPU",
    "colocated": (
        "a group of processes (``train_processes`` on each of ``train_nodes``, keys of the"
        " deployment), each of which generates, scores and trains on a share of every step, on a"
        " GPU of its own"
    ),
    "ray": "training, rollouts and rewards have workers of their own, as Ray actors",
}
Placement = Literal["in_process", "colocated", "ray"]
Mode = Literal["sync", "one_step_off", "async"]
Role = Literal["training", "rollout", "reward"]


class WorkersConfig(Strict):
    """The number of workers of one role, and the share of a machine that each worker gets with
    ``placement: ray``."""

    count: int = Field(1, ge=1)
    """Number of workers."""
    cpus: float = Field(1, gt=0)
    """CPU cores per worker. A fraction lets several workers share a core."""
    gpus: float = Field(0, ge=0)
    """GPUs per worker. A fraction lets several workers share a GPU."""
    cores: list[int] | None = Field(None, min_length=1)
    """Pin these workers to the CPU cores with these numbers. Default: no pinning."""


class ResourcesConfig(Strict):
    """The workers of an online stage. Without ``placement: ray`` only ``reward.count`` may be above
    1: the threads of a process that score."""

    training: WorkersConfig = WorkersConfig()
    rollout: WorkersConfig = WorkersConfig()
    reward: WorkersConfig = WorkersConfig()


class ScoringConfig(Strict):
    """Time-out and retries of rewards in an online stage. Samples whose scoring still fails are
    masked and counted (``max_failed_share``)."""

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
    """End with the policy of the best validation instead of the last policy. Only steps with a
    checkpoint count."""


class DumpsConfig(Strict):
    """Dumps of rollouts for inspection: images, and for each image a JSON line with its prompt,
    target, scores, policy version and seed."""

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
    """Roles whose workers are profiled."""


class PromptFilterConfig(Strict):
    """Filter of training prompts. Before its first step, the stage scores them with the policy that
    it starts from, and drops those outside the limits."""

    prompts: int | None = Field(None, ge=1)
    """Number of prompts to try, chosen at random. The stage trains on those that pass. Default: all
    prompts."""
    samples: int = Field(4, ge=2)
    """Samples per prompt, generated and scored as in training."""
    min_reward: float | None = None
    """Drop prompts whose mean reward (the weighted sum) is below this value."""
    max_reward: float | None = None
    """Drop prompts whose mean reward (the weighted sum) is above this value."""
    min_std: float = Field(0.0, ge=0)
    """Drop prompts whose samples have a smaller standard deviation of rewards."""

    @model_validator(mode="after")
    def _check_filter_has_effect(self) -> PromptFilterConfig:
        # min_std = 0 drops nothing, as no standard deviation is below it.
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
    """Choose prompts by their rewards so far, instead of in turn. A prompt without rewards so far
    gets the largest weight."""

    weight: Literal["spread", "low_reward"] = Field(
        "spread", description=describe_choices(CURRICULA)
    )
    floor: float = Field(0.1, gt=0, le=1)
    """Smallest weight of a prompt, as a share of the largest. It lets every prompt come back."""
    rate: float = Field(0.5, gt=0, le=1)
    """Weight of the newest group in the running mean and standard deviation of a prompt."""


class StepKeys(Strict):
    """How long the stage is, and how a step trains on the samples that it has generated."""

    heading: ClassVar = "steps and updates"

    steps: int = Field(40, ge=1)
    """Number of steps. Each generates rollouts and updates the policy."""
    updates_per_step: int = Field(2, ge=1)
    """Optimiser steps per rollout batch. The samples are split into this number of parts."""
    reuse_rollout_forward: bool = False
    """For algorithms on trajectories with ``updates_per_step: 1``. The backward pass uses the
    rollout's own forward passes, so nothing is predicted again. This is faster, but the activations
    of all trained steps of all samples of a step are in memory together (docs/online.md)."""
    tree: TreeConfig | None = None
    """Tree rollouts, for algorithms on trajectories: the samples of a group split from common
    trajectories, and every denoising step has an advantage of its own (docs/algorithms.md)."""


class PromptSamplingKeys(Strict):
    """Which prompts a step takes."""

    heading: ClassVar = "prompts"

    prompts_per_step: int = Field(8, ge=1)
    """Number of prompts of a step."""
    refill_rounds: int = Field(0, ge=0)
    """Rounds of dynamic sampling (DAPO, 2503.14476). In each, a step replaces the prompts whose
    samples all have the same score by other prompts, and waits for their rollouts, which the newest
    weights generate. 0: no dynamic sampling."""
    prompt_filter: PromptFilterConfig | None = None
    curriculum: CurriculumConfig | None = None

    @model_validator(mode="after")
    def _check_step_can_be_filled(self) -> PromptSamplingKeys:
        # How many prompts pass is known only when the stage has scored them;
        # ``ebbflow.online.prompt_sampler`` fails then if they are too few.
        num_tried = self.prompt_filter.prompts if self.prompt_filter else None
        if num_tried is not None and num_tried < self.prompts_per_step:
            raise ValueError(
                f"prompt_filter.prompts = {num_tried} are fewer than prompts_per_step ="
                f" {self.prompts_per_step}; raise the first"
            )
        return self


class PlacementKeys(Strict):
    """Which processes do the work of a step, and how far ahead of training the rollouts are."""

    heading: ClassVar = "workers and their schedule"

    mode: Mode = Field("sync", description=describe_choices(MODES))
    staleness: int = Field(1, ge=1)
    """With mode ``async``: the number of optimisation steps that the policy may be ahead of the
    rollouts that it trains on."""
    placement: Placement = Field("in_process", description=describe_choices(PLACEMENTS))
    resources: ResourcesConfig = ResourcesConfig()
    rollout_timeout: float = Field(3600, gt=0)
    """With ``placement: ray``: seconds for the rollouts of one part of a step. A worker that takes
    longer is replaced."""
    scoring: ScoringConfig = ScoringConfig()

    @model_validator(mode="after")
    def _check_workers_of_process(self) -> PlacementKeys:
        if self.placement == "ray":
            return self
        # Rewards may have several workers in one process: their calls run in threads.
        single_roles: tuple[Role, ...] = ("training", "rollout")
        for single_role in single_roles:
            if getattr(self.resources, single_role).count > 1:
                raise ValueError(
                    f"resources.{single_role}.count above 1 needs processes of their own; set"
                    " placement: ray, or leave it at 1 (with placement: colocated the deployment's"
                    " train_processes counts the processes)"
                )
        # Compared with the defaults, so that a resolved recipe, which spells out every key, passes.
        defaults = vars(WorkersConfig())
        for role, workers in self.resources:
            for key in ("cpus", "gpus", "cores"):
                if vars(workers)[key] != defaults[key]:
                    raise ValueError(
                        f"resources.{role}.{key} is for processes of their own; set placement:"
                        " ray, or leave it out"
                    )
        return self

    @model_validator(mode="after")
    def _check_gpus_of_ranks(self) -> PlacementKeys:
        # Two ranks on one GPU are a "Duplicate GPU" for NCCL, after all models have been loaded.
        training = self.resources.training
        if training.count > 1 and 0 < training.gpus < 1:
            raise ValueError(
                f"resources.training.gpus = {training.gpus:g} with count = {training.count}: NCCL"
                " needs a GPU of its own for each rank; set gpus to 1, to 0 to train on CPUs, or"
                " count to 1"
            )
        return self

    @model_validator(mode="after")
    def _check_staleness_of_mode(self) -> PlacementKeys:
        # 1 is the default, which a resolved recipe spells out.
        if self.mode != "async" and self.staleness != 1:
            raise ValueError(
                f"staleness = {self.staleness} is for mode: async; mode {self.mode!r} has none to"
                " choose, leave it out"
            )
        return self


class MonitoringKeys(Strict):
    """What a stage measures and records besides its training."""

    heading: ClassVar = "validation and monitoring"

    validation: ValidationConfig | None = None
    dumps: DumpsConfig | None = None
    profile: ProfileConfig | None = None
    statistics_alarm: float | None = Field(2.0, gt=0)
    """Warn in the log and in the report when an image statistic (entropy, edges, brightness ...) of
    a step's samples differs from the first step's by more than this number of its standard
    deviations, beyond chance. ``null``: no warning."""

    def list_profiled_steps(self, role: Role) -> frozenset[int]:
        """List the steps for which the work of a role is profiled."""
        if self.profile is None or role not in self.profile.roles:
            return frozenset()
        return frozenset(self.profile.steps)
