"""Operations on the meta device whose results are known from earlier ones.

torch finds the shape of such a result in Python, which takes a tenth of a millisecond and more, and
the blocks of a network ask for the same shapes dozens of times.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


class Layout(NamedTuple):
    """What is known of a tensor without values that fills memory of its own."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype

    def make_tensor(self) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")


class Results(NamedTuple):
    """What an operation returns: its first argument, or new tensors.

    Attributes:
        in_place: it is the first argument, changed.
        sequence: ``tuple`` or ``list``; None of an operation that returns one tensor.
        layouts: of the tensors; None for one that was not asked for.
    """

    in_place: bool
    sequence: type | None = None
    layouts: tuple[Layout | None, ...] = ()

    def make(self, args: tuple[Any, ...]) -> Any:
        if self.in_place:
            return args[0]
        tensors = [layout.make_tensor() if layout else None for layout in self.layouts]
        return self.sequence(tensors) if self.sequence else tensors[0]


class MetaResults:
    """Computes the operations that a ``TorchDispatchMode`` sees: of those with tensors of the same
    shapes, strides and dtypes, and the same other arguments, the first one alone.

    Views, results that are no tensors, and operations on tensors with values are computed each
    time.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, Results | None] = {}

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return what ``func(*args, **kwargs)`` does, in memory of its own."""
        key = _describe_call(func, args, kwargs)
        known = self._known.get(key) if key else None
        if known:
            return known.make(args)
        result = func(*args, **kwargs)
        if key and key not in self._known:
            # Of a change in place that also changes the shape, the arguments are others by now.
            is_same = _describe_call(func, args, kwargs) == key
            self._known[key] = _describe_results(result, args, kwargs) if is_same else None
        return result


@cache
def _may_be_known(func: Any) -> bool:
    """Return whether an operation changes nothing but its first argument, and returns no view."""
    aliases = [argument.alias_info for argument in func._schema.arguments] or [None]
    return all(alias is None for alias in aliases[1:]) and (
        aliases[0] is None or aliases[0].is_write
    )


def _describe_call(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Hashable | None:
    """Return all that the layout of a result depends on; None where that may be values."""
    if not _may_be_known(func):
        return None
    try:
        return (func, _describe(args), _describe(tuple(kwargs.items())))
    except _HasValuesError:
        return None


class _HasValuesError(Exception):
    pass


def _describe(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        if not value.is_meta:
            raise _HasValuesError
        return (value.shape, value.stride(), value.dtype)
    if isinstance(value, (list, tuple)):
        return tuple([_describe(item) for item in value])
    # 1, 1.0 and True are equal as keys, and make tensors of different dtypes.
    return (type(value), value)


def _describe_results(result: Any, args: Any, kwargs: Mapping[str, Any]) -> Results | None:
    """Describe the first argument or new tensors; None where a result is anything else."""
    if args and result is args[0]:
        return Results(in_place=True)
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    used = {leaf.untyped_storage()._cdata for leaf in leaves}
    layouts: list[Layout | None] = []
    is_sequence = isinstance(result, (tuple, list))
    tensors = result if is_sequence else [result]
    for tensor in tensors:
        if tensor is None:
            layouts.append(None)
            continue
        if not isinstance(tensor, Tensor) or not tensor.is_meta:
            return None
        # Some operations share memory with an argument and do not say so (``_unsafe_view``).
        memory = tensor.untyped_storage()
        layout = Layout(tensor.shape, tensor.stride(), tensor.dtype)
        size = layout.make_tensor().untyped_storage().nbytes()
        if memory._cdata in used or memory.nbytes() != size:
            return None
        used.add(memory._cdata)
        layouts.append(layout)
    return Results(False, type(result) if is_sequence else None, tuple(layouts))
