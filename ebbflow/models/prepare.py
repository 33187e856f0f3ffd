"""The base-model folder of a run: trained here, or taken over from a folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from ebbflow.artifacts import COMMIT, MANIFEST, new_folder, verify
from ebbflow.models import load_model
from ebbflow.models.glyph_training import train_glyph_base
from ebbflow.recipe.recipe import GlyphTraining


def train_base(training: GlyphTraining, threads: int, folder: Path) -> None:
    """Train the glyph base model from scratch and leave it at ``folder``, committed."""
    torch.set_num_threads(threads)
    train_glyph_base(training, folder)
    load_model(folder)


def copy_base(source: Path, folder: Path, family: str = "glyph") -> None:
    """Take over a base-model folder that loads, committed.

    Raises:
        ModelError: ``source`` is not a base model of the family.
        ArtifactError: it was committed and has changed since.
    """
    if (source / COMMIT).exists():
        verify(source)
    load_model(source, family)
    with new_folder(folder) as unfinished:
        shutil.copytree(source, unfinished, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST, COMMIT))
