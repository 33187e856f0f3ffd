"""What one stage of training does: how it samples, what it learns with, and for how long."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    Field,
    ValidationError,
    model_validator,
)

from ebbflow.recipe.algorithms import (
    AlgorithmConfig,
    CustomAlgorithmConfig,
)
from ebbflow.recipe.base import Strict, apportion_total
from ebbflow.recipe.choices import (
    ENGINES,
    AdvantagesConfig,
    CorrectionConfig,
    ParityConfig,
    ReferenceConfig,
    SamplerConfig,
    SizeConfig,
    TreeConfig,
    WindowConfig,
)
from ebbflow.recipe.kinds import AlgorithmKind, find_kind
from ebbflow.recipe.model import Precision
from ebbflow.recipe.online import OnlineConfig
from ebbflow.recipe.optimizer_config import OptimizerConfig
from ebbflow.recipe.paths import PathText
from ebbflow.recipe.plugins import describe_choices, validate_name_or_path
from ebbflow.recipe.registry import ALGORITHMS, AnyAlgorithmConfig, default_algorithm


class CheckpointsConfig(Strict):
    """Checkpoints of a stage. A stage that resumes from one ends with the same bytes as one that
    was never stopped."""

    every: int = Field(10, ge=1)
    """Steps between two checkpoints; in an offline stage, optimiser steps."""
    keep: int = Field(2, ge=1)
    """Number of newest checkpoints to keep, in case the newest is damaged. The best validated one
    is kept as well."""


class StageConfig(Strict):
    """Keys that online and offline stages share."""

    algorithm: AnyAlgorithmConfig
    branch: str | None = None
    """The branch (a name of ``branches``) that this stage belongs to. Different branches start from
    the same policy and run side by side."""
    sampler: SamplerConfig = SamplerConfig()
    sizes: list[SizeConfig] = []
    """Image sizes of the rollouts. Each step of an online stage, and each shard of an offline
    stage, has one size, sampled by weight. Default: the size of ``model``."""
    window: WindowConfig | None = None
    """Window of trained denoising steps, for algorithms on trajectories. They have one by
    default."""
    advantages: AdvantagesConfig = AdvantagesConfig()
    reference: ReferenceConfig = ReferenceConfig()
    correction: CorrectionConfig | None = None
    """Off-policy correction, for algorithms on trajectories. Default: none; the ratio is against
    the rollout's log-probs. Without it, rollouts of another policy, engine or precision raise an
    alarm."""
    optimizer: OptimizerConfig = OptimizerConfig()
    group_size: int = Field(16, ge=2)
    """Samples per prompt. Advantages compare samples within this group."""
    shared_initial_noise: bool = False
    """All samples of a prompt start from the same noise, which changes at every step of an online
    stage (``--init_same_noise`` of DanceGRPO and MixGRPO). Only the noise of stochastic steps makes
    them different."""
    micro_batch: int = Field(64, ge=1)
    """Samples per forward and backward pass."""
    guidance_in_loss: bool = True
    """For algorithms on trajectories and models with classifier-free guidance. false: generate with
    guidance and train the unguided prediction; ratios are against that prediction before the
    updates of the step (one more forward pass)."""
    rollout_precision: Precision | None = None
    """Precision of the network during rollouts. Default: ``model.precision``."""
    engine: Annotated[str, validate_name_or_path(*ENGINES)] = Field(
        "diffusers",
        description=(
            f"{describe_choices(ENGINES)} Or package.module:Name of your own (docs/extending.md)."
        ),
    )
    parity: ParityConfig = ParityConfig()
    """Parity gate of an engine other than ``diffusers``."""
    drift_alarm: float = Field(1.0, gt=0)
    """Warn, and tell the report, when the velocity drift from the base model, mean((v - v_base)^2),
    is above this. A policy that learns well stays well below 1; one that games its reward often
    does not."""
    checkpoints: CheckpointsConfig | None = CheckpointsConfig()
    max_hours: float | None = Field(None, gt=0)
    """Hours after which the stage ends with the policy it has. The run continues."""
    max_gpu_hours: float | None = Field(None, gt=0)
    """The same limit in GPU hours, summed over all GPUs of the stage."""

    @property
    def hyper_parameters(self) -> AlgorithmConfig:
        """The algorithm's hyper-parameters; of a user's own algorithm, its own class of them."""
        return (
            self.algorithm.load_algorithm()[1]
            if isinstance(self.algorithm, CustomAlgorithmConfig)
            else self.algorithm
        )

    @property
    def algorithm_kind(self) -> AlgorithmKind:
        """The kind of rows that the algorithm trains on, which says what suits it."""
        return find_kind(self.hyper_parameters.kind)

    @property
    def algorithm_name(self) -> str:
        """How people call the algorithm: a user's own by its path."""
        return (
            self.algorithm.path
            if isinstance(self.algorithm, CustomAlgorithmConfig)
            else self.algorithm.name
        )

    @property
    def needs_guided_copy(self) -> bool:
        """Whether it needs negative prompts for the reference or the teacher, though the policy
        generates without guidance.
        """
        return self.reference.needs_guidance or self.algorithm_kind.guides_teacher(
            self.hyper_parameters
        )

    @model_validator(mode="before")
    @classmethod
    def _set_defaults_of_algorithm(cls, data: Any) -> Any:
        """Keys that the algorithm sets unless the recipe does, down to single keys of the sampler,
        the window and so on.
        """
        if not isinstance(data, dict):
            return data
        algorithm = _find_algorithm_class(
            data.get("algorithm", cls.model_fields["algorithm"].default)
        )
        if algorithm is None:
            return data  # its own error says more than ours could
        penalty = find_kind(algorithm.kind).default_penalty
        defaults = {"reference": {}} | {
            k: v for k, v in algorithm.stage_defaults.items() if k in cls.model_fields
        }
        defaults["reference"] = {"penalty": penalty} | defaults["reference"]
        return {
            **defaults,
            **data,
            **{
                key: _merge_defaults(key, defaults[key], data[key])
                for key in defaults.keys() & data.keys()
            },
        }

    @model_validator(mode="after")
    def _check_suits_algorithm(self) -> StageConfig:
        kind = getattr(self, "kind", "")
        if kind in ("online", "offline") and kind not in self.hyper_parameters.stages:
            raise ValueError(_explain_wrong_stage(self.algorithm_name, kind))
        if kind == "offline" and (
            hasattr(self.hyper_parameters, "teacher") or hasattr(self.hyper_parameters, "teachers")
        ):
            raise ValueError(
                f"{self.algorithm_name} learns from a teacher, which only online stages load; use"
                " it in one"
            )
        self.algorithm_kind.check_stage(self)
        if self.advantages.clip is None and not self.algorithm_kind.records_trajectory:
            raise ValueError(
                "advantages.clip = null is for algorithms on trajectories, and"
                f" {self.algorithm_name} is none; take a number such as 5, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_samples_of_prompt_differ(self) -> StageConfig:
        if self.shared_initial_noise and not self.sampler.is_stochastic:
            raise ValueError(
                "shared_initial_noise makes all samples of a prompt one and the same image, as the"
                f" sampler {self.sampler.name!r} adds no noise; leave it out, or set sampler.name"
                " to flow_sde, dance_sde or cps"
            )
        return self

    @model_validator(mode="after")
    def _check_schedule_ends(self) -> StageConfig:
        schedule = self.optimizer.schedule
        if (
            getattr(self, "kind", "") == "custom"
            and schedule.depends_on_length
            and schedule.updates is None
        ):
            raise ValueError(
                f"optimizer.schedule.kind = {schedule.kind!r}: nobody knows how many optimiser"
                " steps a custom stage takes; set optimizer.schedule.updates"
            )
        return self

    @model_validator(mode="after")
    def _check_engine_has_parity_gate(self) -> StageConfig:
        if self.engine == "diffusers" and self.parity != ParityConfig():
            raise ValueError(
                "parity is the gate of another engine; set engine: vllm_omni, or leave 'parity' out"
            )
        return self

    @model_validator(mode="after")
    def _check_sizes_are_possible(self) -> StageConfig:
        names = [size.size_label for size in self.sizes]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"sizes has {twice[0]} twice; give one of them the sum of the weights")
        if self.sizes and self.engine != "diffusers":
            raise ValueError(
                f"engine = {self.engine!r} generates in one size; set engine: diffusers, or leave"
                " sizes out"
            )
        if self.sizes and getattr(self, "kind", "") == "custom":
            raise ValueError("a stage of your own kind chooses its sizes itself; leave sizes out")
        return self


def _find_algorithm_class(given: Any) -> type[AlgorithmConfig] | None:
    """The class of hyper-parameters that a recipe's ``algorithm`` asks for, if there is one."""
    if isinstance(given, AlgorithmConfig):
        return type(given)
    if isinstance(given, CustomAlgorithmConfig):
        return type(given.load_algorithm()[1])
    if not isinstance(given, dict):
        return None
    if given.get("name") == "custom":
        try:
            return type(CustomAlgorithmConfig.model_validate(given).load_algorithm()[1])
        except ValidationError:
            return None
    return ALGORITHMS.get(name) if isinstance(name := given.get("name"), str) else None


def _merge_defaults(block: str, default: Any, given: Any) -> Any:
    """What the recipe gives, with the algorithm's defaults for the keys that it leaves out.

    Of another sampler or kind of window than the algorithm's it gives all, but for the number of
    denoising steps: the algorithm's other keys belong to its own.
    """
    if isinstance(given, BaseModel):
        given = given.model_dump(exclude_unset=True)
    if not (isinstance(given, dict) and isinstance(default, dict)):
        return given
    choice, usual = {
        "sampler": ("name", SamplerConfig().name),
        "window": ("kind", WindowConfig().kind),
    }.get(block, ("", ""))
    own = default.get(choice, usual)
    if given.get(choice, own) != own:
        default = {key: value for key, value in default.items() if key == "steps"}
    return default | given


def _explain_wrong_stage(name: str, kind: str) -> str:
    if kind == "offline":
        return (
            f"{name} needs fresh trajectories: use it in an online stage, and diffusion_nft in an"
            " offline one"
        )
    return f"{name} cannot run in an {kind} stage; the nearest that can is diffusion_nft"


REUSABLE_FORWARD: dict[str, tuple[Any, str]] = {
    "mode": ("sync", "other rollouts are of weights that have moved since; set mode: sync"),
    "placement": (
        "in_process",
        "graphs stay in the process that made them; set placement: in_process",
    ),
    "engine": ("diffusers", "another engine gives no gradient; set engine: diffusers"),
    "updates_per_step": (
        1,
        "after the first update the weights have moved; set updates_per_step: 1",
    ),
    "tree": (
        None,
        "samples of a tree share predictions; take an algorithm without one, such as mix_grpo",
    ),
    "guidance_in_loss": (
        True,
        "the loss is on other predictions than the rollout's; leave guidance_in_loss out",
    ),
    "rollout_precision": (
        None,
        "training must predict as the rollout did; leave rollout_precision out",
    ),
    "correction": (None, "the rollout is the policy's own; leave 'correction' out"),
}
"""What ``reuse_rollout_forward`` needs of other keys, and why."""


class OnlineStageConfig(OnlineConfig, StageConfig):
    """An online stage: rollout, score, advantages, update, repeated while the models stay
    loaded."""

    kind: Literal["online"] = "online"
    algorithm: AnyAlgorithmConfig = default_algorithm("mix_grpo")
    steps: int = Field(40, ge=1)
    """Number of steps; each generates rollouts and updates the policy."""
    prompts_per_step: int = Field(8, ge=1)
    refill_rounds: int = Field(0, ge=0)
    """Rounds of dynamic sampling (DAPO, 2503.14476): a step replaces prompts whose samples all have
    the same score by other prompts, at most this number of times. It waits for their rollouts,
    which the newest weights generate."""
    updates_per_step: int = Field(2, ge=1)
    """Optimiser steps per rollout batch. The samples are split into this number of parts."""
    reuse_rollout_forward: bool = False
    """For algorithms on trajectories with ``updates_per_step: 1``. The backward pass uses the
    rollout's own forward passes, so nothing is predicted again. Faster, but the activations of all
    trained steps of all samples of a step are in memory together (docs/online.md)."""
    tree: TreeConfig | None = None
    """Tree rollouts, for algorithms on trajectories: the samples of a group split from common
    trajectories, and every denoising step has an advantage of its own (docs/algorithms.md)."""

    @model_validator(mode="after")
    def _check_tree_fits(self) -> OnlineStageConfig:
        if self.tree is not None:
            self._check_tree_of_window(self.tree)
        return self

    def _check_tree_of_window(self, tree: TreeConfig) -> None:
        if not self.algorithm_kind.records_trajectory:
            raise ValueError(
                f"tree gives the steps of a trajectory advantages, and {self.algorithm_name} trains"
                " on none; leave 'tree' out, or set algorithm.name to branch_grpo"
            )
        if hasattr(self.hyper_parameters, "teacher"):
            raise ValueError(
                f"tree trains the samples whose rewards differ, and {self.algorithm_name} learns"
                " from no reward; leave 'tree' out"
            )
        if (last := tree.splits[-1]) > self.sampler.steps - 2:
            raise ValueError(
                f"tree.splits has {last}, and of sampler.steps = {self.sampler.steps} the last one"
                f" is deterministic; split at {self.sampler.steps - 2} at the latest, or take more"
                " steps"
            )
        if self.group_size % tree.num_leaves:
            raise ValueError(
                f"group_size = {self.group_size} is no multiple of the {tree.num_leaves} leaves of"
                f" a tree, tree.branches = {tree.branches} to the power of {len(tree.splits)}"
                " splits; change one of them"
            )
        if self.advantages.running:
            raise ValueError(
                "advantages.running has one history for each prompt, and the nodes of a tree are"
                " compared at every denoising step; leave one of them out"
            )

    @model_validator(mode="after")
    def _check_best_has_checkpoint(self) -> OnlineStageConfig:
        if self.validation is None or not self.validation.best:
            return self
        if self.checkpoints is None or self.validation.every % self.checkpoints.every:
            every = self.checkpoints.every if self.checkpoints else None
            raise ValueError(
                "validation.best goes back to a checkpoint, and validation.every ="
                f" {self.validation.every} meets none of checkpoints.every = {every}; make the"
                " first a multiple of the second"
            )
        return self

    @model_validator(mode="after")
    def _check_forward_reuse(self) -> OnlineStageConfig:
        if not self.reuse_rollout_forward:
            return self
        if not self.algorithm_kind.records_trajectory:
            raise ValueError(
                "reuse_rollout_forward is for algorithms on trajectories, and"
                f" {self.algorithm_name} is none; leave it out, or set algorithm.name to mix_grpo"
            )
        for key, (needed, why) in REUSABLE_FORWARD.items():
            if (value := getattr(self, key)) != needed:
                given = value if isinstance(value, str | int) else "given"
                raise ValueError(
                    f"reuse_rollout_forward: {key} is {given}, and {why}, or leave"
                    " reuse_rollout_forward out"
                )
        return self

    @model_validator(mode="after")
    def _check_step_can_be_filled(self) -> OnlineStageConfig:
        if (
            tried := self.prompt_filter and self.prompt_filter.prompts
        ) and tried < self.prompts_per_step:
            raise ValueError(
                f"prompt_filter.prompts = {tried} are fewer than prompts_per_step ="
                f" {self.prompts_per_step}; raise the first"
            )
        return self

    @model_validator(mode="after")
    def _check_warmup_ends_in_time(self) -> OnlineStageConfig:
        if (updates := self.steps * self.updates_per_step) <= (
            warmup := self.optimizer.schedule.warmup
        ):
            raise ValueError(
                f"optimizer.schedule.warmup = {warmup} takes the whole stage of steps *"
                f" updates_per_step = {updates} optimiser steps; lower it"
            )
        return self

    @model_validator(mode="after")
    def _check_profiled_steps_exist(self) -> OnlineStageConfig:
        if self.profile and (
            beyond := [step for step in self.profile.steps if not 0 <= step < self.steps]
        ):
            raise ValueError(
                f"profile.steps has {beyond[0]}, and the stage's steps are 0 to {self.steps - 1};"
                " take some of them"
            )
        return self


def resolve_correction(stage: StageConfig, precision: Precision) -> CorrectionConfig | None:
    """The recipe's; without one, rollouts of anything but the policy as it is are watched and
    nothing else is done about them.

    Guided rollouts of a loss without guidance are scored again under the policy without it, and not
    weighed: the weights would be those between two policies that are apart on purpose.
    """
    if not stage.guidance_in_loss:
        return CorrectionConfig(mode="decoupled", weights="none")
    if lacks_correction(stage, precision):
        return CorrectionConfig(mode="bypass", weights="none")
    return stage.correction


def lacks_correction(stage: StageConfig, precision: Precision) -> bool:
    """Whether rollouts are of another policy, engine or precision than training, and the recipe
    says nothing about it.
    """
    rough = (stage.rollout_precision or precision) != precision
    apart = isinstance(stage, OnlineStageConfig) and (
        stage.mode != "sync" or stage.engine != "diffusers"
    )
    return stage.correction is None and (rough or apart)


class OfflineStageConfig(StageConfig):
    """An offline stage: a large batch is generated and scored once, in shards, then trained on for
    several epochs; or training on a file of preference pairs."""

    kind: Literal["offline"] = "offline"
    algorithm: AnyAlgorithmConfig = default_algorithm("diffusion_nft")
    pairs: PathText | None = None
    """A .parquet or .jsonl file of preference pairs to train on, instead of generated and scored
    samples (``datasets/README.md``)."""
    prompts: int = Field(64, ge=1)
    shards: int = Field(2, ge=1)
    """Number of rollout and scoring pods. Prompts are split evenly among them."""
    epochs: int = Field(2, ge=1)
    batch_size: int = Field(128, ge=1)
    """Samples per optimiser step, over all training processes."""
    latent_precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of the final latents in rollout shards. bfloat16 rounds them, and takes less than
    half of the space and of the reading time."""

    @model_validator(mode="after")
    def _check_shards_have_prompts(self) -> OfflineStageConfig:
        if self.shards > self.prompts and not self.pairs:
            raise ValueError(
                f"{self.shards} shards for {self.prompts} prompts leave some empty; take one a"
                " prompt at most"
            )
        return self

    @model_validator(mode="after")
    def _check_every_size_has_shard(self) -> OfflineStageConfig:
        if self.sizes and self.pairs:
            raise ValueError(
                "sizes are of images that are generated, and pairs has images already; leave one of"
                " them out"
            )
        for size, count in zip(
            self.sizes,
            apportion_total([size.weight for size in self.sizes], self.shards),
            strict=True,
        ):
            if not count:
                raise ValueError(
                    f"shards = {self.shards} leaves none for {size.size_label}, as a shard has one"
                    " size; raise it"
                )
        return self

    @model_validator(mode="after")
    def _check_prompts_are_seen_once(self) -> OfflineStageConfig:
        if self.advantages.running:
            raise ValueError(
                "advantages.running needs prompts that come back; an offline stage generates once:"
                " leave it out"
            )
        return self


class CustomStageConfig(StageConfig):
    """A stage kind of your own: ``path`` names the function that trains, ``options`` are its
    settings (docs/extending.md)."""

    kind: Literal["custom"] = "custom"
    algorithm: AnyAlgorithmConfig = default_algorithm("diffusion_nft")
    path: Annotated[str, validate_name_or_path()]
    options: dict[str, Any] = {}


AnyStageConfig = Annotated[
    OnlineStageConfig | OfflineStageConfig | CustomStageConfig, Field(discriminator="kind")
]
