"""Messages to a rollout engine in another process: what is sent arrives, and every failure is an
answer.
"""

from __future__ import annotations

import socket
import threading
import tracemalloc

import numpy as np
import pytest
import torch

from ebbflow.flow.noise import SampleKeys
from ebbflow.flow.windows import Plan, Trajectory
from ebbflow.models import Conditioning
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.rollouts.generate import Rollouts
from ebbflow.rollouts.wire import (
    LENGTH,
    TYPES,
    Task,
    pack_rollouts,
    receive_message,
    send_message,
    serve_calls,
    unpack_rollouts,
)

pytestmark = pytest.mark.any_cpu


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def through(pair, header, tensors):
    """What arrives of a message; it is sent beside, for a socket holds little."""
    ours, theirs = pair
    sender = threading.Thread(target=send_message, args=(ours, header, tensors))
    sender.start()
    found = receive_message(theirs)
    sender.join()
    return found


def encoded(count, guidance=1.0, negative=None):
    tensors = {
        "embeds": torch.randn(count, 5, 3).bfloat16(),
        "mask": torch.rand(count, 5) > 0.5,
        "the pooled one": torch.randn(count, 4),
    }
    return Conditioning(tensors, negative, guidance)


def same(first, second):
    assert first.guidance == second.guidance
    assert first.tensors.keys() == second.tensors.keys()
    assert all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name])
        for name in first.tensors
    )
    assert (first.negative is None) == (second.negative is None)
    if first.negative is not None:
        same(first.negative, second.negative)


def test_negative_prompts_that_guide_nothing_stay_behind():
    task = Task(
        encoded(3, 1.0, encoded(3)),
        SampleKeys(1, [0, 1, 2], [0, 0, 0]),
        SamplerConfig(name="ode", steps=3),
        None,
    )
    header, tensors = task.pack_message()
    assert header["guidance"] == [1.0]
    assert len(tensors) == len(task.conditioning.tensors)


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize(
    "plan", [None, Plan((1, 2), (2,), 0.5), Plan((0,), (0,), None, True)], ids=str
)
def test_a_task_arrives_as_it_was(pair, negative, plan):
    conditioning = encoded(3, 4.5, encoded(3) if negative else None)
    keys = SampleKeys(2**62 + 1, np.array([7, 8, 9]), [np.int64(4), 5, 2**40], sharing=[3])
    sampler = SamplerConfig(name="cps", steps=7, eta=0.3)
    task = Task.unpack_message(
        *through(pair, *Task(conditioning, keys, sampler, plan).pack_message())
    )
    same(task.conditioning, conditioning)
    assert task.keys == SampleKeys(2**62 + 1, [7, 8, 9], [4, 5, 2**40], sharing=[3])
    assert (task.sampler, task.plan) == (sampler, plan)


def test_rollouts_and_images_arrive_as_they_were(pair):
    images = np.arange(2 * 4 * 4 * 3, dtype=np.uint8).reshape(2, 4, 4, 3)
    trajectory = Trajectory(
        torch.linspace(1, 0, 6),
        torch.tensor([1, 2, 4]),
        torch.randn(2, 5, 1, 4, 4),
        torch.randn(2, 3),
        torch.randn(2, 3, 1, 4, 4),
    )
    for rollouts in (
        Rollouts(torch.randn(2, 1, 4, 4), trajectory),
        Rollouts(torch.randn(2, 1, 4, 4), None),
    ):
        found, pictures = unpack_rollouts(through(pair, {}, pack_rollouts(rollouts, images))[1])
        assert np.array_equal(pictures, images)
        assert torch.equal(found.latents, rollouts.latents)
        assert (found.trajectory is None) == (rollouts.trajectory is None)
        if rollouts.trajectory is not None:
            for name, sent in rollouts.trajectory.list_columns().items():
                assert torch.equal(getattr(found.trajectory, name), sent)


def test_large_tensors_pass_the_wire(pair):
    large = torch.randn(3_000_000)
    header, found = through(pair, {"call": "x"}, {"large": large, "view": large[::2]})
    assert header == {"call": "x"}
    assert torch.equal(found["large"], large)
    assert torch.equal(found["view"], large[::2])


@pytest.mark.parametrize("dtype", TYPES.values(), ids=str)
def test_tensors_of_every_type_and_shape_arrive(pair, dtype):
    values = (100 * torch.rand(3, 2)).to(dtype)
    sent = {"a": values, "scalar": values[0, 0], "none": values[:0], "turned": values.T}
    received = through(pair, {}, sent)[1]
    assert list(received) == list(sent)
    for name, expected in sent.items():
        assert received[name].dtype == dtype
        assert torch.equal(received[name], expected)


def test_a_tensor_is_received_where_it_stays(pair):
    large = torch.zeros(8_000_000, dtype=torch.uint8)
    tracemalloc.start()
    through(pair, {}, {"large": large})
    # Tensors are not Python's memory: what is seen here would be copies of them.
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


def test_a_failed_call_is_answered_and_the_next_one_served(pair):
    ours, theirs = pair

    def refuse(header, tensors):
        raise ValueError("made to fail")

    calls = {
        "refuse": refuse,
        "double": lambda header, tensors: ({"n": 2 * header["n"]}, {"x": 2 * tensors["x"]}),
    }
    server = threading.Thread(target=serve_calls, args=(theirs, calls))
    server.start()
    send_message(ours, {"call": "refuse"})
    assert receive_message(ours)[0] == {"error": "ValueError: made to fail"}
    send_message(ours, {"call": "unheard of"})
    assert receive_message(ours)[0] == {"error": "KeyError: 'unheard of'"}
    send_message(ours, {"call": "double", "n": 4}, {"x": torch.tensor([1.5])})
    header, tensors = receive_message(ours)
    assert header == {"n": 8}
    assert tensors["x"].tolist() == [3.0]
    ours.close()
    server.join(10)
    assert not server.is_alive()


def test_half_a_message_is_the_end(pair):
    ours, theirs = pair
    ours.sendall(LENGTH.pack(10) + b"{}")
    ours.close()
    with pytest.raises(EOFError):
        receive_message(theirs)
