"""Weights from elsewhere become a folder on this machine: a folder stays where it is, a repository is fetched at its commit."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download

from ebbflow.recipe.pretrained import PretrainedSourceConfig


class HubError(Exception):
    """Weights that cannot be had: names the folder, or the repository and its commit, what is wrong and the way out."""


def pretrained_folder(pretrained: PretrainedSourceConfig, patterns: list[str] | None = None) -> Path:
    """The local folder (or file) of a ``Pretrained``.

    Of a Hugging Face repository the files that fit ``patterns`` (all by default) are fetched once at the pinned commit and kept
    in the hub's cache. ``HF_TOKEN``, ``HF_HOME``, ``HF_ENDPOINT`` and ``HF_HUB_OFFLINE`` count as they do for huggingface_hub.

    Raises:
        HubError: there is no such folder, or the repository cannot be fetched and is not whole in the cache.
    """
    if not pretrained.on_hub:
        return _existing(pretrained.path)
    assert pretrained.path
    try:
        return Path(snapshot_download(pretrained.path, revision=pretrained.revision, allow_patterns=patterns))
    except Exception as error:  # the hub's client raises its own, its HTTP library's and the system's errors: no common base
        reason = str(error).strip().partition("\n")[0]
        raise HubError(
            f"{pretrained.path} at commit {pretrained.revision} cannot be fetched ({type(error).__name__}: {reason}). Check the "
            "repository and the commit. A private or gated one needs HF_TOKEN, and its licence accepted on its page. With "
            "HF_HUB_OFFLINE, or without a network, it must be in the cache already; else give the path of a local folder"
        ) from error


def _existing(path: str | None) -> Path:
    if path is None or not Path(path).exists():
        raise HubError(f"path = {path!r} is not on this machine; of a Hugging Face repository give the commit as 'revision'")
    return Path(path)
