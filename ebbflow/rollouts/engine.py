"""What a stage asks of a rollout engine, and the reference: diffusers in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from ebbflow.data.prompts import Prompt
from ebbflow.flow.noise import SampleKeys
from ebbflow.flow.windows import Plan
from ebbflow.models.base import Conditioning, device_of
from ebbflow.models.sound import decode_sounds
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.recipe.passes import split_into_equal_passes
from ebbflow.recipe.plugins import check_members, import_object
from ebbflow.recipe.rollout_cache import FeatureCacheConfig, Quantization
from ebbflow.rollouts.generate import Rollouts, generate_samples
from ebbflow.rollouts.quantization import quantize_linears
from ebbflow.stage import StageContext
from ebbflow.storage.artifacts import verify_committed_folder
from ebbflow.training.object_messages import gather_objects
from ebbflow.training.policy import Policy

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


class Diffusers:
    """The reference engine: diffusers' network in this process, under our own denoising loop.

    Args:
        policy: the parameters that generate; the policy that trains needs no ``load``.
        generates: which copy of the policy generates.
        with_graph: as of ``generate_samples``, for samples that are recorded.
    """

    def __init__(
        self,
        ctx: StageContext,
        policy: Policy,
        generates: str = "current",
        with_graph: bool = False,
    ) -> None:
        self.policy = policy
        self.generates = generates
        self.with_graph = with_graph
        self.micro_batch = ctx.config.micro_batch
        self.precision = ctx.config.rollout_precision

    def load(self, weights: Mapping[str, Tensor]) -> None:
        self.policy.assign_parameters(weights)

    def generate(
        self,
        conditioning: Conditioning,
        keys: SampleKeys,
        sampler: SamplerConfig,
        plan: Plan | None = None,
        cache: FeatureCacheConfig | None = None,
        quantization: Quantization | None = None,
        with_sound: bool = False,
    ) -> tuple[Rollouts, np.ndarray]:
        """As the protocol; ``cache`` as of ``generate_samples``, for samples to train on, and the
        network quantised likewise; with the sounds of the samples where something scores them.

        Raises:
            ValueError: a plan, whose log-probs must be those of the network, with either.
            ModelError: the network cannot generate so.
        """
        model = self.policy.model
        if plan is not None and quantization is not None:
            raise ValueError(
                "the log-probabilities of a plan are those of the network, and"
                f" {quantization!r} rounds it; leave one of them out"
            )
        # Requests carry their conditioning on the CPU, as they travel between processes.
        conditioning = conditioning.to(device_of(model))
        # A trajectory is compared with the predictions of training: it must come from the same
        # products.
        merged = nullcontext() if plan else self.policy.merge_adapters(self.precision)
        rounded: AbstractContextManager[None] = nullcontext()
        if quantization is not None:
            rounded = quantize_linears(model, quantization)
        # Read at every call, because a validation may have it generate with another copy.
        with (
            self.policy.use_copy(self.generates),
            merged,
            rounded,
        ):
            rollouts = generate_samples(
                model,
                conditioning,
                keys,
                sampler,
                plan,
                self.micro_batch,
                self.precision,
                self.with_graph,
                cache,
            )
        if with_sound:
            rollouts = replace(rollouts, sounds=decode_sounds(model, rollouts.latents))
        # As many at once as were denoised: a convolution may take another kernel for another batch
        # size, as on Intel CPUs.
        slices = split_into_equal_passes(len(rollouts.latents), self.micro_batch)
        parts = [rollouts.latents[part] for part in slices]
        if self.policy.context_parallel > 1:
            return rollouts, np.concatenate(self._decode_on_ranks(parts))
        return rollouts, np.concatenate([model.decode_latents(part) for part in parts])

    def _decode_on_ranks(self, parts: Sequence[Tensor]) -> list[np.ndarray]:
        """Decode parts of latents with the ranks that share their tokens: all of them have the
        whole latents, and each decodes some parts.
        """
        num_ranks = self.policy.context_parallel
        place = self.policy.ranks.rank % num_ranks
        decoded = [self.policy.model.decode_latents(part) for part in parts[place::num_ranks]]
        of_ranks = gather_objects(decoded, self.policy.row_group)
        return [of_ranks[index % num_ranks][index // num_ranks] for index in range(len(parts))]

    def close(self) -> None:
        """There is nothing outside this process."""
