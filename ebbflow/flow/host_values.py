"""Small tensors of the device whose values the host knows: masks of prompts, noise levels of rows.

Reading a tensor of a GPU waits for all kernels before it. What came from the host, or is computed
from such tensors, is computed on the host beside it, so that a network whose shapes depend on the
lengths of its prompts is launched without waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_host_values: Any = WeakTensorKeyDictionary()


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Move a tensor that nobody will write into, and remember what the host knows of it."""
    moved = values.to(device)
    # The host's tensors need no second copy.
    if moved.device.type == "cpu":
        return moved
    known = _find_host_values(values)
    if known is not None:
        _remember(moved, known)
    return moved


def copy_ahead(values: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device that may still compute: the host does not wait for it."""
    if device.type != "cuda":
        return values.to(device)
    # Only page-locked memory is copied behind the host's back. torch keeps it until the copy is
    # done, whoever drops it before.
    return values.pin_memory().to(device, non_blocking=True)


def derive(change: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Compute ``change(*tensors)``, on the host too if the host knows all of them.

    Example:
        ::

            sigmas = to_device(model.compute_sigmas(10), device)
            sigma = derive(lambda values: values[3].expand(8), sigmas)  # or expand_sigma
            read_on_host(sigma)  # [8], without waiting for the device
    """
    result = change(*tensors)
    if result.device.type == "cpu":
        return result
    known = [_find_host_values(tensor) for tensor in tensors]
    if all(values is not None for values in known):
        _remember(result, change(*known))
    return result


def expand_sigma(sigmas: Tensor, step: int, rows: int) -> Tensor:
    """Return the noise level before a denoising step for each row of a pass, [rows]."""
    return derive(lambda values: values[step].expand(rows), sigmas)


def read_on_host(values: Tensor) -> Tensor:
    """Return a tensor in main memory; waits for the device if the host does not know it yet."""
    known = _find_host_values(values)
    if known is None:
        known = values.cpu()
        _remember(values, known)
    return known


def _find_host_values(values: Tensor) -> Tensor | None:
    if values.device.type == "cpu":
        return values
    known: Tensor | None = _host_values.get(values)
    return known


def _remember(values: Tensor, known: Tensor) -> None:
    if values.device.type != "meta":  # where there is nothing to read
        _host_values[values] = known
