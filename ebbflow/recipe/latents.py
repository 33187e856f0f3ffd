"""Which latents of a sample the rewards judge, and which weigh in the loss."""

from __future__ import annotations

from collections.abc import Sequence

from ebbflow.recipe.families import find_family
from ebbflow.recipe.model import ModelConfig
from ebbflow.recipe.rewards import RewardConfig, select_trained
from ebbflow.recipe.stages import StageConfig


def list_judges(rewards: Sequence[RewardConfig], model: ModelConfig) -> dict[str, list[str]]:
    """List the columns of the trained rewards that judge each latent of a sample, by its name in
    the order of the latents; empty where every reward judges all of it.

    Example: ``videoalign`` with ``latents: [video]``, ``clap`` with ``latents: [sound]`` and
    ``audio_video_sync`` without the key::

        {"video": ["videoalign", "audio_video_sync"], "sound": ["clap", "audio_video_sync"]}
    """
    trained = select_trained(rewards)
    if not any(reward.latents for reward in trained):
        return {}
    family = find_family(model.family)
    latents = family.latents if family else ()
    return {
        latent: [reward.column for reward in trained if reward.judges(latent)] for latent in latents
    }


def check_latent_names(rewards: Sequence[RewardConfig], model: ModelConfig) -> None:
    """Check that the latents that rewards and guardrails name are those of the family.

    Raises:
        ValueError: one is not; names it and the family's.
    """
    family = find_family(model.family)
    latents = family.latents if family else ()
    for reward in rewards:
        unknown = [name for name in reward.latents if name not in latents]
        if unknown and family is None:
            raise ValueError(
                f"{reward.column}.latents: model.family = {model.family!r} has no record that names"
                " its latents; give its file a FAMILY with latents, or leave latents out"
            )
        if unknown and not latents:
            raise ValueError(
                f"{reward.column}.latents: a sample of model.family = {model.family!r} is one"
                " latent; leave latents out"
            )
        if unknown:
            raise ValueError(
                f"{reward.column}.latents names {unknown[0]!r}, and model.family = {model.family!r}"
                f" has {', '.join(latents)}"
            )


def check_stage_trains_judged_latents(
    index: int, stage: StageConfig, rewards: Sequence[RewardConfig], model: ModelConfig
) -> None:
    """Check that a stage can give each latent advantages of its own, where its rewards ask for it.

    Args:
        rewards: those of the stage's branch.

    Raises:
        ValueError: it cannot, or a latent that it trains has no reward; names the key and the fix.
    """
    judges = list_judges(rewards, model)
    if not judges:
        return
    reward = next(reward.column for reward in select_trained(rewards) if reward.latents)
    name = stage.algorithm_name
    obstacles = {
        "kind": getattr(stage, "kind", "") != "online"
        and "offline stages store one advantage of a sample; set kind: online",
        "algorithm": not stage.algorithm_kind.splits_latents
        and f"{name} has one loss of the whole sample; set algorithm.name to diffusion_nft or"
        " mix_grpo",
        "algorithm.name": stage.hyper_parameters.only_selects
        and f"{name} has none in its loss: rewards choose its samples; set algorithm.name to"
        " diffusion_nft or mix_grpo",
        "advantages": stage.hyper_parameters.reshapes_advantages
        and f"{name} reshapes those of whole samples; set algorithm.name to flow_grpo",
        "tree": getattr(stage, "tree", None) is not None
        and "the steps of a tree have advantages of their own; leave 'tree' out",
        "advantages.running": stage.advantages.running
        and "it has one history for each prompt; leave it out",
    }
    for key, reason in obstacles.items():
        if reason:
            raise ValueError(
                f"stages.{index}.{key}: {reward}.latents gives each latent advantages of its own,"
                f" and {reason}, or leave 'latents' of the rewards out"
            )
    for latent, names in judges.items():
        if not names and stage.latent_weights.get(latent, 1.0):
            raise ValueError(
                f"rewards: none judges the latent {latent}; leave 'latents' of one out, or set"
                f" stages.{index}.latent_weights.{latent} to 0"
            )
