"""What a run depends on apart from its recipe: the code, and what the recipe names on this machine.
Digests show changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ebbflow.recipe import Recipe
from ebbflow.recipe.paths import PATH_KEYS, PATH_MAPPINGS, resolve_local_path
from ebbflow.storage.artifacts import COMMIT, digest_of_folder
from ebbflow.storage.disk import sha256_of_file

SOURCE_SUFFIXES = {".py", ".html", ".txt"}
"""Of code, of pages, and of the prompts of rewards that ask a model."""
IMPORT_PATH = re.compile(r"[\w.]+:\w+")
"""``package.module:name``."""


def compute_code_digest(*roots: Path) -> str:
    """sha256 of the sources at ``roots`` (folders or files) and of the versions of what Ebbflow
    requires.

    It is the same wherever the same code is installed, and takes milliseconds.
    """
    return hashlib.sha256(list_code(*roots).encode()).hexdigest()


def list_code(*roots: Path) -> str:
    """What ``compute_code_digest`` is the sha256 of, as JSON: ``sources``, a list of [path, sha256]
    for each root, and ``versions``.
    """
    return json.dumps(
        {"sources": [list_sources(root) for root in roots], "versions": _list_versions()},
        sort_keys=True,
    )


def compute_inputs_digest(recipe: Recipe) -> str:
    """sha256 of what the recipe names on this machine.

    Of a file its content counts; of a folder its COMMIT, or else names, sizes and modification
    times, as a base model has tens of GB; of ``package.module:name`` the sources of the whole
    package. What a URI or a hub holds is taken as unchanged.
    """
    states = {
        key: describe_state(value)
        for key, value in _iterate_local_names(recipe.model_dump(mode="json"))
    }
    return hashlib.sha256(json.dumps(states, sort_keys=True).encode()).hexdigest()


def list_sources(root: Path) -> list[list[str]]:
    """List [path below the root, sha256] of every source."""
    if root.is_file():
        return [[root.name, sha256_of_file(root)]]
    # Sorted, and by paths below the root: the digest must not depend on the order in which a file
    # system lists its files, nor on where the package is installed. The shipped prompts are inputs,
    # and lie below the package where it is installed, beside it in a clone.
    prompts = set(root.glob("datasets/*/*.txt"))
    sources = sorted(
        (path.relative_to(root), path)
        for path in root.rglob("*")
        if path.suffix in SOURCE_SUFFIXES and path not in prompts
    )
    return [[str(name), sha256_of_file(path)] for name, path in sources]


@cache
def _list_versions() -> dict[str, str]:
    # Once: a process keeps the libraries that it has imported, and each version is parsed from the
    # package's whole metadata.
    versions = {}
    for requirement in requires("ebbflow") or ():
        # "torch>=2.9; extra == 'all'" names the package before its first operator.
        name = re.split(r"[^\w.-]", requirement)[0]
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue  # needed on other machines only
    return versions


def _iterate_local_names(value: Any, parent: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, text) of everything in a resolved recipe that may name something on this
    machine.
    """
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    # Mappings such as ``teachers`` have names of the user's as keys, and a path in every value.
    all_are_paths = parent.rpartition(".")[2] in PATH_MAPPINGS
    for name, item in items:
        key = f"{parent}.{name}" if parent else str(name)
        if (
            isinstance(item, str)
            and (all_are_paths or name in PATH_KEYS or IMPORT_PATH.fullmatch(item))
            and "://" not in item
        ):
            yield key, item
        else:
            yield from _iterate_local_names(item, key)


def digest_named_weights(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Digest the files and folders on this machine, and name the commits of repositories, that
    parts of a resolved recipe name, such as the weights of its rewards.

    Example:
        ``{"pickscore": {"weights": {"path": "yuvalkirstain/PickScore_v1", "revision": "a4e4..."},
        "tokenizer": {"path": "/models/clip"}}}`` gives ``{"pickscore.weights":
        "yuvalkirstain/PickScore_v1@a4e4...", "pickscore.tokenizer.path": "3f9a..."}``.

    Args:
        configs: parts of a resolved recipe, by name.
    """
    digests = dict(_iterate_commits(configs))
    for key, name in _iterate_local_names(configs):
        path = resolve_local_path(name)
        if os.path.isfile(path):
            digests[key] = sha256_of_file(Path(path))
        elif os.path.isdir(path):
            # The contents, however large: the same names and sizes may be other weights.
            digests[key] = digest_of_folder(Path(path))
    return dict(sorted(digests.items()))


def _iterate_commits(value: Any, parent: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, repository@commit) of every repository that a resolved recipe names."""
    if not isinstance(value, Mapping):
        return
    if value.get("path") and value.get("revision"):
        yield parent, f"{value['path']}@{value['revision']}"
    for name, item in value.items():
        yield from _iterate_commits(item, f"{parent}.{name}" if parent else str(name))


def describe_state(name: str) -> Any:
    """What ``compute_inputs_digest`` compares of a file, a folder or ``package.module:name``; None
    where there is none of this name.
    """
    path = resolve_local_path(name)
    # Unlike those of pathlib, these raise nothing for a name that no file can have.
    if os.path.isfile(path):
        return sha256_of_file(path)
    if os.path.isdir(path):
        return _describe_folder(path)
    if not IMPORT_PATH.fullmatch(name):
        return None
    # The whole package counts, not the module alone: the module imports from the others.
    roots = find_package_roots(name.partition(":")[0])
    return [source for root in roots for source in list_sources(root)] if roots else None


def _describe_folder(folder: Path) -> Any:
    # COMMIT holds the sha256 of everything in the folder, at the cost of one small file.
    if (folder / COMMIT).is_file():
        return (folder / COMMIT).read_text(errors="replace")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [
        [path.relative_to(folder).as_posix(), path.stat().st_size, path.stat().st_mtime_ns]
        for path in files
    ]


def find_package_roots(module: str) -> list[Path]:
    """The folders of the package, or the one file, that a module belongs to; none if it is not
    installed here.
    """
    try:
        spec = find_spec(module.partition(".")[0])
    except ValueError:  # a module without a file, such as __main__
        spec = None
    if spec is None:
        return []
    # A package may have several folders (a namespace package); a module of one file has none.
    return [Path(root) for root in spec.submodule_search_locations or [spec.origin or ""]]
