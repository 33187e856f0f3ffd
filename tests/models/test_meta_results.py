"""Operations on the meta device whose results are known from earlier ones give what torch gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ebbflow.models.meta_results import MetaResults

aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def describe(tensor: Tensor) -> tuple[Any, ...]:
    memory = tensor.untyped_storage().nbytes()
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.storage_offset(), memory


OPERATIONS = {
    "sum of two": (aten.add.Tensor, (meta(2, 1), meta(3))),
    "sum with a number": (aten.add.Tensor, (meta(2, dtype=torch.int64), 1)),
    "sum with another kind of number": (aten.add.Tensor, (meta(2, dtype=torch.int64), 1.0)),
    "product": (aten.mm.default, (meta(2, 3).t().contiguous(), meta(2, 5))),
    "layout of channels last": (
        aten.relu.default,
        (meta(1, 3, 4, 4).to(memory_format=torch.channels_last),),
    ),
    "list of tensors": (aten.cat.default, ([meta(2, 3), meta(1, 3)],)),
    "new tensor": (aten.zeros.default, ([2, 3],), {"device": "meta"}),
    "unsafe view": (aten._unsafe_view.default, (meta(2, 3), [6])),
    "view": (aten.view.default, (meta(2, 3), [6])),
}


@pytest.mark.any_cpu
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_known_result_has_the_layout_of_a_computed_one(name):
    func, args, *rest = OPERATIONS[name]
    kwargs = rest[0] if rest else {}
    results = MetaResults()
    for other in OPERATIONS.values():  # of which none is taken for this one
        results.compute(other[0], other[1], other[2] if other[2:] else {})
    expected = describe(func(*args, **kwargs))
    first = results.compute(func, args, kwargs)
    second = results.compute(func, args, kwargs)
    assert describe(first) == describe(second) == expected
    memory = [tensor.untyped_storage()._cdata for tensor in (first, second)]
    assert (memory[0] == memory[1]) == ("view" in name)


@pytest.mark.any_cpu
def test_missing_results_stay_missing():
    tensors = (meta(2, 4, 8), meta(2, 3, 8), meta(4, 3, 1))
    settings = ([4], [1], [0], [1], False, [0], 1, [True, False, True])
    results = MetaResults()
    for _ in range(2):
        inputs, weight, bias = results.compute(
            aten.convolution_backward.default, (*tensors, *settings), {}
        )
        assert weight is None
        assert (inputs.shape, bias.shape) == ((2, 3, 8), (4,))


@pytest.mark.any_cpu
def test_a_change_in_place_returns_its_argument_with_the_shape_that_it_has_then():
    results = MetaResults()
    for _ in range(2):
        tensor = meta(2, 3)
        assert results.compute(aten.add_.Tensor, (tensor, 1), {}) is tensor
        assert results.compute(aten.resize_.default, (tensor, [4, 4]), {}) is tensor
        assert tensor.shape == (4, 4)


class CountedOperation:
    def __init__(self, func: Any) -> None:
        self.func = func
        self._schema = func._schema
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.func(*args, **kwargs)


@pytest.mark.any_cpu
def test_of_equal_calls_the_first_alone_is_computed():
    add = CountedOperation(aten.add.Tensor)
    results = MetaResults()
    for shape, number in [((2, 3), 1), ((2, 3), 1.0), ((3, 2), 1)]:
        for _ in range(3):
            results.compute(add, (meta(*shape), number), {})
    assert add.calls == 3


@pytest.mark.any_cpu
def test_what_depends_on_values_is_computed_each_time():
    results = MetaResults()
    for values in ([1.0, 0.0], [1.0, 1.0]):
        nonzero = results.compute(aten.nonzero.default, (torch.tensor(values),), {})
        assert len(nonzero) == sum(values)
