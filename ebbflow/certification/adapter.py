"""What the certificate asks of an engine: open, load, generate, close.

Example:
    An engine of another library; ``ebbflow certify my_package.adapter:MyEngine MODEL`` opens it::

        class MyEngine:
            versions = {"my_engine": my_engine.__version__}

            def __init__(self, setup):
                if setup.policy.dora:
                    raise NotSupportedError("my_engine has no DoRA")
                self.server = my_engine.Server(setup.base, dtype=setup.precision)
                self.policy = setup.policy

            def load(self, weights, version):
                self.server.update_weights(weights, version, alpha=self.policy.alpha)

            def generate(self, request):
                answer = self.server.generate(
                    prompt_embeds=request.conditioning["embeds"],
                    latents=request.generate_noise(0),
                    steps=request.sampler.steps,
                    ...
                )
                return Generated(Rollouts(answer.latents, Trajectory(...)), answer.version)

            def close(self):
                self.server.stop()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from ebbflow.data.prompts import Prompt
from ebbflow.flow.noise import SampleKeys, generate_shared_noise
from ebbflow.flow.windows import Plan
from ebbflow.models.base import Conditioning
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.recipe.model import ModelConfig, Precision
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.rollouts.generate import Rollouts


class NotSupportedError(Exception):
    """An engine does not offer what it is asked for; says what it lacks. Whatever else an adapter
    raises is a failure of the engine.
    """


class WeightsVersionError(Exception):
    """An engine refuses weights, or a request for weights, that it should not generate with."""


@dataclass(frozen=True)
class EngineSetup:
    """What an engine is opened for; it generates after the first ``load``.

    Example:
        ``EngineSetup(Path("sd3.5-medium"), ModelConfig(family="sd3", ...), PolicyConfig(
        train="lora", rank=8, alpha=16), "bfloat16", 4)``

    Attributes:
        base: the base-model folder, in diffusers' layout.
        policy: the kind of weights that ``load`` brings: adapters of a rank and an alpha, or all
            parameters.
        precision: of the engine's network.
        micro_batch: the most samples that a forward pass should have.
    """

    # A folder and not a loaded model: an engine of another library reads it in its own way.
    base: Path
    model: ModelConfig
    policy: PolicyConfig
    # Of the engine alone: the trainer's is ``model.precision``.
    precision: Precision
    micro_batch: int


@dataclass(frozen=True)
class Request:
    """Samples to generate. An engine takes its prompts as texts or encoded, as it likes.

    Attributes:
        version: of the weights that must generate.
        prompts: [N], with negative prompts.
        conditioning: the same, encoded by the trainer's model, [N] rows; it has negative rows and a
            guidance above 1 exactly where the samples are guided.
        keys: fix the noise of every sample.
        sampler: with the number of denoising steps.
        plan: the steps that are stochastic and recorded, with their means; None: nothing is
            recorded, and a deterministic ``sampler`` takes all steps.
        latent_shape: of a sample.
    """

    # Named by the request, so that an engine can tell a request that came too late.
    version: int
    # Both forms of a prompt travel, because engines differ in which of them they take.
    prompts: Sequence[Prompt]
    conditioning: Conditioning
    keys: SampleKeys
    sampler: SamplerConfig
    plan: Plan | None
    latent_shape: tuple[int, ...]

    def generate_noise(self, index: int) -> Tensor:
        """Generate the noise that the samples must have, float32 [N, *latent_shape].

        Args:
            index: 0 is x_T; the noise that denoising step i adds has the index i + 1.
        """
        # The trainer's own function: noise is a function of the keys and of nothing else.
        return generate_shared_noise(self.latent_shape, self.keys, index)

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True)
class Generated:
    """An engine's answer.

    Attributes:
        rollouts: final latents, and with a plan the trajectory. Without means in it, they are
            computed from the noise that the request names.
        version: of the weights that have generated, as the engine knows it.
    """

    rollouts: Rollouts
    # What the engine believes; the lines about weights measure whether it is so.
    version: int


class CertifiedEngine(Protocol):
    """An engine behind the certificate. Two more methods are used where an engine has them:

    ``encode_prompts(prompts) -> Conditioning``, of one that encodes texts itself, and
    ``generate_in_parts(request, cut) -> Generated``, of one that can be stopped before denoising
    step ``cut`` and goes on from there. One without the second repeats a request that was cut.

    Attributes:
        versions: of the engine and of what it runs on, by name, for the report.
    """

    versions: Mapping[str, str]

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Generate with these weights from the next request on: all trained parameters by their
        names in the trainer (``Policy.parameters``), float32, on the CPU.

        Raises:
            WeightsVersionError: the version is older than the one that is loaded.
        """

    def generate(self, request: Request) -> Generated:
        """Generate one sample per row of a request.

        Raises:
            NotSupportedError: the engine has no such sampler, or no such guidance.
            WeightsVersionError: it does not have the weights that the request names.
        """

    def close(self) -> None:
        """Release what the engine holds."""


OpenEngine = Callable[[EngineSetup], CertifiedEngine]
"""Raises ``NotSupportedError`` for a kind of weights or a model that the engine lacks."""
