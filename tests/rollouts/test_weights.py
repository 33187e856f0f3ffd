"""The checksum of weights: it knows them by all that they are, and not by how they come."""

from __future__ import annotations

import pytest
import torch

from ebbflow.rollouts import weights
from ebbflow.rollouts.weights import (
    TransferError,
    WeightsVersion,
    compute_checksum,
    split_into_buckets,
)

pytestmark = pytest.mark.any_cpu

SENT = {name: torch.arange(6.0).reshape(2, 3) + number for number, name in enumerate("abcd")}


@pytest.fixture(params=[1, 48, 2**20], ids=["a tensor at once", "two", "all"], autouse=True)
def hashed_at_once(request, monkeypatch):
    monkeypatch.setattr(weights, "HASHED_AT_ONCE", request.param)


@pytest.mark.parametrize(
    "changed",
    [
        SENT | {"b": SENT["b"].reshape(3, 2)},
        SENT | {"b": SENT["b"].view(torch.int32)},
        SENT | {"b": -SENT["b"]},
        SENT | {"a": SENT["b"], "b": SENT["a"]},
        {name: SENT[name] for name in "abc"},
        {name.upper(): value for name, value in SENT.items()},
    ],
    ids=["shape", "type", "bytes", "exchanged", "missing", "names"],
)
def test_a_change_is_found_on_arrival(changed):
    buckets = tuple(split_into_buckets(changed, 30))
    with pytest.raises(TransferError, match="version 3 arrived as"):
        WeightsVersion(3, compute_checksum(SENT), buckets).receive_tensors(lambda bucket: bucket)


def test_neither_order_nor_memory_layout_counts():
    turned = {name: SENT[name].T.contiguous().T for name in reversed(SENT)}
    assert (
        WeightsVersion(3, compute_checksum(SENT), (turned,))
        .receive_tensors(lambda bucket: bucket)
        .keys()
        == SENT.keys()
    )
