"""Turns pretrained weights into a folder on this machine: a folder stays where it is, a repository
is fetched at its commit.
"""

from __future__ import annotations

import logging
from pathlib import Path

from huggingface_hub import snapshot_download

from ebbflow.recipe.pretrained import PretrainedSourceConfig

logger = logging.getLogger(__name__)


class HubError(Exception):
    """Weights that cannot be fetched: names the folder or the repository and its commit, the reason
    and the fix.
    """


def locate_pretrained(
    pretrained: PretrainedSourceConfig, patterns: list[str] | None = None
) -> Path:
    """The local folder (or file) of pretrained weights.

    Of a repository the files that match ``patterns`` (or all) are fetched once, at the pinned
    commit, into the hub's cache. ``HF_TOKEN``, ``HF_HOME``, ``HF_ENDPOINT`` and ``HF_HUB_OFFLINE``
    work as for huggingface_hub.

    Raises:
        HubError: there is no such folder, or the repository is neither complete in the cache nor
            can it be fetched.
    """
    if not pretrained.is_on_hub:
        if pretrained.path is None or not Path(pretrained.path).exists():
            raise HubError(
                f"path = {pretrained.path!r} is not on this machine; for a Hugging Face repository"
                " give its commit as 'revision'"
            )
        return Path(pretrained.path)
    assert pretrained.path
    # What the cache has of this commit is not fetched again; without a network it may be enough.
    try:
        folder = snapshot_download(
            pretrained.path, revision=pretrained.revision, allow_patterns=patterns
        )
    except Exception as error:
        # The hub's client, its HTTP library and the system raise errors without a common base.
        reason = str(error).strip().partition("\n")[0]
        raise HubError(
            f"{pretrained.path} at commit {pretrained.revision} cannot be fetched"
            f" ({type(error).__name__}: {reason}). Check both; set HF_TOKEN and accept the licence"
            " of a gated repository; or give the path of a local folder"
        ) from error
    logger.info("%s at commit %s is in %s", pretrained.path, pretrained.revision, folder)
    return Path(folder)
