"""Encodes each prompt once: embeddings wait on the CPU, so text encoders need no memory beside the transformer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from ebbflow.data.prompts import Prompt
from ebbflow.models.base import Conditioning, Model, device_of

Encode = Callable[[Sequence[Prompt]], Conditioning]
Key = tuple[str, str, bytes | None]


@dataclass(frozen=True)
class Embeddings:
    """Encoded prompts on the CPU, a row for each different one."""

    table: Conditioning
    row: dict[Key, int]

    def __call__(self, prompts: Sequence[Prompt]) -> Conditioning:
        """The conditioning of some of these prompts, a row each."""
        return self.table.rows(torch.tensor([self.row[_key(prompt)] for prompt in prompts]))


def embed(model: Model, prompts: Iterable[Prompt]) -> Embeddings:
    """Encode every different prompt."""
    unique = {_key(prompt): prompt for prompt in prompts}
    table = model.encode(list(unique.values())).to(torch.device("cpu"))
    return Embeddings(table, {key: index for index, key in enumerate(unique)})


def encode_once(model: Model, prompts: Iterable[Prompt]) -> Encode:
    """Encode prompts now; the result looks up the conditioning of any of them, on the model's device."""
    embeddings, device = embed(model, prompts), device_of(model)
    return lambda wanted: embeddings(wanted).to(device)


def _key(prompt: Prompt) -> Key:
    return prompt.prompt, prompt.negative_prompt, prompt.image
