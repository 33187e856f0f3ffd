"""Wan2.2-A14B, text to video: one transformer for the noise from a boundary on and one for less; one of them is trained."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from diffusers import WanPipeline
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from ebbflow.models.base import Conditioning, ModelError
from ebbflow.models.families.wan import WanModel
from ebbflow.models.published import XXL, Part, Published
from ebbflow.recipe.families import Family
from ebbflow.recipe.model import ModelConfig

FAMILY = Family(adapter="WanA14BModel", experts=True, tiny=("wan_a14b",))
EXPERTS = {"high_noise": "transformer", "low_noise": "transformer_2"}
NETWORK = Part("diffusers", "WanTransformer3DModel", {}, bytes=4)
OTHERS = {
    "text_encoder": Part("transformers", "UMT5EncoderModel", XXL | {"vocab_size": 256384}),
    "vae": Part("diffusers", "AutoencoderKLWan", {}, bytes=4),
}


class WanA14BModel(WanModel):
    """Adapter of ``WanPipeline`` with two transformers; ``model.expert`` names the one that is trained.

    The other one denoises its part of every trajectory as it was published. Both are guided alike.
    """

    pipeline_class = WanPipeline
    published: ClassVar[Published] = {
        "Wan-AI/Wan2.2-T2V-A14B-Diffusers": OTHERS | {"transformer": NETWORK, "transformer_2": NETWORK}
    }
    networks = tuple(EXPERTS.values())

    @classmethod
    def trained_part(cls, config: ModelConfig) -> str:
        return EXPERTS[config.expert or "high_noise"]

    @classmethod
    def _check(cls, pipeline: Any, config: ModelConfig) -> None:
        if pipeline.transformer_2 is None or pipeline.config.boundary_ratio is None:
            raise ModelError(
                f"{config.path} holds one transformer, and {config.family} has two; family wan takes text to video with one"
            )

    def _predict(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """Of the network whose band each sigma is in.

        With gradient, or where it is sharded, the trained one also computes a pass without rows of its band: its gradient is then
        zero instead of missing, and every rank of FSDP has to call it, or the others wait for its share of the weights.
        """
        high = sigma >= self.pipeline.config.boundary_ratio
        trains_high = self.trained_part(self.config) == EXPERTS["high_noise"]
        ours, other = (high, self.pipeline.transformer_2) if trains_high else (~high, self.pipeline.transformer)
        if ours.all():
            return self._denoise(self.transformer, latents, sigma, conditioning)
        published = self._denoise(other, latents, sigma, conditioning)
        if not ours.any() and not torch.is_grad_enabled() and not isinstance(self.transformer, FSDPModule):
            return published
        trained = self._denoise(self.transformer, latents, sigma, conditioning)
        return torch.where(ours.view(-1, 1, 1, 1, 1), trained, published)
