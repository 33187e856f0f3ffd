"""vLLM-Omni's network of each family that the engine generates with; ``ebbflow.recipe.families``
names them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from diffusers import AutoencoderKL, AutoencoderKLFlux2, AutoencoderKLQwenImage, AutoencoderKLWan
from torch import Tensor, nn
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.models.flux.flux_transformer import FluxTransformer2DModel
from vllm_omni.diffusion.models.flux2.flux2_transformer import Flux2Transformer2DModel
from vllm_omni.diffusion.models.qwen_image.qwen_image_transformer import QwenImageTransformer2DModel
from vllm_omni.diffusion.models.qwen_image.rope_utils import txt_seq_lens_from_embeds
from vllm_omni.diffusion.models.sd3.sd3_transformer import SD3Transformer2DModel
from vllm_omni.diffusion.models.wan2_2.pipeline_wan2_2 import create_transformer_from_config
from vllm_omni.diffusion.models.z_image.z_image_transformer import (
    SEQ_MULTI_OF,
    ZImageTransformer2DModel,
)
from vllm_omni.diffusion.utils.tf_utils import get_transformer_config_kwargs


@dataclass(frozen=True)
class Network:
    """What the engine has to know of a family.

    Attributes:
        transformer: builds vLLM-Omni's network.
        vae: diffusers' class.
        scales: pixels to a latent of a VAE, by the name that the family's pipeline has for them.
        renamed: ends of layer names that vLLM-Omni calls differently than diffusers.
    """

    transformer: Callable[[OmniDiffusionConfig], nn.Module]
    vae: Any
    scales: Callable[[Any], Mapping[str, int]]
    renamed: Mapping[str, str] = field(default_factory=dict)


def _qwen_image(config: OmniDiffusionConfig) -> nn.Module:
    arguments = get_transformer_config_kwargs(config.tf_model_config, QwenImageTransformer2DModel)
    transformer = QwenImageTransformer2DModel(od_config=config, **arguments)
    transformer.register_forward_pre_hook(_add_text_lengths, with_kwargs=True)
    return transformer


def _add_text_lengths(
    transformer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """An argument of vLLM-Omni's network that diffusers reads off the embeddings."""
    return args, kwargs | {
        "txt_seq_lens": txt_seq_lens_from_embeds(kwargs["encoder_hidden_states"])
    }


def _flux(config: OmniDiffusionConfig) -> nn.Module:
    arguments = get_transformer_config_kwargs(config.tf_model_config, FluxTransformer2DModel)
    transformer = FluxTransformer2DModel(od_config=config, **arguments)
    # vLLM-Omni looks here for the parts of fused layers that adapters name; FLUX.1 alone keeps them
    # to itself.
    transformer.stacked_params_mapping = [
        (f".{fused}", f".{part}", part)
        for fused, parts in transformer.packed_modules_mapping.items()
        for part in parts
    ]
    return transformer


def _flux2(config: OmniDiffusionConfig) -> nn.Module:
    arguments = get_transformer_config_kwargs(config.tf_model_config, Flux2Transformer2DModel)
    return Flux2Transformer2DModel(od_config=config, **arguments)


class _MaskedZImage(ZImageTransformer2DModel):
    """vLLM-Omni's network passes no mask to its attention ("we don't support multi prompts now"),
    so that a prompt beside a longer one would see the padding: each length gets a pass of its own.
    """

    def forward(
        self, x: list[Tensor], t: Tensor, cap_feats: list[Tensor], return_dict: bool = False
    ) -> tuple[list[Tensor], dict[str, Any]]:
        """As diffusers' network: velocities [C, 1, H, W] of latents ``x`` at the times ``t``, [N],
        for prompts ``cap_feats``, [L, D] each.
        """
        # What fills a prompt up to a multiple is learned and attended to, in both networks.
        padded = [-(-len(prompt) // SEQ_MULTI_OF) for prompt in cap_feats]
        velocities: dict[int, Tensor] = {}
        for length in sorted(set(padded)):
            rows = [row for row, other in enumerate(padded) if other == length]
            prompts = [cap_feats[row] for row in rows]
            parts, _ = super().forward([x[row] for row in rows], t[rows], prompts)
            velocities.update(zip(rows, parts, strict=True))
        return [velocities[row] for row in range(len(x))], {}


def _z_image(config: OmniDiffusionConfig) -> nn.Module:
    arguments = get_transformer_config_kwargs(config.tf_model_config, ZImageTransformer2DModel)
    return _MaskedZImage(**arguments)


def _wan(config: OmniDiffusionConfig) -> nn.Module:
    return create_transformer_from_config(config.tf_model_config.to_dict())


def _read_image_scale(vae: Any) -> dict[str, int]:
    return {"vae_scale_factor": 2 ** (len(vae.config.block_out_channels) - 1)}


def _read_wan_scales(vae: Any) -> dict[str, int]:
    return {
        "vae_scale_factor_spatial": vae.config.scale_factor_spatial,
        "vae_scale_factor_temporal": vae.config.scale_factor_temporal,
    }


def _read_qwen_scale(vae: Any) -> dict[str, int]:
    return {"vae_scale_factor": 2 ** len(vae.temperal_downsample)}


SD3 = Network(
    lambda config: SD3Transformer2DModel(od_config=config), AutoencoderKL, _read_image_scale
)
QWEN_IMAGE = Network(
    _qwen_image, AutoencoderKLQwenImage, _read_qwen_scale, {"attn.to_out.0": "attn.to_out"}
)
FLUX = Network(_flux, AutoencoderKL, _read_image_scale)
FLUX2 = Network(_flux2, AutoencoderKLFlux2, _read_image_scale)
Z_IMAGE = Network(_z_image, AutoencoderKL, _read_image_scale)
WAN = Network(
    _wan,
    AutoencoderKLWan,
    _read_wan_scales,
    {"to_out.0": "to_out", "ffn.net.0.proj": "ffn.net_0.proj", "ffn.net.2": "ffn.net_2"},
)
