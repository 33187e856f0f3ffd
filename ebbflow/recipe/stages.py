"""What one stage of training does: how it samples, what it learns with, and for how long."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator

from ebbflow.recipe.algorithms import BUILT_IN, Algorithm, AlgorithmConfig, Custom, DiffusionNFT, MixGRPO
from ebbflow.recipe.base import Strict

SAMPLERS = {
    "ode": "deterministic Euler steps",
    "flow_sde": "noise that follows the schedule (Flow-GRPO, 2505.05470); eta .7",
    "dance_sde": "the same noise at every step (DanceGRPO, 2505.07818); eta .3",
    "cps": "keeps the noise level of the path, so that no grain is left (2509.05952); eta .8",
    "dpm_solver": "deterministic second-order DPM-Solver++ (2211.01095): closer to the exact path in few steps",
}
STOCHASTIC_SAMPLERS = ("flow_sde", "dance_sde", "cps")


WINDOWS = {
    "all": "every step but the last, which is always deterministic (Flow-GRPO)",
    "fixed": "from 'start' on, always the same",
    "random": "a new start at every optimisation step (Flow-GRPO-Fast)",
    "progressive": "moves by 'stride' every 'steps_per_window' optimisation steps (MixGRPO)",
    "decaying": "moves in ever shorter intervals (MixGRPO)",
    "share": "all steps but the last are stochastic, a random 'share' of them is trained (DanceGRPO)",
}
WINDOW_KEYS: dict[str, tuple[str, ...]] = {
    "all": (),
    "fixed": ("size", "start", "tail"),
    "random": ("size", "start", "tail", "limit", "stride"),
    "progressive": ("size", "start", "tail", "limit", "stride", "steps_per_window", "roll_over"),
    "decaying": ("size", "start", "tail", "limit", "stride", "steps_per_window", "roll_over", "decay", "decay_after"),
    "share": ("share",),
}
"""The keys that each kind of window uses beside ``kind``."""


def _listed(choices: dict[str, str]) -> str:
    return "; ".join(f"{name}: {text}" for name, text in choices.items()) + "."


class Sampler(Strict):
    """How latents are denoised; the steps are in ``ebbflow.flow``."""

    name: Literal["ode", "flow_sde", "dance_sde", "cps", "dpm_solver"] = Field("ode", description=_listed(SAMPLERS))
    steps: int = Field(6, ge=2, le=1000)
    eta: float | None = Field(None, gt=0, le=2)
    """Noise level; left out: the published default of the sampler (.7, .3, .8)."""

    @model_validator(mode="after")
    def _cps_turns_at_one(self) -> Sampler:
        if self.name == "cps" and self.eta is not None and self.eta > 1:
            raise ValueError(f"eta = {self.eta}: the noise of cps, sin(eta * 90 degrees), falls again above 1; take 1 or less")
        return self

    @model_validator(mode="after")
    def _only_stochastic_samplers_have_noise(self) -> Sampler:
        if self.eta is not None and self.name not in STOCHASTIC_SAMPLERS:
            raise ValueError(
                f"{self.name} is deterministic and has no eta; leave it out, or take {', '.join(STOCHASTIC_SAMPLERS)}"
            )
        return self


class Window(Strict):
    """Which denoising steps are stochastic and trained; one draw per optimisation step for all samples.

    A key that the kind does not use is an error.
    """

    kind: Literal["all", "fixed", "random", "progressive", "decaying", "share"] = Field(
        "progressive", description=_listed(WINDOWS)
    )
    size: int = Field(3, ge=1)
    start: int = Field(0, ge=0)
    limit: float = Field(0.5, gt=0, le=1)
    """Windows start within this share of the denoising steps: late steps carry mostly noise. ``decaying`` hurries through them
    instead, and its default is 1."""
    stride: int = Field(1, ge=1)
    steps_per_window: int = Field(10, ge=1)
    decay: float = Field(0.1, ge=0)
    """``decaying``: a window at start t stays for ceil(steps_per_window exp(-decay max(t - decay_after, 0))) steps ..."""
    decay_after: int | None = Field(None, ge=0)
    """... left out: half of the denoising steps, rounded up (published: 13 of 25)."""
    roll_over: bool = True
    """Begin again at ``start`` after the last window; without it the last window stays."""
    share: float = Field(0.6, gt=0, le=1)
    tail: float | None = Field(None, gt=0, lt=1)
    """After the window, DPM-Solver++ takes this share of the remaining steps: .4 is MixGRPO-Flash, and .2 with a ``fixed``
    window at 0 is Flash*."""

    @model_validator(mode="before")
    @classmethod
    def _decaying_windows_reach_the_end(cls, data: Any) -> Any:
        return {"limit": 1.0} | data if isinstance(data, dict) and data.get("kind") == "decaying" else data

    @model_validator(mode="after")
    def _every_key_is_used(self) -> Window:
        """A key at its default counts as left out: a resolved recipe spells out all of them."""
        unused = []
        for key, field in Window.model_fields.items():
            value = getattr(self, key)
            if key not in ("kind", *WINDOW_KEYS[self.kind]) and value != field.default:
                unused.append(f"{key} = {value!r} (for {', '.join(kind for kind, keys in WINDOW_KEYS.items() if key in keys)})")
        if unused:
            raise ValueError(
                f"a window of kind {self.kind!r} does not use {' and '.join(unused)}; leave it out, or take a kind that does"
            )
        return self


class Advantages(Strict):
    """A = (R - baseline) / (std + 1e-4) inside the group of a prompt, clamped."""

    std: Literal["global", "group", "none"] = "global"
    """Of the whole batch (Flow-GRPO), of the group (DanceGRPO), or 1 (Dr. GRPO)."""
    clip: float = Field(5.0, gt=0)
    combine: Literal["per_reward", "sum"] = "per_reward"
    """Several rewards: each normalised by itself, then averaged with the weights; or their weighted sum, then normalised."""
    trim: float = Field(0.0, ge=0, lt=0.5)
    """Share of a group left out at either end of its rewards when its baseline, their mean, is taken."""
    keep_extremes: int | None = Field(None, ge=1)
    """Train on this many best and as many worst samples of each group only."""
    running: bool = False
    """Baseline and standard deviation of a prompt over all its samples of the stage so far, not of this step alone."""

    @model_validator(mode="after")
    def _one_baseline(self) -> Advantages:
        if self.trim and self.running:
            raise ValueError("trim leaves out samples of this step and running averages over earlier ones too; take one of them")
        return self


class Reference(Strict):
    """The pull back to the base model."""

    weight: float = Field(0.0, ge=0)
    """Its weight in the loss; every algorithm has its own default."""
    penalty: Literal["kl", "kl_without_dt", "velocity"] = "velocity"
    """``kl``: mean((mu - mu_ref)^2) / (2 b^2) with the true standard deviation b of the step; ``kl_without_dt``: over 2 s^2, as
    Flow-GRPO's code has it; ``velocity``: mean((v - v_ref)^2). Default: ``kl`` on trajectories, ``velocity`` otherwise."""


class Correction(Strict):
    """What is done about rollouts that another policy made than the one that trains: another engine, precision or version.

    Everything is a function of delta = log-prob under the training policy - log-prob of the rollout, of a sample at a step.
    """

    mode: Literal["bypass", "decoupled"] = "decoupled"
    """Two policies: the ratio is against the rollout's log-probs. Three: it is against the training policy before the updates of
    this step (one more forward pass), and the rollout is corrected by importance weights."""
    unit: Literal["mean", "sum"] = "sum"
    """Scale of delta in weights and thresholds: the sum over the latent's D elements, the true log-density; or their mean, like
    every log-prob here and in published code, which is D times as small, so that 1e-4 is much."""
    weights: Literal["none", "truncated", "masked"] = "truncated"
    """exp(delta), at most ``high``; or exp(delta) where it lies within [``low``, ``high``] and the term dropped elsewhere. Left
    out in mode ``bypass``: none."""
    level: Literal["step", "trajectory"] = "step"
    """One weight per step, or one per sample from the sum of its deltas."""
    low: float = Field(0.8, gt=0, lt=1)
    high: float = Field(1.25, gt=1)
    """Bounds of the weights; left out with unit ``mean``: .9995 and 1.0005."""
    normalise: bool = False
    """Divide the weights by their mean over the batch."""
    reject: Literal["none", "k1", "k2", "k3"] = "none"
    """Drop terms by an estimate of the divergence: |delta|, delta^2 / 2, or exp(delta) - 1 - delta."""
    reject_level: Literal["step", "sequence_mean", "sequence_sum", "sequence_max"] = "step"
    """What is compared with the threshold: the step's own, or the mean, sum or largest over the sample's steps."""
    reject_above: float = Field(0.25, gt=0)
    """Threshold, on the scale of ``unit``; left out: .25 for k1 and .03 for k2 and k3, with unit ``mean`` 5e-4 and 1.25e-7."""

    @model_validator(mode="before")
    @classmethod
    def _weights_follow_the_mode_and_thresholds_the_unit(cls, data: Any) -> Any:
        """Defaults that catch a stale rollout in every unit: a threshold on the wrong scale never does anything."""
        if not isinstance(data, dict):
            return data
        if data.get("mode") == "bypass":
            data = {"weights": "none"} | data
        squared = data.get("reject") in ("k2", "k3")
        if data.get("unit") == "mean":
            return {"low": 0.9995, "high": 1.0005, "reject_above": 1.25e-7 if squared else 5e-4} | data
        return {"reject_above": 0.03 if squared else 0.25} | data

    @model_validator(mode="after")
    def _bypass_has_no_weights(self) -> Correction:
        if self.mode == "bypass" and self.weights != "none":
            raise ValueError(
                f"in bypass mode the ratio itself corrects the rollout, and weights = {self.weights!r} would do so twice; "
                "set weights: none, or mode: decoupled"
            )
        return self


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
    reference: Reference = Reference()
    correction: Correction | None = None
    """For algorithms on trajectories: none by default, and the ratio is against the rollout's log-probs as they are."""
    optimizer: Optimizer = Optimizer()
    group_size: int = Field(16, ge=2)
    """Samples per prompt; advantages compare inside the group."""
    micro_batch: int = Field(64, ge=1)
    """Samples per forward and backward pass."""
    rollout_precision: Literal["float32", "bfloat16"] = "float32"
    """Of the network while it generates; latents and log-probs are float32 always."""
    drift_alarm: float = Field(1.0, gt=0)
    """A velocity drift from the base model, mean((v - v_base)^2), above this is warned of and stands in the report: what learns
    well stays well below 1, what games its reward often does not."""

    @property
    def hyper(self) -> AlgorithmConfig:
        """The algorithm's hyper-parameters; of a user's own algorithm, its own class of them."""
        return self.algorithm.load()[1] if isinstance(self.algorithm, Custom) else self.algorithm

    @property
    def algorithm_name(self) -> str:
        """How people call the algorithm: a user's own by its path."""
        return self.algorithm.path if isinstance(self.algorithm, Custom) else self.algorithm.name

    @model_validator(mode="before")
    @classmethod
    def _defaults_follow_the_algorithm(cls, data: Any) -> Any:
        """Keys that the algorithm sets unless the recipe does, down to single keys of the sampler, the window and so on."""
        if not isinstance(data, dict):
            return data
        algorithm = _algorithm_class(data.get("algorithm", cls.model_fields["algorithm"].default))
        if algorithm is None:
            return data  # its own error says more than ours could
        penalty = "kl" if algorithm.kind == "trajectory" else "velocity"
        defaults = {"reference": {}} | algorithm.stage_defaults
        defaults["reference"] = {"penalty": penalty} | defaults["reference"]
        return {**defaults, **data, **{key: _over(key, defaults[key], data[key]) for key in defaults.keys() & data.keys()}}

    @model_validator(mode="after")
    def _everything_suits_the_algorithm(self) -> Stage:
        kind = getattr(self, "kind", "")
        if kind not in self.hyper.stages:
            raise ValueError(_wrong_stage(self.algorithm_name, kind))
        if kind == "offline" and hasattr(self.hyper, "teacher"):
            raise ValueError(f"{self.algorithm_name} learns from a teacher, which only online stages load; use it in one")
        if self.hyper.kind == "trajectory":
            self._check_trajectory()
        else:
            self._check_forward()
        return self

    def _check_trajectory(self) -> None:
        name, sampler, window = self.algorithm_name, self.sampler, self.window
        if sampler.name not in STOCHASTIC_SAMPLERS:
            raise ValueError(
                f"{name} needs the log-probabilities of a stochastic sampler and {sampler.name!r} has none; "
                "set sampler.name to flow_sde, dance_sde or cps, or algorithm.name to diffusion_nft"
            )
        if window is None:
            raise ValueError(f"{name} trains on a window of the denoising steps; leave 'window' out for the default one")
        _check_window(window, sampler.steps)
        if sampler.name == "cps":
            self._check_cps(name)

    def _check_cps(self, name: str) -> None:
        """The published log-prob of CPS is no density: it has no 1 / (2 b^2), so no threshold on it has a unit."""
        if self.hyper.needs_density:
            raise ValueError(
                f"{name} needs log-probs that are densities, and those of cps leave out 1 / (2 b^2); "
                "set sampler.name to flow_sde or dance_sde, or algorithm.name to mix_grpo"
            )
        for key in ("weights", "reject"):
            if (value := getattr(self.correction, key, "none")) != "none":
                raise ValueError(
                    f"correction.{key} = {value!r} compares densities, and the log-probs of cps are none; "
                    f"set correction.{key} to none, or sampler.name to flow_sde or dance_sde"
                )

    def _check_forward(self) -> None:
        name = self.algorithm_name
        if self.window is not None:
            raise ValueError(f"{name} trains on final latents alone; leave 'window' out, or set algorithm.name to mix_grpo")
        if self.correction is not None:
            raise ValueError(
                f"{name} has no log-probs for a correction to compare; leave 'correction' out, or set algorithm.name to mix_grpo"
            )
        if self.reference.penalty != "velocity":
            raise ValueError(
                f"reference.penalty = {self.reference.penalty!r} compares the steps of a trajectory and {name} has none; "
                "take velocity, or leave it out"
            )


def _algorithm_class(given: Any) -> type[AlgorithmConfig] | None:
    """The class of hyper-parameters that a recipe's ``algorithm`` asks for, if there is one."""
    if isinstance(given, AlgorithmConfig):
        return type(given)
    if isinstance(given, Custom):
        return type(given.load()[1])
    if not isinstance(given, dict):
        return None
    if given.get("name") == "custom":
        try:
            return type(Custom.model_validate(given).load()[1])
        except ValidationError:
            return None
    return next((known for known in BUILT_IN if known.model_fields["name"].default == given.get("name")), None)


def _over(block: str, default: Any, given: Any) -> Any:
    """What the recipe gives, with the algorithm's defaults for the keys that it leaves out.

    Of another sampler or kind of window than the algorithm's it gives all: the algorithm's other keys belong to its own.
    """
    if isinstance(given, BaseModel):
        given = given.model_dump(exclude_unset=True)
    if not (isinstance(given, dict) and isinstance(default, dict)):
        return given
    choice, usual = {"sampler": ("name", Sampler().name), "window": ("kind", Window().kind)}.get(block, ("", ""))
    own = default.get(choice, usual)
    return default | given if given.get(choice, own) == own else given


def _check_window(window: Window, denoising_steps: int) -> None:
    used, reach, end = WINDOW_KEYS[window.kind], window.start + window.size, window.limit * denoising_steps
    if "size" in used and reach >= denoising_steps:
        raise ValueError(
            f"the window's start + size = {reach} must be below sampler.steps = {denoising_steps}: "
            "the last step is deterministic; take a smaller window or more steps"
        )
    if "limit" in used and window.start >= end:
        raise ValueError(
            f"a {window.kind} window would never move: its start = {window.start} must be below limit * sampler.steps = {end:g}; "
            "start earlier, raise limit, or take kind fixed"
        )


def _wrong_stage(name: str, kind: str) -> str:
    if kind == "offline":
        return f"{name} needs fresh trajectories: use it in an online stage, and diffusion_nft in an offline one"
    return f"{name} cannot run in an {kind} stage; the nearest that can is diffusion_nft"


class OnlineStage(Stage):
    """Fresh samples, immediate updates: rollout, score, advantages, update, repeated with the models hot."""

    kind: Literal["online"] = "online"
    algorithm: Algorithm = MixGRPO()
    steps: int = Field(40, ge=1)
    """Rollout-and-update steps."""
    prompts_per_step: int = Field(8, ge=1)
    updates_per_step: int = Field(2, ge=1)
    """Optimiser steps per rollout batch: its samples are split into that many parts."""


class OfflineStage(Stage):
    """A large batch generated and scored once, in shards, then several epochs over it; or a file of preference pairs."""

    kind: Literal["offline"] = "offline"
    algorithm: Algorithm = DiffusionNFT()
    pairs: str | None = None
    """A .parquet or .jsonl file of preference pairs to train on, instead of generating and scoring (``datasets/README.md``)."""
    prompts: int = Field(64, ge=1)
    shards: int = Field(2, ge=1)
    """Rollout and scoring pods; prompts are dealt out evenly."""
    epochs: int = Field(2, ge=1)
    batch_size: int = Field(128, ge=1)
    """Samples per optimiser step, over all training processes."""

    @model_validator(mode="after")
    def _shards_have_prompts(self) -> OfflineStage:
        if self.shards > self.prompts and not self.pairs:
            raise ValueError(f"{self.shards} shards for {self.prompts} prompts leave some empty; take one a prompt at most")
        return self

    @model_validator(mode="after")
    def _a_prompt_is_seen_once(self) -> OfflineStage:
        if self.advantages.running:
            raise ValueError("advantages.running needs prompts that come back; an offline stage generates once: leave it out")
        return self


AnyStage = Annotated[OnlineStage | OfflineStage, Field(discriminator="kind")]
