"""Feature caches on a network that processes share: a process that skips blocks still takes part in
gathering their weights.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.tiny_models import build_tiny
from ebbflow.flow.noise import SampleKeys
from ebbflow.models import load_model
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.recipe.model import ModelConfig
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.recipe.rollout_cache import (
    FirstBlockCacheConfig,
    MagCacheConfig,
    TaylorSeerCacheConfig,
)
from ebbflow.rollouts.generate import generate_samples
from ebbflow.training.distributed import join_process_group
from ebbflow.training.policy import Policy
from tests.models.pipeline_cases import prompts
from tests.two_processes import as_two_ranks

pytestmark = pytest.mark.any_cpu

STEPS = 5
CACHES = {
    "first_block": [FirstBlockCacheConfig(threshold=value) for value in (1e9, 1e-9)],
    "taylor_seer": [TaylorSeerCacheConfig(warmup=value) for value in (1, STEPS)],
    "mag": [MagCacheConfig(ratios=[1.0, 1.0], retention=value) for value in (0.0, 1.0)],
}
"""Of each process: the first one skips what the second one computes."""


def load_tiny(folder):
    config = ModelConfig(
        family="flux", path=str(folder), height=64, width=64, guidance=3.5, max_tokens=32
    )
    return load_model(folder, config)


def generate_with(model, cache):
    rows = prompts("flux")[:2]
    keys = SampleKeys(0, [row.prompt_id for row in rows], [0 for _ in rows])
    sampler = SamplerConfig(name="ode", steps=STEPS)
    conditioning = model.encode_prompts(rows)
    return generate_samples(model, conditioning, keys, sampler, cache=cache).latents


def generate_as_a_rank(base: Path, output: Path) -> None:
    with join_process_group() as ranks:
        model = load_tiny(base)
        Policy(model, PolicyConfig(train="full"), 0, shard=True)
        latents = {
            name: generate_with(model, of_rank[ranks.rank]) for name, of_rank in CACHES.items()
        }
        latents["plain"] = generate_with(model, None)
        torch.save(latents, output / f"{ranks.rank}.pt")


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """The model that is not sharded, and what each of two processes generated."""
    base = tmp_path_factory.mktemp("sharded") / "flux"
    build_tiny("flux", base)
    output = tmp_path_factory.mktemp("generated")
    as_two_ranks(generate_as_a_rank, base, output)
    return load_tiny(base), [torch.load(output / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", CACHES)
def test_processes_that_skip_other_blocks_generate_what_one_process_does(generated, name):
    model, of_ranks = generated
    assert not torch.equal(of_ranks[0][name], of_ranks[0]["plain"])
    assert torch.equal(of_ranks[1][name], of_ranks[1]["plain"])
    for latents, cache in zip(of_ranks, CACHES[name], strict=True):
        expected = generate_with(model, cache)
        assert (latents[name] - expected).norm() < 1e-4 * expected.norm()
