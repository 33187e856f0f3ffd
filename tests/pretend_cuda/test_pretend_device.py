"""The pretend device refuses what CUDA refuses, allows what CUDA allows, and counts."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.pretend_cuda.device import CUDA, MixedDevices, pretend_cuda


@pytest.fixture
def device():
    with pretend_cuda() as device:
        yield device


REFUSED = {
    "product": lambda x: x * torch.ones(3),
    "matrix product": lambda x: torch.ones(2, 3) @ x,
    "concatenation": lambda x: torch.cat([x, torch.ones(1)]),
    "embedding": lambda x: torch.nn.functional.embedding(torch.tensor([1]), x[:, None]),
    "in place": lambda x: torch.ones(3).add_(x),
    "index of the device": lambda x: torch.ones(3)[torch.zeros(1, dtype=torch.int64, device=CUDA)],
    "scalar in a concatenation": lambda x: torch.stack([x.sum(), torch.tensor(1.0)]),
}
ALLOWED = {
    "number": lambda x: x * 2,
    "scalar": lambda x: x * torch.tensor(2.0),
    "condition": lambda x: torch.where(x > 0, x, torch.tensor(0.0)),
    "index of the CPU": lambda x: x[torch.tensor([0, 2])],
    "copy": lambda x: x.copy_(torch.zeros(3)),
    "view": lambda x: x.view(1, 3).T,
    "new": lambda x: x.new_tensor([1.0, 2.0]) + x.new_zeros(2) + torch.ones_like(x)[:2],
    "deep copy": copy.deepcopy,
    "parameter": lambda x: torch.nn.Parameter(x) + x,
}


@pytest.mark.parametrize("case", REFUSED)
def test_operands_of_two_devices_are_refused_with_the_line(device, case):
    x = torch.ones(3, device="cuda")
    with pytest.raises(MixedDevices, match=r"^MIXED aten::.* at tests/pretend_cuda/test_pretend"):
        REFUSED[case](x)


@pytest.mark.parametrize("case", ALLOWED)
def test_results_are_on_the_device_of_their_operands(device, case):
    result = ALLOWED[case](torch.ones(3, device="cuda"))
    assert result.device == CUDA
    assert result.is_cuda


def test_rows_of_the_device_are_padded_on_it(device):
    rows = [torch.ones(3, 2, device="cuda"), torch.ones(1, 2, device="cuda")]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=7.0)
    assert padded.device == CUDA
    assert padded.cpu()[1, :, 0].tolist() == [1.0, 7.0, 7.0]


def test_there_is_no_numpy_array_of_the_device(device):
    with pytest.raises(TypeError, match="MIXED.*has no numpy array"):
        torch.ones(3, device="cuda").numpy()
    assert torch.ones(3, device="cuda").cpu().numpy().sum() == 3


def test_copies_and_waits_are_counted_by_line(device):
    x = torch.ones(3).to("cuda")
    y = x.to("cuda", torch.float64)  # a conversion on the device
    x[x > 0].sum().item()
    y.cpu().sum().item()
    assert (device.host_to_device.total(), device.device_to_host.total()) == (1, 1)
    assert device.synchronizations == 2, "the mask, and one of the two items"
    (line,) = device.device_to_host
    assert line.startswith("tests/pretend_cuda/test_pretend_device.py:")
    assert device.kernels["aten::sum"] == 1


def test_a_transfer_shares_no_memory(device):
    x = torch.ones(3)
    x.to("cuda").zero_()
    x.to("cuda").cpu().zero_()
    assert x.sum().item() == 3


def test_training_on_the_device_gives_the_values_of_the_cpu():
    def train(device: str) -> torch.Tensor:
        torch.manual_seed(0)
        network = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.GELU(), torch.nn.Linear(4, 1))
        network.to(device)
        optimizer = torch.optim.AdamW(network.parameters(), lr=0.1)
        for _ in range(2):
            network(torch.ones(2, 3, device=device)).square().mean().backward()
            assert network[0].weight.grad.device.type == device
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return network[0].weight.detach().cpu()

    expected = train("cpu")
    with pretend_cuda():
        trained = train("cuda")
    assert torch.equal(trained, expected)


def test_outside_of_it_nothing_has_changed():
    before = torch.cuda.is_available()
    with pretend_cuda():
        x = torch.ones(3, device="cuda")
    assert x.device == torch.device("cpu")
    assert torch.cuda.is_available() == before


def test_zeros_of_a_backward_pass_are_on_the_device(device):
    # The gradient of a split whose other parts nobody used is joined with zeros that torch makes.
    x = torch.ones(4, 2, device="cuda", requires_grad=True)
    first, *_ = x.split(1)
    first.sum().backward()
    assert x.grad.device == CUDA
    assert x.grad.cpu().sum() == 2


def test_zeros_of_a_backward_pass_on_the_cpu_stay_there(device):
    x = torch.ones(4, 2, requires_grad=True)
    first, *_ = x.split(1)
    first.sum().backward()
    assert x.grad.device == torch.device("cpu")
    with pytest.raises(MixedDevices):
        x.grad + torch.ones(4, 2, device="cuda")
