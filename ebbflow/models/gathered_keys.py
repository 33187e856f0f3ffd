"""Attention over tokens that ranks share, with the keys and values of all of them on each.

Ulysses (``models.context_parallel``) exchanges tokens for heads, and so needs as many keys as
queries and numbers that divide. Here queries stay where they are, and so any number of tokens of
any number of heads attends to any other sequence: sound to video, or a picture to those to edit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import Tensor


class GatheredKeys:
    """Stands in an attention processor where diffusers' ``ParallelConfig`` would: the ranks of
    ``group`` have a share of the queries, keys and values each.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def gather(
        self, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Gather keys and values, [N, S, heads, D], and the mask of the keys, [N, ..., S], of all
        ranks, in the order of the ranks.
        """
        sizes = _exchange_sizes(key, self.group)
        both = _gather_tokens(torch.stack([key, value], 2), sizes, self.group, sums=True)
        if mask is not None:
            # As numbers, whatever its type: not every backend sends booleans.
            rows = mask.movedim(-1, 1).to(torch.float32)
            gathered = _gather_tokens(rows, sizes, self.group, sums=True)
            mask = gathered.to(mask.dtype).movedim(1, -1)
        return both[:, :, 0], both[:, :, 1], mask

    def gather_output(self, module: Any, inputs: Any, output: Tensor) -> Tensor:
        """Gather the tokens, [N, S, D], that a module returns, as a hook of it: every rank has all
        of them, and computes the whole loss from them.
        """
        return _gather_tokens(output, _exchange_sizes(output, self.group), self.group, sums=False)


def _gather_tokens(
    tokens: Tensor, sizes: Sequence[int], group: dist.ProcessGroup, sums: bool
) -> Tensor:
    whole: Tensor = _GatherTokens.apply(tokens, sizes, group, sums)  # type: ignore[no-untyped-call]
    return whole


class _GatherTokens(torch.autograd.Function):
    """[N, S of this rank, ...] -> [N, S of all ranks, ...].

    Its gradient is what this rank has for its own tokens; with ``sums``, the sum over what all
    ranks have for them, as each uses them for something else.
    """

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, sizes: Sequence[int], group: dist.ProcessGroup, sums: bool
    ) -> Tensor:
        ctx.sizes = sizes
        ctx.group = group
        ctx.sums = sums
        padded = _pad_tokens(tokens, max(sizes))
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        rank = dist.get_rank(ctx.group)
        parts = gradients[0].split(ctx.sizes, 1)
        if not ctx.sums:
            return parts[rank], None, None, None
        padded = [_pad_tokens(part, max(ctx.sizes)) for part in parts]
        summed = torch.empty_like(padded[0])
        dist.reduce_scatter(summed, padded, group=ctx.group)
        return summed[:, : ctx.sizes[rank]], None, None, None


def _exchange_sizes(tokens: Tensor, group: dist.ProcessGroup) -> list[int]:
    """Return how many tokens, [N, S, ...], each rank has."""
    # Shares differ by a token where the number does not divide. A rank cannot tell the others' from
    # its own, and one that remembered them would not take part where another one has to ask.
    size = torch.tensor([tokens.shape[1]], device=tokens.device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    numbers: list[int] = torch.cat(sizes).tolist()
    return numbers


def _pad_tokens(tokens: Tensor, size: int) -> Tensor:
    """Tokens, [N, S, ...], filled up to ``size`` with zeros, in one piece of memory."""
    if tokens.shape[1] == size:
        return tokens.contiguous()
    missing = tokens.new_zeros(len(tokens), size - tokens.shape[1], *tokens.shape[2:])
    return torch.cat([tokens, missing], 1)


def let_backends_gather_keys() -> None:
    """Have the attention backends that take diffusers' ``ParallelConfig`` take ``GatheredKeys`` in
    its place; to all others they stay what they are.
    """
    # A processor calls a backend by its name, and these names are an enumeration of diffusers: one
    # of our own cannot be added to it.
    backends = _AttentionBackendRegistry._backends
    for name in filter(
        _AttentionBackendRegistry._is_context_parallel_available, AttentionBackendName
    ):
        if not hasattr(backends[name], "gathers_keys"):
            backends[name] = _gather_before(backends[name])


def _gather_before(attend: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(attend)
    def attend_to_all(*, _parallel_config: Any = None, **inputs: Any) -> Any:
        if isinstance(_parallel_config, GatheredKeys):
            key, value, mask = _parallel_config.gather(
                inputs["key"], inputs["value"], inputs.get("attn_mask")
            )
            inputs |= {"key": key, "value": value}
            # Some backends take no mask at all, and are then called without one.
            if "attn_mask" in inputs:
                inputs["attn_mask"] = mask
            _parallel_config = None
        return attend(**inputs, _parallel_config=_parallel_config)

    attend_to_all.gathers_keys = True  # type: ignore[attr-defined]
    return attend_to_all
