"""Trains the glyph base model from scratch on rendered strings, with a plain flow-matching loss."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ebbflow.models.families.glyph import GlyphModel, new_glyph, to_latents
from ebbflow.models.glyph_training.lettering import render_batch
from ebbflow.progress import progress
from ebbflow.recipe.model import GlyphTrainingConfig
from ebbflow.storage.artifacts import new_folder

logger = logging.getLogger(__name__)


def train_glyph_base(config: GlyphTrainingConfig, folder: Path) -> None:
    """Train a glyph model from scratch into ``folder``, committed, in the Hugging Face layout.

    Loss: mean((v - (eps - x0))^2) with sigma = sigmoid(.8 + N(0, 1)): most weight near pure noise,
    where the letters are decided. The average of the weights is saved (decay ``config.ema``).
    """
    rng = np.random.default_rng(config.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = new_glyph(config)
        parts = nn.ModuleList([model.transformer, model.text_encoder]).train()
        average = AveragedModel(parts, multi_avg_fn=get_ema_multi_avg_fn(config.ema))  # type: ignore[no-untyped-call, unused-ignore]
        optimizer = torch.optim.AdamW(parts.parameters(), lr=config.lr)
        shown = progress("training the base model", "step", range(config.steps))
        for step in shown:
            noisy_captions = step >= 2 * config.steps // 3
            loss = _loss(model, *_batch(config, rng, noisy_captions))
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            average.update_parameters(parts)
            if step % 25 == 0:
                shown.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    parts.load_state_dict(average.module.state_dict())
    with new_folder(folder) as unfinished:
        model.save(unfinished)
    logger.info(
        "trained the glyph base model for %d steps, last loss %.3f", config.steps, loss.item()
    )


def _batch(
    config: GlyphTrainingConfig, rng: np.random.Generator, noisy_captions: bool
) -> tuple[torch.Tensor, list[str]]:
    """Latents [batch, 1, height, width] of random strings, and their captions."""
    alphabets = _alphabets(config, rng)
    sizes = np.array([[len(alphabet)] for alphabet in alphabets])
    letters = rng.integers(sizes, size=(config.batch, config.letters))
    images = render_batch(_strings(alphabets, letters), config.height, config.width, rng)
    if noisy_captions:
        replaced = rng.random(letters.shape) < config.caption_noise
        letters = np.where(replaced, rng.integers(sizes, size=letters.shape), letters)
    return to_latents(images), _strings(alphabets, letters)


def _alphabets(config: GlyphTrainingConfig, rng: np.random.Generator) -> list[str]:
    """The alphabet of each string of a batch. Of a model with one, none is drawn: it sees the
    strings that it always saw.
    """
    known = config.characters
    if len(known) == 1:
        return known * config.batch
    return [known[index] for index in rng.integers(len(known), size=config.batch)]


def _strings(alphabets: list[str], letters: np.ndarray) -> list[str]:
    return [
        "".join(alphabet[index] for index in row)
        for alphabet, row in zip(alphabets, letters, strict=True)
    ]


def _loss(model: GlyphModel, clean: torch.Tensor, captions: list[str]) -> torch.Tensor:
    noise = torch.randn_like(clean)
    sigma = torch.sigmoid(0.8 + torch.randn(len(clean)))
    rows = sigma.view(-1, 1, 1, 1)
    noisy = (1 - rows) * clean + rows * noise
    velocity = model.velocity(noisy, sigma, model.encode_texts(captions))
    return ((velocity - (noise - clean)) ** 2).mean()
