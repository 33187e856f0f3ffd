"""What a training stage takes over from the policy folder before it, and what it leaves behind in its own."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from ebbflow.algorithms.advantages import PromptStatistics
from ebbflow.data.records import StageRecord
from ebbflow.models import Model, load_model
from ebbflow.recipe import Recipe
from ebbflow.recipe.base import printable
from ebbflow.stage import Place
from ebbflow.training.card import AGAIN, ITERATE, STATISTICS, PolicyCard, PolicyError, read_card
from ebbflow.training.policy import Policy
from ebbflow.training.update import Learner


def open_model(recipe: Recipe, base: Path) -> Model:
    """Load the base model with the recipe's number of threads."""
    torch.set_num_threads(recipe.threads)
    return load_model(base, recipe.model)


def open_policy(
    place: Place, model: Model, folder: Path, teacher: Path | None = None, shard: bool = False
) -> tuple[Policy, PolicyCard]:
    """The policy of a folder, ready for a stage, with every copy that the stage needs.

    Copies that the folder brought along are kept; the others start at its parameters.
    """
    policy = Policy(model, place.recipe.policy, place.recipe.seed, shard)
    card = policy.load(folder, to_train=True)
    if card.progress.algorithm != place.config.algorithm_name:
        policy.copies.pop("old", None)
    if teacher:
        _require_same_base(card, read_card(teacher), teacher)
        policy.load_copy("teacher", teacher)
    if place.keeps_old:
        policy.ensure("old")
    if place.recipe.policy.ema:
        policy.ensure("ema")
    return policy, card


def _require_same_base(card: PolicyCard, other: PolicyCard, folder: Path) -> None:
    if (other.model.family, other.base_digest) != (card.model.family, card.base_digest):
        raise PolicyError(
            f"the teacher in {folder} was trained from the {other.model.family} model {other.base_digest[:12]} and this policy "
            f"from the {card.model.family} model {card.base_digest[:12]}; take a teacher of the same base"
        )


def read_history(place: Place, card: PolicyCard, folder: Path) -> PromptStatistics:
    """The rewards of each prompt so far: those in the policy folder, if the same algorithm left them there."""
    path = folder / STATISTICS
    if card.progress.algorithm != place.config.algorithm_name or not path.exists():
        return PromptStatistics()
    try:
        return PromptStatistics.from_state(json.loads(path.read_bytes()))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise PolicyError(f"{path} holds no rewards of prompts ({printable(str(error), 200)}); {AGAIN}") from None


def save_policy(
    place: Place,
    learner: Learner,
    card: PolicyCard,
    record: StageRecord,
    folder: Path,
    write: bool = True,
    history: PromptStatistics | None = None,
) -> None:
    """Write the policy folder that a stage leaves behind; ``card`` is the one it started from."""
    trained = card.model_copy(
        update={
            "recipe_digest": place.recipe.digest,
            "version": card.version + learner.updates,
            "progress": learner.progress,
            "copies": (*(["old"] if place.keeps_old else []), *([ITERATE] if place.recipe.policy.ema else [])),
            "stages": (*card.stages, record.label),
        }
    )
    statistics = history.state() if history and place.config.advantages.running else None
    learner.policy.save(folder, trained, write, statistics)
