"""The base-model folder of a run: trained here, or taken over from a folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from ebbflow.artifacts import COMMIT, MANIFEST, new_folder, verify
from ebbflow.models import ModelError, load_model
from ebbflow.models.glyph_training import train_glyph_base
from ebbflow.models.hub import pretrained_folder
from ebbflow.recipe.model import GlyphTraining
from ebbflow.recipe.model import Model as ModelConfig
from ebbflow.recipe.pretrained import Pretrained

PIPELINE_FILES = ["model_index.json", "*/*.json", "*/*.safetensors", "*/*.txt", "*/*.model", "*/*.jinja"]


def train_base(training: GlyphTraining, threads: int, folder: Path) -> None:
    """Train the glyph base model from scratch and leave it at ``folder``, committed."""
    torch.set_num_threads(threads)
    train_glyph_base(training, folder)
    load_model(folder)


def download_base(repository: str, revision: str, folder: Path) -> None:
    """Fetch the pipeline in a Hugging Face repository, committed; without the single-file checkpoints beside it.

    Raises:
        HubError: it cannot be fetched.
        ModelError: the repository holds no pipeline in the layout of diffusers.
    """
    source = pretrained_folder(Pretrained(path=repository, revision=revision), PIPELINE_FILES)
    if not (source / "model_index.json").is_file():
        raise ModelError(f"{repository} at {revision} has no model_index.json; name the repository of its diffusers version")
    with new_folder(folder) as unfinished:
        shutil.copytree(source, unfinished, dirs_exist_ok=True, copy_function=_link_or_copy)


def _link_or_copy(source: str, target: str) -> None:
    """Tens of GB need no second place on the disk that the hub's cache is on."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copyfile(source, target)


def copy_base(source: Path, folder: Path, config: ModelConfig) -> None:
    """Take over a base-model folder that loads, committed.

    Raises:
        ModelError: ``source`` is not a base model of the family.
        ArtifactError: it was committed and has changed since.
    """
    if (source / COMMIT).exists():
        verify(source)
    load_model(source, config)
    with new_folder(folder) as unfinished:
        shutil.copytree(source, unfinished, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST, COMMIT))
