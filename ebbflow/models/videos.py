"""What the families that draw videos share: frames in latents, and one frame as an image."""

from __future__ import annotations

from torch import Tensor

from ebbflow.models.base import ModelError
from ebbflow.models.pipeline import PipelineModel


class DrawsVideos(PipelineModel):
    """A family of latents [N, C, frames, H, W]; a video of one frame is an image."""

    draws_videos = True

    @property
    def frames_per_decode(self) -> int:
        """Frames that the VAE decodes at a time, for estimates: those of one latent frame."""
        frames: int = self.pipeline.vae_scale_factor_temporal
        return frames

    def _count_latent_frames(self, pace: int) -> int:
        """Latent frames of a video whose VAE makes one of the first frame, and one of every
        ``pace`` after it: 1 + (frames - 1) / pace.
        """
        if (self.config.frames - 1) % pace:
            near = round((self.config.frames - 1) / pace) * pace + 1
            raise ModelError(
                f"model.frames = {self.config.frames}: {self.config.family} draws 1 + a multiple of"
                f" {pace} frames; take {near}"
            )
        return (self.config.frames - 1) // pace + 1

    def _decode_pixels(self, latents: Tensor) -> Tensor:
        # [n, frames, height, width, 3]; the frame of an image without its dimension.
        video = super()._decode_pixels(latents)
        return video[:, 0] if self.config.frames == 1 else video

    def _encode_pixels(self, images: Tensor) -> Tensor:
        return super()._encode_pixels(images if images.ndim == 5 else images[:, None])
