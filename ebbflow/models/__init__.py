"""Base models: one adapter per family behind one interface, and the folders they are loaded from.

Where it fits
    Above ``recipe`` and ``data`` (prompts), below everything that generates or trains.
    ``ebbflow.models.base.Model`` is all that the other rooms see of a family.

Why
    Rollout, training and evaluation must compute the same velocity, or the first ratio of a policy
    gradient is not 1. So there is ONE forward pass, ``predict``, and everything that differs
    between families (layouts, schedules, guidance, VAE) is behind it.

How
    A family is one file in ``families/``: its record, which ``recipe.families`` reads without
    importing torch, the parts of its published models, and its adapter: diffusers' own parts,
    called as its pipeline calls them (``pipeline.py``, ``pipeline_loading.py``; with images to
    edit ``editing.py``; of modular pipelines their blocks, ``modular.py``).
    ``load_model`` checks a folder and loads it, ``prepare.py`` makes the folder of a run,
    ``hub.py`` fetches repositories, ``encoding.py`` encodes each prompt once. ``sizes.py`` builds
    models on the meta device for ``ebbflow estimate``; ``glyph_training/`` trains the
    glyph model.

Gotchas
    Times are never truncated to integers, as some pipelines do. Prompts stay padded to one length:
    else a row's last bits would depend on the rows beside it. Conditioning waits on the CPU, and
    text encoders and VAE are on the device only while they are called. Folders come from elsewhere:
    only safetensors are read, no code in them is run, and a committed one is verified. A policy
    belongs to one base model: open both with ``training.policy_io.load_policy``, which compares
    digests.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

# Before transformers is imported, which reads it then: it warns of parts that nothing here uses.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch

from ebbflow.models.base import Conditioning, Model, ModelError, default_device, predict
from ebbflow.models.families import load_adapter
from ebbflow.recipe.base_folder import check_folder
from ebbflow.recipe.families import FAMILIES
from ebbflow.recipe.model import ModelConfig
from ebbflow.storage.artifacts import verify_committed_folder
from ebbflow.watchdog import watch

__all__ = ["Conditioning", "Model", "ModelError", "load_model", "predict"]


def load_model(
    folder: Path,
    config: ModelConfig = ModelConfig(),
    device: torch.device | None = None,
    weights_later: bool = False,
) -> Model:
    """The model of a base-model folder, to generate as ``config`` says, frozen and in evaluation
    mode.

    Args:
        weights_later: leave the weights of the networks to train to the policy that is built around
            them, where the family can: it reads its shards alone. The glyph model and users' own
            families read them now.

    Raises:
        ArtifactError: the folder was committed and is not what was committed.
        RecipeError: ``config.family`` is a path that nothing can be imported from.
        ModelError: the folder is no base model of the family.
    """
    # Before any code reads the folder: a damaged file could fail anywhere, or load.
    verify_committed_folder(folder)
    # The layout of a user's own family is known to its ``load`` alone.
    if config.family in FAMILIES:
        check_folder(folder, config.family)
    adapter: Any = load_adapter(config.family)
    options = {}
    if weights_later and config.family in FAMILIES and FAMILIES[config.family].diffusers:
        options["weights_later"] = True
    with watch(f"loading the model of {folder}"):
        model: Model = adapter.load(folder, config, device or default_device(), **options)
    return model
