"""The sizes of a base model, measured once, and the checks that it has passed: the imports and the
modules on the meta device take seconds, the estimate and most of a check none.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ebbflow.data.model_sizes import ModelSizes, SampleSize
from ebbflow.recipe.model import ModelConfig
from ebbflow.storage.disk import DiskFullError, write_text
from ebbflow.storage.identity import compute_code_digest, describe_state
from ebbflow.storage.user_cache import find_user_cache

logger = logging.getLogger(__name__)
MODELS = Path(__file__).parents[1] / "models"
"""The code that the sizes depend on; the cache's keys have its digest."""


def measure_cached(model: ModelConfig) -> tuple[ModelSizes, SampleSize]:
    """Return what ``ebbflow.models.sizes.measure_model`` does, from the user's cache if the same
    model was measured with the same code.

    Raises:
        SizeError: as there.
        ModelError: as there.
    """
    file = cache_folder() / f"{_cache_key(model, '')}.json"
    # No file yet, or one that is damaged or of another form: measure again.
    with suppress(OSError, ValueError, TypeError, KeyError):
        return _decode_sizes(json.loads(file.read_text()))
    logger.info("measuring the base model; kept in %s", file.parent)
    from ebbflow.models.sizes import measure_model  # imports torch

    sizes, sample = measure_model(model)
    # A cache that cannot be written costs a measurement the next time, and nothing else.
    with suppress(OSError, DiskFullError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps({"sizes": asdict(sizes), "sample": asdict(sample)}))
    return sizes, sample


def check_once(model: ModelConfig, name: str, check: Callable[[], None]) -> None:
    """Call a check of a base model, unless this model has passed it before with the same code.

    Args:
        name: of the check.
        check: raises where the model fails. A failure is not kept: its cause may be mended.
    """
    file = cache_folder() / f"{_cache_key(model, name)}.passed"
    if file.is_file():
        return
    check()
    # As above.
    with suppress(OSError, DiskFullError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, "")


def cache_folder() -> Path:
    """Return the folder of the sizes, below ``XDG_CACHE_HOME`` or ``~/.cache``."""
    return find_user_cache("sizes")


def _cache_key(model: ModelConfig, check: str) -> str:
    state = None if model.is_on_hub or model.path is None else describe_state(model.path)
    # A repository is named with its commit. A folder may change under the same path, so its state
    # (sizes and times of its files) is part of the key.
    parts = [model.model_dump_json(), compute_code_digest(MODELS), state, check]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _decode_sizes(cached: dict[str, dict[str, Any]]) -> tuple[ModelSizes, SampleSize]:
    sizes = cached["sizes"]
    sample = cached["sample"]
    # JSON has no tuples, which comparisons of sizes need.
    linears = {name: (inputs, outputs) for name, (inputs, outputs) in sizes["linears"].items()}
    return ModelSizes(**sizes | {"linears": linears}), SampleSize(
        **sample | {"latent_shape": tuple(sample["latent_shape"])}
    )
