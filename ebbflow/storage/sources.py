"""Whether a process runs the sources that were submitted: digests of packages, made where a
workflow is registered and compared wherever a part of it runs.

Code can reach a pod in its image, in an upload, in an installed package. Which of them Python
imports depends on the order of ``sys.path``, and old code runs as silently as new code.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from ebbflow.storage.identity import find_package_roots, list_sources

SUBMITTED = "EBBFLOW_SOURCES"
"""Environment variable of pods: the digests of what was registered, as JSON by package."""
COMMIT = "EBBFLOW_GIT_COMMIT"
"""Environment variable of images and pods: the git commit of the sources, with ``-dirty`` where
they differ from it.
"""
DIRTY = "-dirty"
SHOWN_DIGITS = 12


class SourcesError(Exception):
    """A process runs other code than was submitted: names both, and how to run the submitted."""


def compute_package_digest(roots: Iterable[Path]) -> str:
    """Compute a digest of the sources of a package, which may have several folders, or one file."""
    sources = [source for root in roots for source in list_sources(root)]
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()[:SHOWN_DIGITS]


def write_digests(packages: Mapping[str, Path]) -> str:
    """Write the digests of packages as the value of ``EBBFLOW_SOURCES``.

    Args:
        packages: the folder or the file of each package, by the name that imports it, or by its
            path in the tree of the sources.

    Example:
        >>> write_digests({"mine": Path("mine")})
        '{"mine": "0f3a9c51d2e4"}'
    """
    return json.dumps({name: compute_package_digest([root]) for name, root in packages.items()})


def check_sources(environment: Mapping[str, str] = os.environ) -> None:
    """Check that this process imports what was submitted; without ``EBBFLOW_SOURCES``, as in a run
    on one machine, there is nothing to compare with.

    Raises:
        SourcesError: a package has other sources here.
    """
    submitted: dict[str, str] = json.loads(environment.get(SUBMITTED) or "{}")
    differences = []
    for name, expected in submitted.items():
        roots = _find_sources(name)
        # An image without a package of the user's can run every recipe that does not name it.
        if not roots:
            continue
        digest = compute_package_digest(roots)
        if digest != expected:
            folders = ", ".join(map(str, roots))
            differences.append(f"{name} is {digest} in {folders}, {expected} was submitted")
    if differences:
        listed = "; ".join(differences)
        raise SourcesError(
            f"this pod runs other code than was submitted: {listed}. Submit with `pyflyte run"
            " --remote --copy all`, which sends the sources to every pod, or build this pod's image"
            " from the sources that you register (docs/flyte.md)"
        )


def _find_sources(name: str) -> list[Path]:
    """Find the folders of a package, or what lies at a path beside Ebbflow; none where it is not
    here.
    """
    if "/" not in name:
        return find_package_roots(name)
    path = Path(__file__).parents[2] / name
    return [path] if path.exists() else []
