"""How many CUDA kernels a forward pass of a published model takes, and how long they would run:
``python -m benchmarks.cuda_budget [--write]``. It needs no GPU and no weights, and takes a minute.

The networks are built on the meta device at their published sizes. Every operation is counted, and
timed by a roofline: the most of its floating-point operations, its bytes and the launch of a kernel
(``CONSTANTS``). This is a prediction of eager kernels, not a measurement: ``python -m
benchmarks.gpu`` measures. CUDA's autocast, which no other device has, is imitated by its lists of
functions (``torch/csrc/autocast_mode.h``), and attention runs as flash attention where there is no
mask.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.flop_counter import flop_registry

from ebbflow.models.base import Conditioning, predict
from ebbflow.models.meta_results import MetaResults
from ebbflow.models.sizes import build_meta_adapter
from ebbflow.recipe.model import ModelConfig
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.training.policy import Policy

if TYPE_CHECKING:
    from benchmarks.compiled_kernels import CompiledBlock

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


def _normalize(
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
            return _normalize(*args, **(kwargs or {}))
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


@dataclass(frozen=True)
class Case:
    """A published model, and the rows of a forward pass.

    Attributes:
        rows: samples, twice as many in the network under guidance.
        inputs: shapes of the conditioning without the rows.
        time_in_float32: whether diffusers gives the network the time in float32.
    """

    config: ModelConfig
    rows: int
    inputs: Mapping[str, tuple[int, ...]]
    time_in_float32: bool = True


def _describe_model(family: str, path: str, guidance: float, side: int = 512) -> ModelConfig:
    return ModelConfig.model_validate(
        {
            "family": family,
            "path": path,
            "revision": "0" * 40,
            "height": side,
            "width": side,
            "guidance": guidance,
            "precision": "bfloat16",
        }
    )


CASES = {
    "SD3.5-medium": Case(
        _describe_model("sd3", "stabilityai/stable-diffusion-3.5-medium", 4.5),
        9,
        {"embeds": (333, 4096), "pooled": (2048,)},
    ),
    "FLUX.1-dev": Case(
        _describe_model("flux", "black-forest-labs/FLUX.1-dev", 3.5),
        3,
        {"embeds": (512, 4096), "pooled": (768,)},
        time_in_float32=False,
    ),
    "Qwen-Image": Case(
        _describe_model("qwen_image", "Qwen/Qwen-Image", 4.0),
        2,
        {"embeds": (512, 3584), "mask": (512,)},
        time_in_float32=False,
    ),
}


def build_conditioning(case: Case) -> Conditioning:
    """Build encoded prompts without numbers, and negative ones under classifier-free guidance."""
    tensors = {
        name: torch.empty(
            case.rows,
            *shape,
            dtype=torch.bool if name == "mask" else torch.bfloat16,
            device="meta",
        )
        for name, shape in case.inputs.items()
    }
    negative = Conditioning(tensors) if case.config.family != "flux" else None
    return Conditioning(tensors, negative, case.config.guidance)


def measure_case(case: Case) -> dict[str, Counts]:
    """Count a forward pass of diffusers' network in bfloat16, and those of ``predict`` without
    gradient: without adapters, and with them.
    """
    adapter = build_meta_adapter(case.config)
    network = adapter.transformer.to(torch.bfloat16).requires_grad_(False).eval()
    latents = torch.empty(case.rows, *adapter.latent_shape, device="meta")
    sigma = torch.empty(case.rows, device="meta")
    conditioning = build_conditioning(case)
    results: dict[str, Counts] = {}
    with count_kernels() as counts:
        time = sigma if case.time_in_float32 else sigma.bfloat16()
        adapter.predict_velocity(latents.bfloat16(), time, conditioning)
    results["diffusers, bfloat16"] = counts
    with count_kernels() as counts:
        predict(adapter, latents, sigma, conditioning)
    results["predict(), no adapters"] = counts
    policy = Policy(adapter, PolicyConfig(train="lora", rank=32, alpha=64), 0)
    assert policy.model.transformer is network
    with count_kernels() as counts:
        predict(adapter, latents, sigma, conditioning)
    results["predict(), LoRA"] = counts
    # What merging would save: in bfloat16 adapters are never merged (docs/bitwise.md).
    for layer in network.modules():
        if isinstance(layer, LoraLayer):
            layer.merged_adapters.append("default")
    with count_kernels() as counts:
        predict(adapter, latents, sigma, conditioning)
    results["predict(), LoRA if merged"] = counts
    return results


def measure_compiled(case: Case) -> Counts:
    """Count a forward pass of ``predict`` with adapters whose blocks inductor has compiled: its
    kernels in the blocks, and those that start outside of them as they are.
    """
    from benchmarks.compiled_kernels import compile_block  # torch for CPUs comes without Triton

    adapter = build_meta_adapter(case.config)
    adapter.transformer.to(torch.bfloat16).requires_grad_(False).eval()
    Policy(adapter, PolicyConfig(train="lora", rank=32, alpha=64), 0)
    latents = torch.empty(case.rows, *adapter.latent_shape, device="meta")
    sigma = torch.empty(case.rows, device="meta")
    conditioning = build_conditioning(case)
    compiled: dict[tuple[Any, ...], CompiledBlock] = {}
    calls: list[tuple[Any, ...]] = []

    def compile_once(block: nn.Module, inputs: Any, keys: Any) -> None:
        if torch.compiler.is_compiling():  # called by ``compile_block``
            return
        # As in torch.compile, blocks of one class called with the same shapes share their kernels.
        shapes = tree_map_only(Tensor, lambda values: (values.shape, values.dtype), (inputs, keys))
        weights = [parameter.shape for parameter in block.parameters()]
        call = (type(block), str(shapes), str(weights))
        calls.append(call)
        if call not in compiled:
            compiled[call] = compile_block(block, inputs, keys, attend)

    blocks = adapter.list_blocks()
    hooks = [block.register_forward_pre_hook(compile_once, with_kwargs=True) for block in blocks]
    with torch.no_grad():
        predict(adapter, latents, sigma, conditioning)
    for hook in hooks:
        hook.remove()
    # The embedders and the last layer are not compiled.
    with count_kernels() as counts, _leave_out(blocks, counts):
        predict(adapter, latents, sigma, conditioning)
    for call in calls:
        for kernel in compiled[call].kernels:
            counts.add(kernel.name, kernel.flops, kernel.moved, "bf16")
    return counts


@contextmanager
def _leave_out(blocks: Sequence[nn.Module], counts: Counts) -> Iterator[None]:
    """Count nothing inside some blocks."""

    def call_uncounted(forward: Callable[..., Any], *inputs: Any, **keys: Any) -> Any:
        before = copy.deepcopy(vars(counts))
        outputs = forward(*inputs, **keys)
        vars(counts).update(before)
        return outputs

    with ExitStack() as stack:
        for block in blocks:
            stack.enter_context(
                patch.object(block, "forward", partial(call_uncounted, block.forward))
            )
        yield


COMPILED = "predict(), LoRA, compiled blocks"
HEADER = """# Kernels of a forward pass on CUDA, predicted

Counted on the meta device at the published sizes, in images of 512 x 512, eager and without
gradient. The time is a roofline's on an H100 SXM: for each kernel the longest of its operations
(70 % of 989 TFLOP/s in bfloat16 and of 67 in float32; 45 % in flash attention and 25 % in attention
with a mask), its bytes (85 % of 3.35 TB/s) and 2 microseconds. Nothing here was measured on a GPU.

Without adapters a network runs under autocast; under a LoRA in bfloat16 it does not, its RMS norms
are one kernel each, the rotary embedding of FLUX.1 is a complex product, and Qwen-Image attends to
prompts of different lengths without a mask.

In the rows of compiled blocks, inductor has fused each block for an H100 as it does under
`model.compile: blocks` (`benchmarks/compiled_kernels.py`; torch {torch}, Triton {triton}). Their
rotary embedding is diffusers', and Qwen-Image has its mask.
"""
COLUMNS = (
    "model", "rows in the network", "forward pass", "kernels", "casts", "attentions with a mask",
    "ms", "share of the peak", "against diffusers: kernels", "ms",
)  # fmt: skip


def format_case(name: str, case: Case, results: Mapping[str, Counts]) -> list[str]:
    """Format the lines of a model."""
    rows = case.rows * (1 if case.config.family == "flux" else 2)
    plain = results["diffusers, bfloat16"]
    return [
        f"| {name} | {rows} | {label} | {counts.kernels.total():,} | {counts.casts:,} |"
        f" {counts.masked} | {counts.milliseconds:.1f} | {counts.utilization:.2f} |"
        f" {counts.kernels.total() / plain.kernels.total():.2f} |"
        f" {counts.milliseconds / plain.milliseconds:.2f} |"
        for label, counts in results.items()
    ]


def main() -> None:
    """Print the table, or write it to ``benchmarks/results/cuda_budget.md``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--write",
        action="store_true",
        help="write benchmarks/results/cuda_budget.md instead of printing",
    )
    written = parser.parse_args().write
    report = build_report(measure_all)
    if written:
        Path(__file__).with_name("results").joinpath("cuda_budget.md").write_text(report)
    else:
        print(report)


def measure_all(case: Case) -> dict[str, Counts]:
    """Count every forward pass of the table."""
    return measure_case(case) | {COMPILED: measure_compiled(case)}


def build_report(measure: Callable[[Case], Mapping[str, Counts]]) -> str:
    """Build the page, from the counts of every case."""
    import triton

    versions = {"torch": torch.__version__.split("+")[0], "triton": triton.__version__}
    lines = [HEADER.format(**versions), f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for name, case in CASES.items():
        lines += format_case(name, case, measure(case))
    return "\n".join(
        [*lines, "", "`python -m benchmarks.cuda_budget --write`, on any machine.", ""]
    )


if __name__ == "__main__":
    main()
