"""Objects of every length arrive on the ranks that want them."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed as dist

from ebbflow.training.distributed import join_process_group
from ebbflow.training.object_messages import (
    FIRST_PART,
    LENGTH,
    broadcast_object,
    gather_objects,
    receive_object,
    send_object,
)
from tests.two_processes import as_two_ranks

pytestmark = pytest.mark.any_cpu


def make_text(packed_bytes: int) -> str:
    """Make a text that has so many bytes once it is packed."""
    overhead = count_packed_bytes("x" * 1000) - 1000
    text = "x" * (packed_bytes - overhead)
    assert count_packed_bytes(text) == packed_bytes
    return text


def count_packed_bytes(text: str) -> int:
    packed = io.BytesIO()
    torch.distributed.distributed_c10d._pickler(packed).dump(text)
    return len(packed.getvalue())


def exchange_objects() -> None:
    room = FIRST_PART - LENGTH
    with join_process_group() as ranks:
        # Objects that need no second part on any rank, on one, and on both, with lengths of their
        # own: the last byte of the first part, and the first of the second.
        for lengths in ((500, room), (room + 1, 500), (500, 3 * room), (2 * room, room + 1)):
            texts = [make_text(length) for length in lengths]
            assert gather_objects(texts[ranks.rank]) == texts
            assert broadcast_object(texts[ranks.rank], 1) == texts[1]
        # In a group of this rank alone; all ranks make every group.
        alone = [dist.new_group([0]), dist.new_group([1])][ranks.rank]
        assert gather_objects(ranks.rank, alone) == [ranks.rank]

        if ranks.rank == 1:
            # More than one on its way, of different lengths: each arrives under its own tag.
            sent = [
                send_object({"small": torch.arange(3)}, 0, tag=7),
                send_object("y" * 5 * room, 0, tag=8),
            ]
            for message in sent:
                message.wait_until_received()
                assert not message.parts
        else:
            assert receive_object(1, tag=8) == "y" * 5 * room
            assert receive_object(1, tag=7)["small"].tolist() == [0, 1, 2]


def test_objects_arrive_whatever_their_length():
    as_two_ranks(exchange_objects)


def test_a_process_alone_gathers_its_own_object():
    assert gather_objects("alone") == ["alone"]
    assert broadcast_object("alone", 0) == "alone"
