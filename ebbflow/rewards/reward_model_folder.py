"""The folder of a reward model: its card, the weights that training changed, and a report.

Weights that it started from, such as those of a CLIP, are not in it: the card has their digest.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from ebbflow.models.base import default_device
from ebbflow.recipe.base import Strict, sanitize_text
from ebbflow.recipe.reward_model import RewardNetworkConfig
from ebbflow.rewards.base import RewardError
from ebbflow.rewards.reward_networks import RewardNetwork, build_reward_network
from ebbflow.storage.artifacts import ArtifactError, verify_folder

CARD = "reward_model.json"
WEIGHTS = "weights.safetensors"


class RewardModelCard(Strict):
    """What a reward model is: ``reward_model.json``.

    The score of a picture is ``scale`` times what the network gives, plus ``offset``. Of a model of
    comparisons, differences of scores are log-odds that people prefer the picture.
    """

    network: RewardNetworkConfig
    source_digest: str | None
    """Digest of the weights that the network starts from."""
    objective: Literal["bradley_terry", "rating"]
    scale: float
    offset: float
    labels_digest: str
    training_digest: str
    """Of everything that the model was made from: its keys, labels, seed and code."""


def write_reward_model(folder: Path, card: RewardModelCard, network: RewardNetwork) -> None:
    """Write card and weights into a folder that somebody else commits."""
    (folder / CARD).write_text(card.model_dump_json(indent=2))
    save_file(
        {name: weight.cpu().contiguous() for name, weight in network.trained_weights().items()},
        folder / WEIGHTS,
    )


def read_reward_model_card(folder: Path) -> RewardModelCard:
    """Read the card of a folder.

    Raises:
        RewardError: there is none.
    """
    try:
        return RewardModelCard.model_validate(json.loads((folder / CARD).read_text()))
    except (OSError, ValueError, ValidationError) as error:
        reason = sanitize_text(str(error), 200)
        raise RewardError(f"{folder} is no reward model ({reason}); train one") from None


def load_reward_model(folder: Path, digest: str | None) -> tuple[RewardModelCard, RewardNetwork]:
    """Load a reward model, frozen, onto the device of this process.

    Args:
        digest: what the folder's COMMIT must be; None accepts any.

    Raises:
        RewardError: it is damaged, another one, or its source weights are others.
    """
    try:
        actual = verify_folder(folder)
    except ArtifactError as error:
        raise RewardError(str(error)) from None
    if digest is not None and actual != digest:
        raise RewardError(
            f"the reward model in {folder} has the digest {actual[:12]}, and the recipe says"
            f" {digest[:12]}; name the version that the recipe means"
        )
    # Random weights first; every trained one is then replaced.
    card = read_reward_model_card(folder)
    network = build_reward_network(card.network, seed=0)
    # Adapters on another CLIP would score, and mean nothing.
    if network.source_digest != card.source_digest:
        raise RewardError(
            f"the reward model in {folder} was trained from other weights than those in"
            f" {getattr(card.network, 'path', None)}; put those there that it was trained from"
        )
    network.load_trained_weights(load_file(folder / WEIGHTS))
    return card, network.to(default_device()).requires_grad_(False).eval()
