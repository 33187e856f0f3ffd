"""Where the parts of a pipeline are while they are called, and afterwards."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from benchmarks.tiny_models import build_tiny
from ebbflow.models import load_model, residency
from ebbflow.models.residency import count_free_bytes, parts_on_device
from ebbflow.recipe.model import ModelConfig
from tests.models.pipeline_cases import prompts
from tests.pretend_cuda.device import CUDA, pretend_cuda

PART_BYTES = 4 * (3 * 2 + 2)


def build_part():
    """A layer with 32 bytes of weights."""
    return nn.Linear(3, 2)


def list_devices(module):
    return {tensor.device.type for tensor in [*module.parameters(), *module.buffers()]}


@pytest.mark.parametrize("free", [0, PART_BYTES + 1, 10_000])
def test_parts_are_on_the_device_while_they_are_called(monkeypatch, free):
    monkeypatch.setattr(residency, "count_free_bytes", lambda device: free)
    part = build_part()
    weight = part.weight
    before = weight.detach().clone()
    with pretend_cuda() as device:
        network = build_part().to(CUDA)
        with parts_on_device(CUDA, [part], [network]):
            assert list_devices(part) == {"cuda"}
            fits = free > 1.25 * PART_BYTES
            assert list_devices(network) == {"cuda" if fits else "cpu"}
        assert list_devices(network) == {"cuda"}
        # A twentieth of 10,000 bytes is more than the part has.
        assert list_devices(part) == {"cuda" if free == 10_000 else "cpu"}
        # The two tensors of a network that waits, and never those of the part.
        assert device.device_to_host.total() == (0 if fits else 2)
        assert part.weight is weight
        assert torch.equal(weight.cpu(), before)


def test_an_error_leaves_parts_and_networks_where_they_were(monkeypatch):
    monkeypatch.setattr(residency, "count_free_bytes", lambda device: 0)
    part = build_part()
    with pretend_cuda():
        network = build_part().to(CUDA)
        with pytest.raises(KeyError), parts_on_device(CUDA, [part], [network]):
            raise KeyError
        assert list_devices(part) == {"cpu"}
        assert list_devices(network) == {"cuda"}


def test_a_part_that_does_not_fit_either_leaves_all_where_they_were(monkeypatch):
    class TooLarge(nn.Parameter):
        """What ``tensor.data`` is of a weight for which the device has no memory."""

        @property
        def data(self):
            return self

        @data.setter
        def data(self, value):
            assert value is self

        def to(self, device):
            raise torch.OutOfMemoryError(str(device))

    monkeypatch.setattr(residency, "count_free_bytes", lambda device: 0)
    part = build_part()
    part.bias = TooLarge(torch.zeros(2))
    with pretend_cuda():
        network = build_part().to(CUDA)
        with (
            pytest.raises(torch.OutOfMemoryError),
            parts_on_device(CUDA, [part], [network]),
        ):
            raise AssertionError("it does not fit")
        assert list_devices(part) == {"cpu"}
        assert list_devices(network) == {"cuda"}


def test_the_cpu_has_no_limit_and_nothing_moves():
    part = build_part()
    address = part.weight.data_ptr()
    with parts_on_device(torch.device("cpu"), [part]):
        assert part.weight.data_ptr() == address
    assert part.weight.data_ptr() == address
    assert count_free_bytes(torch.device("cpu")) == math.inf


@pytest.mark.any_cpu
@pytest.mark.parametrize("fits", [True, False])
def test_prompts_are_encoded_with_the_transformer_aside_where_both_do_not_fit(
    tmp_path, monkeypatch, fits
):
    build_tiny("sd3", tmp_path / "sd3")
    config = ModelConfig(family="sd3", path=str(tmp_path / "sd3"), height=64, width=64)
    wanted = prompts("sd3")
    expected = load_model(tmp_path / "sd3", config).encode_prompts(wanted)
    if not fits:
        monkeypatch.setattr(residency, "count_free_bytes", lambda device: 0)
    with pretend_cuda():
        model = load_model(tmp_path / "sd3", config)
        seen = []
        encoder = model.pipeline.text_encoder
        encoder.register_forward_hook(
            lambda *_: seen.append((list_devices(encoder), list_devices(model.transformer)))
        )
        encoded = model.encode_prompts(wanted)
        assert list_devices(model.transformer) == {"cuda"}
        assert seen[0] == ({"cuda"}, {"cuda" if fits else "cpu"})
    for name, values in expected.tensors.items():
        assert torch.equal(encoded.tensors[name].cpu(), values)
