"""How many CUDA kernels a forward pass of a published model takes, and how long they would run:
``python -m benchmarks.cuda_budget [--write]``. It needs no GPU and no weights, and takes a minute.

The networks are built on the meta device at their published sizes (``benchmarks.kernel_counts``).
This is a prediction of eager kernels, not a measurement: ``python -m benchmarks.gpu`` measures.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from benchmarks.kernel_counts import Counts, attend, count_kernels
from ebbflow.models.base import Conditioning, predict
from ebbflow.models.sizes import build_meta_adapter
from ebbflow.recipe.model import ModelConfig
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.training.policy import Policy

if TYPE_CHECKING:
    from benchmarks.compiled_kernels import CompiledBlock


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
