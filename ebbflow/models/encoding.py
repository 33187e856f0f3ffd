"""Prompts are encoded once: their embeddings wait on the CPU, and the text encoders need no place beside the transformer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from ebbflow.data.prompts import Prompt
from ebbflow.models.base import Conditioning, Model

Encode = Callable[[Sequence[Prompt]], Conditioning]


def encode_once(model: Model, prompts: Iterable[Prompt]) -> Encode:
    """Encode every different prompt among ``prompts``; returns what looks up the conditioning of any of them, on its device."""
    unique = {_key(prompt): prompt for prompt in prompts}
    table = model.encode(list(unique.values())).to(torch.device("cpu"))
    device = next(model.transformer.parameters()).device
    row = {key: index for index, key in enumerate(unique)}

    def look_up(wanted: Sequence[Prompt]) -> Conditioning:
        return table.rows(torch.tensor([row[_key(prompt)] for prompt in wanted])).to(device)

    return look_up


def _key(prompt: Prompt) -> tuple[str, str, bytes | None]:
    return prompt.prompt, prompt.negative_prompt, prompt.image
