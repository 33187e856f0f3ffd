"""Train the network of a reward model on labels."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

from ebbflow.data.labels import LabelFileError, Labels
from ebbflow.data.twins import normalize_text
from ebbflow.models.base import default_device
from ebbflow.progress import show_progress
from ebbflow.recipe.reward_model import RewardModelConfig
from ebbflow.rewards.pixels import scale_to_unit_range
from ebbflow.rewards.reward_networks import RewardNetwork, build_reward_network
from ebbflow.seeding import derive_seed, permute_indices
from ebbflow.storage.artifacts import write_new_folder

WARM_UP = 0.1
"""Share of the updates in which the learning rate rises; then it falls to 0 as a cosine."""
WEIGHTS = "weights.safetensors"
PROGRESS = "progress.json"
logger = logging.getLogger(__name__)


def is_held_out(prompt: str, share: float) -> bool:
    """Return whether the labels of a spelling of a prompt are held out: a function of its text
    alone.
    """
    digest = hashlib.sha256(prompt.encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def split_labels(labels: Labels, share: float) -> tuple[list[int], list[int]]:
    """Return the positions of the answers that are trained on, and of those that are held out.

    A prompt in several spellings (``twins.normalize_text``) is on one side: it is held out only if
    each of them is, so that what a champion has trained on is not held out when a new spelling is
    labelled.

    Args:
        share: of the prompts that are held out.
    """
    texts = {prompt: normalize_text(prompt) for prompt in set(labels.prompts)}
    trained_texts = {text for prompt, text in texts.items() if not is_held_out(prompt, share)}
    trained: list[int] = []
    held_out: list[int] = []
    pictures = [judgement.first for judgement in labels.judgements]
    pictures = pictures or [rating.picture for rating in labels.ratings]
    for position, picture in enumerate(pictures):
        side = trained if texts[labels.prompts[picture]] in trained_texts else held_out
        side.append(position)
    return trained, held_out


def score_pictures(network: RewardNetwork, labels: Labels, positions: Sequence[int]) -> Tensor:
    """Score pictures with gradient, float32 [n].

    Raises:
        LabelFileError: a picture cannot be read, or the network cannot score it.
    """
    decoded = labels.decode_pictures(positions)
    prompts = labels.build_prompts(positions)
    for prompt, picture in zip(prompts, decoded, strict=True):
        height, width = picture.shape[:2]
        reason = network.explain_unscorable(prompt, height, width)
        if reason:
            raise LabelFileError(
                f"{', '.join(labels.digests)}: a picture of the prompt {prompt.prompt!r}: {reason};"
                " leave its answers out, or take another reward_model.network"
            )
    # A batch of a network has one size of pictures.
    rows_by_size: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for row, picture in enumerate(decoded):
        rows_by_size[picture.shape].append(row)
    scores: list[Tensor] = [torch.empty(0) for _ in positions]
    for rows in rows_by_size.values():
        images = torch.stack(
            [scale_to_unit_range(decoded[row][None], default_device())[0] for row in rows]
        )
        for row, score in zip(rows, network(images, [prompts[row] for row in rows]), strict=True):
            scores[row] = score
    return torch.stack(scores)


def compute_judgement_loss(margins: Tensor, preferences: Tensor) -> Tensor:
    """Compute the Bradley-Terry loss, the mean of -y log s(m) - (1 - y) log s(-m) with the margin m
    of the first picture and y = 1, .5 or 0 (Bradley and Terry, Biometrika 39, 1952; 2305.01569).
    """
    return binary_cross_entropy_with_logits(margins, preferences)


def train_network(
    config: RewardModelConfig, labels: Labels, seed: int, work: Path
) -> RewardNetwork:
    """Train a network on the answers that are not held out; after each epoch a checkpoint is left
    in ``work``, from which a later call resumes with the same result.

    Raises:
        LabelFileError: a picture cannot be read or scored.
        ArtifactError: the checkpoint is damaged.
    """
    # New weights depend on the seed alone, so a resumed attempt builds the same ones.
    network = build_reward_network(config.network, seed).to(default_device())
    parameters = [weight for weight in network.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=config.lr, weight_decay=config.weight_decay)
    trained, _ = split_labels(labels, config.held_out)
    # Of the trained answers: the last batch of an epoch may be smaller.
    per_epoch = math.ceil(len(trained) / config.batch)
    first_epoch = _load_checkpoint(work, network, optimizer)
    epochs = show_progress("training the reward model", "epoch", range(first_epoch, config.epochs))
    for epoch in epochs:
        # A function of the epoch, and no state to save.
        order = permute_indices(len(trained), derive_seed(seed, "labels", epoch))
        for batch in range(per_epoch):
            rows = [trained[row] for row in order[batch * config.batch :][: config.batch]]
            step = epoch * per_epoch + batch
            for group in optimizer.param_groups:
                group["lr"] = config.lr * _scale_rate(step, config.epochs * per_epoch)
            loss = _compute_loss(network, labels, rows)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
        logger.info("epoch %d of %d: loss %.3f", epoch + 1, config.epochs, loss.item())
        _save_checkpoint(work, network, optimizer, epoch + 1)
    return network.requires_grad_(False).eval()


def _scale_rate(step: int, steps: int) -> float:
    warm_up = max(1.0, WARM_UP * steps)
    return min(1.0, (step + 1) / warm_up) * 0.5 * (1 + math.cos(math.pi * step / steps))


def _compute_loss(network: RewardNetwork, labels: Labels, rows: Sequence[int]) -> Tensor:
    """Compute the loss of some answers of one kind."""
    if labels.judgements:
        judgements = [labels.judgements[row] for row in rows]
        sides = [one.first for one in judgements] + [one.second for one in judgements]
        # Both sides in one pass: pictures of one size share a batch.
        first, second = score_pictures(network, labels, sides).chunk(2)
        preferences = first.new_tensor([one.preference for one in judgements])
        return compute_judgement_loss(first - second, preferences)
    ratings = [labels.ratings[row] for row in rows]
    scores = score_pictures(network, labels, [rating.picture for rating in ratings])
    values = scores.new_tensor([rating.value for rating in ratings])
    deviation = torch.tensor([rating.value for rating in labels.ratings]).std(correction=0).item()
    return compute_rating_loss(scores, values / (deviation or 1.0))


def compute_rating_loss(scores: Tensor, ratings: Tensor) -> Tensor:
    """Compute the mean squared error without the means of both, so that the network has no offset
    to learn; ``fit_scale`` finds it afterwards.
    """
    return mse_loss(scores - scores.mean(), ratings - ratings.mean())


def fit_scale(scores: Tensor, ratings: Tensor) -> tuple[float, float]:
    """Return the slope and the offset of the line from scores to ratings with the least squared
    error.
    """
    # All scores equal: there is no slope, and the mean is the best guess.
    centred = scores - scores.mean()
    spread = centred.square().sum().item()
    slope = (centred * (ratings - ratings.mean())).sum().item() / spread if spread else 0.0
    return slope, ratings.mean().item() - slope * scores.mean().item()


def _save_checkpoint(
    work: Path, network: RewardNetwork, optimizer: torch.optim.Optimizer, epochs: int
) -> None:
    # Flat names in safetensors: a pickle of the optimiser would execute code when it is read.
    states = optimizer.state_dict()["state"]
    tensors = {f"network.{name}": weight for name, weight in network.trained_weights().items()}
    for index, state in states.items():
        tensors |= {f"optimizer.{index}.{name}": value for name, value in state.items()}
    with write_new_folder(work) as unfinished:
        save_file(
            {name: value.contiguous() for name, value in tensors.items()}, unfinished / WEIGHTS
        )
        (unfinished / PROGRESS).write_text(json.dumps({"epochs": epochs}))


def _load_checkpoint(work: Path, network: RewardNetwork, optimizer: torch.optim.Optimizer) -> int:
    """Load the checkpoint of an earlier attempt, if there is one; return the epochs behind it."""
    if not (work / PROGRESS).is_file():
        return 0
    tensors = load_file(work / WEIGHTS)
    network.load_trained_weights(
        {
            name.removeprefix("network."): value
            for name, value in tensors.items()
            if name.startswith("network.")
        }
    )
    states: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for name, value in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "optimizer":
            index, _, key = rest.partition(".")
            states[int(index)][key] = value
    optimizer.load_state_dict(optimizer.state_dict() | {"state": dict(states)})
    epochs: int = json.loads((work / PROGRESS).read_text())["epochs"]
    logger.info("resuming the reward model after epoch %d", epochs)
    return epochs
