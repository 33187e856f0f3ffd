"""What a stage chooses besides its algorithm: sampler, engine, window, advantages, reference
penalty, correction, optimiser.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ebbflow.recipe.base import RecipeError, Strict
from ebbflow.recipe.plugins import describe_choices, validate_name_or_path
from ebbflow.recipe.samplers import (
    SAMPLERS,
    STOCHASTIC_SAMPLERS,
    SamplerFacts,
    find_sampler_facts,
)

SINKS = tuple(file.name for file in iter_modules(import_module("ebbflow.tracking.sinks").__path__))
"""The sinks of Ebbflow, by the names of their files, which nothing imports here."""

WINDOWS = {
    "all": "every step but the last, which is always deterministic (Flow-GRPO)",
    "fixed": "from 'start' on, always the same",
    "random": "a new start at every optimisation step (Flow-GRPO-Fast)",
    "progressive": "moves by 'stride' every 'steps_per_window' optimisation steps (MixGRPO)",
    "decaying": "moves in ever shorter intervals (MixGRPO)",
    "share": (
        "all steps but the last are stochastic, a random 'share' of them is trained (DanceGRPO)"
    ),
}
WINDOW_KEYS: dict[str, tuple[str, ...]] = {
    "all": (),
    "fixed": ("size", "start", "tail"),
    "random": ("size", "start", "tail", "limit", "stride"),
    "progressive": ("size", "start", "tail", "limit", "stride", "steps_per_window", "roll_over"),
    "decaying": (
        "size",
        "start",
        "tail",
        "limit",
        "stride",
        "steps_per_window",
        "roll_over",
        "decay",
        "decay_after",
    ),
    "share": ("share",),
}
"""The keys that each kind of window uses, apart from ``kind``."""


ENGINES = {
    "diffusers": "the reference, in the process of the rollout worker",
    "vllm_omni": "vLLM-Omni, in a process and an environment of its own",
    "sglang": "a server of SGLang-diffusion at EBBFLOW_SGLANG_URL, which generates its own noise",
}


ENGINES_WITH_OWN_NOISE = ("sglang",)
"""Engines whose noise is not that of the sample's key: the gate takes x_T from their samples."""


SGLANG_SAMPLERS = {"flow_sde": "sde", "cps": "cps", "ode": "ode"}
"""The samplers that SGLang has, by the names that its ``rollout_sde_type`` has for them."""


SGLANG_FAMILIES = ("sd3", "qwen_image", "flux")
"""Families whose latents, as SGLang records them, are known here."""


# ``EvaluationConfig.sampler`` has the same description.
SAMPLER_HELP = (
    describe_choices({name: facts.description for name, facts in SAMPLERS.items()})
    + " Or package.module:NAME of your own (docs/extending.md)."
)


class SamplerConfig(Strict):
    """The sampler: how latents are denoised. ``ebbflow.flow`` has the denoising steps."""

    name: Annotated[str, validate_name_or_path(*SAMPLERS)] = Field(
        "ode",
        description=SAMPLER_HELP,
    )
    steps: int = Field(6, ge=2, le=1000)
    """Number of denoising steps."""
    eta: float | None = Field(None, gt=0, le=2)
    """Noise level of a stochastic sampler. Default: the published value of the sampler."""

    @property
    def facts(self) -> SamplerFacts:
        """What is known of the sampler: its default noise level, and what its log-probs are."""
        return find_sampler_facts(self.name)

    @property
    def is_stochastic(self) -> bool:
        """Whether its steps have log-probabilities."""
        # ``eta`` of the facts is the default noise level, which deterministic samplers lack.
        return self.facts.eta is not None

    @model_validator(mode="after")
    def _check_path_of_sampler(self) -> SamplerConfig:
        try:
            # Reading the facts imports a sampler of the user's own, so that a wrong path is an
            # error of the recipe and not of the first rollout.
            _ = self.facts
        except RecipeError as error:
            raise ValueError(str(error)) from None
        return self

    @model_validator(mode="after")
    def _check_noise_level(self) -> SamplerConfig:
        if self.eta is None:
            return self
        if not self.is_stochastic:
            raise ValueError(
                f"{self.name} is deterministic and has no eta; leave it out, or take"
                f" {', '.join(STOCHASTIC_SAMPLERS)}"
            )
        if self.eta > self.facts.max_eta:
            raise ValueError(
                f"eta = {self.eta}: the noise of {self.name} falls again above"
                f" {self.facts.max_eta:g}; take {self.facts.max_eta:g} or less"
            )
        return self


class SizeConfig(Strict):
    """An image size and its share of a stage's rollouts."""

    height: int = Field(ge=8)
    """Height of the images, in pixels."""
    width: int = Field(ge=8)
    """Width of the images, in pixels."""
    weight: float = Field(1.0, gt=0)
    """Weight of this size, relative to the other sizes."""

    @property
    def size_label(self) -> str:
        return f"{self.height} x {self.width}"


class ParityConfig(Strict):
    """The parity gate of a rollout engine: the denoising steps that it takes must be those of the
    training policy on the same noise, with the weights of that moment."""

    samples: int = Field(4, ge=1)
    """Number of samples that the gate compares."""
    every: int = Field(50, ge=1)
    """Number of training steps of an online stage between two looks of the gate. It also looks
    before each of the first four steps: a new adapter changes nothing before the first update."""
    max_shift: float | None = Field(None, gt=0)
    """Largest shift of a denoising step's mean that passes, in standard deviations of the step's
    noise. Default: 3 times the rounding error that is measured of the policy itself, or what makes
    a divergence of .001 nats."""


class WindowConfig(Strict):
    """The denoising steps that are stochastic and trained. All samples of an optimisation step
    share one window.

    A key that the window's kind does not use is an error.
    """

    kind: Literal["all", "fixed", "random", "progressive", "decaying", "share"] = Field(
        "progressive", description=describe_choices(WINDOWS)
    )
    size: int = Field(3, ge=1)
    """Number of denoising steps of the window."""
    start: int = Field(0, ge=0)
    """First denoising step of the (first) window, from zero."""
    limit: float = Field(0.5, gt=0, le=1)
    """Windows start within this share of the denoising steps, because late steps are mostly noise.
    Default of ``decaying``: 1, because it moves through late steps faster instead."""
    stride: int = Field(1, ge=1)
    """Denoising steps between the starts of two windows."""
    steps_per_window: int = Field(10, ge=1)
    """Optimisation steps before the window moves."""
    decay: float = Field(0.1, ge=0)
    """Decay rate of ``decaying``: a window at start t stays for ceil(steps_per_window exp(-decay
    max(t - decay_after, 0))) steps."""
    decay_after: int | None = Field(None, ge=0)
    """Start after which ``decaying`` moves faster. Default: half of the denoising steps, rounded up
    (published: 13 of 25)."""
    roll_over: bool = True
    """Begin again at ``start`` after the last window. false: stay at the last window."""
    share: float = Field(0.6, gt=0, le=1)
    """Share of the stochastic steps that is trained."""
    tail: float | None = Field(None, gt=0, lt=1)
    """DPM-Solver++ takes this share of the steps that remain after the window: .4 is MixGRPO-Flash,
    and .2 with a ``fixed`` window at 0 is Flash*."""

    @model_validator(mode="before")
    @classmethod
    def _set_end_of_decaying_window(cls, data: Any) -> Any:
        return (
            # Put in before validation, so that a ``limit`` of the recipe replaces it.
            {"limit": 1.0} | data
            if isinstance(data, dict) and data.get("kind") == "decaying"
            else data
        )

    @model_validator(mode="after")
    def _check_every_key_is_used(self) -> WindowConfig:
        """A key at its default counts as left out: a resolved recipe spells out all of them."""
        unused = []
        for key, field in WindowConfig.model_fields.items():
            value = getattr(self, key)
            if key not in ("kind", *WINDOW_KEYS[self.kind]) and value != field.default:
                unused.append(
                    f"{key} = {value!r} (for"
                    f" {', '.join(kind for kind, keys in WINDOW_KEYS.items() if key in keys)})"
                )
        if unused:
            raise ValueError(
                f"a window of kind {self.kind!r} does not use {' and '.join(unused)}; leave it out,"
                " or take a kind that does"
            )
        return self


class TreeConfig(Strict):
    """Tree rollouts (BranchGRPO, 2509.06040): trajectories split at some denoising steps, and the
    leaves are the group's samples.

    The part before a split is generated and trained once, with the mean reward of the leaves after
    it.
    """

    splits: list[int] = Field([0, 3, 6, 9], min_length=1)
    """Denoising steps at which every trajectory splits into ``branches``, in ascending order. These
    steps are stochastic in every window."""
    branches: int = Field(2, ge=2)
    """Number of trajectories into which one splits."""

    @property
    def num_leaves(self) -> int:
        """Samples of a tree."""
        return int(self.branches ** len(self.splits))

    @property
    def num_leaves_sharing_noise(self) -> tuple[int, ...]:
        """The leaves that share the noise of each denoising step, up to the last split; after it
        each has its own.
        """
        # ``before[step]`` counts the splits up to a step; each divides the leaves that share noise
        # by ``branches``. Splits at 0 and 3 in 2 branches: before = [1, 1, 1, 2], and (2, 2, 2, 1)
        # of 4 leaves share.
        before = [
            sum(split <= step for split in self.splits) for step in range(self.splits[-1] + 1)
        ]
        return tuple(self.num_leaves // self.branches**count for count in before)

    @model_validator(mode="after")
    def _check_order_of_splits(self) -> TreeConfig:
        # ``num_leaves_sharing_noise`` and the check of the stage take the last entry for the latest
        # split.
        if self.splits != sorted(set(self.splits)) or self.splits[0] < 0:
            raise ValueError(
                f"splits = {self.splits} are denoising steps from 0 on; give each once, in"
                " ascending order"
            )
        return self


ADVANTAGE_CLIP = 5.0
"""The largest advantage of most published code."""


class AdvantagesConfig(Strict):
    """A = (R - baseline) / (std + 1e-4) inside the group of a prompt, clamped unless ``clip`` is
    null.
    """

    std: Literal["global", "group", "none"] = "global"
    """Standard deviation that the advantages are divided by. ``global``: of the whole batch
    (Flow-GRPO). ``group``: of the group (DanceGRPO). ``none``: 1 (Dr. GRPO)."""
    clip: float | None = Field(ADVANTAGE_CLIP, gt=0)
    """Clamp advantages to [-clip, clip]. ``null``, for algorithms on trajectories: no clamping
    (Flow-DPPO)."""
    combine: Literal["per_reward", "sum"] = "per_reward"
    """Combination of several rewards. ``per_reward``: normalise each reward, then add them with
    their weights. ``sum``: add them with their weights, then normalise the sum (Flow-GRPO)."""
    trim: float = Field(0.0, ge=0, lt=0.5)
    """Share of a group's rewards, at either end, that the baseline ignores. The baseline is the
    mean of the rest."""
    keep_extremes: int | None = Field(None, ge=1)
    """Train only on this number of best and this number of worst samples of each group."""
    running: bool = False
    """Compute the baseline and the standard deviation of a prompt over all its samples of the stage
    so far, instead of over this step."""

    @model_validator(mode="after")
    def _check_single_baseline(self) -> AdvantagesConfig:
        if self.trim and self.running:
            raise ValueError(
                "trim leaves out samples of this step and running averages over earlier ones too;"
                " take one of them"
            )
        return self


class ReferenceConfig(Strict):
    """The penalty for moving away from the base model."""

    weight: float = Field(0.0, ge=0)
    """Weight of the penalty in the loss. The default depends on the algorithm."""
    penalty: Literal["kl", "kl_without_dt", "velocity"] = "velocity"
    """``kl``: mean((mu - mu_ref)^2) / (2 b^2) with the true standard deviation b of the step.
    ``kl_without_dt``: the same over 2 s^2, as Flow-GRPO's code computes it; under ``cps`` it equals
    ``kl``. ``velocity``: mean((v - v_ref)^2). Default: ``kl`` on trajectories, ``velocity``
    otherwise."""
    guidance: float = Field(1.0, ge=1)
    """Scale of classifier-free guidance of v_ref, for algorithms on final latents. Above 1 the
    penalty pulls the policy towards the guided base model. 1: no guidance."""
    guidance_2: float | None = Field(None, ge=1)
    """The same of the transformer for low noise, for families with two. Default:
    ``model.guidance_2`` where ``guidance`` is the model's, else ``guidance``."""
    adaptive: bool = False
    """Weight each row's penalty by its advantage, from 1e-4 at -``advantages.clip`` up to
    ``weight`` at +``advantages.clip``. The policy then moves away from samples with low scores
    faster, and stays near the base model on samples with high scores (CRD, 2603.14128)."""
    reset_every: int | None = Field(None, ge=1)
    """Penalise the distance to a copy of the policy instead of the base model, and renew the copy
    after this number of steps of an online stage (GARDO, 2512.24138). ``null``: not by steps."""
    reset_above: float | None = Field(None, gt=0)
    """Renew that copy after a step in which the penalty of an optimiser step, without its weight,
    was above this. ``null``: never. With both keys at ``null`` the reference is the base model."""

    @property
    def is_reset(self) -> bool:
        """Whether the reference is a copy that becomes the policy from time to time."""
        # Without weight there is no penalty, and nothing pulls to a copy that would take memory.
        return self.weight > 0 and self.has_reset_rule

    @property
    def has_reset_rule(self) -> bool:
        """Whether the recipe says when the reference is renewed."""
        return self.reset_every is not None or self.reset_above is not None

    @property
    def copy_name(self) -> Literal["reference", "recent"]:
        """The policy copy that the penalty pulls to."""
        return "recent" if self.is_reset else "reference"

    @property
    def needs_guidance(self) -> bool:
        """Whether it needs the base model's predictions under guidance."""
        # Without weight the penalty is not computed, and needs no negative prompts.
        return self.weight > 0 and self.guidance > 1


class CorrectionConfig(Strict):
    """Off-policy correction of rollouts from another engine, precision or policy version than the
    one in training.

    Everything is a function of delta = log-prob under the training policy - log-prob of the
    rollout, of a sample at a step.
    """

    mode: Literal["bypass", "decoupled"] = "decoupled"
    """``decoupled``: three policies. The ratio is against the training policy before the updates of
    this step (one more forward pass), and importance weights correct for the rollout policy.
    ``bypass``: two policies. The ratio is against the rollout's log-probs. This corrects next to
    nothing, because a ratio of mean log-probs is the true ratio to the power 1 / D, and only of its
    own step."""
    unit: Literal["mean", "sum"] = "sum"
    """Scale of delta in weights and thresholds. ``sum``: the sum over the latent's D elements,
    which is the true log-density. ``mean``: the mean over them, as for every log-prob here and in
    published code. A mean is D times smaller, so a delta of 1e-4 is already large."""
    weights: Literal["none", "truncated", "masked"] = "truncated"
    """Importance weights. ``truncated``: exp(delta), at most ``high``. ``masked``: exp(delta), and
    terms outside of [``low``, ``high``] are dropped. ``none``: no weights, the default in mode
    ``bypass``."""
    level: Literal["step", "trajectory"] = "step"
    """``step``: one weight per step, with less variance. ``trajectory``: one weight per sample,
    from the sum of its deltas. Apart from the bounds, only ``trajectory`` with unit ``sum`` gives
    the gradient of the policy in training."""
    low: float = Field(0.8, gt=0, lt=1)
    """Lower bound of the weights of ``masked``. Default with unit ``mean``: .9995."""
    high: float = Field(1.25, gt=1)
    """Upper bound of the weights. Default with unit ``mean``: 1.0005."""
    normalise: bool = False
    """Divide the weights by their mean over the batch."""
    reject: Literal["none", "k1", "k2", "k3"] = "none"
    """Drop rows by an estimate of the divergence. ``k1``: |delta|. ``k2``: delta^2 / 2. ``k3``:
    exp(delta) - 1 - delta."""
    reject_level: Literal["step", "sequence_mean", "sequence_sum", "sequence_max"] = "step"
    """Value that is compared with ``reject_above``: the estimate of the step, or its mean, sum or
    maximum over the sample's steps."""
    reject_above: float = Field(0.25, gt=0)
    """Threshold of ``reject``, on the scale of ``unit``. Default: .25 for k1, and .03 for k2 and
    k3. With unit ``mean``: 5e-4, and 1.25e-7."""

    @model_validator(mode="before")
    @classmethod
    def _set_defaults_of_mode_and_unit(cls, data: Any) -> Any:
        """Defaults that catch a stale rollout in every unit: a threshold on the wrong scale never
        does anything.
        """
        if not isinstance(data, dict):
            return data
        # The default of the field, ``truncated``, is an error in this mode.
        if data.get("mode") == "bypass":
            data = {"weights": "none"} | data
        # k2 and k3 grow with delta^2 / 2 near 0, so the same distance is a smaller number: .25 for
        # k1 is .25^2 / 2 = .03 for them, and 5e-4 is 1.25e-7.
        squared = data.get("reject") in ("k2", "k3")
        # What the recipe gives comes last in each union, and so replaces the default.
        if data.get("unit") == "mean":
            return {
                "low": 0.9995,
                "high": 1.0005,
                "reject_above": 1.25e-7 if squared else 5e-4,
            } | data
        return {"reject_above": 0.03 if squared else 0.25} | data

    @model_validator(mode="after")
    def _check_bypass_without_weights(self) -> CorrectionConfig:
        if self.mode == "bypass" and self.weights != "none":
            raise ValueError(
                f"mode bypass corrects nothing, and weights = {self.weights!r} belong to a ratio"
                " against the training policy; set weights: none, or mode: decoupled"
            )
        return self
