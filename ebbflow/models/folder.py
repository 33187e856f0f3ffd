"""Reads what base-model folders hold. They come from elsewhere: nothing in them is trusted to be
what diffusers writes.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from diffusers.utils.logging import disable_progress_bar as silence_diffusers
from transformers.utils.logging import disable_progress_bar as silence_transformers

from ebbflow.recipe.base import sanitize_text
from ebbflow.recipe.base_folder import INDEX, ModelError, read_json_object


def copy_published_part(published: Path, folder: Path, part: str) -> None:
    """Put a part of a pipeline into a saved folder as it was published, with the index that names
    its class: ours is a class that only Ebbflow has.
    """
    shutil.copytree(published / part, folder / part, dirs_exist_ok=True)
    shutil.copyfile(published / INDEX, folder / INDEX)


@contextmanager
def report_unreadable_parts(folder: Path, family: str) -> Iterator[None]:
    """Around the code that reads a folder's parts: checks the configurations first, and turns every
    failure into one error.

    Raises:
        ModelError: a configuration or a part cannot be read.
    """
    # diffusers takes anything else for the name of a repository, and asks the hub for it.
    for config in sorted(folder.rglob("*config.json")):
        read_json_object(config)
    # A bar per part would bury the bars that matter.
    silence_diffusers()
    silence_transformers()
    try:
        yield
    except BaseException as error:
        # Three libraries read the parts, each with errors of its own. tokenizers, which is in Rust,
        # panics, and PanicException is no Exception; KeyboardInterrupt must pass.
        is_panic = type(error).__name__ == "PanicException"
        if not isinstance(error, Exception) and not is_panic:
            raise
        reason = sanitize_text(" ".join(f"{type(error).__name__}: {error}".split()))
        raise ModelError(
            f"{folder} cannot be read as a {family} base model ({reason}); fetch it again"
        ) from error
