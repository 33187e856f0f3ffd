"""The sizes of a base model, measured once: the imports and the modules on the meta device take
seconds, the estimate none.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ebbflow.data.model_sizes import Sample, Sizes
from ebbflow.recipe.model import ModelConfig
from ebbflow.storage.disk import DiskFullError, write_text
from ebbflow.storage.identity import code_digest, state_of

logger = logging.getLogger(__name__)
MODELS = Path(__file__).parents[1] / "models"
"""The sources that sizes follow from."""


def measured(model: ModelConfig) -> tuple[Sizes, Sample]:
    """``ebbflow.models.sizes.measure``, kept in the user's cache for the same model, code and
    versions of what it is built with.

    Raises:
        SizeError: as there.
        ModelError: as there.
    """
    file = cache_folder() / f"{_key(model)}.json"
    with suppress(
        OSError, ValueError, TypeError, KeyError
    ):  # nothing there, or nothing that can be used
        return _decoded(json.loads(file.read_text()))
    logger.info("measuring the base model; kept in %s", file.parent)
    from ebbflow.models.sizes import measure  # imports torch

    sizes, sample = measure(model)
    with suppress(OSError, DiskFullError):  # then it is measured again next time
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps({"sizes": asdict(sizes), "sample": asdict(sample)}))
    return sizes, sample


def cache_folder() -> Path:
    """Where sizes are kept: ``XDG_CACHE_HOME``, by default ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ebbflow" / "sizes"


def _key(model: ModelConfig) -> str:
    state = None if model.on_hub or model.path is None else state_of(model.path)
    parts = [model.model_dump_json(), code_digest(MODELS), state]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _decoded(kept: dict[str, dict[str, Any]]) -> tuple[Sizes, Sample]:
    sizes = kept["sizes"]
    sample = kept["sample"]
    linears = {name: (inputs, outputs) for name, (inputs, outputs) in sizes["linears"].items()}
    return Sizes(**sizes | {"linears": linears}), Sample(
        **sample | {"latent_shape": tuple(sample["latent_shape"])}
    )
