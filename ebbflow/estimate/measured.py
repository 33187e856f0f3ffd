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

from ebbflow.data.model_sizes import ModelSizes, SampleSize
from ebbflow.recipe.model import ModelConfig
from ebbflow.storage.disk import DiskFullError, write_text
from ebbflow.storage.identity import compute_code_digest, describe_state

logger = logging.getLogger(__name__)
MODELS = Path(__file__).parents[1] / "models"
"""The sources that sizes follow from."""


def measure_cached(model: ModelConfig) -> tuple[ModelSizes, SampleSize]:
    """``ebbflow.models.sizes.measure_model``, kept in the user's cache for the same model, code and
    versions of what it is built with.

    Raises:
        SizeError: as there.
        ModelError: as there.
    """
    file = cache_folder() / f"{_cache_key(model)}.json"
    with suppress(
        OSError, ValueError, TypeError, KeyError
    ):  # nothing there, or nothing that can be used
        return _decode_sizes(json.loads(file.read_text()))
    logger.info("measuring the base model; kept in %s", file.parent)
    from ebbflow.models.sizes import measure_model  # imports torch

    sizes, sample = measure_model(model)
    with suppress(OSError, DiskFullError):  # then it is measured again next time
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps({"sizes": asdict(sizes), "sample": asdict(sample)}))
    return sizes, sample


def cache_folder() -> Path:
    """Where sizes are kept: ``XDG_CACHE_HOME``, by default ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ebbflow" / "sizes"


def _cache_key(model: ModelConfig) -> str:
    state = None if model.is_on_hub or model.path is None else describe_state(model.path)
    parts = [model.model_dump_json(), compute_code_digest(MODELS), state]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _decode_sizes(kept: dict[str, dict[str, Any]]) -> tuple[ModelSizes, SampleSize]:
    sizes = kept["sizes"]
    sample = kept["sample"]
    linears = {name: (inputs, outputs) for name, (inputs, outputs) in sizes["linears"].items()}
    return ModelSizes(**sizes | {"linears": linears}), SampleSize(
        **sample | {"latent_shape": tuple(sample["latent_shape"])}
    )
