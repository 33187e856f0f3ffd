"""Trains the glyph base model from scratch on rendered strings, with a plain flow-matching loss."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ebbflow.models.families.glyph import GlyphModel, build_glyph_model, encode_grey_images
from ebbflow.models.glyph_training.lettering import render_batch
from ebbflow.progress import show_progress
from ebbflow.recipe.model import GlyphTrainingConfig
from ebbflow.storage.artifacts import write_new_folder

logger = logging.getLogger(__name__)


def train_glyph_base(config: GlyphTrainingConfig, folder: Path) -> None:
    """Train a glyph model from scratch into ``folder``, committed, in the Hugging Face layout.

    Loss: mean((v - (eps - x0))^2) with sigma = sigmoid(.8 + N(0, 1)): most weight near pure noise,
    where the letters are decided. The average of the weights is saved (decay ``config.ema``).
    """
    rng = np.random.default_rng(config.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = build_glyph_model(config)
        parts = nn.ModuleList([model.transformer, model.text_encoder]).train()
        average = AveragedModel(parts, multi_avg_fn=get_ema_multi_avg_fn(config.ema))  # type: ignore[no-untyped-call, unused-ignore]
        optimizer = torch.optim.AdamW(parts.parameters(), lr=config.lr)
        progress = show_progress("training the base model", "step", range(config.steps))
        for step in progress:
            # Only at the end, when the letters are learnt: see GlyphTrainingConfig.caption_noise.
            noisy_captions = step >= 2 * config.steps // 3
            loss = _flow_matching_loss(model, *_sample_training_batch(config, rng, noisy_captions))
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            average.update_parameters(parts)
            if step % 25 == 0:
                progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    parts.load_state_dict(average.module.state_dict())
    with write_new_folder(folder) as unfinished:
        model.save(unfinished)
    logger.info(
        "trained the glyph base model for %d steps, last loss %.3f", config.steps, loss.item()
    )


def _sample_training_batch(
    config: GlyphTrainingConfig, rng: np.random.Generator, noisy_captions: bool
) -> tuple[torch.Tensor, list[str]]:
    """Latents [batch, 1, height, width] of random strings, and their captions."""
    # Letters as indices into the alphabet of their string, [batch, letters]; sizes is [batch, 1],
    # an upper bound for each row.
    alphabets = _choose_alphabets(config, rng)
    sizes = np.array([[len(alphabet)] for alphabet in alphabets])
    letters = rng.integers(sizes, size=(config.batch, config.letters))
    images = render_batch(_join_letters(alphabets, letters), config.height, config.width, rng)
    if noisy_captions:
        # After the images are drawn: the caption alone is wrong.
        replaced = rng.random(letters.shape) < config.caption_noise
        letters = np.where(replaced, rng.integers(sizes, size=letters.shape), letters)
    return encode_grey_images(images), _join_letters(alphabets, letters)


def _choose_alphabets(config: GlyphTrainingConfig, rng: np.random.Generator) -> list[str]:
    """The alphabet of each string of a batch. Of a model with one, none is drawn: it sees the
    strings that it always saw.
    """
    known = config.alphabet_characters
    if len(known) == 1:
        return known * config.batch
    return [known[index] for index in rng.integers(len(known), size=config.batch)]


def _join_letters(alphabets: list[str], letters: np.ndarray) -> list[str]:
    return [
        "".join(alphabet[index] for index in row)
        for alphabet, row in zip(alphabets, letters, strict=True)
    ]


def _flow_matching_loss(
    model: GlyphModel, clean: torch.Tensor, captions: list[str]
) -> torch.Tensor:
    noise = torch.randn_like(clean)
    # The logit-normal times of SD3 (2403.03206), with their mean moved towards the noise.
    sigma = torch.sigmoid(0.8 + torch.randn(len(clean)))
    rows = sigma.view(-1, 1, 1, 1)
    noisy = (1 - rows) * clean + rows * noise
    velocity = model.predict_velocity(noisy, sigma, model.encode_texts(captions))
    return ((velocity - (noise - clean)) ** 2).mean()
