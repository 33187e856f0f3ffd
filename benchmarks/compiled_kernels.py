"""How many kernels inductor makes of the blocks of a network on an H100, on a machine without a
GPU: what ``model.compile: blocks`` starts there, for ``python -m benchmarks.cuda_budget``.

A block is traced on meta tensors, its graph moved to fake tensors of CUDA, and inductor lowers,
fuses and writes its kernels, as it does where the GPU is: the questions that it asks the driver are
answered here. Nothing is loaded or run. Triton's compiler needs no GPU either (``build_kernels``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor, nn
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import config as inductor_config
from torch._inductor import ir
from torch._inductor.codecache import PyCodeCache
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_utils import count_flops_fx
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._inductor.scheduler import BaseSchedulerNode, NopKernelSchedulerNode
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from triton.backends.compiler import GPUTarget

from ebbflow.training.bfloat16 import BFloat16LoraLinear

Attention = Callable[..., Tensor]
TARGET = GPUTarget("cuda", 90, 32)
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    total_memory=80 * 2**30,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    L2_cache_size=50 * 2**20,
    shared_memory_per_block=48 * 2**10,
    shared_memory_per_block_optin=227 * 2**10,
    gcnArchName="",
)
"""What ``torch.cuda.get_device_properties`` says of an H100 SXM."""
SOURCE = re.compile(
    r"^(\w+) = async_compile\.triton\('\w+', '''\n(.*?)''', device_str", re.M | re.S
)
"""A kernel in the module that inductor writes: its name and its source."""


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel that a compiled block starts.

    Attributes:
        name: of the operation of a library, or "triton".
        flops: of products and attention; 0 of fused kernels, whose bytes count.
        moved: bytes that it reads and writes.
    """

    name: str
    flops: int
    moved: int


@dataclass(frozen=True)
class CompiledBlock:
    """What inductor makes of one block.

    Attributes:
        sources: of its Triton kernels, by name.
    """

    kernels: list[CompiledKernel] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)


class _ChosenAttention(TorchFunctionMode):
    """Replaces attention, whose kernel torch would choose by asking the driver."""

    def __init__(self, attend: Attention) -> None:
        super().__init__()
        self.attend = attend

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            return self.attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class _Driver:
    """What Triton and inductor ask the driver of an H100."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def is_active(self) -> bool:
        return True


@contextmanager
def pretend_h100() -> Iterator[None]:
    """Answer what inductor asks the driver, and compile as ``ebbflow.models.compile`` does."""
    answers: list[Any] = [
        patch.multiple(
            torch.cuda,
            is_available=lambda: True,
            device_count=lambda: 1,
            current_device=lambda: 0,
            get_device_properties=lambda *_: H100,
            get_device_capability=lambda *_: (9, 0),
        ),
        patch.multiple(
            CudaInterface,
            is_available=staticmethod(lambda: True),
            is_bf16_supported=staticmethod(lambda *_, **__: True),
            current_device=staticmethod(lambda: 0),
            get_device_properties=staticmethod(lambda *_: H100),
            get_compute_capability=staticmethod(lambda *_: 90),
        ),
        # It asks for a driver; ``triton.compile`` itself does without.
        patch("torch._inductor.scheduler.has_triton", lambda *_: True),
        patch.object(triton.runtime.driver, "_active", _Driver()),
        patch.object(triton_helpers, "set_driver_to_gpu", lambda: None),
        inductor_config.patch(
            emulate_precision_casts=True,
            deterministic=True,
            fx_graph_cache=False,
            use_static_triton_launcher=False,
        ),
    ]
    with ExitStack() as stack:
        for answer in answers:
            stack.enter_context(answer)
        yield


@torch.no_grad()
def compile_block(
    block: nn.Module, inputs: Sequence[Any], keys: Mapping[str, Any], attend: Attention
) -> CompiledBlock:
    """Compile a block of meta tensors for an H100 and return its kernels.

    Args:
        inputs, keys: the arguments of its call, tensors on meta.
        attend: computes attention by the kernel that CUDA would choose.
    """
    layers = [module for module in block.modules() if isinstance(module, BFloat16LoraLinear)]
    casts = [layer.casts for layer in layers]
    weights = dict(block.named_parameters()) | dict(block.named_buffers())
    leaves, layout = tree_flatten((weights, casts, tuple(inputs), dict(keys)))

    def run(*values: Any) -> list[Any]:
        weights, casts, inputs, keys = tree_unflatten(values, layout)
        for layer, cast in zip(layers, casts, strict=True):
            layer.casts = cast
        return tree_leaves(torch.func.functional_call(block, weights, inputs, keys))

    # Under dynamo modules take paths that inductor can compile.
    is_compiling = patch.object(torch.compiler, "is_compiling", lambda: True)
    try:
        # Traced on meta: Python's indexing of a tensor of CUDA, also of a fake one, sets the
        # device, which takes a driver.
        with is_compiling, _ChosenAttention(attend):
            trace: Callable[..., Any] = make_fx(run, decomposition_table=select_decomp_table())
            module: Any = trace(*leaves)
    finally:
        for layer, cast in zip(layers, casts, strict=True):
            layer.casts = cast
    with pretend_h100():
        return _lower(module, leaves)


def _lower(module: Any, leaves: Sequence[Any]) -> CompiledBlock:
    """Move a graph that was traced on meta to CUDA, lower, fuse and write it."""
    mode = FakeTensorMode()
    cuda = torch.device("cuda", 0)

    def to_cuda(values: Any) -> Any:
        return FakeTensor(mode, values.detach(), cuda) if isinstance(values, Tensor) else values

    # Casts that autocast's decompositions leave behind would become kernels.
    module.graph.eliminate_dead_code()
    for node in module.graph.nodes:
        # What makes new tensors names meta as their device.
        if "device" in node.kwargs:
            node.kwargs = node.kwargs | {"device": cuda}
        elif node.op == "get_attr":
            setattr(module, node.target, to_cuda(getattr(module, node.target)))
    leaves = [to_cuda(leaf) for leaf in leaves]
    # Inductor reads shapes and strides of every result from ``node.meta["val"]``.
    FakeTensorProp(module, mode).propagate_dont_convert_inputs(*leaves)
    graph = GraphLowering(module, example_inputs=leaves)
    handlers = (
        V.set_debug_handler(DebugContext()),
        V.set_fake_mode(mode),
        V.set_graph_handler(graph),
    )
    with ExitStack() as stack:
        for handler in handlers:
            stack.enter_context(handler)
        graph.run(*leaves)
        code = graph.codegen()[0].value
        kernels = [
            _describe_kernel(node)
            for node in graph.scheduler.nodes
            # Views of memory, and the parts of a result of several tensors, start nothing.
            if not isinstance(node, NopKernelSchedulerNode)
            and not isinstance(node.node, ir.MultiOutput)
        ]
    return CompiledBlock(kernels, dict(SOURCE.findall(code)))


def _describe_kernel(node: BaseSchedulerNode) -> CompiledKernel:
    moved = node.get_read_write_buffers_sizes()
    if not node.is_extern():
        return CompiledKernel("triton", 0, moved)
    operation: Any = node.node
    name = str(getattr(operation, "op_overload", None) or operation.python_kernel_name)
    # Of the traced operations that became this one, the product or attention.
    flops = [count_flops_fx(origin) or 0 for origin in operation.get_origins()]
    return CompiledKernel(name, max(flops, default=0), moved)


def build_kernels(block: CompiledBlock) -> dict[str, list[bytes]]:
    """Compile the Triton kernels of a block for an H100: for each the binaries of its launch
    configurations.
    """
    binaries = {}
    with pretend_h100():
        for name, source in block.sources.items():
            kernel = getattr(PyCodeCache.load(source), name)
            # As in the processes that compile ahead: nothing is loaded into a GPU.
            kernel.precompile(warm_cache_only=True)
            binaries[name] = [result.kernel.asm["cubin"] for result in kernel.compile_results]
    return binaries
