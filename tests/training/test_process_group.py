"""A process group is left at once after an error, and says in which phase it waited in vain."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ebbflow.compute import GpuError
from ebbflow.training import distributed
from ebbflow.training.distributed import Ranks, enter_phase, join_process_group

pytestmark = pytest.mark.any_cpu

TIMED_OUT = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting"
    " 1800000ms for recv operation to complete"
)


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """The environment of the only rank of a launcher."""
    for name, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        distributed.STORE: str(tmp_path / "store"),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def nccl(launched, monkeypatch):
    """The calls on a group of GPU 3, which a CPU has not."""
    calls = []
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("use", device)))
    monkeypatch.setattr(
        dist,
        "init_process_group",
        lambda backend, **named: calls.append((backend, named["device_id"])),
    )
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(Ranks, "current", lambda: Ranks(0, 1))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("flush"))
    monkeypatch.setattr(distributed, "_abort_process_group", lambda: calls.append("abort"))
    return calls


def fail(error: BaseException, phase: str = "starting") -> None:
    """An error of this rank in a phase of its stage."""
    with join_process_group():
        enter_phase(phase)
        raise error


def test_nccl_knows_the_gpu_of_its_rank_and_finishes_what_is_in_flight(nccl):
    with join_process_group():
        pass
    device = torch.device("cuda", 3)
    assert nccl == [("use", device), ("nccl", device), "flush"]


def test_a_rank_without_a_gpu_of_its_own_is_refused_before_nccl_starts(nccl, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(GpuError, match="rank 3 .* torch sees 2; set EBBFLOW_TRAIN_PROCESSES=2"):
        fail(AssertionError("the stage began"))
    assert nccl == []


@pytest.mark.parametrize("error", [OSError("No space left on device"), KeyboardInterrupt()])
def test_nccl_is_aborted_after_an_error_and_not_flushed(nccl, error):
    with pytest.raises(type(error)):
        fail(error)
    assert nccl[2:] == ["abort"], "a flush waits for ranks in a collective that never ends"


def test_a_group_of_cpus_is_left_after_an_error(launched):
    with pytest.raises(ValueError, match="a bug"):
        fail(ValueError("a bug"))
    assert not dist.is_initialized()


def test_nccls_flight_recorder_is_on_unless_the_environment_says_otherwise(launched, monkeypatch):
    for name in ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_TEMP_FILE"):
        # Set and removed, so that what the group sets is undone after the test.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "10")
    with join_process_group():
        assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
        assert os.environ["TORCH_FR_BUFFER_SIZE"] == "10"
        assert os.environ["TORCH_FR_DUMP_TEMP_FILE"].endswith("/flight_rank_")


def test_a_timeout_names_the_phase_and_the_minutes(launched):
    with pytest.raises(RuntimeError) as error:
        fail(RuntimeError(TIMED_OUT), "saving the checkpoint of step 40")
    (note,) = error.value.__notes__
    assert "within 30 minutes (TIMEOUT_MINUTES)" in note
    assert "while this one was saving the checkpoint of step 40" in note


def test_other_errors_have_no_note(launched):
    with pytest.raises(RuntimeError) as error:
        fail(RuntimeError("the reward server timed out"))
    assert not hasattr(error.value, "__notes__")


def test_the_phase_is_logged_once_before_nccl_ends_the_process(nccl, monkeypatch, caplog):
    monkeypatch.setattr(distributed, "TIMEOUT", timedelta(seconds=0.25))
    monkeypatch.setattr(distributed, "WARN_BEFORE", timedelta(seconds=0.2))
    with join_process_group():
        enter_phase("loading the policy")
        while not caplog.records:
            pass
        once = len(caplog.records)
    assert once == 1
    assert "this rank has been loading the policy for" in caplog.text
    assert "(TIMEOUT_MINUTES)" in caplog.text
