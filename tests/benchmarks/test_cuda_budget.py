"""The committed table of kernels is what the code gives, and training's own forward pass stays
within its budget.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from benchmarks import cuda_budget
from benchmarks.cuda_budget import CASES, COMPILED, format_case, measure_case, measure_compiled
from benchmarks.kernel_counts import CONSTANTS, Counts, count_kernels

LIMIT = 1.1
"""Kernels and predicted time of a forward pass with adapters, for one of diffusers' own."""
TABLE = Path(cuda_budget.__file__).with_name("results") / "cuda_budget.md"


@cache
def measure_eager(name: str) -> dict[str, Counts]:
    return measure_case(CASES[name])


def check_table(name: str, results: dict[str, Counts]) -> None:
    lines = format_case(name, CASES[name], results)
    assert set(lines) <= set(TABLE.read_text().splitlines()), (
        "run python -m benchmarks.cuda_budget --write, and say in the commit what grew"
    )


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "SD3.5-medium" else pytest.mark.exhaustive)
        for name in CASES
    ],
)
def test_the_table_is_what_the_code_gives(name):
    results = measure_eager(name)
    check_table(name, results)
    plain, without_adapters, with_adapters, _ = results.values()
    assert with_adapters.casts <= plain.casts + 2, "the latents, and all adapters at once"
    assert with_adapters.kernels.total() <= LIMIT * plain.kernels.total()
    assert with_adapters.milliseconds <= LIMIT * plain.milliseconds
    assert without_adapters.kernels.total() > plain.kernels.total(), "autocast's casts"


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_compiled_blocks_do_the_same_work_in_fewer_kernels(name):
    pytest.importorskip("triton", reason="torch for CPUs comes without Triton")
    compiled = measure_compiled(CASES[name])
    eager = measure_eager(name)
    check_table(name, eager | {COMPILED: compiled})
    with_adapters = eager["predict(), LoRA"]
    assert compiled.kernels.total() < with_adapters.kernels.total()
    if not compiled.masked:
        assert compiled.flops == with_adapters.flops


def test_kernels_casts_and_work_are_counted():
    x = torch.empty(8, 16, device="meta")
    weight = torch.nn.Parameter(torch.empty(4, 16, device="meta"))
    with count_kernels() as counts, torch.autocast("meta", torch.bfloat16):
        for _ in range(2):
            torch.nn.functional.linear(x, weight).view(-1)
    assert counts.kernels == {"_to_copy": 3, "mm": 2}, "the weight is cast once"
    assert counts.casts == 3
    assert counts.flops == 2 * (2 * 8 * 4 * 16)
    assert counts.seconds["mm"] == 2 * CONSTANTS["launch"]


@pytest.mark.parametrize(("mask", "masked"), [(None, 0), (torch.ones(1, 1, 1, 8) > 0, 1)])
def test_a_mask_keeps_attention_off_flash(mask, masked):
    query = torch.empty(1, 2, 8, 16, dtype=torch.bfloat16, device="meta")
    if mask is not None:
        mask = mask.to("meta")
    with count_kernels() as counts:
        torch.nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=mask)
    assert counts.masked == masked
    assert counts.flops == 2 * 2 * (2 * 8 * 8 * 16)
