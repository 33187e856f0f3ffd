"""The recipe: one YAML file says everything about one run."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from ebbflow.recipe.base import (
    MAX_LENGTH,
    NAME,
    RecipeError,
    Strict,
    explain_validation_error,
    iter_leaves,
    locate_nowhere,
    require_json_values,
    require_no_secrets,
)
from ebbflow.recipe.branches import BranchConfig, check_branches
from ebbflow.recipe.choices import SINKS
from ebbflow.recipe.digest import compute_digest
from ebbflow.recipe.evaluation import EvaluationConfig
from ebbflow.recipe.families import find_family
from ebbflow.recipe.guardrails import DEFAULT_GUARDRAILS, MIN_PROMPTS, choose_guardrails
from ebbflow.recipe.latents import check_latent_names, check_stage_trains_judged_latents
from ebbflow.recipe.model import ModelConfig, resize_model
from ebbflow.recipe.paths import OutputText, StoreText, resolve_paths
from ebbflow.recipe.plugins import validate_name_or_path
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.recipe.promotion import PromotionConfig
from ebbflow.recipe.prompts import PromptsConfig
from ebbflow.recipe.registry import AnyRewardConfig, configure_reward
from ebbflow.recipe.retention import RetentionConfig
from ebbflow.recipe.reward_checks import (
    RewardScope,
    check_evaluated_rewards,
    check_guardrail_tolerances,
    check_guardrails_move_nothing,
    check_held_out_prompts_are_scored,
    check_prompt_sets,
    check_prompt_sets_are_scored,
    check_reward_names,
    check_rewards_suit_model,
)
from ebbflow.recipe.reward_model import RewardModelConfig
from ebbflow.recipe.rewards import (
    ONLY_COMPARISONS,
    CustomRewardConfig,
    RewardConfig,
    prompt_sets_without_reward,
    rewards_for_prompt_sets,
    select_trained,
)
from ebbflow.recipe.stage_checks import (
    check_engines_support_model,
    check_guidance_is_optional,
    check_guided_references,
    check_latent_weights,
    check_optimizer_states,
    check_pictures_have_every_latent,
    check_read_scores,
    check_rollout_caches,
    check_rollout_precision,
    check_rollout_quantization,
    check_sglang_stages,
    check_shares_of_prompt_sets,
    check_stages_from_base,
    check_weights_until_update,
)
from ebbflow.recipe.stages import (
    AnyStageConfig,
    CustomStageConfig,
    OfflineStageConfig,
    OnlineStageConfig,
)
from ebbflow.recipe.students import (
    check_students_are_trainable,
    check_students_have_teacher,
    check_teachers_of_prompt_sets,
)

SEEDS = 2**31
"""Number of seeds that a recipe may have."""


class StopRuleConfig(Strict):
    """Early stopping: the rounds end when the validation reward has not grown by ``min_delta`` for
    ``patience`` rounds."""

    patience: int = Field(2, ge=1)
    min_delta: float = Field(0.0, ge=0)


class TrackingConfig(Strict):
    """Where runs are tracked in MLflow."""

    experiment: str = Field("ebbflow", min_length=1, max_length=MAX_LENGTH)
    """Name of the MLflow experiment."""
    uri: StoreText | None = None
    """Tracking URI of MLflow. Default: ``MLFLOW_TRACKING_URI``, or a SQLite file in ``output`` if
    that is not set."""
    sinks: list[Annotated[str, validate_name_or_path(*SINKS)]] = []
    """Other trackers that also receive the curves of a run. Each needs its package
    (docs/metrics.md). A sink that fails causes a warning."""


class Recipe(Strict):
    """One run, completely. The same recipe on the same machine gives the same bytes."""

    name: str = Field("glyph", pattern=NAME, max_length=MAX_LENGTH)
    """Name of the run."""
    seed: int = Field(0, ge=0, lt=SEEDS)
    """Seed of all random numbers."""
    output: OutputText = "runs"
    """Folder (or URI) for the report and the summary, with one folder per run."""
    threads: int = Field(1, ge=1)
    """Number of torch threads per process. Small models gain from more threads only if cores are
    idle."""
    deterministic: bool = False
    """Use deterministic kernels on a GPU. They are slower and give the same bytes every time. An
    operation without such a kernel is an error (docs/bitwise.md)."""
    model: ModelConfig = ModelConfig()
    prompts: PromptsConfig = PromptsConfig()
    rewards: list[AnyRewardConfig] = Field([configure_reward("ocr")], min_length=1)
    """Rewards to train on, as their weighted sum."""
    guardrails: list[AnyRewardConfig] = list(DEFAULT_GUARDRAILS)
    """Rewards that are measured and never trained on. A guardrail whose package is missing is
    reported and skipped. Default: those of ``tesseract`` and ``similarity`` that are not trained
    on, where held-out prompts name a text to read; none for pretrained families."""
    max_failed_share: float = Field(0.05, ge=0, lt=1)
    """Share of samples whose scoring may fail before the stage stops. Failed samples are masked and
    counted. It is also the share of held-out samples on which a guardrail may fail before the gate
    rejects."""
    reward_model: RewardModelConfig | None = None
    """The reward model that `ebbflow train-reward` and `ebbflow turn` train on labels of people."""
    policy: PolicyConfig = PolicyConfig()
    rounds: int = Field(1, ge=1, le=20)
    """Number of rounds. Each round runs all ``stages``."""
    stages: list[AnyStageConfig] = Field([OnlineStageConfig(), OfflineStageConfig()], min_length=1)
    """Stages of one round, in order. Stages of different ``branches`` run side by side."""
    branches: dict[Annotated[str, Field(pattern=NAME, max_length=MAX_LENGTH)], BranchConfig] = {}
    """Branches of a round by name. Each trains a specialist, and a distillation stage can take the
    specialists as teachers (docs/branches.md)."""
    stop: StopRuleConfig = StopRuleConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    promotion: PromotionConfig = PromotionConfig()
    tracking: TrackingConfig = TrackingConfig()
    retention: RetentionConfig = RetentionConfig()
    # Set in the view of a branch alone, whose rewards no longer tell what the run trains on. Not
    # serialized: views stay in the process that selects them.
    _run_has_default_guardrails: bool | None = PrivateAttr(None)

    @field_validator("rewards", mode="before")
    @classmethod
    def _reject_mapping_of_rewards(cls, rewards: Any) -> Any:
        # Without this, pydantic would only say that a list is expected.
        if isinstance(rewards, dict):
            raise ValueError(
                "give a list of rewards; what is only watched is a list under 'guardrails', beside"
                " 'rewards'"
            )
        return rewards

    # Rules that need several sections of the recipe. Each section has its own rules in its class;
    # the checks that are called here stand with the section that they are about. The first check
    # that fails ends the list, so a check may rely on those before it.

    @model_validator(mode="after")
    def _choose_default_guardrails(self) -> Recipe:
        # Before the checks below, which would complain of guardrails that the file does not have.
        if "guardrails" not in self.model_fields_set:
            # Frozen models take no assignment, and nobody has seen this one yet.
            self.__dict__["guardrails"] = self._default_guardrails
        return self

    @model_validator(mode="after")
    def _check_rewards(self) -> Recipe:
        check_reward_names([self.rewards, *self._branch_rewards], self.guardrails)
        check_prompt_sets("rewards", self.rewards, self.prompts.prompt_set_labels)
        check_prompt_sets("guardrails", self.guardrails, self.prompts.prompt_set_labels)
        for scope in self._reward_scopes():
            if scope.branch:
                branch_rewards = self.branches[scope.branch].rewards
                # The rewards of a branch may name the sets of the branch only.
                check_prompt_sets(scope.key, branch_rewards, scope.prompt_sets)
            check_prompt_sets_are_scored(scope)
        check_held_out_prompts_are_scored(self.prompts, self.rewards)
        check_evaluated_rewards(self._reward_scopes(), self.guardrails)
        check_rewards_suit_model(self._all_rewards, self.model)
        check_latent_names(self._all_rewards, self.model)
        check_guardrails_move_nothing(self.guardrails)
        check_guardrail_tolerances(self.promotion.guardrail_tolerance, self.guardrails)
        return self

    @model_validator(mode="after")
    def _check_branches(self) -> Recipe:
        check_branches(self.branches, self.stages, self.prompts.prompt_set_labels)
        for index, stage in enumerate(self.stages):
            check_shares_of_prompt_sets(index, stage, self.select_branch(stage.branch).prompts)
        for index, stage in enumerate(self.stages):
            prompts = self.select_branch(stage.branch).prompts
            check_teachers_of_prompt_sets(index, stage, prompts.prompt_set_labels)
        check_students_have_teacher(self.stages, self.rounds)
        check_stages_from_base(self.stages)
        return self

    @model_validator(mode="after")
    def _check_stages_suit_model(self) -> Recipe:
        check_students_are_trainable(self.stages, self.model)
        check_rollout_precision(self.stages, self.model, self.policy)
        check_weights_until_update(self.stages, self.model)
        check_optimizer_states(self.stages, self.model)
        check_engines_support_model(self.stages, self.model, self.policy)
        check_sglang_stages(self.stages, self.model, self.policy, self.evaluation)
        check_rollout_caches(self.stages, self.model)
        check_rollout_quantization(self.stages, self.model)
        check_guided_references(self.stages, self.model)
        check_pictures_have_every_latent(self.stages, self.model)
        check_latent_weights(self.stages, self.model)
        for index, stage in enumerate(self.stages):
            rewards = self.select_branch(stage.branch).rewards
            check_stage_trains_judged_latents(index, stage, rewards, self.model)
            check_read_scores(index, stage, rewards)
        self._check_deterministic_kernels()
        check_guidance_is_optional(self.stages, self.model)
        return self

    def _check_deterministic_kernels(self) -> None:
        # diffusers calls torch's own kernels ``native``, or ``_native_`` with a suffix.
        attention = self.model.attention or "native"
        if self.deterministic and "native" not in attention:
            raise ValueError(
                "deterministic: torch cannot tell whether the kernels of model.attention ="
                f" {attention!r} add in a fixed order; take native, or leave it out"
            )

    @model_validator(mode="after")
    def _check_evaluated_size(self) -> Recipe:
        sizes = {
            key: size for key in ("height", "width") if (size := getattr(self.evaluation, key))
        }
        family = find_family(self.model.family)
        if sizes and family and family.has_fixed_size:
            key, size = next(iter(sizes.items()))
            raise ValueError(
                f"evaluation.{key} = {size}: the {self.model.family} model draws the size that it"
                " was trained on; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_sizes_of_family(self) -> Recipe:
        family = find_family(self.model.family)
        index = next((index for index, stage in enumerate(self.stages) if stage.sizes), None)
        if index is not None and family and family.has_fixed_size:
            raise ValueError(
                f"stages.{index}.sizes: the {self.model.family} model draws the size that it was"
                " trained on; leave sizes out"
            )
        if index is not None and family and family.edits_images:
            raise ValueError(
                f"stages.{index}.sizes: {self.model.family} draws the images that it edits in one"
                " size; leave sizes out"
            )
        return self

    # Whether mypy reports the type of this decorator depends on the order of the files.
    @model_validator(mode="wrap")  # type: ignore[arg-type, unused-ignore]
    @classmethod
    def _explain_errors(
        cls, data: Any, handler: ModelWrapValidatorHandler[Recipe], info: ValidationInfo
    ) -> Recipe:
        context = info.context or {}
        locate = context.get("locate", locate_nowhere)
        try:
            values = iter_leaves(data)
            # First: a later error could quote the secret.
            require_no_secrets(values, locate)
            # Only a recipe that was read from a file has a folder; what Python builds keeps its
            # paths.
            if "folder" in context:
                data = resolve_paths(data, context["folder"])
            recipe: Recipe = handler(data)
            # Last: a type error of pydantic says more about a wrong value than JSON's limits do.
            require_json_values(values, locate)
        except ValidationError as error:
            raise RecipeError(
                f"this recipe cannot be run:\n{explain_validation_error(error, cls, locate)}"
            ) from None
        except RecipeError as error:
            raise RecipeError(f"this recipe cannot be run:\n{error}") from None
        return recipe

    @property
    def plugin_paths(self) -> list[str]:
        """The paths to custom code that reading the recipe does not import: rewards, the family,
        engines, stage kinds, the sampler of evaluations.
        """
        rewards = [
            config.path for config in self._all_rewards if isinstance(config, CustomRewardConfig)
        ]
        kinds = [stage.path for stage in self.stages if isinstance(stage, CustomStageConfig)]
        engines = [stage.engine for stage in self.stages]
        # The samplers and algorithms of stages were imported when their sections were validated.
        names = [*rewards, self.model.family, *engines, *kinds, self.evaluation.sampler]
        # Built-in families, engines and samplers have names without a colon.
        return [name for name in names if ":" in name]

    @property
    def evaluated_rewards(self) -> list[RewardConfig]:
        """The ``rewards`` that score single images, as an evaluation does.

        Raises:
            RecipeError: there are none, or none for a prompt set, or a custom reward cannot be
                imported.
        """
        # ``check_evaluated_rewards`` has let custom rewards pass without importing them, so they
        # are asked here.
        evaluated = [reward for reward in self.rewards if not reward.compares]
        trained = select_trained(evaluated)
        if not trained or prompt_sets_without_reward(trained, self.prompts.prompt_set_labels):
            raise RecipeError(ONLY_COMPARISONS.format("rewards"))
        return evaluated

    @property
    def has_default_guardrails(self) -> bool:
        """Whether the guardrails are those of a recipe that names none. A resolved recipe spells
        them out, so that equal ones count as left out. The view of a branch says what is true of
        its run.
        """
        if self._run_has_default_guardrails is not None:
            return self._run_has_default_guardrails
        return self.guardrails == self._default_guardrails

    @property
    def min_compared(self) -> int:
        """The number of held-out prompts that a guardrail has to score: ``MIN_PROMPTS``, or two,
        without which there is no comparison, where the run holds out fewer and promotes nothing.
        """
        return MIN_PROMPTS if self.prompts.held_out >= MIN_PROMPTS else 2

    def select_scorable_guardrails(self, num_texts: int) -> list[AnyRewardConfig]:
        """Return the guardrails that an evaluation measures. Default ones that read are left out
        where there is too little to read; those that the recipe names always count. A list that
        equals the default counts as default where it is written out, too: a resolved recipe spells
        defaults out, so that the two cannot be told apart.

        Args:
            num_texts: held-out prompts that name a text.
        """
        if num_texts >= self.min_compared or not self.has_default_guardrails:
            return self.guardrails
        return [guardrail for guardrail in self.guardrails if not guardrail.reads]

    @property
    def rollout_models(self) -> list[ModelConfig]:
        """The base model in the image sizes that decide how much memory rollouts need: its own
        size if a stage names no ``sizes``, and the largest of all ``sizes``.
        """
        models = []
        if not all(stage.sizes for stage in self.stages):
            models.append(self.model)
        sizes = [size for stage in self.stages for size in stage.sizes]
        if sizes:
            # Memory grows with the number of pixels.
            largest = max(sizes, key=lambda size: size.height * size.width)
            models.append(resize_model(self.model, largest.height, largest.width))
        return models

    @property
    def canonical_json(self) -> str:
        """The resolved recipe as JSON: every key with its value, sorted."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))

    @property
    def num_evaluated(self) -> int:
        """Samples of one evaluation."""
        # The first sample of a repeated prompt is among ``held_out`` already.
        return (
            self.prompts.validation
            + self.prompts.held_out
            + self.count_repeated(self.prompts.held_out) * (self.evaluation.samples - 1)
        )

    def count_repeated(self, num_held_out: int) -> int:
        """Count the held-out prompts that have several samples in an evaluation.

        Args:
            num_held_out: of the run, or of a branch.
        """
        repeated = self.evaluation.repeated_prompts
        return num_held_out if repeated is None else min(repeated, num_held_out)

    @property
    def digest(self) -> str:
        """The sha256 of the keys that are set (``ebbflow.recipe.digest``)."""
        return compute_digest(self)

    def stage_label(self, round_index: int, stage_index: int) -> str:
        """Return the name of a stage in logs, tables and reports, counted from one: ``"2.1
        online"``, or ``"2.1 online letters"`` in a branch.
        """
        stage = self.stages[stage_index]
        label = f"{round_index + 1}.{stage_index + 1} {stage.kind}"
        return f"{label} {stage.branch}" if stage.branch else label

    def count_rounds(self, stage_index: int) -> int:
        """Return in how many rounds a stage is trained, in a run that starts from the base model
        and does not stop early.
        """
        return 1 if self.stages[stage_index].only_from_base else self.rounds

    def branch_label(self, round_index: int, name: str) -> str:
        """Return the name of a branch in a round, counted from one: ``"2 letters"``."""
        return f"{round_index + 1} {name}"

    def select_branch(self, name: str | None) -> Recipe:
        """Return the recipe as the stages of a branch see it: with the branch's prompt sets, and
        the rewards and guardrails that score one of them. Outside of branches it is unchanged.
        """
        branch = self.branches.get(name or "")
        if branch is None:
            return self
        mixture = [
            prompt_set
            for prompt_set in self.prompts.mixture
            if prompt_set.prompt_set_label in branch.prompts
        ]
        # ``branch.prompts`` is empty by default, which means all sets.
        prompts = self.prompts.model_copy(update={"mixture": mixture or self.prompts.mixture})
        labels = prompts.prompt_set_labels
        changes = {
            "prompts": prompts,
            "rewards": rewards_for_prompt_sets(branch.rewards or self.rewards, labels),
            "guardrails": rewards_for_prompt_sets(self.guardrails, labels),
        }
        # ``model_copy`` does not validate again: this is a view of a recipe that was checked, and
        # its stages may name branches and sets that the view lacks.
        view = self.model_copy(update=changes)
        # A private attribute can be set although the model is frozen.
        view._run_has_default_guardrails = self.has_default_guardrails
        return view

    def _reward_scopes(self) -> list[RewardScope]:
        scopes = []
        for name in (None, *self.branches):
            view = self.select_branch(name)
            key = f"branches.{name}.rewards" if name else "rewards"
            # Errors name the key that the user wrote: a branch without rewards has those of the
            # run.
            source_key = key if name and self.branches[name].rewards else "rewards"
            labels = view.prompts.prompt_set_labels
            scopes.append(RewardScope(name, key, source_key, view.rewards, labels))
        return scopes

    @property
    def _all_rewards(self) -> list[AnyRewardConfig]:
        """Rewards, guardrails and the rewards of branches."""
        return [
            *self.rewards,
            *self.guardrails,
            *(config for rewards in self._branch_rewards for config in rewards),
        ]

    @property
    def _default_guardrails(self) -> list[AnyRewardConfig]:
        branch_rewards = [config for rewards in self._branch_rewards for config in rewards]
        return choose_guardrails(self.model.family, [*self.rewards, *branch_rewards])

    @property
    def _branch_rewards(self) -> list[list[AnyRewardConfig]]:
        return [branch.rewards for branch in self.branches.values() if branch.rewards]
