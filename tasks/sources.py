"""The sources that are submitted: what a registered version runs, and what Flyte uploads."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import ebbflow
from ebbflow.storage.identity import list_sources
from ebbflow.storage.sources import COMMIT, SUBMITTED, write_digests
from tasks.cache import CLONE

PACKAGES = {
    "ebbflow": Path(ebbflow.__file__).parent,
    "tasks": Path(__file__).parent,
    "workflows": CLONE / "workflows",
}
ENGINE_SIDE = "containers/vllm_omni/ebbflow_vllm_omni"
"""The package alone: installing its project leaves an ``egg-info`` beside it, in some images."""
CODE = tuple(PACKAGES.values())
"""The sources that decide what a run does."""
DOCKER_IGNORE = ".dockerignore"
"""What neither the builder of images nor Flyte's upload gets; both read it."""


def describe_submitted_sources() -> str:
    """Describe what is registered, as the value of ``EBBFLOW_SOURCES``.

    In a pod it is what the pod was given: a dynamic workflow passes it on to its nodes.
    """
    if os.environ.get(SUBMITTED):
        return os.environ[SUBMITTED]
    return write_digests(_find_submitted_packages())


def list_ignored_sources() -> list[str]:
    """List the sources that have a part in the digests and that Flyte's upload leaves out, by their
    paths below the clone: no pod that runs the upload could have the same digests.
    """
    from flytekit.tools.ignore import (
        DockerIgnore,
        FlyteIgnore,
        GitIgnore,
        IgnoreGroup,
        StandardIgnore,
    )

    # The rules with which ``pyflyte run`` chooses the files that it uploads.
    rules = IgnoreGroup(str(CLONE), [GitIgnore, DockerIgnore, StandardIgnore, FlyteIgnore])
    sources = [
        (root / name if root.is_dir() else root).relative_to(CLONE).as_posix()
        for root in _find_submitted_packages().values()
        for name, _ in list_sources(root)
    ]
    return [source for source in sources if rules.is_ignored(source)]


def _find_submitted_packages() -> dict[str, Path]:
    """Find the packages that the digests cover: Ebbflow's, and the user's own beside them."""
    packages = PACKAGES | dict(_iterate_own_packages(CLONE))
    if (CLONE / ENGINE_SIDE).is_dir():
        packages[ENGINE_SIDE] = CLONE / ENGINE_SIDE
    return packages


def describe_submitted_commit() -> str:
    """Describe the git commit of what is registered, with "-dirty" where the clone differs from it;
    empty where there is no repository. An upload replaces the code of an image, whose own commit
    then says nothing.

    In a pod it is what the pod was given, as above.
    """
    git = shutil.which("git")
    if os.environ.get(SUBMITTED) or git is None or not (CLONE / ".git").exists():
        return os.environ.get(COMMIT, "")
    command = [git, "-C", str(CLONE), "describe", "--always", "--abbrev=40", "--dirty"]
    done = subprocess.run([*command, "--exclude=*"], capture_output=True, text=True)
    return done.stdout.strip()


def _iterate_own_packages(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield the user's own packages and modules beside Ebbflow: those that are uploaded."""
    # The parent of an installed Ebbflow is a folder of other libraries.
    if not (root / DOCKER_IGNORE).is_file():
        return
    for path in sorted(root.iterdir()):
        name = path.name.removesuffix(".py")
        if not name.isidentifier() or name in PACKAGES or not is_uploaded(path.name, root):
            continue
        if path.suffix == ".py" or any(path.glob("*.py")):
            yield name, path


def is_uploaded(path: str, root: Path = CLONE) -> bool:
    """Return whether the upload has a file or folder, named by its path below ``root``."""
    # Flyte's own reader of the file, imported by flytekit anyway.
    from docker.utils.build import PatternMatcher

    file = root / DOCKER_IGNORE
    lines = file.read_text().splitlines() if file.is_file() else []
    patterns = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    return not PatternMatcher(patterns).matches(path)
