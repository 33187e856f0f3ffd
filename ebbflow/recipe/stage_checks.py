"""Checks of stages against the model, the policy and the prompts that they train."""

from __future__ import annotations

from collections.abc import Sequence

from ebbflow.recipe.choices import SGLANG_FAMILIES, SGLANG_SAMPLERS
from ebbflow.recipe.evaluation import EvaluationConfig
from ebbflow.recipe.families import FAMILIES, find_family
from ebbflow.recipe.model import ModelConfig
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.recipe.prompts import PromptsConfig
from ebbflow.recipe.registry import REWARDS
from ebbflow.recipe.rewards import RewardConfig
from ebbflow.recipe.stages import OnlineStageConfig, StageConfig

NUM_PROMPTS_KEYS = {"online": "prompts_per_step", "offline": "prompts"}
"""The key of each stage kind that says how many prompts are taken at once."""


def check_shares_of_prompt_sets(index: int, stage: StageConfig, prompts: PromptsConfig) -> None:
    """Check that a stage takes at least one prompt of each prompt set.

    Args:
        prompts: the prompts of the stage's branch.

    Raises:
        ValueError: a set gets less than one prompt; names the key and the fix.
    """
    if not stage.takes_prompts:
        return
    key = NUM_PROMPTS_KEYS[getattr(stage, "kind", "")]
    num_prompts = getattr(stage, key)
    counts = prompts.count_by_prompt_set(num_prompts)
    empty_sets = [name for name, count in counts.items() if not count]
    if empty_sets:
        raise ValueError(
            f"stages.{index}.{key} = {num_prompts} gives the prompt set {empty_sets[0]} less than"
            " one prompt; raise it, or the set's weight in prompts.mixture"
        )


def check_stages_from_base(stages: Sequence[StageConfig]) -> None:
    """Check that a run which skips the stages ``only_from_base`` still trains something.

    Raises:
        ValueError: such a stage is in a branch, or no other one comes after it.
    """
    for index, stage in enumerate(stages):
        key = f"stages.{index}.only_from_base"
        # A branch is one node, which trains all of its stages and chooses among their policies.
        if stage.only_from_base and stage.branch:
            raise ValueError(
                f"{key}: the stage is in the branch {stage.branch!r}, which needs all of its"
                " stages; leave one of the two keys out"
            )
        # The last stage outside of branches ends the round, whose reward decides on the next one.
        later = [other for other in stages[index + 1 :] if other.branch is None]
        if stage.only_from_base and all(other.only_from_base for other in later):
            raise ValueError(
                f"{key}: a run that starts from an earlier policy would train nothing after it;"
                " add a stage, or leave the key out"
            )


def check_rollout_precision(
    stages: Sequence[StageConfig], model: ModelConfig, policy: PolicyConfig
) -> None:
    """Check that rollouts in float32 have weights in float32.

    Full training keeps its weights in float32 whatever ``model.precision`` is; beside a LoRA, the
    frozen weights are rounded to ``model.precision`` for good.

    Raises:
        ValueError: a stage's rollouts would use rounded weights.
    """
    if model.precision == "float32" or policy.train != "lora":
        return
    for index, stage in enumerate(stages):
        if stage.rollout_precision == "float32":
            raise ValueError(
                f"stages.{index}.rollout_precision = 'float32' cannot be had from weights kept"
                f" in model.precision = {model.precision!r}; set model.precision to float32, or"
                " leave rollout_precision out"
            )


def check_weights_until_update(stages: Sequence[StageConfig], model: ModelConfig) -> None:
    """Check that the weights of a rollout are still there when its backward pass needs them.

    Raises:
        ValueError: ``model.cpu_offload`` overwrites them.
    """
    for index, stage in enumerate(stages):
        reuses_forward = isinstance(stage, OnlineStageConfig) and stage.reuse_rollout_forward
        if model.cpu_offload and reuses_forward:
            raise ValueError(
                f"stages.{index}.reuse_rollout_forward goes back through the weights of the"
                " rollout, and model.cpu_offload overwrites them meanwhile; leave one of"
                " them out"
            )


def check_optimizer_states(stages: Sequence[StageConfig], model: ModelConfig) -> None:
    """Check that optimiser states can be divided and offloaded as stages do.

    Raises:
        RecipeError: one cannot (``OptimizerConfig.require_whole_state``).
    """
    for index, stage in enumerate(stages):
        # How many processes train an offline stage is no key of the recipe: ``ebbflow.preflight``
        # checks those.
        sharded = isinstance(stage, OnlineStageConfig) and stage.resources.training.count > 1
        stage.optimizer.require_whole_state(f"stages.{index}.optimizer", sharded, model.cpu_offload)


def check_engines_support_model(
    stages: Sequence[StageConfig], model: ModelConfig, policy: PolicyConfig
) -> None:
    """Check that the engine of each stage can generate with the model and its adapters.

    Raises:
        ValueError: vLLM-Omni cannot; names the stage and the fix.
    """
    # A family of the user's own is never among them: the engine needs a network of its own for
    # each.
    supported = [name for name, family in FAMILIES.items() if family.vllm_omni]
    served = [index for index, stage in enumerate(stages) if stage.engine == "vllm_omni"]
    if not served:
        return
    if model.family not in supported:
        raise ValueError(
            f"stages.{served[0]}.engine = 'vllm_omni' generates with {', '.join(supported)}, not"
            f" with model.family = {model.family!r}; set engine: diffusers, or leave it out"
        )
    if policy.rslora or policy.dora:
        raise ValueError(
            f"stages.{served[0]}.engine = 'vllm_omni' knows adapters without policy.rslora and"
            " policy.dora; leave them out, or set engine: diffusers"
        )


def check_sglang_stages(
    stages: Sequence[StageConfig],
    model: ModelConfig,
    policy: PolicyConfig,
    evaluation: EvaluationConfig,
) -> None:
    """Check that SGLang's protocol can say what a stage asks of it.

    Args:
        evaluation: whose sampler the validations of a stage have.

    Raises:
        ValueError: it cannot; names the stage and the fix.
    """
    branches = {stage.branch for stage in stages if stage.engine == "sglang" and stage.branch}
    for index, stage in enumerate(stages):
        if stage.engine != "sglang":
            continue
        window = stage.window
        validates = isinstance(stage, OnlineStageConfig) and stage.validation is not None
        tree = stage.tree if isinstance(stage, OnlineStageConfig) else None
        workers = stage.resources.rollout.count if isinstance(stage, OnlineStageConfig) else 1
        samplers = ", ".join(SGLANG_SAMPLERS)
        # One request holds one prompt, one seed, one schedule: what needs more cannot be said.
        reasons = {
            f"generates with {', '.join(SGLANG_FAMILIES)}, not with model.family ="
            f" {model.family!r}": model.family not in SGLANG_FAMILIES,
            f"has the samplers {samplers}, not sampler.name = {stage.sampler.name!r}": (
                stage.sampler.name not in SGLANG_SAMPLERS
            ),
            f"has the samplers {samplers} for validations, too, not evaluation.sampler ="
            f" {evaluation.sampler!r}": validates and evaluation.sampler not in SGLANG_SAMPLERS,
            "generates noise of its own, which samples cannot share (shared_initial_noise)": (
                stage.shared_initial_noise
            ),
            "generates noise of its own, which branches cannot share (tree)": tree is not None,
            "takes all steps of its schedule (window.tail)": (
                window is not None and window.tail is not None
            ),
            "gets adapters merged into the weights, without policy.dora": policy.dora,
            "is one server, whose weights several workers would overwrite"
            " (resources.rollout.count)": workers > 1,
            f"is one server, whose weights the branches {', '.join(sorted(branches))}, which run"
            " side by side, would overwrite": len(branches) > 1 and stage.branch is not None,
        }
        for reason, applies in reasons.items():
            if applies:
                raise ValueError(
                    f"stages.{index}.engine = 'sglang' {reason}; change that, or set engine:"
                    " diffusers"
                )


def check_rollout_quantization(stages: Sequence[StageConfig], model: ModelConfig) -> None:
    """Check that the network can generate in 8 bits where a stage asks for it.

    Raises:
        ValueError: it cannot; names the stage and the fix.
    """
    for index, stage in enumerate(stages):
        if stage.rollout_quantization is None:
            continue
        key = f"stages.{index}.rollout_quantization = {stage.rollout_quantization!r}"
        precision = stage.rollout_precision or model.precision
        if precision != "bfloat16":
            raise ValueError(
                f"{key} rounds the products of bfloat16, and rollouts are in {precision}; set"
                " rollout_precision: bfloat16, or leave rollout_quantization out"
            )
        if model.compile == "blocks":
            raise ValueError(
                f"{key} replaces the weights of compiled blocks; set model.compile: off, or leave"
                " rollout_quantization out"
            )


def check_rollout_caches(stages: Sequence[StageConfig], model: ModelConfig) -> None:
    """Check that the network can generate with the feature cache of each stage.

    Raises:
        ValueError: it cannot; names the stage and the fix.
    """
    family = find_family(model.family)
    for index, stage in enumerate(stages):
        cache = stage.rollout_cache
        if cache is None:
            continue
        key = f"stages.{index}.rollout_cache.name = {cache.name!r}"
        if model.compile == "blocks":
            raise ValueError(
                f"{key} is decided in every step, which compiled blocks cannot; set model.compile:"
                " off, or leave rollout_cache out"
            )
        # A family of the user's own without a record: the rollout finds out.
        if family is not None and cache.name not in family.feature_caches:
            fitting = ", ".join(family.feature_caches)
            raise ValueError(
                f"{key} does not fit the network of model.family = {model.family!r};"
                f" {f'take {fitting}, or leave' if fitting else 'leave'} rollout_cache out"
            )


def check_pictures_have_every_latent(stages: Sequence[StageConfig], model: ModelConfig) -> None:
    """Check that no stage trains on pictures of files where a sample has more latents than those.

    Raises:
        ValueError: one does; names the key and the fix.
    """
    family = find_family(model.family)
    # A family of the user's own without a record: its adapter refuses to encode pictures.
    if family is None or not family.latents:
        return
    others = ", ".join(family.latents[1:])
    for index, stage in enumerate(stages):
        for key in ("pairs", "data", "anchor"):
            if getattr(stage, key, None) is not None:
                raise ValueError(
                    f"stages.{index}.{key} has pictures without the {others} that a sample of"
                    f" model.family = {model.family!r} has; leave {key} out, or take a family"
                    " without, such as ltx_video"
                )


def check_latent_weights(stages: Sequence[StageConfig], model: ModelConfig) -> None:
    """Check that ``latent_weights`` are of latents that the family has.

    Raises:
        ValueError: one is not, the family has one latent, the algorithm's loss is of whole samples,
            or all weights are 0; names the stage and the fix.
    """
    family = find_family(model.family)
    for index, stage in enumerate(stages):
        weights = stage.latent_weights
        if not weights:
            continue
        key = f"stages.{index}.latent_weights"
        if not stage.algorithm_kind.splits_latents:
            raise ValueError(
                f"{key}: {stage.algorithm_name} has one loss of the whole sample; leave"
                " latent_weights out, or set algorithm.name to diffusion_nft or mix_grpo"
            )
        if family is None:
            continue  # of the user's own without a record: training asks its adapter
        if not family.latents:
            raise ValueError(
                f"{key}: a sample of model.family = {model.family!r} is one latent; leave"
                " latent_weights out"
            )
        unknown = [name for name in weights if name not in family.latents]
        if unknown:
            raise ValueError(
                f"{key}.{unknown[0]}: model.family = {model.family!r} has no such latent; it has"
                f" {', '.join(family.latents)}"
            )
        if not any(weights.get(name, 1.0) for name in family.latents):
            raise ValueError(f"{key} are all 0, so nothing would be trained; raise one")


def check_guided_references(stages: Sequence[StageConfig], model: ModelConfig) -> None:
    """Check that a reference under guidance has a model with guidance, and one with two scales of
    it a model with two transformers.

    Raises:
        ValueError: the family has none, or the second scale does nothing; names the stage and the
            fix.
    """
    family = find_family(model.family)
    for index, stage in enumerate(stages):
        second = stage.reference.guidance_2
        has_experts = family is None or family.experts
        if second is not None and not (has_experts and stage.reference.needs_guidance):
            reason = (
                "the reference has no guidance; set reference.guidance above 1, or leave it out"
                if has_experts
                else f"{model.family} has one transformer; leave it out"
            )
            raise ValueError(f"stages.{index}.reference.guidance_2 = {second:g}: {reason}")
    # A family of the user's own without a record (None) may have guidance: its adapter decides.
    if family is None or family.guided:
        return
    for index, stage in enumerate(stages):
        if stage.reference.needs_guidance:
            raise ValueError(
                f"stages.{index}.reference.guidance = {stage.reference.guidance:g} (a default"
                " of some algorithms) needs classifier-free guidance, which model.family ="
                f" {model.family!r} has not; set reference.guidance to 1"
            )


def check_guidance_is_optional(stages: Sequence[StageConfig], model: ModelConfig) -> None:
    """Check that ``guidance_in_loss: false`` has guidance to leave out of the loss, and
    ``negative_gradient: false`` a gradient.

    Raises:
        ValueError: the model generates without guidance; names the stage and the fix.
    """
    family = find_family(model.family)
    # Of a family without a record, only ``model.guidance`` says whether there is guidance.
    unguided = model.guidance == 1 or (family is not None and not family.guided)
    for index, stage in enumerate(stages):
        for key in ("guidance_in_loss", "negative_gradient"):
            if unguided and not getattr(stage, key):
                raise ValueError(
                    f"stages.{index}.{key} = False, and model.family ="
                    f" {model.family!r} with model.guidance = {model.guidance:g} has no"
                    f" classifier-free guidance to leave out; leave {key} out"
                )


def check_read_scores(index: int, stage: StageConfig, rewards: Sequence[RewardConfig]) -> None:
    """Check that the rewards give the scores that the algorithm of a stage reads.

    A name that is of no reward may be a metric of one, and is looked for at the first step.

    Args:
        rewards: those of the stage's branch.

    Raises:
        ValueError: a reward is missing.
    """
    # Which metrics a reward gives is known only once it scores, which reward there is beforehand.
    columns = [reward.column for reward in rewards]
    for name in stage.hyper_parameters.read_columns:
        if name in REWARDS and name not in columns:
            raise ValueError(
                f"stages.{index}.algorithm: {stage.algorithm_name} reads the scores of {name!r},"
                f" and the rewards are {', '.join(columns)}; add {{name: {name}, weight: 0}}"
            )
