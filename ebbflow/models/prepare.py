"""Makes the base-model folder of a run: trained, fetched from the hub, or copied."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import torch
from huggingface_hub.constants import HF_HUB_CACHE

from ebbflow.models import ModelError, load_model
from ebbflow.models.glyph_training.train import train_glyph_base
from ebbflow.models.glyph_training.trained import load_trained_glyph
from ebbflow.models.hub import locate_pretrained
from ebbflow.recipe.base_folder import INDEX, MODULAR_INDEX, find_index, read_json_object
from ebbflow.recipe.model import GlyphTrainingConfig, ModelConfig
from ebbflow.recipe.pretrained import PretrainedSourceConfig
from ebbflow.storage.artifacts import (
    COMMIT,
    MANIFEST,
    ArtifactError,
    verify_committed_folder,
    verify_folder,
    write_new_folder,
)
from ebbflow.storage.locks import wait_for_lock

logger = logging.getLogger(__name__)
PART_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")


def train_base_folder(training: GlyphTrainingConfig, threads: int, folder: Path) -> None:
    """Make the glyph base model in ``folder``, committed: train it from scratch, or copy the model
    that comes with the package if that was trained with the same settings.
    """
    trained = load_trained_glyph(training)
    if trained is None:
        # The order of additions, and so the weights, depends on the number of threads: the
        # recipe's.
        torch.set_num_threads(threads)
        train_glyph_base(training, folder)
    else:
        logger.info(
            "the base model comes with the package, as it was trained with these settings before;"
            " another 'model.training.seed' trains one here"
        )
        with write_new_folder(folder) as unfinished:
            trained.save(unfinished)
    # A model that does not load fails here, and not in the stage that opens it.
    load_model(folder)


def fetch_pipeline(pretrained: PretrainedSourceConfig) -> Path:
    """The local folder of a pipeline in a Hugging Face repository. Only the pipeline's parts are
    fetched.

    Raises:
        HubError: it cannot be fetched.
        ModelError: the repository holds no pipeline in the layout of diffusers.
    """
    folder = locate_pretrained(pretrained, [INDEX, MODULAR_INDEX])
    if not find_index(folder).is_file():
        raise ModelError(
            f"{pretrained.path} at {pretrained.revision} has neither {INDEX} nor"
            f" {MODULAR_INDEX}; name a repository for diffusers"
        )
    return locate_pretrained(pretrained, _pipeline_file_patterns(folder))


def download_base_folder(repository: str, revision: str, folder: Path) -> None:
    """Fetch the pipeline in a Hugging Face repository to ``folder``, committed.

    Raises:
        HubError, ModelError: as ``fetch_pipeline``.
    """
    source = fetch_pipeline(PretrainedSourceConfig(path=repository, revision=revision))
    with write_new_folder(folder) as unfinished:
        for pattern in _pipeline_file_patterns(source):
            # Only these: the cache may hold more of the repository than was asked for here.
            for file in sorted(source.glob(pattern)):
                target = unfinished / file.relative_to(source)
                target.parent.mkdir(exist_ok=True)
                _link_or_copy(file, target)


def cache_base_folder(pretrained: PretrainedSourceConfig) -> Path:
    """The committed folder of a pipeline in a Hugging Face repository, made once, of links into the
    hub's cache and next to it.

    Raises:
        HubError, ModelError: as ``fetch_pipeline``.
        ArtifactError: it is damaged. It is not made again: the hub's cache shares its files.
    """
    assert pretrained.path
    assert pretrained.revision
    repository = pretrained.path.replace("/", "--")
    folder = Path(HF_HUB_CACHE) / f"ebbflow--{repository}" / pretrained.revision
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Several runs of a machine may ask at the same time; the first one fetches it.
        with wait_for_lock(folder.with_suffix(".lock")):
            if not folder.exists():
                download_base_folder(pretrained.path, pretrained.revision, folder)
    try:
        verify_folder(folder)
    except ArtifactError as error:
        raise ArtifactError(
            f"{error}; remove {folder} and {Path(HF_HUB_CACHE) / f'models--{repository}'}"
        ) from None
    return folder


def _pipeline_file_patterns(folder: Path) -> list[str]:
    """Patterns of a pipeline's files: its index, and of every part the weights and their
    configuration.

    Raises:
        ModelError: the name of a part leads out of the folder.
    """
    index = find_index(folder)
    parts = [
        part
        for part, kind in read_json_object(index).items()
        if isinstance(kind, list) and kind and kind[0]
    ]
    strange_parts = [part for part in parts if not part.isidentifier()]
    if strange_parts:
        raise ModelError(
            f"{index} names the part {strange_parts[0]!r}, which is no identifier; fetch"
            " another repository"
        )
    return [index.name, *(f"{part}/{suffix}" for part in parts for suffix in PART_FILES)]


def _link_or_copy(source: Path, target: Path) -> None:
    """A link where the hub's cache is on the same disk: tens of GB need not be there twice."""
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)


def copy_base_folder(source: Path, folder: Path, config: ModelConfig) -> None:
    """Copy a base-model folder that loads, committed.

    Raises:
        ModelError: ``source`` is not a base model of the family, or holds a link that leads out of
            it.
        ArtifactError: it was committed and has changed since.
    """
    # Before any code reads the folder, which comes from elsewhere.
    verify_committed_folder(source)
    _reject_links_out(source)
    load_model(source, config)
    with write_new_folder(folder) as unfinished:
        # The copy is committed anew, with a manifest and a COMMIT of its own.
        shutil.copytree(
            source, unfinished, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST, COMMIT)
        )


def _reject_links_out(folder: Path) -> None:
    """A link out of a foreign folder could bring any file of this machine into the artifact store.

    A snapshot in the hub's cache consists of links, but to its own ``blobs``.
    """
    # models--OWNER--NAME/snapshots/COMMIT/file -> models--OWNER--NAME/blobs/SHA
    home = folder.parent.parent if folder.parent.name == "snapshots" else folder
    for path in folder.rglob("*"):
        if path.is_symlink() and not path.resolve().is_relative_to(home.resolve()):
            raise ModelError(f"{path} is a link out of {folder}; put the file itself there")
