"""A sample of several latents, such as a video and its sound: one row of numbers with named parts.

Samplers and stored rollouts work on the elements of a sample, whatever they mean, and take the row
as it is. The family's network and its decoders look at the parts, and so do log-probs and losses:
each latent has its own, a mean over its own elements. A sample of one latent keeps that latent's
own shape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Shape = Sequence[int]


class NamedLatents(tuple[int, ...]):
    """The shape of a sample of several latents: that of its row, (D,), and the parts of the row.

    The first latent keeps the noise that it would have alone; each other one has a noise key of
    its own, made of the sample's key and the latent's name.

    Example:
        LTX-2 with 121 frames of 512 x 768 pixels has 786,432 numbers of video and 16,128 of sound::

            shape = NamedLatents({"video": (128, 16, 16, 24), "sound": (8, 126, 16)})
            shape == (802560,)
            shape.split(latents)["sound"]  # [N, 8, 126, 16] of [N, 802560]

    Attributes:
        parts: the shape of each latent by its name, in the order of the row.
    """

    parts: Mapping[str, tuple[int, ...]]

    def __new__(cls, parts: Mapping[str, Shape]) -> NamedLatents:
        # A tuple, as the shapes of all other families are: whatever allocates, stores or compares
        # latents need not know that there are several.
        sizes = [math.prod(shape) for shape in parts.values()]
        named = super().__new__(cls, (sum(sizes),))
        named.parts = {name: tuple(shape) for name, shape in parts.items()}
        return named

    def __getnewargs__(self) -> tuple[Mapping[str, Shape]]:
        # A process that gets the shape from another one builds it again from its parts.
        return (self.parts,)

    def split(self, latents: Tensor) -> dict[str, Tensor]:
        """Split rows, [N, D], into each latent by name, [N, *shape]."""
        sizes = [math.prod(shape) for shape in self.parts.values()]
        pieces = latents.split(sizes, dim=1)
        return {
            name: piece.unflatten(1, shape)
            for (name, shape), piece in zip(self.parts.items(), pieces, strict=True)
        }

    def join(self, latents: Mapping[str, Tensor]) -> Tensor:
        """Join each latent by name, [N, *shape], to rows, [N, D]: the inverse of ``split``."""
        # Not at the top of the file: shapes are looked at where torch is not loaded.
        import torch

        return torch.cat([latents[name].flatten(1) for name in self.parts], dim=1)

    def slice_parts(self) -> dict[str, slice]:
        """Return the elements of a row that belong to each latent, by name."""
        slices = {}
        start = 0
        for name, shape in self.parts.items():
            slices[name] = slice(start, start + math.prod(shape))
            start = slices[name].stop
        return slices

    def average_parts(self, values: Tensor) -> Tensor:
        """Average over the elements of each latent, [N, D] to [N, K]."""
        import torch

        # Contiguous, so that the sum has the order that it has for a latent that lies alone.
        means = [values[:, part].contiguous().mean(1) for part in self.slice_parts().values()]
        return torch.stack(means, 1)

    def derive_noise_seeds(self, seed: int) -> list[tuple[slice, int]]:
        """Derive the seed of the noise of each latent, with its elements in the row."""
        # Not at the top of the file: reading a recipe imports it, and must not load NumPy.
        from ebbflow.seeding import derive_seed

        (_, first), *others = self.slice_parts().items()
        # By name and not by position: another latent in the middle changes the noise of none.
        seeds = [(part, derive_seed(seed, "latent", name)) for name, part in others]
        return [(first, seed), *seeds]


def join_averages(means: Tensor, shape: Shape) -> Tensor:
    """Return the average over all elements of a sample, [...], of those over the elements of each
    of its K latents, [..., K]; what a sample of one latent has, as it is.
    """
    if not isinstance(shape, NamedLatents):
        return means
    sizes = [math.prod(part) for part in shape.parts.values()]
    return (means * means.new_tensor(sizes)).sum(-1) / sum(sizes)


def get_picture_shape(shape: Shape) -> tuple[int, ...]:
    """Return the shape of the latent that becomes pictures: the first one of several."""
    if isinstance(shape, NamedLatents):
        return next(iter(shape.parts.values()))
    return tuple(shape)
