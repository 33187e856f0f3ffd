"""FSDP2 on one rank, under NCCL on a GPU, with and without offload, against a process alone."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.first_hour.lines import Line, Setting, judge
from benchmarks.first_hour.parts.updates import UPDATES, digest_tensors
from benchmarks.gpu import GUIDANCE
from benchmarks.gpu_sides import LORA, SIZES, STAGE, build_sides, build_training_batch
from ebbflow.models.base import default_device
from ebbflow.training.batches import count_micro_batches
from ebbflow.training.distributed import STORE, join_process_group
from ebbflow.training.policy import Policy
from ebbflow.training.sharding import gather_tensor, shard_like
from ebbflow.training.update import PolicyUpdater

CLAIMS = {
    False: "FSDP2 on one rank trains the bytes of a process alone",
    True: "FSDP2 on one rank with offload trains the bytes of a process alone",
}


def measure(setting: Setting) -> Iterator[Line]:
    expected = train_adapters(setting.size, shard=False, cpu_offload=False)
    for offload, claim in CLAIMS.items():
        with announce_one_rank(), join_process_group(offload):
            digest = train_adapters(setting.size, shard=True, cpu_offload=offload)
        yield judge(claim, digest == expected, f"{digest[:12]} and {expected[:12]}", "equal")


@contextmanager
def announce_one_rank() -> Iterator[None]:
    """Set the environment of a launcher's only rank inside the block."""
    with tempfile.TemporaryDirectory() as folder:
        variables = {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_WORLD_SIZE": "1",
            STORE: str(Path(folder) / "store"),
        }
        os.environ.update(variables)
        try:
            yield
        finally:
            for name in variables:
                del os.environ[name]


def train_adapters(size: str, shard: bool, cpu_offload: bool) -> str:
    """Train a LoRA for some updates with a copy that is swapped in; return a digest of both."""
    torch.manual_seed(0)
    bench = build_sides(SIZES[size], default_device(), "bfloat16")
    # From plain rollouts, so that all three train on the same rows.
    batch = build_training_batch(bench, GUIDANCE, bench.size.training_micro_batch)
    policy = Policy(bench.model, LORA, seed=0, shard=shard, cpu_offload=cpu_offload)
    torch.manual_seed(1)
    start = {name: torch.randn(p.shape) * 0.02 for name, p in policy.parameters.items()}
    policy.assign_parameters(
        {name: shard_like(start[name].to(p.device), p) for name, p in policy.parameters.items()}
    )
    policy.snapshot_copy("old")
    updater = PolicyUpdater(policy, STAGE)
    passes = count_micro_batches(batch.group_index, bench.size.training_micro_batch)
    for _ in range(UPDATES):
        updater.update_policy(batch, passes)
        # Overwrites the shards right after they were read, as every step with a copy does.
        with policy.use_copy("old"):
            pass
    return digest_tensors({n: gather_tensor(p.detach()) for n, p in policy.parameters.items()})
