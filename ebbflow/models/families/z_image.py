"""The Z-Image family (2511.22699): the base model, and Z-Image-Turbo, which draws without
guidance."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from diffusers import ZImagePipeline
from diffusers.pipelines.z_image.pipeline_z_image import get_default_z_image_sigmas
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ebbflow.data.prompts import Prompt
from ebbflow.flow.host_values import read_on_host
from ebbflow.models.base import Conditioning
from ebbflow.models.pipeline import PipelineModel
from ebbflow.models.published import IMAGE_VAE, QWEN3_4B, Part, Published
from ebbflow.recipe.families import Family

FAMILY = Family(
    adapter="ZImageModel",
    pipeline="ZImagePipeline",
    size_multiple=16,
    vllm_omni="ebbflow_vllm_omni.networks:Z_IMAGE",
)
OTHERS = {"text_encoder": Part("transformers", "Qwen3Model", QWEN3_4B), "vae": IMAGE_VAE}
PUBLISHED: Published = {
    "Tongyi-MAI/Z-Image": (
        OTHERS | {"transformer": Part("diffusers", "ZImageTransformer2DModel", {})}
    ),
    "Tongyi-MAI/Z-Image-Turbo": (
        OTHERS | {"transformer": Part("diffusers", "ZImageTransformer2DModel", {}, bytes=4)}
    ),
}


class ZImageModel(PipelineModel):
    """Adapter of ``ZImagePipeline``, which counts guidance from 0: its scale is ours less 1.

    A prompt cannot be padded, for the image's positions begin after it. The network pads the rows
    of a pass to the longest of them, so that a row's last bits depend on the other rows of its
    batch.
    """

    pipeline_class = ZImagePipeline
    published = PUBLISHED
    lora_targets = [
        *(f"attention.{layer}" for layer in ("to_q", "to_k", "to_v", "to_out.0")),
        *(f"feed_forward.{layer}" for layer in ("w1", "w2", "w3")),
    ]
    text_parts = ("text_encoder",)
    default_size = (1024, 1024)

    def _compute_latent_shape(self) -> tuple[int, ...]:
        scale = self.pipeline.vae_scale_factor
        self._require_multiple(2 * scale)
        return (self.transformer.config.in_channels, self.height // scale, self.width // scale)

    def token_widths(self) -> tuple[int, int]:
        return self.transformer.config.dim, self.transformer.config.cap_feat_dim

    def compute_sigmas(self, steps: int) -> Tensor:
        # The pipeline's own list: in the last bit it differs from numpy's, and the network turns
        # the time a thousand times.
        scheduler = self.pipeline.scheduler
        tokens = self.latent_shape[1] * self.latent_shape[2] // 4
        scheduler.set_timesteps(
            sigmas=get_default_z_image_sigmas(steps), **self._schedule_arguments(tokens, steps)
        )
        sigmas: Tensor = scheduler.sigmas.clone()
        return sigmas

    def _encode_inputs(self, texts: list[str], prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        # A copy, since the pipeline writes its chat template into the list.
        rows, _ = self.pipeline.encode_prompt(
            list(texts), self.device, False, max_sequence_length=self.max_tokens
        )
        # A list of [L_i, D], padded to [n, L, D] to be stored; _run_network cuts them again.
        masks = [row.new_ones(len(row), dtype=torch.bool) for row in rows]
        return {
            "embeds": pad_sequence(rows, batch_first=True),
            "mask": pad_sequence(masks, batch_first=True),
        }

    def _run_network(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        # Padding comes last. Selecting by the mask would wait for the device in each row.
        lengths = read_on_host(conditioning["mask"]).sum(1).tolist()
        rows = zip(conditioning["embeds"], lengths, strict=True)
        # Time runs from noise to image, and so does the prediction, x0 - eps: hence the sign below.
        # Not 1 - sigma, but rounded as the pipeline rounds it.
        time = (1000 - 1000 * sigma) / 1000
        velocity: list[Tensor] = self.transformer(
            # Images as videos of one frame: a list of [C, 1, H, W].
            list(latents[:, :, None]),
            time,
            [embeds[:length] for embeds, length in rows],
            return_dict=False,
        )[0]
        return -torch.stack(velocity)[:, :, 0]

    def list_blocks(self) -> list[nn.Module]:
        # In the order of their calls, which fsdp.prefetch needs.
        network = self.transformer
        return [*network.noise_refiner, *network.context_refiner, *network.layers]
