"""What the families share whose network sees 2 x 2 patches of the latents as tokens."""

from __future__ import annotations

from torch import Tensor

from ebbflow.models.pipeline import PipelineModel


class PackedPipelineModel(PipelineModel):
    """A family whose network sees 2 x 2 patches of the latents as tokens."""

    def _compute_latent_shape(self) -> tuple[int, ...]:
        # The network's channels are those of a token, 2 x 2 latents.
        scale = self.pipeline.vae_scale_factor
        self._require_multiple(2 * scale)
        return (self.transformer.config.in_channels // 4, self.height // scale, self.width // scale)

    def _unpack_prediction(self, prediction: Tensor) -> Tensor:
        return unpack_tokens(prediction, self.latent_shape)


def pack_latents(latents: Tensor) -> Tensor:
    """Latents [N, C, H, W] as tokens of 2 x 2 patches, [N, H/2 W/2, 4 C]."""
    count, channels, height, width = latents.shape
    # [N, C, H/2, 2, W/2, 2] -> [N, H/2, W/2, C, 2, 2]: a token is channel-major, as in
    # FluxPipeline._pack_latents and its copies in the other pipelines.
    patches = latents.reshape(count, channels, height // 2, 2, width // 2, 2)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(count, height * width // 4, 4 * channels)


def unpack_tokens(tokens: Tensor, latent_shape: tuple[int, ...]) -> Tensor:
    """The inverse of ``pack_latents``: tokens [N, H/2 W/2, 4 C] as latents [N, C, H, W]."""
    channels, height, width = latent_shape
    # [N, H/2, W/2, C, 2, 2] -> [N, C, H/2, 2, W/2, 2].
    patches = tokens.reshape(len(tokens), height // 2, width // 2, channels, 2, 2)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(len(tokens), channels, height, width)
