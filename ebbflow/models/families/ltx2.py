"""The LTX-2 family (2601.03233), LTX-2 and LTX-2.3, text to video with sound: a sample has a latent
of each, and the network denoises both together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from diffusers import LTX2Pipeline
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from torch import Tensor

from ebbflow.data.prompts import Prompt
from ebbflow.data.sounds import encode_pcm
from ebbflow.flow.latents import NamedLatents
from ebbflow.models.base import Conditioning, ModelError, Tokens
from ebbflow.models.families.ltx_video import LTXVideoModel
from ebbflow.models.published import Part, Published
from ebbflow.recipe.families import Family
from ebbflow.recipe.model import ModelConfig

FAMILY = Family(
    adapter="LTX2Model",
    pipeline="LTX2Pipeline",
    size_multiple=32,
    frame_multiple=8,
    latents=("video", "sound"),
    caveat="video and sound are trained, rewarded and evaluated under classifier-free guidance with"
    " one scale, and LTX2Pipeline adds further guidance by default; pass the arguments of"
    " docs/models.md, LTX-2 with its sound",
)
GEMMA3_12B = {
    "text_config": {
        "vocab_size": 262208,
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 896,
        "patch_size": 14,
        "vision_use_head": False,
    },
}
PUBLISHED: Published = {
    "Lightricks/LTX-2": {
        "transformer": Part("diffusers", "LTX2VideoTransformer3DModel", {}),
        "text_encoder": Part("transformers", "Gemma3ForConditionalGeneration", GEMMA3_12B),
        "connectors": Part("ltx2", "LTX2TextConnectors", {}),
        "vae": Part(
            "diffusers",
            "AutoencoderKLLTX2Video",
            {"spatial_compression_ratio": 32, "temporal_compression_ratio": 8},
        ),
        "audio_vae": Part("diffusers", "AutoencoderKLLTX2Audio", {}),
        "vocoder": Part("ltx2", "LTX2Vocoder", {}),
    },
}
FRAME_RATE = 24
"""Frames per second of the pipeline, in which the network counts time."""


class LTX2Model(LTXVideoModel):
    """Adapter of ``LTX2Pipeline``: pictures attend to sound, and sound to pictures.

    A row of latents is the video, [C, F, H, W], and then its sound, [C, L, M]: L points in time of
    M bands of frequencies.

    Attributes:
        sound_rate: samples a second of decoded sound.
    """

    pipeline_class = LTX2Pipeline
    published = PUBLISHED
    lora_targets = [
        *(
            f"{attention}.{layer}"
            for attention in (
                "attn1",
                "attn2",
                "audio_attn1",
                "audio_attn2",
                "audio_to_video_attn",
                "video_to_audio_attn",
            )
            for layer in ("to_q", "to_k", "to_v", "to_out.0")
        ),
        *(f"{name}.{layer}" for name in ("ff", "audio_ff") for layer in ("net.0.proj", "net.2")),
    ]
    text_parts = ("text_encoder", "connectors")
    sound_parts = ("audio_vae", "vocoder")
    default_size = (512, 768)
    default_max_tokens = 1024
    latent_shape: NamedLatents

    @classmethod
    def _check_pipeline(cls, pipeline: Any, config: ModelConfig) -> None:
        if pipeline.vae.config.timestep_conditioning:
            raise ModelError(
                f"{config.path} has a VAE that draws noise to decode; take the one of"
                " Lightricks/LTX-2"
            )
        network = pipeline.transformer.config
        if network.use_keyframes_abs_pos_embedding or not network.use_prompt_adaln_single:
            raise ModelError(
                f"{config.path} is later than LTX-2.3, and {config.family} is LTX-2 and LTX-2.3;"
                " take Lightricks/LTX-2"
            )
        # Empty places of a prompt are filled with learned tokens, a whole set at a time.
        registers = pipeline.connectors.config.video_connector_num_learnable_registers or 1
        if config.max_tokens is not None and config.max_tokens % registers:
            near = max(registers, round(config.max_tokens / registers) * registers)
            raise ModelError(
                f"model.max_tokens = {config.max_tokens}: prompts are filled up with {registers}"
                f" learned tokens, over and over; take {near}"
            )

    def _compute_latent_shape(self) -> NamedLatents:
        pipeline = self.pipeline
        audio_vae = pipeline.audio_vae
        # Latents a second, as the pipeline counts them: 25 of the published models.
        pace = (
            pipeline.audio_sampling_rate
            / pipeline.audio_hop_length
            / pipeline.audio_vae_temporal_compression_ratio
        )
        sound = (
            audio_vae.config.latent_channels,
            round(self.config.frames / FRAME_RATE * pace),
            audio_vae.config.mel_bins // pipeline.audio_vae_mel_compression_ratio,
        )
        return NamedLatents({"video": super()._compute_latent_shape(), "sound": sound})

    def token_widths(self) -> tuple[int, int]:
        width, text_width = super().token_widths()
        config = self.transformer.config
        # The connectors of LTX-2.3 give prompts the width of the blocks.
        return width, text_width if config.use_prompt_embeddings else config.cross_attention_dim

    def count_tokens(self) -> Tokens:
        tokens = super().count_tokens()
        # A point in time of the sound is a token; the prompt is encoded for it as well.
        width = self.token_widths()[1]
        return replace(
            tokens,
            image=tokens.image + self.latent_shape.parts["sound"][1],
            condition_channels=self.max_tokens * width,
        )

    def count_shared_tokens(self) -> dict[str, int]:
        return {
            "video": self._count_video_tokens(),
            "sound": self.latent_shape.parts["sound"][1],
        }

    def plan_shared_tokens(self, network: Any) -> dict[str, Any]:
        # That of diffusers 0.42.1 leaves the sound and the rotary positions between the two whole,
        # and knows positions of one layout only.
        tokens = ContextParallelInput(split_dim=1, expected_dims=3)
        if network.config.rope_type == "split":  # cosines and sines are [N, heads, S, D]
            positions = ContextParallelInput(split_dim=2, expected_dims=4, split_output=True)
        else:  # [N, S, D]
            positions = ContextParallelInput(split_dim=1, expected_dims=3, split_output=True)
        rotary = ("rope", "audio_rope", "cross_attn_rope", "cross_attn_audio_rope")
        gathered = ContextParallelOutput(gather_dim=1, expected_dims=3)
        return {
            "": {"hidden_states": tokens, "audio_hidden_states": tokens},
            **{name: {0: positions, 1: positions} for name in rotary},
            "proj_out": gathered,
            "audio_proj_out": gathered,
        }

    def _encode_inputs(self, texts: list[str], prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        # One at a time: the states of all 49 layers, in several copies, and the scores of 262,208
        # words take gigabytes for each.
        rows = [self._encode_text(text) for text in texts]
        embeds, sound_embeds, mask = (torch.cat(column) for column in zip(*rows, strict=True))
        return {"embeds": embeds, "sound_embeds": sound_embeds, "mask": mask.bool()}

    def _encode_text(self, text: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the pictures and what the sound attend to, [1, L, width] each, and the mask
        of both, [1, L].
        """
        pipeline = self.pipeline
        states, mask = pipeline._get_gemma_prompt_embeds(
            text, max_sequence_length=self.max_tokens, device=self.device
        )
        encoded: tuple[Tensor, Tensor, Tensor] = pipeline.connectors(
            states, mask, padding_side=pipeline.tokenizer.padding_side
        )
        return encoded

    def _run_network(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        parts = self.latent_shape.split(latents)
        video, sound = parts["video"], parts["sound"]
        _, frames, height, width = video.shape[1:]
        video_velocity, sound_velocity = self.transformer(
            # [N, C, F, H, W] as tokens [N, F H W, C]: a latent is a token.
            hidden_states=video.flatten(2).mT,
            # [N, C, L, M] as tokens [N, L, C M]: a point in time is a token.
            audio_hidden_states=sound.transpose(1, 2).flatten(2),
            encoder_hidden_states=conditioning["embeds"],
            audio_encoder_hidden_states=conditioning["sound_embeds"],
            timestep=1000 * sigma,
            # Of LTX-2.3, whose blocks modulate what they attend to by it.
            sigma=1000 * sigma,
            use_cross_timestep=True,
            encoder_attention_mask=conditioning["mask"],
            audio_encoder_attention_mask=conditioning["mask"],
            num_frames=frames,
            height=height,
            width=width,
            fps=FRAME_RATE,
            audio_num_frames=sound.shape[2],
            return_dict=False,
        )
        return self.latent_shape.join(
            {
                "video": video_velocity.mT,
                "sound": sound_velocity.unflatten(2, sound.shape[1::2]).transpose(1, 2),
            }
        )

    def _decode_pixels(self, latents: Tensor) -> Tensor:
        return super()._decode_pixels(self.latent_shape.split(latents)["video"])

    def _encode_with_vae(self, pixels: Tensor) -> Tensor:
        raise ModelError(
            f"{self.config.family} has a sound with every video, and pictures have none; leave out"
            " what encodes pictures, such as pairs of pictures"
        )

    @property
    def sound_rate(self) -> int:
        rate: int = self.pipeline.vocoder.config.output_sampling_rate
        return rate

    @torch.no_grad()
    def decode_sound(self, latents: Tensor) -> np.ndarray:
        """Decode the sound of latents, [N, D]: int16 [N, samples, channels], ``sound_rate`` samples
        a second.
        """
        with self._parts_on_device(*self.sound_parts):
            waves = [
                self._decode_waves(part.to(self.device)).cpu()
                for part in torch.split(latents, self._images_per_vae_call())
            ]
        return encode_pcm(torch.cat(waves).numpy())

    def _decode_waves(self, latents: Tensor) -> Tensor:
        """Decode sound in about [-1, 1], [n, channels, samples]."""
        audio_vae = self.pipeline.audio_vae
        sound = self.latent_shape.split(latents.float())["sound"]
        # Statistics of each channel and band, [C M], which the VAE keeps with its weights.
        mean, std = (
            values.view(sound.shape[1], 1, -1).to(sound)
            for values in (audio_vae.latents_mean, audio_vae.latents_std)
        )
        spectrogram = audio_vae.decode(sound * std + mean, return_dict=False)[0]
        waves: Tensor = self.pipeline.vocoder(spectrogram)
        return waves
