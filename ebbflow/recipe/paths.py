"""Texts of a recipe that name a file, a folder, a URI or a store: refused where they could not
work, before anything runs.
"""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote

from pydantic import AfterValidator

MAX_NAME = 255
MAX_PATH = 4000
"""Largest name and path, in bytes. Linux takes paths of 4,096: the rest is for what a run puts into
a folder.
"""
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
PATTERN = re.compile(r"[*?[]")
HTTP_PATTERN = re.compile(r"[*[]")
"""What Flyte and fsspec take for the pattern of several files."""
PATH_KEYS = {"path", "source", "held_out_source", "pairs", "teacher", "hacked"}
"""Recipe keys that name files, folders or ``package.module:name``."""
PATH_MAPPINGS = {"teachers", "labels"}
"""Recipe keys of mappings and lists whose values name files, folders or URIs."""
SQLITE = re.compile(r"sqlite(\+\w+)?:")
LOCAL_PATH = "is a local path, which pods cannot see; upload it and give its URI"
"""What is wrong with a path of a run on a cluster; follows the key and the path."""
SHIPPED = "ebbflow:datasets/"
"""Prefix of a path to a file that is installed with Ebbflow. It means the same on every machine."""
PACKAGE = Path(__file__).parents[1]
# A link in a clone, which Flyte's upload of sources leaves out; it has the folder that it leads to.
SHIPPED_HOME = PACKAGE if (PACKAGE / "datasets").exists() else PACKAGE.parent


def check_path(text: str) -> str:
    """Check the text of a local path or a URI.

    Raises:
        ValueError: no file can have this name, or what reads it would take it for something else.
    """
    if CONTROL.search(text):
        raise ValueError("it has a control character; take it out")
    # In a URI of the web, '?' begins the query.
    if (HTTP_PATTERN if re.match("https?://", text) else PATTERN).search(text):
        raise ValueError(
            "'*', '?' and '[' are patterns of several files; rename the file or folder"
        )
    if "://" in text:
        return text
    if text.startswith("~"):
        raise ValueError("'~' is the home folder to a shell only; write the path out")
    # File systems count bytes. ``replace``: half of a surrogate pair has an error of its own
    # (``require_json_values``), and must not raise another one here.
    if len(text.encode(errors="replace")) > MAX_PATH:
        raise ValueError(f"a path has at most {MAX_PATH} bytes; shorten it")
    if any(len(name.encode(errors="replace")) > MAX_NAME for name in text.split("/")):
        raise ValueError(f"a name in a path has at most {MAX_NAME} bytes; shorten it")
    return text


def check_output(text: str) -> str:
    """Check the text of an output folder, whose path becomes part of URIs.

    Raises:
        ValueError: as ``check_path``, or it reads as the escape of another character.
    """
    if "://" not in text and unquote(text) != text:
        raise ValueError("'%' with two digits is another character in a URI; rename the folder")
    return check_path(text)


def check_store_uri(uri: str) -> str:
    """Check the URI of an MLflow store. A SQLite store is a file, and its path means the same to
    everything that reads the URI.

    Raises:
        ValueError: it is not.
    """
    if CONTROL.search(uri):
        raise ValueError("it has a control character; take it out")
    if SQLITE.match(uri):
        path = uri.removeprefix("sqlite:///")
        # ``path`` is still the whole ``uri`` where it has another number of slashes, or a driver.
        if path in (uri, "", ":memory:") or path.startswith("file:"):
            raise ValueError(
                "a SQLite store is a file that all nodes of a run open; write sqlite:/// and its"
                " path"
            )
        check_output(path)
    return uri


def resolve_local_path(text: str) -> Path:
    """Return where a file is on this machine, also that of ``ebbflow:datasets/...``."""
    if text.startswith(SHIPPED):
        return SHIPPED_HOME / text.removeprefix("ebbflow:")
    return Path(text)


def list_shipped_files() -> list[str]:
    """Return the prompt files that are installed with Ebbflow, as a recipe names them."""
    return sorted(
        f"ebbflow:{path.relative_to(SHIPPED_HOME)}"
        for path in SHIPPED_HOME.glob("datasets/*/prompts.*")
    )


def resolve_paths(data: Any, folder: Path, all_paths: bool = False) -> Any:
    """Return the data of a recipe in ``folder``, with its paths as the working directory sees them.

    Example:
        >>> resolve_paths({"prompts": {"source": "words.txt"}}, Path("recipes"))
        {"prompts": {"source": "recipes/words.txt"}}

    A relative path is looked for in ``folder``, then in the working directory; one that is in
    neither stays as it is, and so does what a hub holds. Paths below the working directory stay
    relative, so that the recipe means the same on other machines.

    Args:
        all_paths: every text in this mapping or list is a path, whatever its key.
    """
    if isinstance(data, list):
        return [
            _resolve_path(item, folder)
            if all_paths and isinstance(item, str)
            else resolve_paths(item, folder)
            for item in data
        ]
    if not isinstance(data, dict):
        return data
    if all_paths:
        path_keys = set(data)
    elif data.get("revision"):
        path_keys = set()  # ``path`` is then the id of a Hugging Face repository
    else:
        path_keys = PATH_KEYS
    resolved = {}
    for key, value in data.items():
        if key in path_keys and isinstance(value, str):
            resolved[key] = _resolve_path(value, folder)
        else:
            resolved[key] = resolve_paths(value, folder, key in PATH_MAPPINGS)
    return resolved


def _resolve_path(text: str, folder: Path) -> str:
    if not text or "://" in text or text.startswith(SHIPPED) or os.path.isabs(text):
        return text
    # The recipe's folder first, so that a recipe means the same from every working directory.
    in_folder = os.path.join(folder, text)
    if not os.path.exists(in_folder):
        return text
    # Both exist: the same text means two files, and only the reader knows which one is meant.
    if os.path.exists(text):
        if os.path.samefile(text, in_folder):
            return text
        warnings.warn(
            f"{text} is in {folder} and in the working directory; the first is used: rename one",
            stacklevel=2,
        )
    # Relative below the working directory, so that a resolved recipe means the same elsewhere.
    relative = os.path.relpath(in_folder)
    return os.path.abspath(in_folder) if relative.startswith("..") else relative


PathText = Annotated[str, AfterValidator(check_path)]
OutputText = Annotated[str, AfterValidator(check_output)]
StoreText = Annotated[str, AfterValidator(check_store_uri)]
