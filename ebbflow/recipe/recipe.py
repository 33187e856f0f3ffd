"""The recipe: one YAML file says everything about one run."""

from __future__ import annotations

import difflib
import json
import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
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
    find_nearest_name,
    format_path,
    iter_leaves,
    locate_nowhere,
    require_json_values,
    require_no_secrets,
)
from ebbflow.recipe.branches import BranchConfig, branches_teaching, check_branches
from ebbflow.recipe.choices import SINKS
from ebbflow.recipe.digest import compute_digest
from ebbflow.recipe.evaluation import EvaluationConfig
from ebbflow.recipe.families import FAMILIES, find_family
from ebbflow.recipe.model import ModelConfig, resize_model
from ebbflow.recipe.paths import OutputText, StoreText, resolve_paths
from ebbflow.recipe.plugins import validate_name_or_path
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.recipe.promotion import PromotionConfig
from ebbflow.recipe.prompts import PromptsConfig
from ebbflow.recipe.registry import AnyRewardConfig, configure_reward
from ebbflow.recipe.rewards import (
    GUARDRAIL_COMPARES,
    ONLY_COMPARISONS,
    CustomRewardConfig,
    RewardConfig,
    check_prompt_sets,
    prompt_sets_without_reward,
    rewards_for_prompt_sets,
)
from ebbflow.recipe.stages import (
    AnyStageConfig,
    CustomStageConfig,
    OfflineStageConfig,
    OnlineStageConfig,
)
from ebbflow.recipe.yaml_text import describe_yaml_error, read_yaml

MAX_BYTES = 2**16
"""Of a recipe file; real ones have some thousand."""
SHIPPED = "workflows/recipes"
"""The folder of our recipes, in a clone."""


class StopRuleConfig(Strict):
    """Early stopping: ends the rounds when the validation reward has not grown by ``min_delta`` for
    ``patience`` rounds."""

    patience: int = Field(2, ge=1)
    min_delta: float = Field(0.0, ge=0)


class TrackingConfig(Strict):
    """Where runs are tracked. Default of ``uri``: ``MLFLOW_TRACKING_URI``, or else a SQLite file in
    ``output``."""

    experiment: str = Field("ebbflow", min_length=1, max_length=MAX_LENGTH)
    uri: StoreText | None = None
    sinks: list[Annotated[str, validate_name_or_path(*SINKS)]] = []
    """Other trackers that also get the curves of a run; each needs its package (docs/metrics.md). A
    sink that fails causes a warning."""


class Recipe(Strict):
    """One run, completely. The same recipe on the same machine gives the same bytes."""

    name: str = Field("glyph", pattern=NAME, max_length=MAX_LENGTH)
    seed: int = Field(0, ge=0, lt=2**31)
    output: OutputText = "runs"
    """Folder (or URI) for the report and the summary, with one folder per run."""
    threads: int = Field(1, ge=1)
    """Torch threads per process. Small models gain from more only if cores are idle."""
    deterministic: bool = False
    """On a GPU, use deterministic kernels: slower, with the same bytes every time. An operation
    without such a kernel is an error (docs/bitwise.md)."""
    model: ModelConfig = ModelConfig()
    prompts: PromptsConfig = PromptsConfig()
    rewards: list[AnyRewardConfig] = Field([configure_reward("ocr")], min_length=1)
    """Rewards to train on, as their weighted sum."""
    guardrails: list[AnyRewardConfig] = [
        configure_reward("tesseract"),
        configure_reward("similarity"),
    ]
    """Rewards that are measured and never trained on. A guardrail that is not installed is reported
    and skipped."""
    max_failed_share: float = Field(0.05, ge=0, lt=1)
    """Share of samples whose scoring may fail (they are masked and counted) before the stage stops;
    also the share of held-out samples on which a guardrail may fail before the gate rejects."""
    policy: PolicyConfig = PolicyConfig()
    rounds: int = Field(1, ge=1, le=20)
    stages: list[AnyStageConfig] = Field([OnlineStageConfig(), OfflineStageConfig()], min_length=1)
    """Stages of one round, in order. Stages of different ``branches`` run side by side."""
    branches: dict[Annotated[str, Field(pattern=NAME, max_length=MAX_LENGTH)], BranchConfig] = {}
    """Branches of a round by name. Each trains a specialist, and a distillation can take them as
    teachers (docs/branches.md)."""
    stop: StopRuleConfig = StopRuleConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    promotion: PromotionConfig = PromotionConfig()
    tracking: TrackingConfig = TrackingConfig()

    @field_validator("rewards", mode="before")
    @classmethod
    def _check_rewards_are_list(cls, given: Any) -> Any:
        if isinstance(given, dict):
            raise ValueError(
                "give a list of rewards; what is only watched is a list under 'guardrails', beside"
                " 'rewards'"
            )
        return given

    @model_validator(mode="after")
    def _check_guardrails_differ_from_rewards(self) -> Recipe:
        watched = [config.column for config in self.guardrails]
        trained = [
            [config.column for config in rewards]
            for rewards in (self.rewards, *self._branch_rewards)
        ]
        for names in (*trained, watched):
            if len(set(names)) < len(names):
                raise ValueError(
                    f"each reward may be named once, got {names}; give one of them a 'label'"
                )
        if both := {name for names in trained for name in names} & set(watched):
            raise ValueError(
                f"{sorted(both)} cannot be trained on and be a guardrail; take it out of"
                " 'guardrails'"
            )
        if weighed := [guardrail.column for guardrail in self.guardrails if guardrail.weight != 1]:
            raise ValueError(
                f"a guardrail has no weight, since it is only watched; take it from {weighed}"
            )
        return self

    @model_validator(mode="after")
    def _check_rewards_of_prompt_sets(self) -> Recipe:
        check_prompt_sets("rewards", self.rewards, self.prompts.prompt_set_labels)
        check_prompt_sets("guardrails", self.guardrails, self.prompts.prompt_set_labels)
        for name in (None, *self.branches):
            view = self.select_branch(name)
            key = f"branches.{name}.rewards" if name else "rewards"
            if name:
                check_prompt_sets(key, self.branches[name].rewards, view.prompts.prompt_set_labels)
            if without := prompt_sets_without_reward(view.rewards, view.prompts.prompt_set_labels):
                raise ValueError(
                    f"{key}: none of them scores the prompt set {without[0]}; add it to the"
                    " 'prompts' of one"
                )
        if self.prompts.held_out_source and all(reward.prompts for reward in self.rewards):
            raise ValueError(
                "rewards: each names prompt sets, and prompts.held_out_source is none; leave"
                " 'prompts' of one out"
            )
        return self

    @model_validator(mode="after")
    def _check_evaluated_rewards(self) -> Recipe:
        """Of rewards that come with Ebbflow: whether a user's own compares is known once it is
        imported.
        """
        for name in (None, *self.branches):
            view = self.select_branch(name)
            key = f"branches.{name}.rewards" if name and self.branches[name].rewards else "rewards"
            evaluated = [
                reward
                for reward in view.rewards
                if isinstance(reward, CustomRewardConfig) or not reward.compares
            ]
            sets = view.prompts.prompt_set_labels
            if not evaluated or prompt_sets_without_reward(
                evaluated, sets
            ) != prompt_sets_without_reward(view.rewards, sets):
                raise ValueError(ONLY_COMPARISONS.format(key))
        watched = [
            guardrail
            for guardrail in self.guardrails
            if not isinstance(guardrail, CustomRewardConfig)
        ]
        if compared := [guardrail.column for guardrail in watched if guardrail.compares]:
            raise ValueError(GUARDRAIL_COMPARES.format(compared[0]))
        return self

    @model_validator(mode="after")
    def _check_rewards_suit_model(self) -> Recipe:
        if "lower_case" in self.model.training.alphabets and any(
            config.name == "recognizer" for config in self._all_rewards
        ):
            raise ValueError(
                "recognizer reads capitals alone, and model.training.alphabets has lower_case; take"
                " ocr, case: kept"
            )
        # What a user's own scores is not known before it is imported: it fails when it gets images.
        of_videos = [
            config.column
            for config in self._all_rewards
            if not isinstance(config, CustomRewardConfig) and config.scores == "videos"
        ]
        if self.model.frames == 1 and of_videos:
            raise ValueError(
                f"{of_videos[0]} scores videos, and model.frames = 1 draws images; raise it, or"
                f" leave {of_videos[0]} out"
            )
        return self

    @model_validator(mode="after")
    def _check_tolerances_of_guardrails(self) -> Recipe:
        known = [guardrail.column for guardrail in self.guardrails]
        tolerance = self.promotion.guardrail_tolerance
        for unit in ("standard_deviations", "absolute"):
            for name in getattr(tolerance, unit):
                if name not in known:
                    nearest = difflib.get_close_matches(name, known, n=1)
                    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
                    key = format_path(("promotion", "guardrail_tolerance", unit, name))
                    raise RecipeError(
                        f"{key}: no such guardrail; {hint}It has {', '.join(known) or 'none'}"
                    )
        return self

    @model_validator(mode="after")
    def _check_branches(self) -> Recipe:
        sets = self.prompts.prompt_set_labels
        for name, branch in self.branches.items():
            if strange := [part for part in branch.prompts if part not in sets]:
                raise ValueError(
                    f"branches.{name}.prompts: prompts.mixture has no set {strange[0]!r}, only"
                    f" {', '.join(sets) or 'no sets'}"
                )
        check_branches(self.branches, self.stages)
        return self

    @model_validator(mode="after")
    def _check_shares_of_prompt_sets(self) -> Recipe:
        for index, stage in enumerate(self.stages):
            from_pairs = isinstance(stage, OfflineStageConfig) and stage.pairs
            key = (
                None
                if from_pairs
                else {"online": "prompts_per_step", "offline": "prompts"}.get(stage.kind)
            )
            wanted = getattr(stage, key) if key else 0
            counts = (
                self.select_branch(stage.branch).prompts.count_by_prompt_set(wanted)
                if wanted
                else {}
            )
            if empty := [name for name, count in counts.items() if not count]:
                raise ValueError(
                    f"stages.{index}.{key} = {wanted} gives the prompt set {empty[0]} less than one"
                    " prompt; raise it, or the set's weight in prompts.mixture"
                )
        return self

    @model_validator(mode="after")
    def _check_teachers_of_prompt_sets(self) -> Recipe:
        for index, stage in enumerate(self.stages):
            names = self.select_branch(stage.branch).prompts.prompt_set_labels
            if not (teachers := getattr(stage.hyper_parameters, "teachers", {})):
                continue
            given = f"stages.{index}.algorithm.teachers = {', '.join(teachers)}"
            if strange := sorted(teachers.keys() - set(names)):
                raise ValueError(
                    f"{given}: prompts.mixture has no set {strange[0]!r}, only"
                    f" {', '.join(names) or 'no sets'}; name the sets"
                )
            if without := [name for name in names if name not in teachers]:
                raise ValueError(
                    f"{given}: the prompt set {without[0]} has no teacher; name one for every set"
                    " of prompts.mixture"
                )
        return self

    @model_validator(mode="after")
    def _check_students_have_teacher(self) -> Recipe:
        """The velocity of a student of few steps is no score, so it cannot be the teacher of
        another.
        """
        for index, stage in enumerate(self.stages):
            key = f"stages.{index}.algorithm"
            named = branches_teaching(stage)
            teacher = getattr(stage.hyper_parameters, "teacher", None)
            if not stage.algorithm_kind.trains_student or (teacher and not named):
                continue
            branch = stage.branch
            end = index
            policy = (
                f"{key} has no teacher, so that it learns from the policy before it, and that is"
            )
            if named:
                branch = named[0]
                end = 1 + max(
                    number for number in range(index) if self.stages[number].branch == branch
                )
                policy = f"{key}.teacher = {teacher!r} is"
            if students := self._list_earlier_student_stages(end, branch):
                since = f"since stages.{students[0]}" if students[0] < end else "in round 2"
                raise ValueError(
                    f"{policy} a student of few steps {since}; give teacher a policy folder"
                )
        return self

    def _list_earlier_student_stages(self, end: int, branch: str | None) -> list[int]:
        """The stages that make a student of few steps of the policy that a branch, or none, has
        before a stage.
        """
        return [
            index
            for index, stage in enumerate(self.stages)
            if stage.algorithm_kind.trains_student
            and stage.branch in (None, branch)
            and (index < end or (self.rounds > 1 and stage.branch is None))
        ]

    @model_validator(mode="after")
    def _check_students_are_trainable(self) -> Recipe:
        family = find_family(self.model.family)
        for index, stage in enumerate(self.stages):
            hyper = stage.hyper_parameters
            if not stage.algorithm_kind.trains_student:
                continue
            if self.model.guidance > 1 and (family is None or family.guided):
                raise ValueError(
                    f"stages.{index}: a student of {stage.algorithm_name} generates without"
                    f" guidance, and model.guidance = {self.model.guidance:g}; set it to 1, and"
                    " algorithm.guidance to that of the teacher"
                )
            guidance = getattr(hyper, "guidance", 1.0)
            guides_teacher = stage.algorithm_kind.guides_teacher(hyper)
            if guides_teacher and family and not family.guided:
                raise ValueError(
                    f"stages.{index}.algorithm.guidance = {guidance:g} needs classifier-free"
                    f" guidance, which model.family = {self.model.family!r} has not; leave it out"
                )
            if self.model.precision == "float16":
                raise ValueError(
                    f"stages.{index}: the fake score of {stage.algorithm_name} has no float16; take"
                    " bfloat16"
                )
        return self

    @model_validator(mode="after")
    def _check_rollouts_are_computable(self) -> Recipe:
        rough = self.model.precision
        for index, stage in enumerate(self.stages):
            if (
                rough != "float32"
                and stage.rollout_precision == "float32"
                and self.policy.train == "lora"
            ):
                raise ValueError(
                    f"stages.{index}.rollout_precision = 'float32' cannot be had from weights kept"
                    f" in model.precision = {rough!r}; set model.precision to float32, or leave"
                    " rollout_precision out"
                )
        return self

    @model_validator(mode="after")
    def _check_weights_until_update(self) -> Recipe:
        for index, stage in enumerate(self.stages):
            if (
                self.model.cpu_offload
                and isinstance(stage, OnlineStageConfig)
                and stage.reuse_rollout_forward
            ):
                raise ValueError(
                    f"stages.{index}.reuse_rollout_forward goes back through the weights of the"
                    " rollout, and model.cpu_offload overwrites them meanwhile; leave one of"
                    " them out"
                )
        return self

    @model_validator(mode="after")
    def _check_optimizer_states(self) -> Recipe:
        for index, stage in enumerate(self.stages):
            sharded = isinstance(stage, OnlineStageConfig) and stage.resources.training.count > 1
            stage.optimizer.require_whole_state(
                f"stages.{index}.optimizer", sharded, self.model.cpu_offload
            )
        return self

    @model_validator(mode="after")
    def _check_engines_support_family(self) -> Recipe:
        known = [name for name, family in FAMILIES.items() if family.vllm_omni]
        for index, stage in enumerate(self.stages):
            if stage.engine == "vllm_omni" and self.model.family not in known:
                raise ValueError(
                    f"stages.{index}.engine = 'vllm_omni' generates with {' and '.join(known)}, not"
                    f" with model.family = {self.model.family!r}; set engine: diffusers, or leave"
                    " it out"
                )
        return self

    @model_validator(mode="after")
    def _check_engines_support_adapters(self) -> Recipe:
        for index, stage in enumerate(self.stages):
            if stage.engine == "vllm_omni" and (self.policy.rslora or self.policy.dora):
                raise ValueError(
                    f"stages.{index}.engine = 'vllm_omni' knows adapters without policy.rslora and"
                    " policy.dora; leave them out, or set engine: diffusers"
                )
        return self

    @model_validator(mode="after")
    def _check_guided_references(self) -> Recipe:
        family = find_family(self.model.family)
        for index, stage in enumerate(self.stages):
            if stage.reference.needs_guidance and family and not family.guided:
                raise ValueError(
                    f"stages.{index}.reference.guidance = {stage.reference.guidance:g} (a default"
                    " of some algorithms) needs classifier-free guidance, which model.family ="
                    f" {self.model.family!r} has not; set reference.guidance to 1"
                )
        return self

    @model_validator(mode="after")
    def _check_deterministic_kernels(self) -> Recipe:
        if self.deterministic and "native" not in (attention := self.model.attention or "native"):
            raise ValueError(
                "deterministic: torch cannot tell whether the kernels of model.attention ="
                f" {attention!r} add in a fixed order; take native, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_guidance_is_optional(self) -> Recipe:
        family = find_family(self.model.family)
        for index, stage in enumerate(self.stages):
            if not stage.guidance_in_loss and (
                self.model.guidance == 1 or (family and not family.guided)
            ):
                raise ValueError(
                    f"stages.{index}.guidance_in_loss = False, and model.family ="
                    f" {self.model.family!r} with model.guidance = {self.model.guidance:g} has no"
                    " classifier-free guidance to leave out; leave guidance_in_loss out"
                )
        return self

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

    @model_validator(mode="wrap")  # type: ignore[arg-type, unused-ignore]  # mypy finds it or not, by the order of the files
    @classmethod
    def _explain_errors(
        cls, data: Any, handler: ModelWrapValidatorHandler[Recipe], info: ValidationInfo
    ) -> Recipe:
        context = info.context or {}
        locate = context.get("locate", locate_nowhere)
        try:
            values = iter_leaves(data)
            require_no_secrets(values, locate)
            recipe: Recipe = handler(
                resolve_paths(data, context["folder"]) if "folder" in context else data
            )
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
        """Paths to a user's own code that nothing imports while the recipe is read: rewards, the
        family, engines, stage kinds.
        """
        rewards = [
            config.path for config in self._all_rewards if isinstance(config, CustomRewardConfig)
        ]
        kinds = [stage.path for stage in self.stages if isinstance(stage, CustomStageConfig)]
        engines = [stage.engine for stage in self.stages]
        return [
            path
            for path in (*rewards, self.model.family, *engines, *kinds, self.evaluation.sampler)
            if ":" in path
        ]

    @property
    def evaluated_rewards(self) -> list[RewardConfig]:
        """Those of ``rewards`` that score single images, as an evaluation does.

        Raises:
            RecipeError: there are none, or none for a prompt set, or nothing can be imported from
                the path of a user's own.
        """
        found = [reward for reward in self.rewards if not reward.compares]
        if not found or prompt_sets_without_reward(found, self.prompts.prompt_set_labels):
            raise RecipeError(ONLY_COMPARISONS.format("rewards"))
        return found

    @property
    def rollout_models(self) -> list[ModelConfig]:
        """The base model as rollouts have it: in its own size, where a stage names no ``sizes``,
        and in the largest of those.
        """
        largest = max(
            (size for stage in self.stages for size in stage.sizes),
            key=lambda s: s.height * s.width,
            default=None,
        )
        own = [self.model] * (not all(stage.sizes for stage in self.stages))
        return [
            *own,
            *([resize_model(self.model, largest.height, largest.width)] if largest else []),
        ]

    @property
    def canonical_json(self) -> str:
        """The resolved recipe as JSON: every key with its value, sorted."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))

    @property
    def num_evaluated(self) -> int:
        """Samples of one evaluation."""
        repeated = min(self.evaluation.repeated_prompts, self.prompts.held_out)
        return (
            self.prompts.validation
            + self.prompts.held_out
            + repeated * (self.evaluation.samples - 1)
        )

    @property
    def digest(self) -> str:
        """The sha256 of the keys that are set (``ebbflow.recipe.digest``)."""
        return compute_digest(self)

    def stage_label(self, round_index: int, stage_index: int) -> str:
        """How a stage is called everywhere, counted from one: ``"2.1 online"``, or ``"2.1 online
        letters"`` in a branch.
        """
        stage = self.stages[stage_index]
        return f"{round_index + 1}.{stage_index + 1} {stage.kind}" + (
            f" {stage.branch}" if stage.branch else ""
        )

    def branch_label(self, round_index: int, name: str) -> str:
        """How a branch is called in a round, counted from one: ``"2 letters"``."""
        return f"{round_index + 1} {name}"

    def select_branch(self, name: str | None) -> Recipe:
        """The recipe with the prompt sets and the rewards of a branch; as it is for what is in no
        branch.
        """
        branch = self.branches.get(name or "")
        if branch is None:
            return self
        mixture = [
            part for part in self.prompts.mixture if part.prompt_set_label in branch.prompts
        ] or self.prompts.mixture
        prompts = self.prompts.model_copy(update={"mixture": mixture})
        scored = {
            "rewards": rewards_for_prompt_sets(
                branch.rewards or self.rewards, prompts.prompt_set_labels
            ),
            "guardrails": rewards_for_prompt_sets(self.guardrails, prompts.prompt_set_labels),
        }
        return self.model_copy(update={"prompts": prompts, **scored})

    @property
    def _all_rewards(self) -> list[AnyRewardConfig]:
        """Those of branches, too, and guardrails."""
        return [
            *self.rewards,
            *self.guardrails,
            *(config for rewards in self._branch_rewards for config in rewards),
        ]

    @property
    def _branch_rewards(self) -> list[list[AnyRewardConfig]]:
        return [branch.rewards for branch in self.branches.values() if branch.rewards]


def load_recipe(path: str | Path) -> Recipe:
    """Read a recipe from a YAML (or JSON) file.

    Raises:
        RecipeError: the file is missing, is not a mapping, or does not describe a run; names the
            line.
    """
    path = Path(path)
    if not os.path.isfile(path):  # no error of its own for a name that no file can have
        raise RecipeError(
            f"no recipe at {path}; {_suggest_recipe(path)}the ones that come with Ebbflow are in"
            f" {SHIPPED}/"
        )
    if path.stat().st_size > MAX_BYTES:
        raise RecipeError(
            f"{path} is no recipe: it has more than {MAX_BYTES} bytes; name the YAML file of a run"
        )
    return parse_recipe(path.read_bytes(), str(path), path.parent)


def parse_recipe(text: str | bytes, name: str, folder: Path = Path()) -> Recipe:
    """Read a recipe from YAML or JSON, which ``name`` stands for in messages; its paths are
    relative to ``folder``.

    Raises:
        RecipeError: it is not a mapping, gives a key twice, or does not describe a run; names the
            line.
    """
    try:
        read = read_yaml(text, name)
    except Exception as error:
        # what PyYAML's converters raise at odd tags, and the end of the stack at deep nesting, too
        raise RecipeError(describe_yaml_error(error, name)) from None
    if not isinstance(read.data, dict):
        raise RecipeError(
            f"{name} must hold a mapping of recipe keys, got {type(read.data).__name__}"
        )
    return Recipe.model_validate(read.data, context={"locate": read.locate_key, "folder": folder})


def _suggest_recipe(path: Path) -> str:
    """A hint for a path that leads nowhere: a recipe in the same folder, or one of ours."""
    folders = [folder for folder in (path.parent, Path(SHIPPED)) if os.path.isdir(folder)]
    known = {
        file.stem: str(file)
        for folder in reversed(folders)
        for file in sorted(folder.glob("*.yaml"))
    }
    near = find_nearest_name(path.stem, known)
    return f"did you mean {known[near]}? " if near else ""
