"""The engines that a recipe names, behind the certificate's adapter: each inside the rollout worker
that an online stage puts around it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from ebbflow.certification.adapter import (
    CertifiedEngine,
    EngineSetup,
    Generated,
    NotSupportedError,
    Request,
    WeightsVersionError,
)
from ebbflow.models import load_model
from ebbflow.online.messages import RolloutRequest
from ebbflow.online.sample_workers import RolloutWorker
from ebbflow.recipe import Recipe, RecipeError
from ebbflow.recipe.plugins import check_members, import_object
from ebbflow.recipe.rollout_cache import Quantization
from ebbflow.rollouts.engine import PATHS, Engine
from ebbflow.rollouts.generate import Diffusers, Rollouts
from ebbflow.rollouts.quantization import quantize_linears
from ebbflow.rollouts.weights import WeightsVersion, compute_checksum
from ebbflow.stage import StageContext
from ebbflow.training.policy import Policy

KEPT_VERSIONS = 2
"""Versions of the weights that a request can name: the newest, and the one before it, which a
rollout of mode ``async`` may still have been asked for.
"""


@dataclass(frozen=True)
class RecipeEngine:
    """Opens the engine that a recipe calls ``name``: ``diffusers``, ``vllm_omni`` or a user's own.

    Example:
        An engine of ``engine: my_package.engines:Mine`` is certified through a line of one's own,
        ``CERTIFIED = RecipeEngine("my_package.engines:Mine")``.

    Attributes:
        quantization: of ``diffusers``, as of a stage's ``rollout_quantization``.
    """

    name: str
    quantization: Quantization | None = None

    def __call__(self, setup: EngineSetup) -> CertifiedEngine:
        """Open the engine.

        Raises:
            NotSupportedError: a recipe rejects the engine with this model or these adapters.
        """
        ctx = self._build_context(setup)
        if self.name == "diffusers":
            # A model of its own, beside the trainer's: sharing one would prove nothing.
            policy = Policy(load_model(setup.base, setup.model), setup.policy, ctx.stage_seed)
            return WorkerEngine(RoundedDiffusers(ctx, policy, self.quantization), ctx)
        path = PATHS.get(self.name, self.name)
        engine: Engine = import_object(path)(ctx, setup.base)
        check_members(engine, ("load", "generate", "close"), path, "ebbflow.rollouts.engine.Engine")
        return WorkerEngine(engine, ctx)

    def _build_context(self, setup: EngineSetup) -> StageContext:
        stage = {
            "kind": "online",
            "algorithm": {"name": "flow_grpo"},
            "engine": self.name,
            "micro_batch": setup.micro_batch,
            "rollout_precision": setup.precision,
        }
        values: dict[str, Any] = {
            "model": setup.model.model_dump(mode="json"),
            "policy": setup.policy.model_dump(mode="json"),
            "stages": [stage],
        }
        try:
            return StageContext(Recipe.model_validate(values), 0, 0)
        except RecipeError as error:
            # What a recipe rejects, a stage could never ask of the engine.
            raise NotSupportedError(str(error)) from None


FLOAT8 = RecipeEngine("diffusers", "float8")
"""The trainer's own engine with ``rollout_quantization: float8``, as ``ebbflow certify`` takes it:
``ebbflow.certification.own_engines:FLOAT8``.
"""


class RoundedDiffusers(Diffusers):
    """The reference engine, which also rounds where a stage refuses it: in steps whose log-probs
    are recorded, so that the certificate shows what they would be off.
    """

    def __init__(
        self, ctx: StageContext, policy: Policy, quantization: Quantization | None
    ) -> None:
        super().__init__(ctx, policy)
        self.quantization = quantization

    def generate(self, *arguments: Any, **keywords: Any) -> tuple[Rollouts, np.ndarray]:
        rounded: AbstractContextManager[None] = nullcontext()
        if self.quantization is not None:
            rounded = quantize_linears(self.policy.model, self.quantization)
        with rounded:
            return super().generate(*arguments, **keywords)


class WorkerEngine:
    """An engine in a rollout worker, which is given the weights that a request names."""

    def __init__(self, engine: Engine, ctx: StageContext) -> None:
        self.worker = RolloutWorker(engine)
        self.ctx = ctx
        self.weights: dict[int, WeightsVersion] = {}
        self.versions: Mapping[str, str] = getattr(engine, "versions", {})
        self.takes_noise: bool = getattr(engine, "takes_noise", True)

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        # A push that was overtaken by a newer one on its way.
        if self.weights and version < max(self.weights):
            raise WeightsVersionError(f"version {version} is older than {max(self.weights)}")
        # Copies: the trainer goes on changing its parameters in place.
        tensors = {name: values.detach().clone() for name, values in weights.items()}
        self.weights[version] = WeightsVersion(version, compute_checksum(tensors), (tensors,))
        # Each is as large as the trained parameters.
        for old in sorted(self.weights)[:-KEPT_VERSIONS]:
            del self.weights[old]

    def generate(self, request: Request) -> Generated:
        if request.version not in self.weights:
            raise WeightsVersionError(f"version {request.version} is not kept any more")
        # The certificate asks for every sampler; a recipe would have been rejected.
        sampler = request.sampler.name
        samplers = getattr(self.worker.engine, "samplers", (sampler,))
        if sampler not in samplers:
            raise NotSupportedError(f"it has the samplers {', '.join(samplers)}, not {sampler}")
        rollouts, _, report = self.worker.generate(
            RolloutRequest(
                step=0,
                prompts=list(request.prompts),
                conditioning=request.conditioning,
                sample_index=np.arange(len(request)),
                keys=request.keys,
                sampler=request.sampler,
                plan=request.plan,
            ),
            self.weights[request.version],
        )
        return Generated(rollouts, report.version)

    def close(self) -> None:
        self.worker.close()
