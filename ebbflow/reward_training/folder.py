"""From labels to a committed folder: the network, its card, what was measured, and a page."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from pydantic import BaseModel

import ebbflow.rewards.reward_networks
from ebbflow.compute import set_up_process
from ebbflow.data.labels import Judgement, LabelFileError, Labels, read_labels
from ebbflow.plots.reliability import plot_reliability
from ebbflow.recipe import Recipe, RecipeError
from ebbflow.recipe.digest import select_set_keys
from ebbflow.recipe.reward_model import RewardModelConfig
from ebbflow.report.page_environment import create_result_environment
from ebbflow.reward_training.decide import RewardModelDecision, decide_reward_model
from ebbflow.reward_training.measure import (
    RewardModelMeasurement,
    average_agreement,
    compare_ratings,
    compute_margins,
    measure_hacked,
    measure_reward_model,
    score_in_batches,
)
from ebbflow.reward_training.train import fit_scale, split_labels, train_network
from ebbflow.rewards.reward_model_folder import (
    RewardModelCard,
    load_reward_model,
    write_reward_model,
)
from ebbflow.rewards.reward_networks import RewardNetwork
from ebbflow.storage.artifacts import write_new_folder
from ebbflow.storage.disk import sha256_of_file, write_text
from ebbflow.storage.identity import compute_code_digest

RECORD = "record.json"
PAGE = "report.html"
logger = logging.getLogger(__name__)


class RewardModelRecord(BaseModel):
    """What a training of a reward model came to: ``record.json``."""

    training_digest: str
    labels_digest: str
    answers: int
    trained_answers: int
    compared_with: str | None
    """The version that it was compared with."""
    measurement: RewardModelMeasurement
    decision: RewardModelDecision


def require_reward_model_config(recipe: Recipe) -> RewardModelConfig:
    """Return the section ``reward_model``.

    Raises:
        RecipeError: the recipe has none.
    """
    if recipe.reward_model is None:
        raise RecipeError(
            f"the recipe {recipe.name!r} has no section reward_model; add one with the 'labels' to"
            " train on (docs/reward_models.md)"
        )
    return recipe.reward_model


def compute_training_digest(recipe: Recipe, labels: Labels) -> str:
    """Return the sha256 of everything that decides what a reward model becomes: its keys, the
    contents of its labels, the seed and the code.
    """
    config = require_reward_model_config(recipe)
    # The digest answers one question: would the same weights come out again?
    # Where the files lie and what the model is called changes nothing.
    keys = select_set_keys(
        config.model_copy(update={"name": "", "labels": [], "hacked": None, "queue": 200})
    )
    inputs = {
        "keys": keys,
        "labels": labels.digest,
        "hacked": sha256_of_file(Path(config.hacked)) if config.hacked else None,
        "seed": recipe.seed,
        "code": compute_code_digest(
            Path(__file__).parent, Path(ebbflow.rewards.reward_networks.__file__)
        ),
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def train_reward_folder(
    recipe: Recipe,
    labels: Labels,
    folder: Path,
    work: Path,
    champion: Path | None = None,
    champion_name: str | None = None,
) -> RewardModelRecord:
    """Train, measure and describe a reward model, into ``folder``.

    Args:
        work: where the checkpoint of a killed attempt is.
        champion: the folder of the registered reward model; None where there is none.

    Raises:
        LabelFileError: the labels cannot be used.
        RewardError: the champion cannot be loaded.
    """
    config = require_reward_model_config(recipe)
    # Threads and kernels first: they decide the bytes of the weights.
    set_up_process(recipe)
    trained, held_out = split_labels(labels, config.held_out)
    if not trained or not held_out:
        raise LabelFileError(
            f"{len(trained)} answers to train on and {len(held_out)} held out; label more prompts,"
            " or change reward_model.held_out"
        )
    # Before the training, which may take hours.
    hacked = read_hacked_pairs(config.hacked) if config.hacked else None
    # A killed attempt left its last epoch in ``work``, and goes on from there.
    network = train_network(config, labels, recipe.seed, work)
    measurement = _measure_network(network, labels, held_out, hacked, config.confidence)
    decision = decide_reward_model(
        measurement.by_prompt,
        _measure_champion(champion, labels, held_out) if champion else None,
        measurement.hacked,
        config.confidence,
    )
    record = RewardModelRecord(
        training_digest=compute_training_digest(recipe, labels),
        labels_digest=labels.digest,
        answers=len(trained) + len(held_out),
        trained_answers=len(trained),
        compared_with=champion_name,
        measurement=measurement,
        decision=decision,
    )
    with write_new_folder(folder) as unfinished:
        write_reward_model(
            unfinished, _build_card(config, labels, network, record, trained), network
        )
        write_text(unfinished / RECORD, record.model_dump_json(indent=2))
        write_text(unfinished / PAGE, render_page(config.name, record))
    logger.info(
        "reward model %s: agrees with %.1f %% of %d held-out answers (%.1f to %.1f %%)",
        config.name,
        *(100 * measurement.agreement.mean, measurement.judgements),
        *(100 * measurement.agreement.low, 100 * measurement.agreement.high),
    )
    return record


def _measure_network(
    network: RewardNetwork,
    labels: Labels,
    held_out: Sequence[int],
    hacked: Labels | None,
    confidence: float,
) -> RewardModelMeasurement:
    try:
        measurement = measure_reward_model(network, labels, held_out, confidence)
    except ValueError as error:
        raise LabelFileError(str(error)) from None
    # After training and with the same network: hacked pictures are a test, never labels.
    if hacked:
        kinds = [name_kind(judgement) for judgement in hacked.judgements]
        measurement.hacked = measure_hacked(network, hacked, kinds, confidence)
    return measurement


def read_hacked_pairs(path: str) -> Labels:
    """Read the pairs of honest and hacked pictures.

    Raises:
        LabelFileError: it has ratings, or a kind has pairs of fewer than two prompts, of which
            there is no interval.
    """
    hacked = read_labels([path])
    prompts: dict[str, set[str]] = defaultdict(set)
    for judgement in hacked.judgements:
        if judgement.preference != 0.5:
            prompts[name_kind(judgement)].add(hacked.prompts[judgement.first])
    few = sorted(kind for kind, texts in prompts.items() if len(texts) < 2)
    if few or not prompts:
        what = f"the kind {few[0]!r}" if few else "it"
        raise LabelFileError(
            f"reward_model.hacked = {path}: {what} needs pairs of at least 2 prompts, with the"
            " columns prompt, chosen (honest) and rejected"
        )
    return hacked


def name_kind(judgement: Judgement) -> str:
    """Name how the rejected picture of a pair was hacked."""
    return judgement.kind or "hacked"


def _measure_champion(champion: Path, labels: Labels, held_out: list[int]) -> dict[str, float]:
    """Return the champion's agreement with the same answers, by prompt."""
    _, network = load_reward_model(champion, None)
    judgements = (
        [labels.judgements[row] for row in held_out]
        if labels.judgements
        else compare_ratings(labels, held_out)
    )
    return average_agreement(
        compute_margins(network, labels, judgements),
        np.array([judgement.preference for judgement in judgements]),
        [labels.prompts[judgement.first] for judgement in judgements],
    )


def _build_card(
    config: RewardModelConfig,
    labels: Labels,
    network: RewardNetwork,
    record: RewardModelRecord,
    trained: Sequence[int],
) -> RewardModelCard:
    # Differences of scores become log-odds, so that rewards of two versions have one unit.
    scale = 1 / record.measurement.temperature
    offset = 0.0
    # Fitted on trained answers: held-out ones only measure.
    if labels.ratings:
        ratings = [labels.ratings[row] for row in trained]
        scores = score_in_batches(network, labels, [rating.picture for rating in ratings])
        values = torch.tensor([rating.value for rating in ratings], dtype=torch.float64)
        scale, offset = fit_scale(torch.tensor(scores, dtype=torch.float64), values)
    return RewardModelCard(
        network=config.network,
        source_digest=network.source_digest,
        objective="bradley_terry" if labels.judgements else "rating",
        scale=scale,
        offset=offset,
        labels_digest=labels.digest,
        training_digest=record.training_digest,
    )


def read_record(folder: Path) -> RewardModelRecord:
    """Read what was measured as the reward model of a folder was trained."""
    return RewardModelRecord.model_validate_json((folder / RECORD).read_text())


def render_page(name: str, record: RewardModelRecord) -> str:
    """Render the page about a reward model: one HTML file without references to others."""
    bins = [(one.confidence, one.right, one.count) for one in record.measurement.reliability]
    template = create_result_environment(Path(__file__).parent).get_template("reward_model.html")
    return template.render(
        name=name,
        record=record,
        measurement=record.measurement,
        decision=record.decision,
        reliability=plot_reliability(bins),
    )
