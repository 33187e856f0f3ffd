"""What the host knows of small tensors of the device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ebbflow.flow.host_values import derive, expand_sigma, read_on_host, to_device
from ebbflow.models.base import Conditioning
from tests.pretend_cuda.device import PretendDevice, pretend_cuda


@pytest.fixture
def device() -> Iterator[PretendDevice]:
    with pretend_cuda() as pretend:
        yield pretend


CUDA = torch.device("cuda", 0)


def test_values_that_came_from_the_host_are_read_without_waiting(device):
    sigmas = to_device(torch.tensor([1.0, 0.5, 0.0]), CUDA)
    sigma = expand_sigma(sigmas, 1, 2)
    rows = derive(lambda values, index: values[index], sigma, to_device(torch.tensor([1]), CUDA))
    assert rows.is_cuda
    assert read_on_host(rows).tolist() == [0.5]
    assert not device.device_to_host
    assert not device.waits


def test_values_that_were_made_on_the_device_are_read_once(device):
    sigma = torch.full((2,), 0.25, device="cuda")
    assert read_on_host(sigma).tolist() == [0.25, 0.25]
    assert read_on_host(sigma).tolist() == [0.25, 0.25]
    assert device.device_to_host.total() == 1


def test_what_one_operand_of_the_device_alone_decides_is_not_known(device):
    known = to_device(torch.ones(2), CUDA)
    unknown = torch.ones(2, device="cuda")
    read_on_host(derive(lambda a, b: a + b, known, unknown))
    assert device.device_to_host.total() == 1


def test_masks_of_prompts_are_known_through_all_that_selects_and_joins_rows(device):
    def conditioning(length: int) -> Conditioning:
        mask = torch.arange(4)[None] < length
        return Conditioning({"embeds": torch.ones(1, 4, 2), "mask": mask}).to(CUDA)

    both = Conditioning.concatenate([conditioning(1), conditioning(3)]).to_dtype(torch.bfloat16)
    index = to_device(torch.tensor([1, 0, 1]), CUDA)
    rows = both.select_rows(index).select_rows(slice(0, 2))
    assert read_on_host(rows["mask"]).sum(1).tolist() == [3, 1]
    assert rows["mask"].is_cuda
    assert not device.device_to_host
    assert not device.waits
