"""Measure a reward model on answers that it was not trained on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations, pairwise

import numpy as np
import torch
from pydantic import BaseModel

from ebbflow.data.labels import Judgement, Labels, group_judgements
from ebbflow.evaluation.statistics import compute_paired_interval
from ebbflow.labeling.agreement import compute_krippendorff_alpha
from ebbflow.reward_training.train import score_pictures
from ebbflow.rewards.reward_networks import RewardNetwork

BATCH = 64
"""Pictures scored at a time."""
BINS = 8
HALVINGS = 60
MAX_INVERSE_TEMPERATURE = 1e4


class Share(BaseModel):
    """A share with its confidence interval, over prompts."""

    mean: float
    low: float
    high: float


class ReliabilityBin(BaseModel):
    """Answers whose predicted confidence lies in a range: how often the model was right."""

    confidence: float
    right: float
    count: int


class RewardModelMeasurement(BaseModel):
    """What is known of a reward model.

    Attributes:
        agreement: share of held-out answers, without ties, that the model agrees with.
        by_prompt: the same for each held-out prompt.
        temperature: by which scores are divided, so that their differences are log-odds.
        calibration_error: mean distance between confidence and share of right predictions, weighted
            by the answers; each half of the prompts with the temperature of the other half.
        rater_agreement: how often two answers on one pair are the same; None where no pair has two.
        hacked: for each kind of hacked pictures, the share of pairs whose honest picture the model
            prefers.
    """

    judgements: int
    prompts: int
    agreement: Share
    by_prompt: dict[str, float]
    temperature: float
    calibration_error: float
    reliability: list[ReliabilityBin]
    rater_agreement: float | None
    krippendorff_alpha: float | None
    hacked: dict[str, Share] = {}


def measure_reward_model(
    network: RewardNetwork, labels: Labels, held_out: Sequence[int], confidence: float
) -> RewardModelMeasurement:
    """Measure a network on the held-out answers.

    Raises:
        ValueError: fewer than two held-out prompts have an answer that is no tie.
    """
    judgements = (
        [labels.judgements[row] for row in held_out]
        if labels.judgements
        else compare_ratings(labels, held_out)
    )
    margins = compute_margins(network, labels, judgements)
    preferences = np.array([judgement.preference for judgement in judgements])
    prompts = [labels.prompts[judgement.first] for judgement in judgements]
    by_prompt = average_agreement(margins, preferences, prompts)
    if len(by_prompt) < 2:
        raise ValueError(
            f"{len(by_prompt)} held-out prompts have an answer that is no tie, and an interval"
            " needs 2; label more prompts, or raise reward_model.held_out"
        )
    # A temperature that was fitted on the same answers would look better than it is.
    confidences, right = cross_fit_confidence(margins, preferences, prompts)
    # All answers, the trained ones too: raters agree or not whatever the model learned.
    groups = [
        [round(preference, 6) for preference in answers]
        for answers in group_judgements(labels).values()
    ]
    return RewardModelMeasurement(
        judgements=len(judgements),
        prompts=len(by_prompt),
        agreement=compute_share(list(by_prompt.values()), confidence),
        by_prompt=by_prompt,
        temperature=1 / fit_inverse_temperature(margins, preferences),
        calibration_error=float(np.abs(_bin_gaps(confidences, right)).sum()),
        reliability=bin_reliability(confidences, right),
        rater_agreement=measure_rater_agreement(groups),
        krippendorff_alpha=compute_krippendorff_alpha(groups),
    )


def compute_share(values: Sequence[float], confidence: float) -> Share:
    """Compute the mean of one value per prompt, with its interval."""
    array = np.array(values, np.float64)
    mean, low, high = compute_paired_interval(array, np.zeros_like(array), confidence)
    return Share(mean=mean, low=low, high=high)


def compute_margins(
    network: RewardNetwork, labels: Labels, judgements: Sequence[Judgement]
) -> np.ndarray:
    """Compute score(first) - score(second) of each judgement, float64 [n]."""
    # Each picture is scored once, however many answers there are about it.
    used = sorted({side for one in judgements for side in (one.first, one.second)})
    scores = dict(zip(used, score_in_batches(network, labels, used), strict=True))
    return np.array([scores[one.first] - scores[one.second] for one in judgements])


def score_in_batches(
    network: RewardNetwork, labels: Labels, positions: Sequence[int]
) -> list[float]:
    """Score pictures without gradient, some at a time."""
    scores: list[float] = []
    with torch.no_grad():
        for start in range(0, len(positions), BATCH):
            part = positions[start : start + BATCH]
            scores += score_pictures(network, labels, part).double().tolist()
    return scores


def compare_ratings(labels: Labels, held_out: Sequence[int]) -> list[Judgement]:
    """Turn ratings into comparisons: of all pictures of a prompt, or of neighbours where no prompt
    has two.
    """
    ratings = [labels.ratings[row] for row in held_out]
    groups: dict[str, list[int]] = defaultdict(list)
    for position, rating in enumerate(ratings):
        groups[labels.prompts[rating.picture]].append(position)
    pairs = [pair for group in groups.values() for pair in combinations(group, 2)]
    # Ratings of different prompts do compare: a rater uses one scale for all of them.
    if not pairs:
        pairs = list(pairwise(range(len(ratings))))
    return [
        Judgement(
            ratings[one].picture,
            ratings[other].picture,
            0.5 + 0.5 * float(np.sign(ratings[one].value - ratings[other].value)),
        )
        for one, other in pairs
    ]


def average_agreement(
    margins: np.ndarray, preferences: np.ndarray, prompts: Sequence[str]
) -> dict[str, float]:
    """Return the share of answers that the margins agree with, by prompt; ties do not count, and a
    margin of 0 is half right.
    """
    agreed: dict[str, list[float]] = defaultdict(list)
    for margin, preference, prompt in zip(margins, preferences, prompts, strict=True):
        if preference != 0.5:
            agreed[prompt].append(0.5 + 0.5 * float(np.sign(margin) * np.sign(preference - 0.5)))
    return {prompt: float(np.mean(values)) for prompt, values in agreed.items()}


def fit_inverse_temperature(margins: np.ndarray, preferences: np.ndarray) -> float:
    """Find the b at which s(b m) has the highest likelihood (temperature scaling, 1706.04599).

    Of n answers, 1 counts as (n + 1) / (n + 2) and 0 as 1 / (n + 2), so that b stays finite where
    all of them agree (Platt, Probabilistic Outputs for Support Vector Machines, 1999). Where all
    margins are m or -m and k agree, b = log(p / (1 - p)) / m with p = (k + 1) / (n + 2).
    """
    preferences = (preferences * len(preferences) + 1) / (len(preferences) + 2)
    # From nearly no confidence to nearly full confidence, in equal factors.
    low = 1 / MAX_INVERSE_TEMPERATURE
    high = MAX_INVERSE_TEMPERATURE
    # The derivative of the negative log-likelihood rises with b, so its zero is bracketed.
    for _ in range(HALVINGS):
        middle = float(np.sqrt(low * high))
        slope = (margins * (_sigmoid(middle * margins) - preferences)).sum()
        if slope > 0:
            high = middle
        else:
            low = middle
    return float(np.sqrt(low * high))


def cross_fit_confidence(
    margins: np.ndarray, preferences: np.ndarray, prompts: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Return confidences in [.5, 1] and whether each prediction was right, without ties. Each half
    of the prompts has the temperature of the other half.
    """
    # By prompt and not by answer: answers on one prompt are alike.
    halves = {prompt: index % 2 for index, prompt in enumerate(sorted(set(prompts)))}
    half = np.array([halves[prompt] for prompt in prompts])
    probabilities = np.empty_like(margins)
    for side in (0, 1):
        inverse = fit_inverse_temperature(margins[half != side], preferences[half != side])
        probabilities[half == side] = _sigmoid(inverse * margins[half == side])
    # A prediction cannot be right or wrong about a tie.
    decided = preferences != 0.5
    first_is_better = probabilities > 0.5
    confidences = np.maximum(probabilities, 1 - probabilities)[decided]
    return confidences, (first_is_better == (preferences > 0.5))[decided]


def bin_reliability(confidences: np.ndarray, right: np.ndarray) -> list[ReliabilityBin]:
    """Average predictions in ``BINS`` ranges of confidence from .5 to 1; empty ones are left
    out.
    """
    ranges = _find_bins(confidences)
    return [
        ReliabilityBin(
            confidence=float(confidences[ranges == index].mean()),
            right=float(right[ranges == index].mean()),
            count=int((ranges == index).sum()),
        )
        for index in range(BINS)
        if (ranges == index).any()
    ]


def _find_bins(confidences: np.ndarray) -> np.ndarray:
    return np.asarray(np.minimum(((confidences - 0.5) * 2 * BINS).astype(int), BINS - 1))


def _bin_gaps(confidences: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the gap of each bin times its share of the predictions (1706.04599, equation 3)."""
    return np.asarray(
        [
            (one.right - one.confidence) * one.count / len(right)
            for one in bin_reliability(confidences, right)
        ]
    )


def measure_rater_agreement(groups: Sequence[Sequence[float]]) -> float | None:
    """Return how often two answers on one pair of pictures are the same, a mean over the pairs with
    several; None without any.
    """
    shares = [
        float(np.mean([one == other for one, other in combinations(answers, 2)]))
        for answers in groups
        if len(answers) > 1
    ]
    return float(np.mean(shares)) if shares else None


def measure_hacked(
    network: RewardNetwork, hacked: Labels, kinds: Sequence[str], confidence: float
) -> dict[str, Share]:
    """Return, for each kind of hacked pictures, how often the honest one is preferred."""
    margins = compute_margins(network, hacked, hacked.judgements)
    preferences = np.array([judgement.preference for judgement in hacked.judgements])
    prompts = [hacked.prompts[judgement.first] for judgement in hacked.judgements]
    shares = {}
    for kind in sorted(set(kinds)):
        rows = [row for row, name in enumerate(kinds) if name == kind]
        agreed = average_agreement(margins[rows], preferences[rows], [prompts[row] for row in rows])
        shares[kind] = compute_share(list(agreed.values()), confidence)
    return shares


def _sigmoid(values: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-np.clip(values, -700, 700))))
