"""Wan2.2-A14B, text to video: one transformer for the noise from a boundary on and one for less;
one is trained, or both.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from diffusers import WanPipeline
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ebbflow.flow.host_values import read_on_host
from ebbflow.models.base import Conditioning, Experts, ModelError, trained_networks
from ebbflow.models.families.wan import WanModel
from ebbflow.models.published import XXL, Part, Published
from ebbflow.recipe.families import Family
from ebbflow.recipe.model import ModelConfig

FAMILY = Family(
    adapter="WanA14BModel",
    pipeline="WanPipeline",
    size_multiple=16,
    frame_multiple=4,
    experts=True,
    feature_caches=("first_block", "taylor_seer"),
)
EXPERTS = {"high_noise": "transformer", "low_noise": "transformer_2"}
NETWORK = Part("diffusers", "WanTransformer3DModel", {}, bytes=4)
OTHERS = {
    "text_encoder": Part("transformers", "UMT5EncoderModel", XXL | {"vocab_size": 256384}),
    "vae": Part("diffusers", "AutoencoderKLWan", {}, bytes=4),
}


class WanA14BModel(WanModel):
    """Adapter of ``WanPipeline`` with two transformers; ``model.expert`` names the one that is
    trained, or both.

    One that is not trained denoises its part of every trajectory as it was published.
    """

    pipeline_class = WanPipeline
    published: ClassVar[Published] = {
        "Wan-AI/Wan2.2-T2V-A14B-Diffusers": (
            OTHERS | {"transformer": NETWORK, "transformer_2": NETWORK}
        )
    }
    networks = tuple(EXPERTS.values())

    @classmethod
    def trained_parts(cls, config: ModelConfig) -> tuple[str, ...]:
        if config.expert == "both":
            return cls.networks
        return (EXPERTS[config.expert or "high_noise"],)

    @classmethod
    def _trained_network(cls, pipeline: Any, config: ModelConfig) -> Any:
        networks = {part: getattr(pipeline, part) for part in cls.trained_parts(config)}
        return Experts(networks) if len(networks) > 1 else next(iter(networks.values()))

    @classmethod
    def _check_pipeline(cls, pipeline: Any, config: ModelConfig) -> None:
        if pipeline.transformer_2 is None or pipeline.config.boundary_ratio is None:
            raise ModelError(
                f"{config.path} holds one transformer, and {config.family} has two; family wan"
                " takes text to video with one"
            )

    def _guidance_of_rows(self, sigma: Tensor, conditioning: Conditioning) -> float | Tensor:
        second = conditioning.guidance_2
        # A teacher or a reference with another guidance than the model's has its own second scale,
        # or one for both networks.
        if second is None and conditioning.guidance == self.config.guidance:
            second = self.config.guidance_2
        if second is None:
            return conditioning.guidance
        is_high = sigma >= self.pipeline.config.boundary_ratio
        scales = torch.where(is_high, conditioning.guidance, second)
        return scales.to(sigma.dtype).view(-1, 1, 1, 1, 1)

    def _run_network(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """The prediction of the network whose band each sigma is in.

        With gradient, or where it is sharded, a trained one also computes a pass without rows of
        its band: its gradient is then zero instead of missing, and every rank of FSDP has to call
        it, or the others wait for its share of the weights.
        """
        # [N]: a batch of training has rows of any sigma, a step of a rollout of one.
        boundary = self.pipeline.config.boundary_ratio
        high, low = self.networks
        parts_with_rows = {high if level else low for level in read_on_host(sigma) >= boundary}
        trained = list(trained_networks(self.transformer).values())
        velocities = []
        for part in self.networks:
            network = getattr(self.pipeline, part)
            is_needed_without_rows = network in trained and (
                torch.is_grad_enabled() or isinstance(network, FSDPModule)
            )
            # Each computes all rows; ``where`` takes its own.
            if part in parts_with_rows or is_needed_without_rows:
                velocities.append(self._call_expert(network, latents, sigma, conditioning))
        # If one network was called, all rows are its own and both arguments are its velocity.
        is_high = (sigma >= boundary).view(-1, 1, 1, 1, 1)
        return torch.where(is_high, velocities[0], velocities[-1])

    def list_blocks(self) -> list[nn.Module]:
        return [
            block
            for network in trained_networks(self.transformer).values()
            for block in network.blocks
        ]
