"""A pretend CUDA device: ordinary code runs on "cuda" on a machine without a GPU, with the values
of the CPU, and fails where a GPU would refuse tensors of two devices.

Inside ``pretend_cuda()`` every tensor still lies in main memory, and the kernels are the CPU's. A
table says which memory (which storage) is the device's. Two of torch's modes keep it:

- ``_Functions`` sees calls from Python: it answers ``tensor.device``, and turns ``device="cuda"``
  and ``tensor.to("cuda")`` into memory of the CPU that is entered in the table. A transfer always
  copies, so that no memory is on both sides.
- ``_Kernels`` sees every operation below, also those of backward passes and optimisers: its results
  are on the device of its operands, and operands of two devices raise ``MixedDevices``.

Example::

    with pretend_cuda() as device:
        x = torch.ones(3, device="cuda")
        (x * torch.ones(3))  # MixedDevices: MIXED aten::mul: ...
        x.sum().item()
    device.synchronizations  # 1

Not covered: streams (every copy is immediate), NCCL, compiled networks, CUDA's own autocast (the
CPU's takes its place), other threads than the one that entered, and memory: the device is never
full.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
ROOT = Path(__file__).parents[2]
MEMORY = 2**40
"""Bytes of the device, all of them free."""
SWEEP_EVERY = 10_000
"""Entries of the table after which those of freed memory are removed."""

COPIES = {aten.copy_, aten._foreach_copy_}
"""Operations that may have operands on two devices: transfers into memory that is there."""
INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
"""Operations whose indices may be in main memory: CUDA copies them to the device."""
SCALAR_OPERANDS = {aten.where, aten.masked_fill, aten.masked_fill_, aten.fill_, aten.lerp}
"""Operations that take a 0-dimensional tensor of the CPU although torch does not tag them as
pointwise."""
WAITING = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
    aten.equal,
}
"""Operations whose result the CPU needs: it waits for the device."""
FREE = {
    "alias", "as_strided", "detach", "diagonal", "expand", "empty", "empty_like", "empty_strided",
    "lift_fresh", "new_empty", "new_empty_strided", "permute", "select", "slice", "split",
    "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze", "view",
    "_reshape_alias", "_unsafe_view",
}  # fmt: skip
"""Operations that start no kernel: views, and memory that nobody has written to."""


class MixedDevices(RuntimeError):
    """Operands on two devices, which CUDA refuses."""


@dataclass
class PretendDevice:
    """What ran on the device, and which memory is its own.

    Attributes:
        kernels: started, by operation: ``{"aten::mul": 12}``. CUDA may fuse some and split others.
        host_to_device, device_to_host: copies, by the line of the repository that made them:
            ``{"ebbflow/models/base.py:301": 2}``.
        blocking_copies: those to the device that the host waits for, and with them for all kernels
            before.
        waits: how often the CPU waited for the device, copies to the CPU aside, by line.
    """

    kernels: Counter[str] = field(default_factory=Counter)
    host_to_device: Counter[str] = field(default_factory=Counter)
    device_to_host: Counter[str] = field(default_factory=Counter)
    blocking_copies: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    # A weak reference keeps the address of its storage from being used again, so that memory of the
    # CPU is never taken for freed memory of the device.
    _storages: dict[int, StorageWeakRef] = field(default_factory=dict)
    # Memory that torch's own C++ made without operands, as backward passes make zeros. On CUDA it
    # would have said where; here it belongs to the tensors that it is first used with.
    _undecided: dict[int, StorageWeakRef] = field(default_factory=dict)
    in_python_factory: bool = False

    @property
    def synchronizations(self) -> int:
        """How often the CPU waited for the device, copies to the CPU aside."""
        return self.waits.total()

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on the device."""
        with torch._C.DisableTorchFunction():
            return tensor.untyped_storage()._cdata in self._storages

    def leave_open(self, result: Any) -> Any:
        """Enter the memory of a result as that of whatever it is used with first."""
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                with torch._C.DisableTorchFunction():
                    reference = StorageWeakRef(tensor.untyped_storage())
                self._undecided[reference.cdata] = reference
        return result

    def is_open(self, tensor: Tensor) -> bool:
        """Return whether a tensor belongs to whatever it is used with first."""
        with torch._C.DisableTorchFunction():
            return tensor.untyped_storage()._cdata in self._undecided

    def place(self, result: Any, on_device: bool) -> Any:
        """Enter the memory of all tensors of a result as the device's, or as the CPU's."""
        for tensor in tree_leaves(result):
            if not isinstance(tensor, Tensor):
                continue
            with torch._C.DisableTorchFunction():
                reference = StorageWeakRef(tensor.untyped_storage())
            self._undecided.pop(reference.cdata, None)
            if on_device:
                self._storages[reference.cdata] = reference
            else:
                self._storages.pop(reference.cdata, None)
        if len(self._storages) % SWEEP_EVERY == SWEEP_EVERY - 1:
            freed = [key for key, reference in self._storages.items() if reference.expired()]
            for key in freed:
                del self._storages[key]
        return result


def _find_line(depth: int = 1) -> str:
    """Return the innermost lines of the repository that led here, the last call first."""
    lines: list[str] = []
    frame: Any = sys._getframe(1)
    while frame and len(lines) < depth:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and path != Path(__file__) and ".venv" not in path.parts:
            lines.append(f"{path.relative_to(ROOT)}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines) or "outside of the repository"


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _replace_cuda(value: Any) -> Any:
    """Return the CPU in place of a CUDA device, and anything else as it is."""
    is_device = isinstance(value, torch.device | str)
    return torch.device("cpu") if is_device and _is_cuda(value) else value


class _Generator(torch.Generator):
    """A generator of the CPU, whatever its device is called."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls, _replace_cuda(torch.device(device)))


class _Autocast(torch.autocast):
    """The CPU's autocast, which rounds other operations than CUDA's."""

    def __init__(self, device_type: str, *arguments: Any, **keys: Any) -> None:
        super().__init__("cpu", *arguments, **keys)


def _pad_sequence(
    sequences: list[Tensor],
    batch_first: bool = False,
    padding_value: float = 0.0,
    padding_side: str = "right",
) -> Tensor:
    """As ``torch.nn.utils.rnn.pad_sequence``, which makes its result in C, on the CPU."""
    assert padding_side == "right"
    longest = max(len(sequence) for sequence in sequences)
    padded = [
        torch.nn.functional.pad(
            sequence,
            (0, 0) * (sequence.ndim - 1) + (0, longest - len(sequence)),
            value=padding_value,
        )
        for sequence in sequences
    ]
    return torch.stack(padded, 0 if batch_first else 1)


class _Functions(TorchFunctionMode):
    """Answers what Python asks of tensors, and makes transfers."""

    def __init__(self, device: PretendDevice) -> None:
        super().__init__()
        self.device = device
        # What a tensor of the device says of itself; others, also on meta, answer themselves.
        self.answers: dict[Any, Any] = {
            Tensor.device.__get__: CUDA,
            Tensor.is_cuda.__get__: True,
            Tensor.is_cpu.__get__: False,
            Tensor.get_device: 0,
        }

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        first = args[0] if args and isinstance(args[0], Tensor) else None
        held = first is not None and self.device.holds(first)
        if held and func in self.answers:
            return self.answers[func]
        if held and func in (Tensor.numpy, Tensor.__array__):
            raise TypeError(
                f"MIXED: a tensor of {CUDA} has no numpy array at {_find_line(3)}; call .cpu()"
            )
        if held and func is Tensor.tolist:
            self.device.waits[_find_line()] += 1
        if func is torch._C._nn.pad_sequence and self.device.holds(args[0][0]):
            return _pad_sequence(*args, **kwargs)
        if func in (Tensor.pin_memory, Tensor.is_pinned):
            return first if func is Tensor.pin_memory else False
        kwargs.pop("pin_memory", None)
        if func is Tensor.cuda:
            return self._transfer(first, held, Tensor.to, (first,), {"device": CUDA})
        if func is Tensor.cpu:
            return self._transfer(first, held, Tensor.to, (first,), {"device": torch.device("cpu")})
        if func is Tensor.to:
            return self._transfer(first, held, func, args, kwargs)
        if func is torch.as_tensor and first is not None:
            return self._transfer(first, held, Tensor.to, args, kwargs)
        target = kwargs.get("device")
        if target is None:
            result = self._call(func, args, kwargs)
            # These copy in C, below what ``_Kernels`` sees.
            if held and func in (Tensor.__deepcopy__, Tensor.new_tensor):
                self.device.place(result, True)
            return result
        on_device = _is_cuda(target)
        result = self._call(func, args, kwargs | {"device": _replace_cuda(target)})
        if on_device and func in (torch.tensor, torch.as_tensor, Tensor.new_tensor):
            self.device.host_to_device[_find_line()] += 1  # values of Python come from the CPU
        return self.device.place(result, on_device)

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a function; memory that Python asked for without operands is the CPU's."""
        leaves = tree_leaves((args, kwargs))
        self.device.in_python_factory = not any(isinstance(leaf, Tensor) for leaf in leaves)
        try:
            return func(*args, **kwargs)
        finally:
            self.device.in_python_factory = False

    def _transfer(
        self, tensor: Tensor, held: bool, func: Any, args: Any, kwargs: dict[str, Any]
    ) -> Tensor:
        """Convert a tensor as ``Tensor.to``, and copy it where it changes the device."""
        target = held
        for other in [*args[1:], *kwargs.values()]:
            if isinstance(other, Tensor):
                target = self.device.holds(other)
            elif isinstance(other, torch.device | str):
                target = _is_cuda(other)
        args, kwargs = tree_map(_replace_cuda, (tuple(args), kwargs))
        result: Tensor = func(*args, **kwargs)
        if target == held:
            return result
        direction = self.device.host_to_device if target else self.device.device_to_host
        direction[_find_line()] += 1
        if target and not kwargs.get("non_blocking"):
            self.device.blocking_copies[_find_line()] += 1
        if result.untyped_storage()._cdata == tensor.untyped_storage()._cdata:
            result = result.clone()
        self.device.place(result, target)
        return result


class _Kernels(TorchDispatchMode):
    """Refuses operands on two devices, counts, and places results."""

    def __init__(self, device: PretendDevice) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_device = [tensor for tensor in tensors if self.device.holds(tensor)]
        undecided = [tensor for tensor in tensors if self.device.is_open(tensor)]
        if not on_device:
            result = func(*args, **kwargs)
            if len(undecided) < len(tensors) or self.device.in_python_factory:
                return self.device.place(result, False)
            return self.device.leave_open(result)
        self.device.place(undecided, True)
        name = func._schema.name
        packet = func.overloadpacket
        if len(on_device) < len(tensors):
            self._check_operands(func, args, [t for t in tensors if not self.device.holds(t)])
        if packet in WAITING or (packet in INDEXED and self._has_mask(args)):
            self.device.waits[_find_line()] += 1
        if name.removeprefix("aten::") not in FREE:
            self.device.kernels[name] += 1
        result = func(*args, **kwargs)
        if packet in COPIES:
            return result  # of ``self``, which stays where it is
        return self.device.place(result, True)

    def _check_operands(self, func: Any, args: Any, on_cpu: list[Tensor]) -> None:
        """Refuse operands of the CPU that CUDA refuses, and count those that are transfers."""
        packet = func.overloadpacket
        if packet in COPIES:
            to_device = self.device.holds(tree_leaves(args[0])[0])
            direction = self.device.host_to_device if to_device else self.device.device_to_host
            direction[_find_line()] += 1
            return
        if packet in INDEXED and self.device.holds(args[0]):
            indices = [index for index in args[1] if index is not None]
            on_cpu = [t for t in on_cpu if not any(t is index for index in indices)]
            self.device.host_to_device[_find_line()] += len(indices)
        takes_scalars = (
            torch.Tag.pointwise in func.tags
            or packet in SCALAR_OPERANDS | INDEXED
            or func._schema.name.startswith("aten::_foreach_")
        )
        wrong = [tensor for tensor in on_cpu if tensor.ndim or not takes_scalars]
        if wrong:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in wrong)
            raise MixedDevices(
                f"MIXED {func._schema.name}: operands on {CUDA} and on the CPU (of shape {shapes})"
                f" at {_find_line(4)}"
            )

    def _has_mask(self, args: Any) -> bool:
        """Return whether an index is boolean: how much it selects is only known on the device."""
        return any(index is not None and index.dtype == torch.bool for index in args[1])


@contextmanager
def pretend_cuda() -> Iterator[PretendDevice]:
    """Pretend inside the block that this machine has one CUDA device."""
    device = PretendDevice()

    def synchronize(*_: Any) -> None:
        device.waits[_find_line()] += 1

    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": synchronize,
        "get_device_name": lambda *_: "pretend",
        "get_device_capability": lambda *_: (9, 0),
        "max_memory_allocated": lambda *_: 0,
        "memory_allocated": lambda *_: 0,
        "reset_peak_memory_stats": lambda *_: None,
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *_: None,
        "mem_get_info": lambda *_: (MEMORY, MEMORY),
    }
    # Optimisers ask the accelerator's stream, which needs a driver, whether it records a graph.
    no_graphs = patch.object(
        torch.optim.Optimizer, "_accelerator_graph_capture_health_check", lambda optimizer: None
    )
    classes = patch.multiple(torch, Generator=_Generator, autocast=_Autocast)
    with (
        patch.multiple(torch.cuda, **answers),
        no_graphs,
        classes,
        _Functions(device),
        _Kernels(device),
    ):
        yield device
