"""The requests and answers of a rollout engine in a process of its own: a JSON header and the
bytes of tensors, nothing else.

A message is the length of the header in eight bytes (little-endian), the header, and the elements
of each tensor that it names, one after another. Tensors are sent from where they lie and received
where they stay: at video sizes every further copy would take as long as the socket. Both processes
import this module, so it needs no more than ``ebbflow.rollouts.generate`` does.
"""

from __future__ import annotations

import json
import socket
import struct
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ebbflow.flow.noise import SampleKeys
from ebbflow.flow.windows import Plan, Trajectory
from ebbflow.models.base import Conditioning
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.rollouts.generate import Rollouts

LENGTH = struct.Struct("<Q")
TENSORS = "tensors"
"""Key of the header: [name, type, shape] of each tensor that follows it."""
TYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
    )
}
"""Types of tensors by the name that a header has for them."""
CPU = torch.device("cpu")

Header = dict[str, Any]
Tensors = Mapping[str, Tensor]
Answer = Callable[[Header, Tensors], tuple[Header, Tensors]]


def send_message(connection: socket.socket, header: Header, tensors: Tensors | None = None) -> None:
    """Send a message; tensors come from any device.

    Raises:
        KeyError: a tensor has a type that is not in ``TYPES``.
    """
    # JSON and plain elements, no pickle: the environments have different versions of Python
    # packages, and reading a message must not run code.
    plain = {name: values.detach().to(CPU).contiguous() for name, values in (tensors or {}).items()}
    names = {dtype: name for name, dtype in TYPES.items()}
    layout = [[name, names[values.dtype], list(values.shape)] for name, values in plain.items()]
    head = json.dumps(header | {TENSORS: layout}).encode()
    connection.sendall(LENGTH.pack(len(head)) + head)
    for values in plain.values():
        connection.sendall(_view_bytes(values))


def receive_message(connection: socket.socket) -> tuple[Header, dict[str, Tensor]]:
    """Wait for a message.

    Raises:
        EOFError: the other side is gone.
    """
    length = bytearray(LENGTH.size)
    _fill_bytes(connection, memoryview(length))
    head = bytearray(LENGTH.unpack(length)[0])
    _fill_bytes(connection, memoryview(head))
    header = json.loads(head)
    tensors = {}
    for name, dtype, shape in header.pop(TENSORS):
        values = torch.empty(shape, dtype=TYPES[dtype])
        _fill_bytes(connection, _view_bytes(values))
        tensors[name] = values
    return header, tensors


def _view_bytes(values: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    # NumPy has no bfloat16, so torch views the elements as bytes.
    return values.reshape(-1).view(torch.uint8).numpy().data


def _fill_bytes(connection: socket.socket, rest: memoryview) -> None:
    """Receive as many bytes as a piece of memory has."""
    while rest:
        # A socket gives what has arrived so far, and nothing at all once the other side is gone.
        count = connection.recv_into(rest)
        if not count:
            raise EOFError("the other side has closed the connection")
        rest = rest[count:]


def serve_calls(connection: socket.socket, calls: Mapping[str, Answer]) -> None:
    """Answer the calls that arrive, by the header's ``call``, until the other side is gone; an
    error is an answer too.
    """
    try:
        while True:
            send_message(connection, *_answer_call(calls, *receive_message(connection)))
    except (EOFError, ConnectionError):
        return


def _answer_call(
    calls: Mapping[str, Answer], header: Header, tensors: Tensors
) -> tuple[Header, Tensors]:
    try:
        return calls[header["call"]](header, tensors)
    except Exception as error:  # whatever it is, the side that waits has to know
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}, {}


@dataclass(frozen=True)
class Task:
    """One call of an engine's ``generate``."""

    conditioning: Conditioning
    keys: SampleKeys
    sampler: SamplerConfig
    plan: Plan | None

    def pack_message(self) -> tuple[Header, Tensors]:
        header = {
            "keys": {name: _convert_integers(value) for name, value in vars(self.keys).items()},
            "sampler": self.sampler.model_dump(),
            "plan": None if self.plan is None else asdict(self.plan),
            "guidance": [part.guidance for part in _list_guidance_sides(self.conditioning)],
        }
        sides = enumerate(_list_guidance_sides(self.conditioning))
        return header, {
            f"{side} {name}": values
            for side, part in sides
            for name, values in part.tensors.items()
        }

    @staticmethod
    def unpack_message(header: Header, tensors: Tensors) -> Task:
        plan = header["plan"]
        if plan is not None:
            plan = Plan(
                tuple(plan["stochastic"]), tuple(plan["trained"]), plan["tail"], plan["with_means"]
            )
        # Backwards: a conditioning holds its negative one, which must exist before it.
        conditioning: Conditioning | None = None
        for side, guidance in reversed(list(enumerate(header["guidance"]))):
            named = [(name.split(" ", 1), values) for name, values in tensors.items()]
            columns = {name: values for (number, name), values in named if number == str(side)}
            conditioning = Conditioning(columns, conditioning, guidance)
        assert conditioning is not None
        return Task(
            conditioning,
            SampleKeys(**header["keys"]),
            SamplerConfig.model_validate(header["sampler"]),
            plan,
        )


def _convert_integers(value: Any) -> Any:
    """Integers of any kind as JSON's."""
    return np.asarray(value).tolist()


def _list_guidance_sides(conditioning: Conditioning) -> list[Conditioning]:
    """The conditioning and, where it is guided, what guidance steers away from."""
    guided = conditioning.negative is not None and conditioning.guidance != 1
    return [conditioning, *([conditioning.negative] if conditioning.negative and guided else [])]


def pack_rollouts(rollouts: Rollouts, images: np.ndarray) -> dict[str, Tensor]:
    """What an engine has generated, as tensors."""
    trajectory = rollouts.trajectory.list_columns() if rollouts.trajectory else {}
    return {"images": torch.from_numpy(images), "final latents": rollouts.latents, **trajectory}


def unpack_rollouts(tensors: Tensors) -> tuple[Rollouts, np.ndarray]:
    """The inverse of ``pack_rollouts``."""
    rest = dict(tensors)
    images = rest.pop("images").numpy()
    latents = rest.pop("final latents")
    return Rollouts(latents, Trajectory(**rest) if rest else None), images
