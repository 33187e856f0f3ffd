"""What a stage asks of a rollout engine, and how all engines but the reference are opened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from ebbflow.data.prompts import Prompt
from ebbflow.flow.noise import SampleKeys
from ebbflow.flow.windows import Plan
from ebbflow.models.base import Conditioning
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.recipe.plugins import check_members, import_object
from ebbflow.rollouts.generate import Rollouts
from ebbflow.stage import StageContext
from ebbflow.storage.artifacts import verify_committed_folder

PATHS = {
    "vllm_omni": "ebbflow.rollouts.vllm_omni:VllmOmni",
    "sglang": "ebbflow.rollouts.sglang:Sglang",
}
"""What opens each engine but the reference, ``(ctx, base-model folder) -> Engine``; a user's own is
opened in the same way.
"""


class Engine(Protocol):
    """Generates samples with the base model and the weights that were loaded last. Noise is a
    function of the keys.

    An engine that encodes texts itself has an attribute ``takes_texts = True``, and its
    ``generate`` an argument ``prompts``, [N].
    """

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Load the trained parameters: all of them by name (``Policy.parameters``), float32,
        unsharded, on the CPU.
        """

    def generate(
        self,
        conditioning: Conditioning,
        keys: SampleKeys,
        sampler: SamplerConfig,
        plan: Plan | None = None,
    ) -> tuple[Rollouts, np.ndarray]:
        """One sample per row, as ``ebbflow.rollouts.generate.generate_samples``: (rollouts, their
        images or videos).
        """

    def close(self) -> None:
        """Release what the engine holds outside this process."""


def build_text_arguments(engine: Engine, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Build the arguments that ``engine.generate`` takes beside those of every engine: the prompts
    of the N samples, where the engine encodes texts itself.
    """
    return {"prompts": prompts} if getattr(engine, "takes_texts", False) else {}


def open_engine(ctx: StageContext, base: Path) -> Engine:
    """Open the engine of a stage that names another than ``diffusers``; it generates after
    ``load``.

    Args:
        base: the base-model folder.

    Raises:
        ArtifactError: the folder is not what was committed.
        RecipeError: a user's path cannot be imported, or what it opens is not an engine.
        EngineError: vLLM-Omni does not start.
    """
    # Another engine reads the folder by itself, past the check that ``load_model`` makes.
    verify_committed_folder(base)
    path = PATHS.get(ctx.config.engine, ctx.config.engine)
    # Imported here alone: vLLM-Omni's module and a user's own may need packages that the stage's
    # own process lacks.
    engine: Engine = import_object(path)(ctx, base)
    check_members(engine, ("load", "generate", "close"), path, "ebbflow.rollouts.engine.Engine")
    return engine
