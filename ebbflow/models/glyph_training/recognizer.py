"""A small network that reads the pictures of the glyph model, trained on strings drawn as the
model's own training pictures.

It is differentiable: algorithms on the gradient of the reward learn from it where an OCR engine has
no gradient.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy, pad

from ebbflow.models.families.glyph import ALPHABET
from ebbflow.models.glyph_training import lettering
from ebbflow.models.glyph_training.lettering import render_batch
from ebbflow.storage.artifacts import verify_folder, write_new_folder
from ebbflow.storage.identity import compute_code_digest
from ebbflow.storage.locks import wait_for_lock

logger = logging.getLogger(__name__)
STEPS = 400
BATCH = 64
RATE = 4e-3
CHANNELS = 16
SMOOTHING = 0.1
"""Of the labels (1512.00567). It bounds the log-probability of a letter from both sides: about -6
to -.1.
"""
WEIGHTS = "recognizer.safetensors"


@cache
def open_recognizer(height: int, width: int, letters: int) -> nn.Module:
    """The recogniser of strings of ``letters`` capitals A-Z in pictures of a size: [N, 1, height,
    width] in [0, 1] to log-probs [N, letters, 26].

    It is trained at its first use, in seconds, and kept in the user's cache. It is on the CPU,
    frozen.

    Raises:
        ValueError: that many letters do not fit legibly.
        ArtifactError: the cache is damaged.
    """
    folder = cache_folder() / _cache_key(height, width, letters)
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        # The workers of a run ask at the same time; the first one trains it for all.
        with wait_for_lock(folder.with_suffix(".lock")):
            if not folder.exists():
                train_recognizer(height, width, letters, folder)
    verify_folder(folder)
    network = build_recognizer(height, width, letters)
    network.load_state_dict(load_file(folder / WEIGHTS))
    return network.requires_grad_(False).eval()


def cache_folder() -> Path:
    """Where recognisers are kept: ``XDG_CACHE_HOME``, by default ``~/.cache``."""
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ebbflow" / "recognizers"
    )


def _cache_key(height: int, width: int, letters: int) -> str:
    # Of the code, too: another recogniser gives other rewards, and must not pass for this one.
    parts = [height, width, letters, compute_code_digest(Path(__file__), Path(lettering.__file__))]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def train_recognizer(
    height: int, width: int, letters: int, folder: Path, steps: int = STEPS
) -> None:
    """Train a recogniser from scratch into ``folder``, committed; the same weights on the same
    machine.

    Loss: cross-entropy of each letter, on drawn strings that are damaged as samples are: faint,
    blurred, grainy, with the shadow of other letters.

    Raises:
        ValueError: that many letters do not fit legibly.
    """
    rng = np.random.default_rng(0)
    # The order of additions, and so the weights, would depend on the number of threads.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # A run that asks for the recogniser has random numbers and perhaps no_grad of its own.
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(0)
            network = build_recognizer(height, width, letters)
            optimizer = torch.optim.AdamW(network.parameters(), lr=RATE)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
            for _ in range(steps):
                pictures, targets = _sample_training_batch(height, width, letters, rng)
                # [batch letters, 26] against [batch letters].
                loss = cross_entropy(
                    network(_damage_pictures(pictures)).flatten(0, 1),
                    targets.flatten(),
                    label_smoothing=SMOOTHING,
                )
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                optimizer.step()
                schedule.step()
    finally:
        torch.set_num_threads(threads)
    with write_new_folder(folder) as unfinished:
        save_file(network.state_dict(), unfinished / WEIGHTS)
    logger.info(
        "trained a recogniser of %d letters in %dx%d pixels, last loss %.3f",
        letters,
        height,
        width,
        loss.item(),
    )


def build_recognizer(height: int, width: int, letters: int) -> nn.Sequential:
    """A recogniser with random weights: convolutions that halve the picture to about four rows, and
    a linear layer.
    """
    num_halvings = max(2, (height // 4).bit_length() - 1)
    channels = [1, CHANNELS] + [2 * CHANNELS for _ in range(num_halvings - 1)]
    # Kernel 3, stride 2, padding 1: each side becomes half, rounded up.
    convolutions = [nn.Conv2d(inputs, outputs, 3, 2, 1) for inputs, outputs in pairwise(channels)]
    rows = -(-height // 2**num_halvings)
    columns = -(-width // 2**num_halvings)
    features = 2 * CHANNELS * rows * columns
    return nn.Sequential(
        *(layer for convolution in convolutions for layer in (convolution, nn.GELU())),
        nn.Conv2d(2 * CHANNELS, 2 * CHANNELS, 3, 1, 1),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(features, letters * len(ALPHABET)),
        nn.Unflatten(1, (letters, len(ALPHABET))),
        nn.LogSoftmax(-1),
    )


def letter_indices(texts: list[str]) -> Tensor:
    """Positions in the alphabet of texts of equal length, integer [N, letters]."""
    return torch.tensor([[ALPHABET.index(letter) for letter in text] for text in texts])


def _sample_training_batch(
    height: int, width: int, letters: int, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Pictures in [0, 1], [batch, 1, height, width], of random strings, and their letters, [batch,
    letters].
    """
    targets = rng.integers(len(ALPHABET), size=(BATCH, letters))
    texts = ["".join(ALPHABET[index] for index in row) for row in targets]
    pictures = torch.from_numpy(render_batch(texts, height, width, rng)).float()[:, None] / 255
    return pictures, torch.from_numpy(targets)


def _damage_pictures(pictures: Tensor) -> Tensor:
    """The same, each with the shadow of another string, blurred, in another contrast and with
    grain, all by random amounts.
    """

    # [N, 1, 1, 1]: an amount for each picture.
    def sample_uniform(low: float, high: float) -> Tensor:
        return torch.empty(len(pictures), 1, 1, 1).uniform_(low, high)

    # The picture before in the batch, faint, as the dark of both: what a sample between two strings
    # looks like.
    shadowed = torch.minimum(pictures, 1 - sample_uniform(0, 0.35) * (1 - pictures.roll(1, 0)))
    blurred = avg_pool2d(pad(shadowed, (1, 1, 1, 1), mode="replicate"), 3, 1)
    softened = shadowed.lerp(blurred, sample_uniform(0, 1))
    faded = 0.5 + (softened - 0.5) * sample_uniform(0.4, 1.1) + sample_uniform(-0.1, 0.1)
    return (faded + sample_uniform(0, 0.3) * torch.randn_like(faded)).clamp(0, 1)
