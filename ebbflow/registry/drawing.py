"""``ebbflow draw``: pictures of a registered version, or of a policy folder, as PNG files; sound as
WAV files beside them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from typing import NamedTuple

from ebbflow.data.images import ImageError, load_condition_image
from ebbflow.data.movies import can_encode_movies, convert_to_movie
from ebbflow.data.prompts import Prompt
from ebbflow.data.sounds import read_sound
from ebbflow.evaluation.serve import iterate_images
from ebbflow.models import ModelError
from ebbflow.models.hub import HubError
from ebbflow.registry.model_folders import open_model_folders
from ebbflow.storage.artifacts import ArtifactError
from ebbflow.storage.disk import DiskFullError, atomic_write
from ebbflow.tracking.store import TrackingError
from ebbflow.training.policy_metadata import PolicyError

MAX_NAME = 40
"""Characters of a prompt in the name of its file: at four bytes each they leave room for a suffix
below 255.
"""

ERRORS = (
    TrackingError,
    ImageError,
    ArtifactError,
    PolicyError,
    ModelError,
    HubError,
    DiskFullError,
    OSError,
)
"""What ``generate_pictures`` raises, for a person to read."""


class Picture(NamedTuple):
    """A drawn prompt.

    Example:
        A picture, and a prompt that could not be drawn::

            Picture('a sign "OPEN"', Path("pictures/a-sign-OPEN-0.png"), None)
            Picture('a sign "OPEN"', None, "the picture has values that are not finite, …")

    Attributes:
        path: its PNG; None if it could not be drawn.
        problem: why it could not be drawn, or what to know of the picture.
    """

    prompt: str
    path: Path | None
    problem: str | None


def generate_pictures(
    tracking_uri: str,
    model: str,
    prompts: Sequence[str],
    folder: Path,
    seeds: Sequence[int] = (0,),
    *,
    base: Path | None = None,
    images: Sequence[Path] = (),
    allowed_code: Collection[str] = (),
) -> Iterator[Picture]:
    """Draw every prompt with every seed into ``folder``, as a registered version of the model draws
    it. Overwrites nothing.

    Args:
        model: a policy folder, or ``MODEL``, ``MODEL@alias`` or ``MODEL/version``.
        base: folder of the base model, where it is neither stored with a registered version nor in
            the run of the policy folder.
        images: files of the image to edit, or of several.
        allowed_code: code that the policy may name.

    Raises:
        RegistryError, TrackingError: there is no such version, or its base model is missing.
        ImageError: one of ``images`` cannot be read.
        ArtifactError, PolicyError, ModelError: as ``serve.iterate_images``.
        DiskFullError: no space was left.
    """
    # before the model, which takes long to load: a wrong path fails at once
    edited = _load_images(images) if images else None
    rows = [
        (Prompt(0, prompt, "", None, "", "", "{}", edited), seed)
        for prompt in prompts
        for seed in seeds
    ]
    with open_model_folders(tracking_uri, model, base) as folders:
        drawn = iterate_images(
            folders.base,
            folders.policy,
            [prompt for prompt, _ in rows],
            [seed for _, seed in rows],
            allowed_code,
        )
        for index, generated in drawn:
            prompt, seed = rows[index]
            path = (
                _write_picture(folder, f"{_name_file(prompt.prompt)}-{seed}", generated.image)
                if generated.image
                else None
            )
            yield Picture(prompt.prompt, path, generated.error or generated.warning)


def _load_images(paths: Sequence[Path]) -> bytes:
    try:
        return load_condition_image([path.read_bytes() for path in paths], Path())
    except ImageError as error:
        raise ImageError(f"--image {', '.join(map(str, paths))} {error}") from None


def _name_file(prompt: str) -> str:
    """A prompt as part of a file name: letters, digits and dashes."""
    # \W keeps letters of all alphabets
    words = re.sub(r"[\W_]+", "-", prompt).strip("-")
    return words[:MAX_NAME].rstrip("-") or "prompt"


def _write_picture(folder: Path, name: str, picture: bytes) -> Path:
    """Write ``name.png``, and ``name.wav`` where the picture has sound, with ``name.mp4`` of both
    where PyAV is installed; where another file has one of the names, ``name-2`` and so on. What is
    there already is not written again.
    """
    files = {".png": picture}
    sound = read_sound(picture)
    if sound:
        files[".wav"] = sound
        movie = convert_to_movie(picture) if can_encode_movies() else None
        if movie:
            files[".mp4"] = movie
    # Both under one name, so that a sound is found beside its picture.
    names = chain([name], (f"{name}-{number}" for number in count(2)))
    candidates = (
        {folder / f"{name}{suffix}": content for suffix, content in files.items()} for name in names
    )
    contents = next(paths for paths in candidates if _can_write(paths))
    for path, content in contents.items():
        if not os.path.lexists(path):
            # unlike a rename, a link replaces nothing, also if another process has just made it
            with atomic_write(path, publish=os.link) as partial:
                partial.write_bytes(content)
    return next(iter(contents))


def _can_write(contents: Mapping[Path, bytes]) -> bool:
    """Whether no other file has one of the paths."""
    return all(
        not os.path.lexists(path) or _file_holds(path, content)
        for path, content in contents.items()
    )


def _file_holds(path: Path, content: bytes) -> bool:
    return path.is_file() and path.read_bytes() == content
