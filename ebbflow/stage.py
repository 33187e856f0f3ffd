"""What every part of a training stage needs to know: which stage of the run it is, on which model and prompts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ebbflow.algorithms.base import Algorithm
from ebbflow.algorithms.registry import ALGORITHMS
from ebbflow.data.prompts import Prompt
from ebbflow.flow.noise import derive_seed
from ebbflow.models import Model, load_model
from ebbflow.recipe import Recipe
from ebbflow.recipe.stages import OfflineStage, OnlineStage
from ebbflow.records import StageRecord
from ebbflow.rollouts.generate import SampleKeys
from ebbflow.training.policy import Policy, PolicyCard

Log = Callable[[dict[str, float], int], None]
"""Takes the metrics of a training step and the step's number."""


@dataclass(frozen=True)
class Place:
    """A stage within a run: the recipe, and indices from zero."""

    recipe: Recipe
    round: int
    stage: int

    @property
    def config(self) -> OnlineStage | OfflineStage:
        return self.recipe.stages[self.stage]

    @property
    def online(self) -> OnlineStage:
        assert isinstance(self.config, OnlineStage)
        return self.config

    @property
    def offline(self) -> OfflineStage:
        assert isinstance(self.config, OfflineStage)
        return self.config

    @property
    def algorithm(self) -> Algorithm:
        return ALGORITHMS[self.config.algorithm.name]

    @property
    def label(self) -> str:
        return self.recipe.stage_label(self.round, self.stage)

    @property
    def seed(self) -> int:
        """Seed of all noise of the stage; two stages never share a draw."""
        return derive_seed(self.recipe.seed, "stage", self.round, self.stage)

    @property
    def rollout_copy(self) -> str:
        """Which copy of the policy generates: the old one where the algorithm keeps one."""
        return "old" if self.algorithm.old_decay else "current"

    def groups(self, prompts: list[Prompt], step: int) -> tuple[list[Prompt], SampleKeys]:
        """One group of samples per prompt: the prompt of every sample, and its keys. Samples are numbered across steps."""
        size = self.config.group_size
        repeated = [prompt for prompt in prompts for _ in range(size)]
        samples = [step * size + member for _ in prompts for member in range(size)]
        return repeated, SampleKeys(self.seed, [prompt.prompt_id for prompt in repeated], samples)


def open_model(recipe: Recipe, base: Path) -> Model:
    """Load the base model with the recipe's number of threads."""
    torch.set_num_threads(recipe.threads)
    return load_model(base)


def open_policy(place: Place, model: Model, folder: Path, shard: bool = False) -> tuple[Policy, PolicyCard]:
    """The policy of a folder, ready for a stage: with an old copy if the algorithm keeps one and the folder brought none."""
    policy = Policy(model, place.recipe.policy, place.recipe.seed, shard)
    card = policy.load(folder)
    if place.algorithm.old_decay:
        policy.ensure("old")
    return policy, card


@dataclass
class Kept:
    """A log that also keeps what it was told, for the report."""

    log: Log | None
    """Where to pass it on, if anywhere."""
    metrics: list[dict[str, float]] = field(default_factory=list)

    def __call__(self, metrics: dict[str, float], step: int) -> None:
        self.metrics.append({"step": step, **metrics})
        if self.log:
            self.log(metrics, step)

    def write(self, path: Path) -> None:
        """The kept metrics as a JSON list with one object per step."""
        path.write_text(json.dumps(self.metrics))


def save_policy(place: Place, policy: Policy, card: PolicyCard, record: StageRecord, folder: Path, write: bool = True) -> None:
    """Write the policy folder that a stage leaves behind; ``card`` is the one it started from."""
    trained = card.model_copy(
        update={
            "recipe_digest": place.recipe.digest,
            "version": card.version + record.optimizer_steps,
            "copies": ("old",) if place.algorithm.old_decay else (),
            "stages": (*card.stages, record.label),
        }
    )
    policy.save(folder, trained, write)
