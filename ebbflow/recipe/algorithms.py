"""The hyper-parameters of each algorithm with their source, and what it needs of a stage; losses
are in ``ebbflow.algorithms``.

Each class says in a line what the algorithm does (``ebbflow list`` prints it), declares the stage's
defaults that make it the published one, and holds what was published, with sources: ``ebbflow
defaults`` prints both, and a test holds them against each other. Published clip ranges are for
latents of 10^4 and more elements: log-probs are means over them, so a small model such as glyph,
with 512, needs a wider one.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, ValidationError, model_validator

from ebbflow.recipe.base import RecipeError, Strict, explain_validation_error
from ebbflow.recipe.kinds import find_kind
from ebbflow.recipe.paths import PathText
from ebbflow.recipe.plugins import import_object, validate_name_or_path


class EmaScheduleConfig(Strict):
    """A copy that follows the policy: copy <- d copy + (1 - d) theta after step n, with d =
    min(min_decay + slope max(n - warmup, 0), max_decay).

    A step is an optimiser step. For a copy that generates the rollouts (DiffusionNFT, CRD) it is a
    rollout step.
    """

    warmup: int = Field(0, ge=0)
    """Steps during which d stays at ``min_decay``."""
    min_decay: float = Field(0.0, ge=0, lt=1)
    slope: float = Field(0.09, ge=0)
    """Growth of d per step after the warm-up."""
    max_decay: float = Field(0.9, ge=0, lt=1)

    @model_validator(mode="after")
    def _check_decay_does_not_fall(self) -> EmaScheduleConfig:
        # ``decay_after_step`` takes the smaller of the two, so a min_decay above max_decay would
        # never be reached, and nothing would say so.
        if self.min_decay > self.max_decay:
            raise ValueError(
                f"min_decay = {self.min_decay:g} is above max_decay = {self.max_decay:g}; raise the"
                " second"
            )
        return self

    def decay_after_step(self, step: int) -> float:
        """d after a step, counted from one."""
        return min(self.min_decay + self.slope * max(step - self.warmup, 0), self.max_decay)


GROUP_SIZE = "the size of a run follows the machines, not the algorithm"
SUM_OF_REWARDS = (
    "each of several rewards is normalised by itself, so that no scale decides; of one reward it is"
    " the same"
)
TEACHER_GUIDANCE = "it is that of a model, and some have none; the recipe says it"
"""Why defaults of every algorithm deviate from their source."""


class PublishedSetting(NamedTuple):
    """A setting as its source has it.

    Attributes:
        value: the value as a recipe would state it; in words where no key sets it.
        source: repository, file and entry of the public code, or the paper.
        note: the values that the source has for other rewards, tasks or models.
        deviation: why the default here differs; empty where it is the same.
        ours: what this library does, in words, where no key sets it.
    """

    value: Any
    source: str
    note: str = ""
    deviation: str = ""
    ours: str = ""


class AlgorithmConfig(Strict):
    """What every algorithm declares. A user's own hyper-parameters derive from one of the five
    kinds below.

    Attributes:
        kind: what the rows of the loss are made of: steps of a trajectory with log-probs, noised
            final latents, rewards with gradient, or samples of a few-step student that are noised
            again.
        stages: the stage kinds that the algorithm can run in.
        stage_defaults: defaults of the stage's keys while this algorithm is used; a stage ignores
            keys that its kind lacks.
        published: the values of the source, by the dotted key of a stage (``algorithm.beta``,
            ``window.size``).
        needs_density: the loss takes log-probs as logarithms of a density, which those of the
            ``cps`` sampler are not.
        compares_means: the loss compares the means of steps with those of the rollout, which keeps
            them for it, a latent for each trained step.
        imitates: the loss makes every sample likelier, so that captioned data without rewards can
            be its samples.
        only_selects: rewards choose the samples, and the loss of a row is the same whatever its
            advantage is.
        reshapes_advantages: the algorithm changes the advantages of whole samples by their scores,
            which the steps of a tree and single latents do not have.
        data_defaults: ``stage_defaults`` of a stage with ``data``, those of ``algorithm`` included.
        data_published: ``published`` of a stage with ``data``.
        paper: arXiv id of the publication.
    """

    kind: ClassVar[str]
    stages: ClassVar[tuple[str, ...]]
    stage_defaults: ClassVar[dict[str, Any]] = {}
    published: ClassVar[dict[str, PublishedSetting]] = {}
    needs_density: ClassVar[bool] = False
    compares_means: ClassVar[bool] = False
    imitates: ClassVar[bool] = False
    only_selects: ClassVar[bool] = False
    reshapes_advantages: ClassVar[bool] = False
    data_defaults: ClassVar[dict[str, Any]] = {}
    data_published: ClassVar[dict[str, PublishedSetting]] = {}
    paper: ClassVar[str] = ""

    @property
    def read_columns(self) -> list[str]:
        """The columns of scores that the algorithm reads besides the weighted sum of the trained
        rewards.
        """
        return []

    def ratio_range(self, dims: int) -> float | None:
        """How far the ratio of mean log-probs over ``dims`` elements may be off 1 before a term has
        no gradient; None: any.
        """
        return None


class TrajectoryConfig(AlgorithmConfig):
    """Algorithms that train on the steps of a fresh trajectory: a stochastic sampler, a window of
    its steps, their log-probs."""

    # A stage's own default, ``ode``, is deterministic: its steps have no log-probs.
    stage_defaults: ClassVar = {"sampler": {"name": "flow_sde"}, "window": {"kind": "progressive"}}

    kind: ClassVar = "trajectory"
    stages: ClassVar = ("online",)


SIGMAS = {
    "uniform": "evenly spread",
    "logit_normal": "1 / (1 + exp(-z)) of a standard normal z, mostly in the middle (2403.03206)",
    "schedule": "the sigmas of the stage's sampler, which its family has shifted",
}


class SigmaConfig(Strict):
    """The noise levels (sigmas) to which a forward-process loss noises final latents."""

    kind: Literal["uniform", "logit_normal", "schedule"] = Field(
        description="; ".join(f"{name}: {text}" for name, text in SIGMAS.items()) + "."
    )
    shift: float = Field(1.0, gt=0)
    """Shift of ``uniform`` and ``logit_normal``: sigma <- shift sigma / (1 + (shift - 1) sigma).
    SD3's schedule has a shift of 3."""
    min: float = Field(0.0, ge=0, le=1)
    """Smallest sigma. After the shift, sigmas are sampled from [``min``, ``max``]."""
    max: float = Field(1.0, ge=0, le=1)
    """Largest sigma."""
    stratified: bool = True
    """Stratified sampling: the distribution (or the schedule) is split into ``noise_levels`` equal
    parts, and each part gives one sigma. false: samples are independent, or come without
    replacement from a schedule."""

    @model_validator(mode="after")
    def _check_band_is_not_empty(self) -> SigmaConfig:
        if self.min >= self.max:
            raise ValueError(
                f"min = {self.min:g} is not below max = {self.max:g}, so no sigma is left; lower"
                " min or raise max"
            )
        return self

    @model_validator(mode="after")
    def _check_schedule_without_shift(self) -> SigmaConfig:
        # A second shift would train at noise levels that the sampler never visits.
        if self.kind == "schedule" and self.shift != 1:
            raise ValueError(
                f"shift = {self.shift:g}: the sampler's schedule is shifted by its family; "
                "leave shift out, or take kind uniform or logit_normal"
            )
        return self


class ForwardConfig(AlgorithmConfig):
    """Algorithms that train on noised final latents: any sampler, no log-probs."""

    kind: ClassVar = "forward"
    stages: ClassVar = ("online", "offline")
    shared_noise: ClassVar[bool] = True
    """Whether the samples of a pair or a group share the noise, as they share sigma."""

    noise_levels: int = Field(2, ge=1)
    """Number of (sigma, noise) samples per latent and pass."""
    sigma: SigmaConfig = SigmaConfig(kind="uniform")
    """Distribution of the sigmas."""


class GradientConfig(AlgorithmConfig):
    """Algorithms that train on the gradient of differentiable rewards: they repeat some denoising
    steps with gradient, and decode."""

    stage_defaults: ClassVar = {"sampler": {"name": "ode"}}

    kind: ClassVar = "gradient"
    stages: ClassVar = ("online",)

    @property
    def steps_with_gradient(self) -> int:
        """Evaluations of the network that the gradient of a row goes through."""
        return 1

    @property
    def rows_per_sample(self) -> int:
        """Rows of the loss for each sample."""
        return 1

    @abstractmethod
    def first_step(self, steps: int, draw: Any) -> int:
        """The first denoising step with gradient, of ``steps``.

        Args:
            draw: a numpy ``Generator``, another one for each update.
        """


class DirectAlignConfig(GradientConfig):
    """Direct-Align (2509.06942): final latents are noised with their own initial noise, and
    recovered by one step with gradient.

    The step ends at a sigma that is sampled for each latent from [``min_sigma``, ``max_sigma``].
    The denoising branch starts above it, the inversion branch below it.
    """

    kind: ClassVar = "direct_align"

    min_sigma: float = Field(0.75, ge=0, lt=1)
    """Lower end of the band of noise levels."""
    max_sigma: float = Field(0.9643, gt=0, lt=1)
    """Upper end of the band of noise levels."""
    jump: float = Field(0.1, gt=0, le=0.5)
    """Length of the step, as a share of the band [``min_sigma``, ``max_sigma``]. The step is
    shorter near the ends of the band and never leaves it."""
    inversion: bool = True
    """Add a row of the inversion branch for each sample. false: only the denoising branch."""

    @model_validator(mode="after")
    def _check_band_is_not_empty(self) -> DirectAlignConfig:
        if self.min_sigma >= self.max_sigma:
            raise ValueError(
                f"min_sigma = {self.min_sigma:g} is not below max_sigma = {self.max_sigma:g}; lower"
                " min_sigma or raise max_sigma"
            )
        return self

    @property
    def rows_per_sample(self) -> int:
        # Each sample gives a row of the denoising branch, and one of the inversion branch.
        return 1 + self.inversion

    def first_step(self, steps: int, draw: Any) -> int:
        return steps  # no step of the sampler has a gradient

    def choose_words(self, update: int) -> tuple[str, str]:
        """The positive and the negative word that an update puts before the prompts that rewards
        see; empty: none.

        Args:
            update: the number of updates before it.
        """
        return "", ""


class MatchingConfig(AlgorithmConfig):
    """Distribution matching: distils a many-step teacher into a few-step student
    (docs/few_steps.md)."""

    kind: ClassVar = "matching"
    stages: ClassVar = ("online",)
    along_trajectory: ClassVar[bool] = False
    """true: noise the end of a deterministic step again, to the noise levels of that step. false:
    noise the clean prediction."""
    level_gap: ClassVar[float | None] = None
    """A number: the noise levels begin this far above the end of the step, before ``sigma.shift``,
    and may lie above its start. None: they stay between the two ends of the step."""

    teacher: PathText | None = Field(None, min_length=1)
    """Policy folder (or URI) of the teacher. It must have the same base model and the same
    ``policy``. Default: the policy that the stage starts from."""
    guidance: float = Field(1.0, ge=1)
    """Scale of classifier-free guidance of the teacher only. The student learns to generate without
    guidance (``model.guidance: 1``)."""
    fake_updates: int = Field(5, ge=1)
    """Optimiser steps of the fake score before each optimiser step of the student, on the same
    samples with other noise."""
    fake_lr_factor: float = Field(1.0, gt=0)
    """Learning rate of the fake score, relative to the student's. The rest of its optimiser is the
    same."""
    # ``min_step_percent`` and ``max_step_percent`` of DMD2's published script.
    sigma: SigmaConfig = SigmaConfig(kind="uniform", min=0.02, max=0.98)
    """Distribution of the noise levels at which the loss compares the two scores and at which the
    fake score is trained."""

    @property
    def largest_guidance(self) -> float:
        """Largest scale of classifier-free guidance of a copy."""
        return self.guidance


class SurrogateConfig(MatchingConfig):
    """Distribution matching that also learns from rewards: a denoiser is trained beside the student
    as a surrogate of the reward."""

    along_trajectory: ClassVar = True

    surrogate_lr_factor: float = Field(1.0, gt=0)
    """Learning rate of the surrogate, relative to the student's. But for its betas, the rest of its
    optimiser is the same."""
    surrogate_betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(
        [0.9, 0.999], min_length=2, max_length=2
    )
    """Betas of the surrogate's optimiser."""
    surrogate_guidance: float = Field(1.0, ge=1)
    """Scale of classifier-free guidance of the surrogate where the student learns from it."""
    surrogate_sigma: SigmaConfig = SigmaConfig(kind="uniform")
    """Distribution of the noise levels at which the surrogate is trained and asked. They lie above
    the end of the student's step."""
    surrogate_old: EmaScheduleConfig = EmaScheduleConfig()
    """The moving average of the surrogate. Steps are optimiser steps."""

    @property
    def largest_guidance(self) -> float:
        return max(self.guidance, self.surrogate_guidance)


class CustomAlgorithmConfig(Strict):
    """An algorithm of your own: ``path`` names an ``ebbflow.algorithms.base.Algorithm``, and
    ``options`` are its hyper-parameters."""

    name: Literal["custom"] = "custom"
    path: Annotated[str, validate_name_or_path()]
    options: dict[str, Any] = {}

    @model_validator(mode="after")
    def _check_path_and_options(self) -> CustomAlgorithmConfig:
        try:
            self.load_algorithm()
        except RecipeError as error:
            raise ValueError(str(error)) from None  # which pydantic gives its place in the recipe
        return self

    def load_algorithm(self) -> tuple[Any, AlgorithmConfig]:
        """The algorithm and its hyper-parameters.

        Raises:
            RecipeError: nothing can be imported from there, it is no algorithm, it does not take
                these options, or it asks for what no stage can give.
        """
        algorithm = import_object(self.path)
        config = getattr(algorithm, "config", None)
        if not (isinstance(config, type) and issubclass(config, AlgorithmConfig)):
            raise RecipeError(
                f"{self.path} is a {type(algorithm).__name__}, not an"
                " ebbflow.algorithms.base.Algorithm"
            )
        try:
            # Validated here and not by pydantic with the rest: the class of ``options`` is known
            # only once ``path`` is imported.
            hyper = config.model_validate(self.options)
        except ValidationError as error:
            raise RecipeError(
                f"options of {self.path}:\n{explain_validation_error(error, config)}"
            ) from None
        kind = find_kind(hyper.kind)
        # The kind reads its own fields (``sigma``, ``noise_levels`` and so on) of the hyper-
        # parameters, which only a class that derives from its own is sure to have.
        if not isinstance(hyper, kind.config_class):
            raise RecipeError(
                f"{self.path} is of kind {kind.name!r}, whose hyper-parameters are a"
                f" {kind.config_class.__name__}; derive {config.__name__} from it"
            )
        # ``stages`` is what the user's class claims; what an offline stage stores decides whether
        # its rows can be built.
        if "offline" in hyper.stages and not kind.can_be_offline:
            raise RecipeError(
                f"{self.path}: offline stages store no trajectories; take them out of"
                f" {config.__name__}.stages"
            )
        if (
            # The weights of a teacher are loaded from the path in the hyper-parameters.
            "teacher" in algorithm.copies(hyper)
            and not {"teacher", "teachers"} & config.model_fields.keys()
        ):
            raise RecipeError(
                f"{self.path} asks for the copy 'teacher' and has no key for its path; give"
                f" {config.__name__} a field 'teacher: str', its policy folder or URI"
            )
        self._check_reshape(algorithm, hyper)
        return algorithm, hyper

    def _check_reshape(self, algorithm: Any, hyper: AlgorithmConfig) -> None:
        declares = type(hyper).__name__
        # The recipe is checked by the class alone, which a tree or latents of their own rely on.
        if (algorithm.reshape is not None) != hyper.reshapes_advantages:
            there = "has" if algorithm.reshape else "has no"
            raise RecipeError(
                f"{self.path} {there} 'reshape', and {declares}.reshapes_advantages is"
                f" {hyper.reshapes_advantages}; write 'reshapes_advantages: ClassVar ="
                f" {algorithm.reshape is not None}' into {declares}"
            )
        if algorithm.reshape and "offline" in hyper.stages:
            raise RecipeError(
                f"{self.path} has 'reshape', which changes the advantages of one step, and offline"
                " stages compute those of all samples at once; take 'offline' out of"
                f" {declares}.stages"
            )
