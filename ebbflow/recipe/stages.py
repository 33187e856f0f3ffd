"""What one stage of training does: how it samples, what it learns with, and for how long."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ebbflow.recipe.algorithms import AlgorithmConfig, CustomAlgorithmConfig
from ebbflow.recipe.base import apportion_total
from ebbflow.recipe.choices import ParityConfig, TreeConfig
from ebbflow.recipe.data import DataConfig
from ebbflow.recipe.kinds import AlgorithmKind, find_kind
from ebbflow.recipe.online import MonitoringKeys, PlacementKeys, PromptSamplingKeys, StepKeys
from ebbflow.recipe.passes import choose_pass_size
from ebbflow.recipe.paths import PathText
from ebbflow.recipe.plugins import validate_name_or_path
from ebbflow.recipe.registry import AnyAlgorithmConfig, default_algorithm
from ebbflow.recipe.rollout_cache import check_approximations
from ebbflow.recipe.stage_defaults import add_algorithm_defaults
from ebbflow.recipe.stage_keys import GenerationKeys, LearningKeys, LimitKeys


# pydantic collects fields from the last base class to the first, so the groups stand here in
# reverse: ``ebbflow keys`` prints LearningKeys first.
class StageConfig(LimitKeys, GenerationKeys, LearningKeys):
    """Keys that online, offline and custom stages share."""

    @property
    def hyper_parameters(self) -> AlgorithmConfig:
        """The algorithm's hyper-parameters. ``options`` of a custom algorithm become an instance
        of its own class.
        """
        if isinstance(self.algorithm, CustomAlgorithmConfig):
            return self.algorithm.load_algorithm()[1]
        return self.algorithm

    @property
    def algorithm_kind(self) -> AlgorithmKind:
        """The kind of rows that the algorithm trains on, which says what suits it."""
        return find_kind(self.hyper_parameters.kind)

    @property
    def algorithm_name(self) -> str:
        """The algorithm's name in messages and tables; the path of a custom one."""
        if isinstance(self.algorithm, CustomAlgorithmConfig):
            return self.algorithm.path
        return self.algorithm.name

    @property
    def source_file(self) -> str | None:
        """The file or folder of samples that the stage trains on instead of generating them."""
        return None

    @property
    def captioned_data(self) -> DataConfig | None:
        """The images or videos with captions that the stage trains on, alone or as its anchor."""
        return self.anchor.data if self.anchor else None

    @property
    def source_files(self) -> list[str]:
        """All files and folders of samples that the stage names."""
        anchors = [self.anchor.data.path] if self.anchor else []
        return [*anchors, *([self.source_file] if self.source_file else [])]

    @property
    def takes_prompts(self) -> bool:
        """Whether it is known how many of the run's prompts the stage generates for."""
        # A custom stage takes as many as it wants; pairs and data bring prompts of their own.
        # ``kind`` is a field of the subclasses.
        return getattr(self, "kind", "") in ("online", "offline") and self.source_file is None

    @property
    def needs_guided_copy(self) -> bool:
        """Whether the reference or the teacher needs negative prompts, even where the policy
        generates without guidance.
        """
        return self.reference.needs_guidance or self.algorithm_kind.guides_teacher(
            self.hyper_parameters
        )

    @property
    def noise_sharing(self) -> tuple[int, ...]:
        """Samples of a prompt with successive numbers that share their noise, by its step index
        (``ebbflow.flow.noise.SampleKeys.sharing``).
        """
        # The entry at index 0 is x_T; the noise of denoising step i is at index i + 1.
        return (self.group_size,) if self.shared_initial_noise else ()

    @model_validator(mode="before")
    @classmethod
    def _set_defaults_of_algorithm(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        # Before validation: afterwards, a default cannot be told from what the recipe gives.
        return add_algorithm_defaults(data, cls, cls.model_fields["algorithm"].default)

    @model_validator(mode="after")
    def _check_suits_algorithm(self) -> StageConfig:
        # A custom stage decides itself what it does with an algorithm.
        # ``kind`` is a field of the subclasses.
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
        if not self.negative_gradient and (
            self.algorithm_kind.is_unguided or not self.guidance_in_loss
        ):
            raise ValueError(
                f"negative_gradient = False: the loss of {self.algorithm_name} is without guidance"
                " and so without negative prompts; leave negative_gradient out"
            )
        check_approximations(self)
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
    def _check_anchor_is_trained_here(self) -> StageConfig:
        if self.anchor is None:
            return self
        if getattr(self, "kind", "") == "custom":
            raise ValueError("a stage of your own kind trains as it likes; leave anchor out")
        if getattr(self, "placement", "") == "ray":
            raise ValueError(
                "anchor is for placement: in_process and colocated, whose processes get the data;"
                " set one of them, or leave anchor out"
            )
        return self

    @model_validator(mode="after")
    def _check_reference_is_reset_online(self) -> StageConfig:
        if self.reference.has_reset_rule and getattr(self, "kind", "") != "online":
            raise ValueError(
                "reference.reset_every and reference.reset_above renew the reference between the"
                " steps of an online stage; leave them out"
            )
        return self

    @model_validator(mode="after")
    def _check_engine_has_parity_gate(self) -> StageConfig:
        if self.engine == "diffusers" and self.parity != ParityConfig():
            raise ValueError(
                "parity is the gate of another engine; set engine: vllm_omni or sglang, or leave"
                " 'parity' out"
            )
        return self

    @model_validator(mode="after")
    def _check_sizes_are_possible(self) -> StageConfig:
        labels = [size.size_label for size in self.sizes]
        duplicates = [label for label in labels if labels.count(label) > 1]
        if duplicates:
            raise ValueError(
                f"sizes has {duplicates[0]} twice; give one of them the sum of the weights"
            )
        if self.sizes and self.engine != "diffusers":
            raise ValueError(
                f"engine = {self.engine!r} generates in one size; set engine: diffusers, or leave"
                " sizes out"
            )
        if self.sizes and getattr(self, "kind", "") == "custom":
            raise ValueError("a stage of your own kind chooses its sizes itself; leave sizes out")
        return self


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
"""Key to (the value that ``reuse_rollout_forward`` needs, the reason and the fix)."""


class OnlineStageConfig(MonitoringKeys, PlacementKeys, PromptSamplingKeys, StepKeys, StageConfig):
    """An online stage: each step generates samples, scores them and updates the policy, while the
    models stay loaded."""

    kind: Literal["online"] = "online"
    algorithm: AnyAlgorithmConfig = default_algorithm("mix_grpo")

    @property
    def prompts_depend_on_rewards(self) -> bool:
        """Whether nobody knows the prompts of a step before the steps in front of it."""
        # Refills replace groups that score alike; the others weigh or drop prompts by rewards.
        return bool(self.refill_rounds or self.curriculum or self.prompt_filter)

    @property
    def candidates_per_prompt(self) -> int:
        """Prompts that are encoded ahead for each prompt of a step."""
        # A curriculum divides the random number of each prompt by its weight w <= 1 and takes the
        # smallest quotients. So its first n prompts are among about the first n / mean(w) of the
        # order without weights. mean(w) is above 1/2 until half of a large set has come up; later,
        # more prompts are encoded when a step asks for them.
        return (2 if self.curriculum else 1) * (1 + self.refill_rounds)

    @property
    def pass_size(self) -> int:
        """Samples of a forward pass of rollouts and updates, at most: ``micro_batch``, or the
        nearest number below it that makes all of them equal.
        """
        return choose_pass_size(self.group_size, self.micro_batch)

    @property
    def noise_sharing(self) -> tuple[int, ...]:
        if not self.tree:
            return super().noise_sharing
        # A tree has one root: its samples share their first noise whatever the group does.
        first = max([*super().noise_sharing, self.tree.num_leaves])
        return (first, *self.tree.num_leaves_sharing_noise)

    @model_validator(mode="after")
    def _check_tree_fits(self) -> OnlineStageConfig:
        if self.tree is not None:
            self._require_suitable_stage(self.tree)
        return self

    def _require_suitable_stage(self, tree: TreeConfig) -> None:
        if not self.algorithm_kind.records_trajectory:
            raise ValueError(
                f"tree gives the steps of a trajectory advantages, and {self.algorithm_name} trains"
                " on none; leave 'tree' out, or set algorithm.name to branch_grpo"
            )
        # Recognised by its field, which an algorithm of the user's own may have as well.
        if hasattr(self.hyper_parameters, "teacher"):
            raise ValueError(
                f"tree trains the samples whose rewards differ, and {self.algorithm_name} learns"
                " from no reward; leave 'tree' out"
            )
        if self.hyper_parameters.reshapes_advantages:
            raise ValueError(
                f"tree gives every step an advantage of its own, and {self.algorithm_name} reshapes"
                " those of whole samples; leave 'tree' out, or set algorithm.name to branch_grpo"
            )
        # Splits come from different noise, and the last denoising step adds none.
        last = tree.splits[-1]
        if last > self.sampler.steps - 2:
            raise ValueError(
                f"tree.splits has {last}, and of sampler.steps = {self.sampler.steps} the last one"
                f" is deterministic; split at {self.sampler.steps - 2} at the latest, or take more"
                " steps"
            )
        # A group is made of whole trees, whose leaves are its samples.
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
        # The best policy is read from its checkpoint, so every validated step must have one.
        if self.checkpoints is None or self.validation.every % self.checkpoints.every:
            every = self.checkpoints.every if self.checkpoints else None
            raise ValueError(
                "validation.best goes back to a checkpoint, and validation.every ="
                f" {self.validation.every} meets none of checkpoints.every = {every}; make the"
                " first a multiple of the second"
            )
        return self

    @model_validator(mode="after")
    def _check_engine_of_colocated_ranks(self) -> OnlineStageConfig:
        if self.placement == "colocated" and self.engine != "diffusers":
            raise ValueError(
                "placement: colocated generates with the weights that each process trains, and"
                f" engine = {self.engine!r} holds weights of its own; set placement: ray, or"
                " engine: diffusers"
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
        for key, (required, reason) in REUSABLE_FORWARD.items():
            value = getattr(self, key)
            if value != required:
                # A section such as ``tree`` would fill the message with its keys.
                setting = value if isinstance(value, str | int) else "given"
                raise ValueError(
                    f"reuse_rollout_forward: {key} is {setting}, and {reason}, or leave"
                    " reuse_rollout_forward out"
                )
        return self

    @model_validator(mode="after")
    def _check_warmup_ends_in_time(self) -> OnlineStageConfig:
        updates = self.steps * self.updates_per_step
        warmup = self.optimizer.schedule.warmup
        if updates <= warmup:
            raise ValueError(
                f"optimizer.schedule.warmup = {warmup} takes the whole stage of steps *"
                f" updates_per_step = {updates} optimiser steps; lower it"
            )
        return self

    @model_validator(mode="after")
    def _check_profile(self) -> OnlineStageConfig:
        if self.profile is None:
            return self
        if self.placement != "ray" and "reward" in self.profile.roles:
            raise ValueError(
                "profile.roles has 'reward', which is scored during the rollouts, and torch has one"
                " profiler per process; set placement: ray, or leave 'reward' out"
            )
        for step in self.profile.steps:
            if not 0 <= step < self.steps:
                raise ValueError(
                    f"profile.steps has {step}, and the stage's steps are 0 to {self.steps - 1};"
                    " take some of them"
                )
        return self


class OfflineStageConfig(StageConfig):
    """An offline stage: it generates and scores one large batch, in shards, and trains on it for
    several epochs. Or it trains on a file of preference pairs, or on captioned data."""

    kind: Literal["offline"] = "offline"
    algorithm: AnyAlgorithmConfig = default_algorithm("diffusion_nft")
    pairs: PathText | None = None
    """A .parquet or .jsonl file of preference pairs. The stage trains on them instead of generating
    and scoring samples (``datasets/README.md``)."""
    data: DataConfig | None = None
    """Images or videos with captions to train on instead of generating and scoring samples
    (supervised fine-tuning), for algorithms that imitate: ``sft`` and ``rwr``."""
    prompts: int = Field(64, ge=1)
    """Number of prompts."""
    shards: int = Field(2, ge=1)
    """Number of rollout and scoring pods. Prompts are split evenly among them."""
    epochs: int = Field(2, ge=1)
    """Number of epochs over the samples."""
    batch_size: int = Field(128, ge=1)
    """Samples per optimiser step, over all training processes."""
    latent_precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of the final latents in rollout shards. bfloat16 rounds them. It takes less than
    half of the space and of the time to read them."""

    @property
    def source_file(self) -> str | None:
        return self.data.path if self.data else self.pairs

    @property
    def captioned_data(self) -> DataConfig | None:
        return self.data or super().captioned_data

    @model_validator(mode="after")
    def _check_learns_from_data(self) -> OfflineStageConfig:
        if self.data is None:
            return self
        if self.pairs:
            raise ValueError("pairs and data are both samples to train on; leave one of them out")
        if self.anchor:
            raise ValueError("data is trained on anyway; leave 'anchor' out, or one of them")
        if not self.hyper_parameters.imitates:
            raise ValueError(
                f"{self.algorithm_name} compares samples by their rewards, which data has not; set"
                " algorithm.name to sft, or use the data in an anchor"
            )
        return self

    @model_validator(mode="after")
    def _check_shards_have_prompts(self) -> OfflineStageConfig:
        if self.shards > self.prompts and self.takes_prompts:
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
        if self.sizes and self.data:
            raise ValueError(
                "sizes are of images that are generated; the sizes of pictures are data.buckets:"
                " set those, and leave 'sizes' out"
            )
        # A shard has one size, so each size needs a shard.
        num_shards = apportion_total([size.weight for size in self.sizes], self.shards)
        for size, count in zip(self.sizes, num_shards, strict=True):
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
    """A stage kind of your own: ``path`` names the function that trains, and ``options`` are its
    settings (docs/extending.md)."""

    kind: Literal["custom"] = "custom"
    algorithm: AnyAlgorithmConfig = default_algorithm("diffusion_nft")
    path: Annotated[str, validate_name_or_path()]
    options: dict[str, Any] = {}


AnyStageConfig = Annotated[
    OnlineStageConfig | OfflineStageConfig | CustomStageConfig, Field(discriminator="kind")
]


def is_trained_in_group(stage: AnyStageConfig) -> bool:
    """Return whether the deployment's ``train_processes`` run a stage, at least its training."""
    return stage.kind == "offline" or (stage.kind == "online" and stage.placement == "colocated")
