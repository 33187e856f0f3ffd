"""Count the CUDA kernels of a forward pass on the meta device, and predict their time.

Every operation is counted, and timed by a roofline: the most of its floating-point operations, its
bytes and the launch of a kernel (``CONSTANTS``). CUDA's autocast, which no other device has, is
imitated by its lists of functions (``torch/csrc/autocast_mode.h``), and attention runs as flash
attention where there is no mask.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from ebbflow.models.meta_results import MetaResults

aten = torch.ops.aten

CONSTANTS = {
    "bf16": 989e12 * 0.70,
    "float32": 67e12 * 0.70,
    "attention": 989e12 * 0.45,
    "masked attention": 989e12 * 0.25,
    "bytes": 3.35e12 * 0.85,
    "launch": 2e-6,
}
"""Of an H100 SXM (NVIDIA's data sheet: 989 TFLOP/s in bfloat16, 67 in float32, 3.35 TB/s), with the
shares of it that large products, attention and copies reach: FLOP/s, bytes/s and seconds a kernel.
"""
LOWER = {
    "linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "baddbmm", "einsum", "conv1d", "conv2d",
    "conv3d", "scaled_dot_product_attention",
}  # fmt: skip
"""Functions that CUDA's autocast computes in 16 bits."""
FLOAT32 = {
    "exp", "log", "pow", "__pow__", "rsqrt", "reciprocal", "layer_norm", "group_norm", "softmax",
    "norm", "sum", "prod", "cumsum", "softplus",
}  # fmt: skip
"""Functions that CUDA's autocast computes in float32."""
WIDEST = {"cat", "concat", "stack"}
"""Functions whose operands CUDA's autocast casts to the widest of them."""
FREE = {
    "alias", "as_strided", "detach", "diagonal", "expand", "empty", "empty_like", "empty_strided",
    "lift_fresh", "new_empty", "new_empty_strided", "permute", "select", "slice", "split",
    "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze", "view",
    "view_as_complex", "view_as_real", "_reshape_alias", "_unsafe_view",
}  # fmt: skip
"""Operations that start no kernel."""
UNPADDED = "torch_attn::_varlen_attn"
"""Flash attention of sequences of different lengths (``torch.nn.attention.varlen``)."""


@dataclass
class Counts:
    """What one forward pass starts.

    Attributes:
        kernels: by operation.
        casts: kernels that change the precision of a tensor and nothing else.
        seconds: predicted, by operation.
        flops: of products and attention.
        masked: attentions with a mask, which flash attention does not take.
    """

    kernels: Counter[str] = field(default_factory=Counter)
    casts: int = 0
    seconds: Counter[str] = field(default_factory=Counter)
    flops: int = 0
    masked: int = 0

    def add(self, name: str, flops: int, moved: int, rate: str) -> None:
        """Count a kernel that computes and moves so much.

        Args:
            rate: of ``CONSTANTS``, for kernels that are no attention.
        """
        self.kernels[name] += 1
        if "attention" in name or name == UNPADDED:
            is_flash = "flash" in name or name == UNPADDED
            rate = "attention" if is_flash else "masked attention"
            self.masked += not is_flash
        self.flops += flops
        self.seconds[name] += max(
            flops / CONSTANTS[rate], moved / CONSTANTS["bytes"], CONSTANTS["launch"]
        )

    @property
    def milliseconds(self) -> float:
        return 1000 * self.seconds.total()

    @property
    def utilization(self) -> float:
        """The share of the peak in bfloat16 (MFU)."""
        return self.flops / self.seconds.total() / 989e12


class _Roofline(TorchDispatchMode):
    """Counts and times the operations on meta tensors."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts
        self._results = MetaResults()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = self._results.compute(func, args, kwargs or {})
        name = func._schema.name.removeprefix("aten::")
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        tensors = [tensor for tensor in (*inputs, *outputs) if tensor.is_meta]
        # Positions and schedules that are computed on the CPU start no kernel.
        if name in FREE or not tensors:
            return result
        if name == "_to_copy" and inputs[0].dtype != outputs[0].dtype:
            self.counts.casts += 1
        flops = 0
        if func.overloadpacket in flop_registry:
            flops = flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=result)
        if name == UNPADDED:
            # Lengths are unknown on meta, and the formula takes the longest for each sequence. Of
            # the two of a row one is then the whole row, and the other one, its padding, is empty.
            flops //= 2
            self.counts.kernels["zeros"] += 1  # an empty state of the dropout
        moved = sum(
            min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
            for tensor in tensors
        )
        self.counts.add(
            name, flops, moved, "float32" if tensors[0].dtype == torch.float32 else "bf16"
        )
        return result


class _CudaAutocast(TorchFunctionMode):
    """Casts as CUDA's autocast does, on meta tensors; parameters once in a block."""

    def __init__(self, *_: Any, enabled: bool = True) -> None:
        super().__init__()
        self.enabled = enabled
        self.cast_weights: dict[int, Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        kwargs = kwargs or {}
        if not self.enabled or name not in LOWER | FLOAT32 | WIDEST:
            return func(*args, **kwargs)
        if name in LOWER:
            args, kwargs = tree_map(self._lower, (tuple(args), dict(kwargs)))
        elif name in FLOAT32 or any(
            leaf.dtype == torch.float32
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor)
        ):
            args, kwargs = tree_map(_to_float32, (tuple(args), dict(kwargs)))
        return func(*args, **kwargs)

    def _lower(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            return value
        if not isinstance(value, torch.nn.Parameter):
            return value.bfloat16()
        if id(value) not in self.cast_weights:
            self.cast_weights[id(value)] = value.bfloat16()
        return self.cast_weights[id(value)]


def _to_float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention with the kernel that CUDA would choose: flash, or with a mask the
    memory-efficient one.
    """
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        repeats = query.shape[-3] // key.shape[-3]
        key = key.repeat_interleave(repeats, -3)
        value = value.repeat_interleave(repeats, -3)
    if attn_mask is None:
        result: Tensor = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
        return result
    if attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(
            ~attn_mask, -math.inf
        )
    attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    # A gradient also needs the logarithm of the sum of a row's exponentials.
    with_log_sums = torch.is_grad_enabled()
    outputs = aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, with_log_sums, dropout_p, is_causal, scale=scale
    )
    masked: Tensor = outputs[0]
    return masked


def normalize(
    inputs: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Compute an RMS norm in one kernel, as CUDA does where the weight has the input's precision;
    a layer norm's moves the same bytes.
    """
    if weight is not None and weight.dtype != inputs.dtype:
        return torch.rms_norm(inputs, shape, weight, eps)
    result: Tensor = torch.native_layer_norm(inputs, shape, weight, None, eps or 1e-6)[0]
    return result


class _FusedKernels(TorchFunctionMode):
    """Replaces attention and RMS norms, which on meta tensors would be their parts."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is functional.scaled_dot_product_attention:
            return attend(*args, **(kwargs or {}))
        if func is functional.rms_norm:
            return normalize(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextmanager
def count_kernels() -> Iterator[Counts]:
    """Count the kernels of what runs on meta tensors inside the block."""
    counts = Counts()
    with (
        torch.no_grad(),
        patch.object(torch, "autocast", _CudaAutocast),
        _FusedKernels(),
        _Roofline(counts),
    ):
        yield counts
