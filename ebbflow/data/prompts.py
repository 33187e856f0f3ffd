"""Prompt tables (placeholder while the room is being built)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Prompt:
    """One row of the prompt table."""

    prompt_id: int
    prompt: str
    negative_prompt: str
    target: str | None
    source: str
    split: str
    metadata: str
