"""What a run depends on beside its recipe: the code, and what the recipe names on this machine. Digests tell if they changed."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ebbflow.recipe import Recipe
from ebbflow.storage.artifacts import COMMIT

SOURCES = {".py", ".html"}
NAMING = {"path", "source", "pairs", "teacher"}
"""Keys of a recipe that name files, folders or ``package.module:name``."""


CODE = re.compile(r"[\w.]+:\w+")
"""``package.module:name``."""


def code_digest(*places: Path) -> str:
    """sha256 of the sources at ``places`` (folders or files) and of the versions of what Ebbflow requires.

    It is the same wherever the same code is installed, and takes milliseconds.
    """
    sources = [[[str(name), _sha256(path)] for name, path in _sources(place)] for place in places]
    return _digest({"sources": sources, "versions": _versions()})


def inputs_digest(recipe: Recipe) -> str:
    """sha256 of what the recipe names on this machine.

    Of a file its content counts; of a folder its COMMIT, or else names, sizes and times of change, as a base model has tens of
    GB; of ``package.module:name`` the sources of the whole package. What lies behind a URI or on a hub is taken as unchanged.
    """
    return _digest({key: _state(named) for key, named in _named(recipe.model_dump(mode="json"))})


def _sources(place: Path) -> Iterator[tuple[Path, Path]]:
    """(path below the place, path) of every source."""
    if place.is_file():
        yield Path(place.name), place
    else:
        found = (path for path in place.rglob("*") if path.suffix in SOURCES)
        yield from sorted((path.relative_to(place), path) for path in found)


def _versions() -> dict[str, str]:
    names = (re.split(r"[^\w.-]", requirement)[0] for requirement in requires("ebbflow") or ())
    return dict(_installed(names))


def _installed(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    for name in names:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue  # needed on other machines only


def _named(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, text) of everything in a resolved recipe that may name something on this machine."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        key = f"{place}.{name}" if place else str(name)
        if isinstance(item, str) and (name in NAMING or CODE.fullmatch(item)) and "://" not in item:
            yield key, item
        else:
            yield from _named(item, key)


def _state(named: str) -> Any:
    path = Path(named)
    if os.path.isfile(path):  # unlike pathlib's, no error for a name that no file can have
        return _sha256(path)
    if os.path.isdir(path):
        return _folder_state(path)
    return _package_state(named.partition(":")[0]) if CODE.fullmatch(named) else None


def _folder_state(folder: Path) -> Any:
    if (folder / COMMIT).is_file():
        return (folder / COMMIT).read_text(errors="replace")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [[path.relative_to(folder).as_posix(), path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def _package_state(module: str) -> Any:
    """The sources of the package, or of the one file, that a module belongs to."""
    try:
        spec = find_spec(module.partition(".")[0])
    except ValueError:  # a module without a file, such as __main__
        spec = None
    if spec is None:
        return None
    places = [Path(place) for place in spec.submodule_search_locations or [spec.origin or ""]]
    return [[str(name), _sha256(path)] for place in places for name, path in _sources(place)]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
