"""The page of the benchmark of feature caches."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.rollout_caches import LAYERS, Setting, format_page
from ebbflow.recipe.rollout_cache import FirstBlockCacheConfig


def test_the_page_has_the_speed_up_and_the_paired_difference() -> None:
    plain = Setting("none", None, [4.0, 3.0, 9.0], 1.0, torch.ones(2, 4), np.array([0.5, 0.7]))
    cached = Setting(
        "first_block",
        FirstBlockCacheConfig(),
        [2.0, 1.0, 8.0],
        0.5,
        torch.full((2, 4), 1.5),
        np.array([0.4, 0.4]),
    )
    page = format_page({name: [plain, cached] for name in ("glyph", *LAYERS)}, "a command")
    # Medians 4 and 2; half of the norm away; differences -.1 and -.3.
    assert "| first_block | 2.00 | 50% | 0.500 | 0.400 | -0.200 ± 0.100 |" in page
    assert "| none | 1.00 | 100% | 0.000 | 0.600 | +0.000 ± 0.000 |" in page
    assert page.count("| first_block | 2.00 | 50% | 0.500 |\n") == len(LAYERS)
