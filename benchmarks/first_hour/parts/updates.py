"""Two processes with deterministic kernels, each with a rollout and two updates."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from benchmarks.first_hour.lines import Line, Setting, judge
from benchmarks.first_hour.parts.ratio import move_adapters
from benchmarks.gpu import GUIDANCE
from benchmarks.gpu_sides import LORA, SIZES, STAGE, build_sides, build_training_batch
from ebbflow.compute import use_deterministic_kernels
from ebbflow.models.base import default_device
from ebbflow.training.batches import count_micro_batches
from ebbflow.training.policy import Policy
from ebbflow.training.update import PolicyUpdater

CLAIM = "two processes with deterministic kernels train the same bytes"
UPDATES = 2


def measure(setting: Setting) -> Iterator[Line]:
    code = f"from {__name__} import print_digest; print_digest({setting.size!r})"
    digests = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        if done.returncode:
            sys.stderr.write(done.stderr)
            yield judge(CLAIM, False, "", "equal digests", done.stderr.strip()[-300:])
            return
        digests.append(done.stdout.split()[-1])
    yield judge(CLAIM, digests[0] == digests[1], " and ".join(d[:12] for d in digests), "equal")


def print_digest(size: str) -> None:
    """Train with deterministic kernels, and print a digest of the adapters."""
    use_deterministic_kernels()
    torch.manual_seed(0)
    bench = build_sides(SIZES[size], default_device(), "bfloat16")
    policy = Policy(bench.model, LORA, seed=0)
    move_adapters(policy)
    updater = PolicyUpdater(policy, STAGE)
    rows = bench.size.training_micro_batch
    for _ in range(UPDATES):
        batch = build_training_batch(bench, GUIDANCE, rows)
        updater.update_policy(batch, count_micro_batches(batch.group_index, rows))
    print(digest_tensors(policy.parameters))


def digest_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Compute the sha256 of tensors, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()
