"""The hyper-parameters of each algorithm with their source, and what it needs of a stage; losses are in ``ebbflow.algorithms``.

Each class says in a line what the algorithm does (``ebbflow list`` prints it) and declares the stage's defaults that make
it the published one. Clip ranges follow the number of latent elements D, because log-probs are means over them: the defaults are
for the glyph model's 512, and the published value for large models stands beside them.
"""

from __future__ import annotations

import difflib
import re
from importlib import import_module
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, Field, ValidationError, model_validator

from ebbflow.recipe.base import RecipeError, Strict, explain

PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def name_or_path(*known: str) -> AfterValidator:
    """Accepts the known names, and ``package.module:name`` of something that the user wrote."""

    def check(value: str) -> str:
        if value not in known and not PATH.fullmatch(value):
            choices = f"take {', '.join(known)}, or give" if known else "give"
            raise ValueError(f"{choices} package.module:name of your own")
        return value

    return AfterValidator(check)


class EmaScheduleConfig(Strict):
    """A copy that follows: copy <- d copy + (1 - d) theta after step n, d = min(slope max(n - flat, 0), most).

    A step is an optimiser step; of a copy that generates the rollouts (DiffusionNFT, CRD) it is a rollout step.
    """

    warmup: int = Field(0, ge=0)
    slope: float = Field(0.09, ge=0)
    max_decay: float = Field(0.9, ge=0, lt=1)

    def decay(self, step: int) -> float:
        """d after a step, counted from one."""
        return min(self.slope * max(step - self.warmup, 0), self.max_decay)


class AlgorithmConfig(Strict):
    """What every algorithm declares. A user's own hyper-parameters derive from one of the two kinds below.

    Attributes:
        kind: what its terms are made of: steps of a trajectory with log-probs, or noised final latents.
        stages: where it can run.
        stage_defaults: keys of the stage that it sets unless the recipe does.
        needs_density: its loss takes log-probs for logarithms of a density, which those of the ``cps`` sampler are not.
        paper: where it is published.
    """

    kind: ClassVar[Literal["trajectory", "forward"]]
    stages: ClassVar[tuple[str, ...]]
    stage_defaults: ClassVar[dict[str, Any]] = {}
    needs_density: ClassVar[bool] = False
    paper: ClassVar[str] = ""


class TrajectoryConfig(AlgorithmConfig):
    """Algorithms on the steps of a fresh trajectory: a stochastic sampler, a window of its steps, their log-probs."""

    stage_defaults: ClassVar = {"sampler": {"name": "flow_sde"}, "window": {"kind": "progressive"}}

    kind: ClassVar = "trajectory"
    stages: ClassVar = ("online",)


class ClippedConfig(TrajectoryConfig):
    """Policy gradients with a clipped ratio."""

    clip_range: float = Field(1e-3, gt=0, lt=1)
    """Clip of the ratio (published: 1e-4, and 1e-5 for Flow-GRPO-Fast)."""


class ForwardConfig(AlgorithmConfig):
    """Algorithms on noised final latents: any sampler, no log-probs."""

    kind: ClassVar = "forward"
    stages: ClassVar = ("online", "offline")

    noise_levels: int = Field(2, ge=1)
    """Draws of (sigma, noise) per sample and pass, one from each of as many equal parts of the distribution."""
    sigmas: Literal["uniform", "logit_normal"] = "uniform"


class FlowGRPOConfig(ClippedConfig):
    """Clipped policy gradient on every stochastic denoising step."""

    paper: ClassVar = "2505.05470"
    stage_defaults: ClassVar = {"sampler": {"name": "flow_sde"}, "window": {"kind": "all"}, "reference": {"weight": 0.02}}

    name: Literal["flow_grpo"] = "flow_grpo"


class FlowGRPOFastConfig(ClippedConfig):
    """Flow-GRPO on a short window that starts anew at random in the first half; no reference penalty."""

    paper: ClassVar = "2505.05470"
    stage_defaults: ClassVar = {"sampler": {"name": "flow_sde"}, "window": {"kind": "random", "size": 2}}

    name: Literal["flow_grpo_fast"] = "flow_grpo_fast"


class MixGRPOConfig(ClippedConfig):
    """Flow-GRPO on a window that moves from the first steps on; the steps outside are deterministic."""

    paper: ClassVar = "2507.21802"
    stage_defaults: ClassVar = {"sampler": {"name": "flow_sde"}, "window": {"kind": "progressive"}, "reference": {"weight": 0.02}}

    name: Literal["mix_grpo"] = "mix_grpo"


class DanceGRPOConfig(ClippedConfig):
    """Clipped policy gradient on Dance-SDE: each group by its own standard deviation, a random share of the steps."""

    paper: ClassVar = "2505.07818"
    stage_defaults: ClassVar = {
        "sampler": {"name": "dance_sde"},
        "window": {"kind": "share", "share": 0.6},
        "advantages": {"std": "group"},
    }

    name: Literal["dance_grpo"] = "dance_grpo"


class GRPOGuardConfig(TrajectoryConfig):
    """Flow-GRPO whose ratio is centred and weighted alike at every step, so that the clip bites at all of them."""

    paper: ClassVar = "2510.22319"
    needs_density: ClassVar = True
    stage_defaults: ClassVar = {"sampler": {"name": "flow_sde"}, "window": {"kind": "all"}}

    name: Literal["grpo_guard"] = "grpo_guard"
    clip_range: float = Field(1e-4, gt=0, lt=1)
    """Clip of the regulated ratio (published: 2e-6)."""


class FlowDPPOConfig(TrajectoryConfig):
    """Policy gradient that drops the terms which move further away than a divergence allows, instead of clipping a ratio."""

    name: Literal["flow_dppo"] = "flow_dppo"
    divergence_limit: float = Field(1e-5, gt=0)
    """tau: the largest mean((mu - mu_old)^2) / (2 b^2) of a term that still moves away from the old policy."""


class DistillationConfig(TrajectoryConfig):
    """On-policy distillation: the policy's own steps are pulled to a teacher's; no reward is learnt from."""

    name: Literal["distillation"] = "distillation"
    teacher: str = Field(min_length=1)
    """Policy folder (or URI) of the teacher, trained from the same base model with the same ``policy``."""


class DiffusionNFTConfig(ForwardConfig):
    """Contrast of an implicit better with an implicit worse policy, both around the old one that generates."""

    paper: ClassVar = "2509.16117"
    stage_defaults: ClassVar = {"reference": {"weight": 1e-4}}

    name: Literal["diffusion_nft"] = "diffusion_nft"
    beta: float = Field(0.1, gt=0, le=1)
    """How far the implicit policies stand from the old one: 1 in the paper, .1 for OCR or several rewards."""
    advantages: Literal["all", "positive_only", "negative_only", "one_only", "binary"] = "all"
    """What becomes of the advantages: as they are; only those above or below zero; 1 above zero and 0 elsewhere; their sign."""
    old: EmaScheduleConfig = EmaScheduleConfig()
    """The old policy online; offline it stays as it was when it generated. Published: ``{max_decay: 0}`` (a copy),
    ``{slope: .001, max_decay: .5}``, and ``{warmup: 75, slope: .0075, max_decay: .999}``."""


class AWMConfig(ForwardConfig):
    """Advantage-weighted matching: the flow-matching loss of each sample, weighted with its advantage, near a lagging copy."""

    paper: ClassVar = "2509.25050"
    stage_defaults: ClassVar = {"reference": {"weight": 0.1}}

    name: Literal["awm"] = "awm"
    noise_levels: int = Field(6, ge=1)
    """Draws of (sigma, noise) per sample and pass."""
    surrogate: Literal["power", "plain", "sigma", "sigma_squared"] = "power"
    """The stand-in for the log-prob: -(sigma / q) ((l + 1e-10)^q - (1e-10)^q), -l, -sigma l or -sigma^2 l."""
    power: float = Field(0.25, gt=0, le=1)
    """q of the ``power`` surrogate."""
    old_weight: float = Field(1.0, ge=0)
    """Weight of mean((v - v_old)^2); the old copy is what the paper calls the EMA."""
    old: EmaScheduleConfig = EmaScheduleConfig(slope=0.001, max_decay=0.3)


class DiffusionDPOConfig(ForwardConfig):
    """Preference pairs: better against worse, from a file or from the samples of a group."""

    paper: ClassVar = "2311.12908"

    name: Literal["diffusion_dpo"] = "diffusion_dpo"
    sigmas: Literal["uniform", "logit_normal"] = "logit_normal"
    beta: float = Field(50.0, gt=0)
    """Strength of the preference, on errors that are means over the latent's elements (published: 100 to 2000 and more)."""
    pairs_share: float = Field(0.25, gt=0, le=0.5)
    """Of each group, this share of the best is paired with as many of the worst, best with worst; ties make no pair."""
    refresh_every: int = Field(0, ge=0)
    """The policy replaces the reference of the pairs after this many optimiser steps; 0: it stays the base model."""


class DGPOConfig(ForwardConfig):
    """Group preference: the whole group decides how much each of its samples still has to gain."""

    paper: ClassVar = "2510.08425"

    name: Literal["dgpo"] = "dgpo"
    beta: float = Field(50.0, gt=0)
    """Strength of the preference, on errors that are means over the latent's elements."""


class CRDConfig(ForwardConfig):
    """Regression of the change against the old policy on the advantage, both centred inside the group."""

    paper: ClassVar = "2603.14128"
    stage_defaults: ClassVar = {"reference": {"weight": 1e-4}}

    name: Literal["crd"] = "crd"
    beta: float = Field(0.1, gt=0)
    """Scale of the implied reward."""
    old: EmaScheduleConfig = EmaScheduleConfig()


class SFTConfig(ForwardConfig):
    """Flow matching on the best samples of every group (rejection sampling)."""

    name: Literal["sft"] = "sft"
    best: int = Field(1, ge=1)
    """Samples per group that are learnt from."""


class RWRConfig(ForwardConfig):
    """Flow matching on every sample, weighted with exp(advantage / temperature)."""

    paper: ClassVar = "2302.12192"

    name: Literal["rwr"] = "rwr"
    temperature: float = Field(1.0, gt=0)


class CustomAlgorithmConfig(Strict):
    """A user's own: ``path`` leads to an ``ebbflow.algorithms.base.Algorithm``, ``options`` are its hyper-parameters."""

    name: Literal["custom"] = "custom"
    path: Annotated[str, name_or_path()]
    options: dict[str, Any] = {}

    @model_validator(mode="after")
    def _must_exist(self) -> CustomAlgorithmConfig:
        try:
            self.load()
        except RecipeError as error:
            raise ValueError(str(error)) from None  # which pydantic gives its place in the recipe
        return self

    def load(self) -> tuple[Any, AlgorithmConfig]:
        """The algorithm and its hyper-parameters.

        Raises:
            RecipeError: nothing can be imported from there, it is no algorithm, it does not take these options, or it asks for
                what no stage can give.
        """
        algorithm = import_path(self.path)
        config = getattr(algorithm, "config", None)
        if not (isinstance(config, type) and issubclass(config, AlgorithmConfig)):
            raise RecipeError(f"{self.path} is a {type(algorithm).__name__}, not an ebbflow.algorithms.base.Algorithm")
        try:
            hyper = config.model_validate(self.options)
        except ValidationError as error:
            raise RecipeError(f"options of {self.path}:\n{explain(error, config)}") from None
        if hyper.kind == "trajectory" and "offline" in hyper.stages:
            raise RecipeError(f"{self.path}: offline stages store no trajectories; take them out of {config.__name__}.stages")
        if "teacher" in algorithm.copies(hyper) and "teacher" not in config.model_fields:
            raise RecipeError(
                f"{self.path} asks for the copy 'teacher' and cannot be told where it is; give {config.__name__} a field "
                "'teacher: str', its policy folder or URI"
            )
        return algorithm, hyper


def import_path(path: str) -> Any:
    """What ``package.module:name`` leads to.

    Raises:
        RecipeError: the module cannot be imported or has no such name. Whatever else goes wrong inside it comes through as it is.
    """
    module_name, name = path.split(":")
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise RecipeError(f"{path} cannot be imported ({error}); install its package, or put its folder on PYTHONPATH") from None
    try:
        return getattr(module, name)
    except AttributeError:
        nearest = difflib.get_close_matches(name, dir(module), n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else "name something that it defines"
        raise RecipeError(f"{path}: the module {module_name!r} has no {name!r}; {hint}") from None


AnyAlgorithmConfig = Annotated[
    FlowGRPOConfig
    | FlowGRPOFastConfig
    | MixGRPOConfig
    | DanceGRPOConfig
    | GRPOGuardConfig
    | FlowDPPOConfig
    | DistillationConfig
    | DiffusionNFTConfig
    | AWMConfig
    | DiffusionDPOConfig
    | DGPOConfig
    | CRDConfig
    | SFTConfig
    | RWRConfig
    | CustomAlgorithmConfig,
    Field(discriminator="name"),
]
"""The one list of algorithms: a new one is entered here, and with its loss in ``ebbflow.algorithms.registry``."""

BUILT_IN: tuple[type[AlgorithmConfig], ...] = tuple(
    config for config in get_args(get_args(AnyAlgorithmConfig)[0]) if config is not CustomAlgorithmConfig
)
