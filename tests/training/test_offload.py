"""One process with its optimiser's state and copies in main memory learns the same bytes as one
that holds them on its device.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from training_cases import FULL, LORA, NFT, forward_rows, stage_of

from ebbflow.models import load_model, predict
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.storage.artifacts import write_new_folder
from ebbflow.training.checkpoint import restore_updater, write_part
from ebbflow.training.optimizer import OffloadedOptimizer
from ebbflow.training.policy import Policy
from ebbflow.training.update import PolicyUpdater

AVERAGED = PolicyConfig(ema={"slope": 0.5, "max_decay": 0.5})
FACTORS = {"lr_factors": [{"parameters": "*.bias", "factor": 0.5}], "weight_decay": 0.1}
CASES = {
    "adamw": (AVERAGED, FACTORS),
    "muon": (FULL, {"name": "muon", **FACTORS}),
    "lora": (LORA, {}),
}


def begin(base, case, cpu_offload):
    config, optimizer = CASES[case]
    policy = Policy(load_model(base), config, 0, cpu_offload=cpu_offload)
    for name in ("old", *(["ema"] if config.ema else [])):
        policy.ensure_copy(name)
    updater = PolicyUpdater(
        policy, stage_of(NFT, reference={"weight": 0.1}, optimizer={"lr": 0.01, **optimizer})
    )
    assert isinstance(updater.optimizer, OffloadedOptimizer) == cpu_offload
    return updater


def train(updater, count):
    """(metrics, every tensor) after some updates."""
    rows = forward_rows(updater.policy.model, updater.stage)
    metrics = [updater.update_policy(rows, 2) for _ in range(count)]
    tensors = {"": updater.policy.parameters, **updater.policy.copies}
    tensors |= {
        name: updater.optimizer.state[parameter]
        for name, parameter in updater.policy.parameters.items()
    }
    return metrics, {
        (part, name): value.clone()
        for part, values in tensors.items()
        for name, value in values.items()
    }


def same(one, other):
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    return all(torch.equal(value, other[1][name]) for name, value in one[1].items())


@pytest.mark.any_cpu
@pytest.mark.parametrize("case", CASES)
def test_it_changes_no_byte_with_or_without_a_checkpoint_between(base_folder, tmp_path, case):
    held, through, first, second = (
        begin(base_folder, case, offload) for offload in (False, True, True, True)
    )
    expected = train(held, 3)
    assert same(train(through, 3), expected)
    train(first, 2)
    with write_new_folder(tmp_path / "checkpoint") as folder:
        write_part(folder, first)
    restore_updater(tmp_path / "checkpoint", second)
    resumed = train(second, 1)
    assert same((expected[0][-1:], expected[1]), resumed)


def test_a_checkpoint_is_of_either(base_folder, tmp_path):
    """Where things wait is no part of what was learnt."""
    held = begin(base_folder, "adamw", False)
    waiting = begin(base_folder, "adamw", True)
    train(waiting, 2)
    with write_new_folder(tmp_path / "checkpoint") as folder:
        write_part(folder, waiting)
    restore_updater(tmp_path / "checkpoint", held)
    assert same(train(held, 1), train(waiting, 1))


def test_the_state_of_no_parameter_shares_memory_with_another(base_folder):
    """Each is copied back into its own."""
    updater = begin(base_folder, "adamw", True)
    train(updater, 1)
    before = {
        value.data_ptr() for state in updater.optimizer.state.values() for value in state.values()
    }
    train(updater, 1)
    after = {
        value.data_ptr() for state in updater.optimizer.state.values() for value in state.values()
    }
    assert after == before
    assert len(before) == sum(map(len, updater.optimizer.state.values()))


class DelayedStream:
    """Stands in for a CUDA stream, as slow as can be: what is launched runs when something waits
    for it. An event of torch is replaced by the stream itself, which knows all that it must wait
    for.
    """

    def __init__(self) -> None:
        self.launched: list[Callable[[], object]] = []

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        launched, self.launched = self.launched, []
        for work in launched:
            work()


@pytest.fixture
def group_of_one(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_shards_are_not_overwritten_while_the_device_may_still_read_them(
    base_folder, group_of_one, monkeypatch
):
    """FSDP2 reads offloaded shards later than the forward pass returns: ``use_copy`` must neither
    put the copy over the policy's weights before they are read, nor the policy's over the copy's.
    """
    policy = Policy(load_model(base_folder), FULL, 0, shard=True, cpu_offload=True)
    policy.snapshot_copy("old")
    policy.assign_parameters({name: 1.5 * p.detach() for name, p in policy.parameters.items()})
    arguments = forward_rows(policy.model, stage_of(NFT)).inputs.model_arguments(slice(0, 6))
    predictions = {}

    def launch(name):
        def run():
            with torch.no_grad():
                predictions[name] = predict(policy.model, *arguments)

        stream.launched.append(run)

    stream = DelayedStream()
    expected = {}
    for name in ("current", "old"):
        with policy.use_copy(name):
            launch(name)
            stream.synchronize()
        expected[name] = predictions.pop(name)
    assert not torch.equal(expected["current"], expected["old"])

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", lambda: stream)
    for name in ("current", "old"):
        with policy.use_copy(name):
            launch(name)
    stream.synchronize()
    for name, prediction in expected.items():
        assert torch.equal(predictions[name], prediction), name
