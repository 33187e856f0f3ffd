"""Encodes each prompt once: embeddings wait on the CPU, so text encoders need no memory beside the transformer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from ebbflow.data.prompts import Prompt
from ebbflow.models.base import Conditioning, Model, ModelError, device_of

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


def embed(model: Model, prompts: Iterable[Prompt], negatives: bool = False) -> Embeddings:
    """Encode every different prompt.

    Args:
        negatives: with its negative prompt, even if the model generates without guidance.

    Raises:
        ModelError: ``negatives`` of a family without classifier-free guidance.
    """
    unique = {_key(prompt): prompt for prompt in prompts}
    table = model.encode(list(unique.values())).to(torch.device("cpu"))
    if negatives and table.negative is None:
        if not getattr(model, "guided", False):
            raise ModelError(
                f"reference.guidance needs classifier-free guidance, which {type(model).__name__} has not; set it to 1"
            )
        empty = [replace(prompt, prompt=prompt.negative_prompt) for prompt in unique.values()]
        table = replace(table, negative=model.encode(empty).to(torch.device("cpu")))
    return Embeddings(table, {key: index for index, key in enumerate(unique)})


def encode_once(model: Model, prompts: Iterable[Prompt], negatives: bool = False) -> Encode:
    """``embed`` now; the result looks up the conditioning of any of the prompts, on the model's device."""
    embeddings, device = embed(model, prompts, negatives), device_of(model)
    return lambda wanted: embeddings(wanted).to(device)


def _key(prompt: Prompt) -> Key:
    return prompt.prompt, prompt.negative_prompt, prompt.image
