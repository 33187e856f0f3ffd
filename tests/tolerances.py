"""One rule for the tolerances of tests on floats: so many roundings of the size of the terms."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_equal_to_rounding(
    value: Tensor, expected: Tensor, *terms: Tensor, roundings: int = 32
) -> None:
    """Check that two tensors differ by rounding alone, whatever the CPU.

    A sum is as exact as its largest term: where guidance adds and subtracts predictions of up to
    18, an error of 1e-5 is ten roundings (18 * 2^-23 = 2e-6), and no fixed tolerance holds for all
    families and instruction sets.

    Args:
        terms: what ``expected`` was computed from, where its terms are larger than itself.
        roundings: how many units in the last place of the largest term may be lost on the way.
    """
    size = max(term.abs().max().item() for term in (expected, *terms))
    tolerance = roundings * torch.finfo(expected.dtype).eps * size
    error = (value - expected).abs().max().item()
    assert error <= tolerance, f"{error:.3g} apart; {roundings} roundings of {size:.3g} are allowed"
