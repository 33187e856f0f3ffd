"""Weights go from one process to all others; whoever is missing, gone or sent something else says so, and a new group goes on."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing

from ebbflow.online import broadcast
from ebbflow.online.broadcast import BroadcastError
from ebbflow.rollouts.weights import TransferError, WeightsVersion, bucketize, checksum

HERE, WAIT, SOON = "127.0.0.1", 120, 0.3
"""Address, and seconds: for what comes, and for what does not."""


def tensors(version: int) -> dict[str, torch.Tensor]:
    """Tensors of several types and odd sizes: nothing begins at a multiple of anything."""
    generator = torch.Generator().manual_seed(version)
    return {
        "odd": torch.randint(0, 255, (7,), generator=generator, dtype=torch.uint8),
        "weight": torch.randn(3, 5, generator=generator),
        "transposed": torch.randn(4, 6, generator=generator).T,
        "half": torch.randn(5, generator=generator).bfloat16(),
        "scale": torch.tensor(float(version)),
        "large": torch.randn(2, 400, generator=generator).double(),
    }


EXPECTED = broadcast.specs(tensors(0))


def weights(version: int, **other: Any) -> WeightsVersion:
    whole = tensors(version)
    size = sum(value.nbytes for value in whole.values())
    return replace(WeightsVersion(version, checksum(whole), tuple(small(whole)), size), **other)


small = partial(bucketize, size=100)
"""Several buckets, on all members."""


def member(rank: int, port: int, name: str, answers: Any) -> None:
    """A rollout worker: receives once, and in the first group all that follows."""
    broadcast.bucketize = small
    group = broadcast.join(HERE, port, name, rank, 3, WAIT)
    version, received = broadcast.receive(group, EXPECTED)
    wanted = tensors(version.version)
    equal = [torch.equal(received[key], wanted[key]) for key in wanted]
    answers.put((name, rank, "received", [version.version, list(received) == list(wanted) and all(equal)]))
    if name == "first":
        for problem, expected in (("changed", EXPECTED), ("others", {"odd": EXPECTED["odd"]})):
            with pytest.raises(TransferError) as error:
                broadcast.receive(group, expected)
            answers.put((name, rank, problem, str(error.value)))
        stay(group, port, answers) if rank == 1 else go(port, answers)
    broadcast.leave(group)


def stay(group: broadcast.Group, port: int, answers: Any) -> None:
    """The next transfer does not come about, because the other one is gone; both then meet in a new group."""
    with pytest.raises(BroadcastError) as error:
        broadcast.receive(replace(group, timeout=SOON), EXPECTED)
    answers.put((group.name, 1, "waited", str(error.value)))
    member(1, port, "second", answers)


def go(port: int, answers: Any) -> None:
    """Be there for the transfer of a group of two, and die."""
    answers.close()
    answers.join_thread()
    group = broadcast.join(HERE, port, "two", 1, 2, WAIT)
    group.store.set("0/ready/1", "")
    os._exit(0)


@pytest.fixture(scope="module")
def said():
    """``said[group, rank, what]``: what the members say, each a process: this one sends, two receive, and one of them dies."""
    context, store, told = multiprocessing.get_context("spawn"), broadcast.serve(HERE), {}
    answers = context.Queue()

    def worker(rank: int, name: str) -> Any:
        process = context.Process(target=member, args=(rank, store.port, name, answers), daemon=True)
        process.start()
        return process

    def refused(what: str, group: broadcast.Group, sent: WeightsVersion) -> None:
        with pytest.raises(BroadcastError) as error:
            broadcast.send(group, sent)
        told[group.name, 0, what] = str(error.value)

    first, second = worker(1, "first"), worker(2, "first")
    group = broadcast.join(HERE, store.port, "first", 0, 3, WAIT)
    broadcast.send(group, weights(1))
    broadcast.send(group, weights(2, digest=weights(1).digest))
    broadcast.send(group, weights(3, buckets=()))
    refused("lost", broadcast.join(HERE, store.port, "two", 0, 2, WAIT), weights(4, buckets=({"": torch.zeros(2**24)},)))
    second.join()
    group.store.wait(["3/ready/1"])
    refused("waited", replace(group, timeout=SOON), weights(4))
    broadcast.leave(group)
    again = worker(2, "second")
    group = broadcast.join(HERE, store.port, "second", 0, 3, WAIT)
    broadcast.send(group, weights(5))
    for process in (first, again):
        process.join()
        assert process.exitcode == 0
    while not answers.empty():
        name, rank, what, answer = answers.get()
        told[name, rank, what] = answer
    return told


@pytest.mark.parametrize("rank", [1, 2])
def test_tensors_of_every_type_arrive_as_they_were_sent(said, rank):
    assert said["first", rank, "received"] == [1, True]


@pytest.mark.parametrize("rank", [1, 2])
def test_other_bytes_than_those_announced_are_refused(said, rank):
    assert "version 2 arrived as" in said["first", rank, "changed"]
    assert weights(2).digest[:12] in said["first", rank, "changed"]
    assert f"rank {rank} of 'first' expects 7 bytes and is sent {weights(3).size}" in said["first", rank, "others"]


def test_who_is_waited_for_in_vain_is_named(said):
    assert "rank 0 of 'first' waited 0.3 s for rank 2 of 3: the group is of no use any more" in said["first", 0, "waited"]
    assert "rank 1 of 'first' waited 0.3 s for rank 0 of 3" in said["first", 1, "waited"]
    assert "set transfer: store" in said["first", 0, "waited"]


def test_one_that_dies_in_the_middle_ends_the_transfer(said):
    assert "rank 0 of 'two' lost another one in the middle of a transfer (" in said["two", 0, "lost"]


@pytest.mark.parametrize("rank", [1, 2])
def test_a_new_group_goes_on_with_the_one_that_replaced_the_dead(said, rank):
    assert said["second", rank, "received"] == [5, True]


def test_a_group_that_is_not_complete_says_who_is_missing():
    store = broadcast.serve(HERE)
    with pytest.raises(BroadcastError, match=r"rank 0 of 'alone' waited 0.3 s for rank 1, 2 of 3"):
        broadcast.join(HERE, store.port, "alone", 0, 3, SOON)


def test_a_store_that_is_not_there_is_named():
    with socket.socket() as closed:
        closed.bind((HERE, 0))
        port = closed.getsockname()[1]
        with pytest.raises(BroadcastError, match=rf"rank 1 of 'lost' finds no store at {HERE}:{port} .*transfer: store"):
            broadcast.join(HERE, port, "lost", 1, 2, SOON)
