"""Prompts to evaluate on."""

from __future__ import annotations

import pytest


@pytest.fixture
def prompts(make_prompts):
    """Five to validate and six held out; the ids are those of a longer table."""
    chosen = make_prompts(11)
    return [
        type(p)(**{**vars(p), "prompt_id": 10 + i, "split": "validation" if i < 5 else "held_out"})
        for i, p in enumerate(chosen)
    ]
