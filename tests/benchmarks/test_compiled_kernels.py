"""Inductor's kernels of a block are counted, and built for an H100, without one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from benchmarks import kernel_counts

pytest.importorskip("triton", reason="torch for CPUs comes without Triton")
from benchmarks.compiled_kernels import build_kernels, compile_block

ROWS, TOKENS, WIDTH = 2, 64, 256


class ModulatedBlock(nn.Module):
    """A norm with a scale, a product, and a residual: as the blocks of diffusers' networks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor, scale: Tensor) -> Tensor:
        modulated = self.norm(tokens) * (1 + scale[:, None])
        return tokens + nn.functional.gelu(self.linear(modulated))


class AttentionBlock(nn.Module):
    """Attention that keeps the layout of its inputs."""

    def forward(self, query: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(query, query, query)


def meta(*shape: int) -> Tensor:
    return torch.empty(*shape, device="meta", dtype=torch.bfloat16)


def test_norm_and_modulation_are_one_kernel_and_build_for_an_h100():
    block = ModulatedBlock().to("meta", torch.bfloat16)
    compiled = compile_block(
        block, [meta(ROWS, TOKENS, WIDTH)], {"scale": meta(ROWS, WIDTH)}, kernel_counts.attend
    )
    norm, product, residual = compiled.kernels
    assert [kernel.name for kernel in compiled.kernels] == ["triton", "aten.addmm.out", "triton"]
    size = ROWS * TOKENS * WIDTH * 2  # bytes of all tokens
    assert norm.moved == 2 * size + ROWS * WIDTH * 2, "read, written, and the scale"
    assert product.flops == 2 * ROWS * TOKENS * WIDTH**2
    assert residual.moved == 3 * size, "both summands, and the sum"
    binaries = build_kernels(compiled)
    assert len(binaries) == 2
    for name, configurations in binaries.items():
        assert configurations, name
        assert all(binary.startswith(b"\x7fELF") for binary in configurations), name


def test_attention_is_flash_attention_with_its_operations():
    compiled = compile_block(AttentionBlock(), [meta(1, 2, 8, 16)], {}, kernel_counts.attend)
    (attention,) = compiled.kernels
    assert "flash_attention" in attention.name
    assert attention.flops == 2 * 2 * (2 * 8 * 8 * 16)


def test_nothing_stays_of_the_pretended_gpu():
    available = torch.cuda.is_available()
    properties = torch.cuda.get_device_properties
    compile_block(AttentionBlock(), [meta(1, 2, 8, 16)], {}, kernel_counts.attend)
    assert torch.cuda.is_available() == available
    assert torch.cuda.get_device_properties is properties
    assert not torch.compiler.is_compiling()
