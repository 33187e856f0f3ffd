r"""The loss of samples of several latents, such as a video and its sound: that of each latent.

    L = sum_k w_k L_k / sum_k w_k

L_k is the algorithm's loss of latent k alone: its log-probs, velocity errors and penalties are
means over the elements of this latent, so a large latent does not drown a small one. The division
by the sum is that of OmniNFT (2605.12480; ``weight_sum`` in scripts/train_omninft_ltx_fsdp.py of
zghhui/OmniNFT). A sample of one latent has the algorithm's loss as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from ebbflow.algorithms.base import RowMetrics, mean_per_row
from ebbflow.flow.latents import NamedLatents, Shape
from ebbflow.training.batches import ForwardInputs
from ebbflow.training.passes import TrainingError

AnyBatch = TypeVar("AnyBatch")
LatentColumns = ("advantage", "old_log_prob")
"""Fields of a batch that have a number for each row, [M], or for each of its K latents, [M, K]."""


@dataclasses.dataclass(frozen=True)
class LatentShare:
    """One latent of several.

    Example: the sound of LTX-2 with ``latent_weights: {sound: 3}`` counts three times as much as
    the video: ``LatentShare("sound", 1, slice(786432, 802560), 0.75)``.

    Attributes:
        name: of the latent.
        index: its position among the latents of a sample.
        elements: of a row.
        share: of its loss in that of the sample, w_k / sum w.
    """

    name: str
    index: int
    elements: slice
    share: float


def list_latent_shares(shape: Shape, weights: Mapping[str, float]) -> list[LatentShare]:
    """List the latents of a sample with their shares in the loss; none where it has one latent.

    Args:
        shape: of a sample, ``Model.latent_shape``.
        weights: ``latent_weights`` of the stage; a latent without an entry has 1.

    Raises:
        TrainingError: a weight is of no latent of the model, or all of them are 0.
    """
    if not isinstance(shape, NamedLatents):
        if weights:
            raise TrainingError(
                f"latent_weights names {', '.join(weights)}, and a sample of this model is one"
                " latent; leave latent_weights out"
            )
        return []
    unknown = [name for name in weights if name not in shape.parts]
    if unknown:
        raise TrainingError(
            f"latent_weights.{unknown[0]}: this model has no such latent; it has"
            f" {', '.join(shape.parts)}"
        )
    total = sum(weights.get(name, 1.0) for name in shape.parts)
    if not total:
        raise TrainingError("latent_weights are all 0, so nothing would be trained; raise one")
    return [
        LatentShare(name, index, elements, weights.get(name, 1.0) / total)
        for index, (name, elements) in enumerate(shape.slice_parts().items())
    ]


def select_latent(batch: AnyBatch, latent: LatentShare) -> AnyBatch:
    """Return the rows of one latent: the same samples with its elements alone."""
    fields: Any = batch  # its class names them in ``latent_fields``
    parts: dict[str, Any] = {}
    for name in fields.latent_fields:
        values = getattr(fields, name)
        if isinstance(values, ForwardInputs):
            parts[name] = dataclasses.replace(
                values, latents=values.latents[:, latent.elements], predicted={}
            )
        elif values is not None:
            parts[name] = values[:, latent.elements]
    for name in LatentColumns:
        values = getattr(fields, name, None)
        if values is not None and values.ndim == 2:
            parts[name] = values[:, latent.index]
    selected: AnyBatch = dataclasses.replace(fields, **parts)
    return selected


def join_latent_losses(
    latents: list[LatentShare], losses: list[Tensor], metrics: list[RowMetrics]
) -> tuple[Tensor, RowMetrics]:
    """Return the loss of each row over all latents, [m], and its metrics: the averages over the
    latents by their shares, and each latent's own as ``METRIC/LATENT``.

    Args:
        losses: of each latent, [m].
        metrics: of each latent, by name.
    """
    # A latent without weight is left out, not multiplied by 0: nothing goes back through it.
    shares = [latent.share for latent in latents]
    total = _add_shares(losses, shares)
    joined: RowMetrics = {
        name: _add_shares([values[name] for values in metrics], shares) for name in metrics[0]
    }
    for latent, loss, values in zip(latents, losses, metrics, strict=True):
        # A copy of the loss without its graph, as metrics outlive the backward pass.
        own = {"loss": loss.detach(), **values}
        joined |= {f"{name}/{latent.name}": value for name, value in own.items()}
    return total, joined


def average_over_latents(values: Tensor, latents: list[LatentShare]) -> Tensor:
    """Average over the elements of each row, [m, ...] to [m]; of several latents the average of
    theirs by their shares.
    """
    if not latents:
        return mean_per_row(values)
    means = [mean_per_row(values[:, latent.elements]) for latent in latents]
    return _add_shares(means, [latent.share for latent in latents])


def _add_shares(values: list[Tensor], shares: list[float]) -> Tensor:
    """Add [m] values by their shares, those without a share left out."""
    weighted = [share * value for share, value in zip(shares, values, strict=True) if share]
    return torch.stack(weighted).sum(0)
