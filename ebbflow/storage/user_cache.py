"""Where this user's caches are: what takes long to make, and may be deleted at any time."""

from __future__ import annotations

import os
from pathlib import Path


def find_user_cache(name: str) -> Path:
    """Return the folder of one of Ebbflow's caches, below ``XDG_CACHE_HOME`` or ``~/.cache``.

    Example:
        >>> find_user_cache("recognizers")
        PosixPath('/home/ada/.cache/ebbflow/recognizers')
    """
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "ebbflow" / name
