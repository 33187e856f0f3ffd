"""The recipe: one YAML file says everything about one run."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, model_validator

from ebbflow.recipe.algorithms import Following, name_or_path
from ebbflow.recipe.base import RecipeError, Strict, explain
from ebbflow.recipe.stages import AnyStage, OfflineStage, OnlineStage


class GlyphTraining(Strict):
    """How the glyph base model is trained from scratch when ``model.path`` is left out."""

    height: int = Field(16, ge=16, le=64, multiple_of=8)
    width: int = Field(32, ge=16, le=256, multiple_of=8)
    letters: int = Field(4, ge=1, le=16)
    """Letters per string."""
    steps: int = Field(900, ge=1)
    batch: int = Field(64, ge=1)
    lr: float = Field(2e-3, gt=0, le=1)
    ema: float = Field(0.99, ge=0, lt=1)
    caption_noise: float = Field(0.35, ge=0, le=1)
    """In the last third each letter of a caption is replaced with this probability. It leaves the headroom that
    reinforcement learning then wins back: without it the base already spells almost everything right."""
    seed: int = Field(0, ge=0, lt=2**63)


class Model(Strict):
    """The base model: a folder in the Hugging Face layout of its family, or the glyph model trained here."""

    family: Annotated[str, name_or_path("glyph")] = "glyph"
    """A family that comes along, or ``package.module:load`` of a user's own, a function of the folder and the device."""
    path: str | None = None
    training: GlyphTraining = GlyphTraining()

    @model_validator(mode="after")
    def _only_glyph_is_trained_here(self) -> Model:
        if self.family != "glyph" and self.path is None:
            raise ValueError(f"family = {self.family!r} needs the 'path' of its base model; only glyph is trained here")
        return self


class Prompts(Strict):
    """Where prompts come from and how they are split by id."""

    source: str | None = None
    """A .txt, .jsonl, .csv or .parquet file; left out: random strings for the glyph model."""
    count: int = Field(2048, ge=3)
    """How many strings to make up when there is no source."""
    validation: int = Field(64, ge=1)
    """Prompts that choose the best round."""
    held_out: int = Field(128, ge=2)
    """Prompts that only the report and the promotion gate see."""

    @model_validator(mode="after")
    def _some_left_to_train(self) -> Prompts:
        if self.source is None and self.validation + self.held_out >= self.count:
            raise ValueError(
                f"validation + held_out = {self.validation + self.held_out} leaves nothing of count = {self.count} to train on"
            )
        return self


REWARD_NAMES = ("ocr", "tesseract", "similarity", "jpeg_compressibility", "jpeg_incompressibility")
RewardName = Annotated[str, name_or_path(*REWARD_NAMES)]
"""A reward that comes along, or ``package.module:Name`` of a user's own."""


def score_column(reward: str) -> str:
    """The column of a reward's scores in every table, chart and guard: its name, or the last part of its path."""
    return reward.rpartition(":")[2]


class RewardTerm(Strict):
    """One reward and its weight in the sum."""

    name: RewardName
    weight: float = Field(1.0, gt=0)


class Rewards(Strict):
    """What is trained on, and what is only watched."""

    terms: list[RewardTerm] = Field([RewardTerm(name="ocr")], min_length=1)
    guards: list[RewardName] = ["tesseract", "similarity"]
    """Metrics that are never trained on; a guard that is not installed is reported and left out."""
    max_failed_share: float = Field(0.05, ge=0, lt=1)
    """Share of samples whose scoring may fail (they are masked and counted) before the stage stops."""

    @model_validator(mode="after")
    def _guards_are_not_trained_on(self) -> Rewards:
        names = [score_column(term.name) for term in self.terms]
        if len(set(names)) < len(names):
            raise ValueError(f"each reward may be named once, got {names}")
        if both := set(names) & set(map(score_column, self.guards)):
            raise ValueError(f"{sorted(both)} cannot be trained on and be a guard; take it out of 'guards'")
        return self


class Policy(Strict):
    """Which parameters are trained, and which are evaluated and served."""

    train: Literal["full", "lora"] = "full"
    rank: int = Field(16, ge=1)
    alpha: int = Field(16, ge=1)
    ema: Following | None = None
    """An exponential moving average of the trained parameters, updated after every optimiser step. Where there is one, it is what
    gets evaluated, promoted and served; training goes on from the parameters themselves."""


class Evaluation(Strict):
    """Fixed prompts, fixed noise, deterministic sampler."""

    steps: int = Field(10, ge=2, le=1000)
    confidence: float = Field(0.95, gt=0.5, lt=1)
    resamples: int = Field(10_000, ge=100)


class StopRule(Strict):
    """Ends the rounds early: the validation reward has not grown by ``min_delta`` for ``patience`` rounds."""

    patience: int = Field(2, ge=1)
    min_delta: float = Field(0.0, ge=0)


class Promotion(Strict):
    """When the best policy of the run becomes champion."""

    model_name: str = Field("ebbflow-glyph", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    guard_tolerance: float = Field(0.02, ge=0)
    """How far the mean of a guard may fall below the champion's."""


class Tracking(Strict):
    """Where runs are tracked; ``MLFLOW_TRACKING_URI`` when ``uri`` is left out, a SQLite file in ``output`` without it."""

    experiment: str = Field("ebbflow", min_length=1)
    uri: str | None = None


class Recipe(Strict):
    """One run, completely. The same recipe on the same machine gives the same bytes."""

    name: str = Field("glyph", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    seed: int = Field(0, ge=0, lt=2**31)
    output: str = "runs"
    """Folder (or URI) that gets the report and the summary, one folder per run."""
    threads: int = Field(1, ge=1)
    """Torch threads per process: small models do not gain from more unless the cores are idle."""
    model: Model = Model()
    prompts: Prompts = Prompts()
    rewards: Rewards = Rewards()
    policy: Policy = Policy()
    rounds: int = Field(1, ge=1, le=20)
    stages: list[AnyStage] = Field([OnlineStage(), OfflineStage()], min_length=1)
    """What one round does, in order."""
    stop: StopRule = StopRule()
    evaluation: Evaluation = Evaluation()
    promotion: Promotion = Promotion()
    tracking: Tracking = Tracking()

    @model_validator(mode="wrap")
    @classmethod
    def _explain_what_is_wrong(cls, data: Any, handler: ValidatorFunctionWrapHandler) -> Recipe:
        try:
            return handler(data)
        except ValidationError as error:
            raise RecipeError(f"this recipe cannot be run:\n{explain(error, cls)}") from None

    @property
    def digest(self) -> str:
        """sha256 of the resolved recipe, independent of key order and of what the YAML left out."""
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def stage_label(self, round_index: int, stage_index: int) -> str:
        """How a stage is called everywhere, counted from one: ``"2.1 online"``."""
        return f"{round_index + 1}.{stage_index + 1} {self.stages[stage_index].kind}"


class _UniqueKeys(yaml.SafeLoader):
    """YAML's safe loader, to which a key given twice is an error and not a silent choice of the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        if twice := {key for key in keys if keys.count(key) > 1}:
            raise yaml.constructor.ConstructorError(None, None, f"given twice: {sorted(twice)}", node.start_mark)
        return super().construct_mapping(node, deep)


def load_recipe(path: str | Path) -> Recipe:
    """Read a recipe from a YAML (or JSON) file.

    Raises:
        RecipeError: the file is missing, is not a mapping, or does not describe a run.
    """
    path = Path(path)
    if not path.is_file():
        raise RecipeError(f"no recipe at {path}; the ones that come with Ebbflow are in workflows/recipes/")
    try:
        data = yaml.load(path.read_bytes(), _UniqueKeys)
    except (yaml.YAMLError, ValueError) as error:
        raise RecipeError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(data, dict):
        raise RecipeError(f"{path} must hold a mapping of recipe keys, got {type(data).__name__}")
    return Recipe.model_validate(data)
