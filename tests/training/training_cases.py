"""What the tests of the training room share: a stage around an algorithm, a batch of six samples,
plain gradient descent.
"""

from __future__ import annotations

import dataclasses
import warnings

import numpy as np
import pytest
import torch

from ebbflow.data.records import StageRecord
from ebbflow.flow.noise import SampleKeys
from ebbflow.flow.windows import Plan
from ebbflow.models import load_model
from ebbflow.models.base import device_of
from ebbflow.recipe.algorithms import EmaScheduleConfig
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.recipe.stages import OnlineStageConfig
from ebbflow.rollouts.generate import generate_samples
from ebbflow.training.batches import build_forward_batch, build_trajectory_batch
from ebbflow.training.policy import Policy
from ebbflow.training.policy_io import open_policy, save_policy
from ebbflow.training.policy_metadata import PolicyMetadata
from ebbflow.training.update import PolicyUpdater
from tests.glyph_stages import small_stage
from tests.parameters import values

FULL = PolicyConfig(train="full")
LORA = PolicyConfig(train="lora", rank=4, alpha=8)
TEXTS = ["ABCD", "EFGH", "IJKL", "MNOP", "QRST", "UVWX"]
ALONE = np.arange(6)
PAIRS = np.array([0, 0, 1, 1, 2, 2])
GROUPS = np.array([0, 0, 0, 1, 1, 2])
NFT = {"name": "diffusion_nft", "beta": 0.5, "noise_levels": 1}


def stage_of(algorithm, **stage):
    """An online stage that trains with an algorithm, given as its keys or its name; nothing is
    clipped unless asked for.
    """
    algorithm = {"name": algorithm} if isinstance(algorithm, str) else algorithm
    return OnlineStageConfig.model_validate(
        small_stage({"optimizer": {"max_grad_norm": 1e9}, **stage, "algorithm": algorithm})
    )


def schedule_of(model, stage):
    """The sigmas of the stage's sampler."""
    return model.compute_sigmas(stage.sampler.steps)


def sgd(policy, lr=0.1):
    """Plain gradient descent: Adam's first step is a sign, which turns rounding into full steps."""
    return torch.optim.SGD(policy.parameters.values(), lr=lr)


def updater_of(model, algorithm, config=FULL, lr=0.1, version=0, **stage):
    """A updater of a new policy with every copy that the algorithm may ask for, all of them the
    base model.
    """
    policy = Policy(model, config, 0)
    for name in ("old", "sampling", "teacher", "recent", *(["ema"] if config.ema else [])):
        policy.ensure_copy(name)
    metadata = PolicyMetadata(base_digest="b", recipe_digest="r", config=config, version=version)
    return PolicyUpdater(policy, stage_of(algorithm, **stage), metadata, sgd(policy, lr))


def samples(model, start=0, stop=6):
    """(clean latents, conditioning, advantages, keys) of rows ``start`` to ``stop`` of six fixed
    samples.
    """
    prompt_ids = list(range(start, stop))
    clean = torch.stack(
        [
            torch.randn(model.latent_shape, generator=torch.Generator().manual_seed(i))
            for i in prompt_ids
        ]
    )
    advantage = torch.tensor([2.0, -1.0, -1.5, 1.0, -2.0, 3.0])[start:stop]
    return (
        clean.to(device_of(model)),
        model.encode_texts(TEXTS[start:stop]),
        advantage.to(device_of(model)),
        SampleKeys(1, prompt_ids, [7] * len(prompt_ids)),
    )


def forward_rows(model, stage, group_index=ALONE, start=0, stop=6):
    """The forward-process rows of those samples."""
    return build_forward_batch(
        *samples(model, start, stop),
        group_index[start:stop],
        stage.hyper_parameters,
        schedule_of(model, stage),
        visit=0,
    )


def rollout(model, sampler, steps=(0, 1, 2), precision="float32", micro_batch=4):
    """(trajectory, conditioning, keys) of the six samples under the policy as it is."""
    conditioning = model.encode_texts(TEXTS)
    keys = SampleKeys(2, list(range(6)), [7] * 6)
    plan = Plan(steps, steps, with_means=True)
    rollouts = generate_samples(model, conditioning, keys, sampler, plan, micro_batch, precision)
    return rollouts.trajectory, conditioning, keys


def trajectory_rows(model, stage, steps=(0, 1, 2), corrected=None):
    """The trajectory rows of a rollout of six samples under the policy as it is."""
    trajectory, conditioning, keys = rollout(model, stage.sampler, steps)
    return build_trajectory_batch(
        corrected or trajectory, conditioning, samples(model)[2], keys, stage.sampler
    )


def farthest(one, other):
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


def quietly(call, *args, **kwargs):
    """The result of a call that must not warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return call(*args, **kwargs)


def spoilt(batch, field, row, wrong):
    """The batch with one wrong row."""
    changed = getattr(batch, field).clone()
    changed[row] = wrong
    return dataclasses.replace(batch, **{field: changed})


AVERAGED = EmaScheduleConfig(slope=0.25, max_decay=0.8)
BOTH = pytest.mark.parametrize("config", [FULL, LORA], ids=["full", "lora"])


def average_policy(config):
    return PolicyConfig(**{**config.model_dump(), "ema": AVERAGED})


def take_steps(updater, count, group_index=None):
    """The parameters after each of some steps of one update on the same samples."""
    batch = forward_rows(
        updater.policy.model, updater.stage, *(() if group_index is None else (group_index,))
    )
    seen = []
    for _ in range(count):
        updater.update_policy(batch, 2)
        updater.finish_step()
        seen.append(values(updater.policy))
    return seen


def train(ctx, base_folder, folder, trained, updates):
    """Train a policy folder into another with plain gradient descent; returns (parameters, average)
    as they were left.
    """
    model = load_model(base_folder)
    policy, metadata = open_policy(ctx, model, folder)
    updater = PolicyUpdater(policy, ctx.online_config, metadata, sgd(policy, 0.5))
    take_steps(updater, updates)
    record = StageRecord(
        label="x", algorithm="sft", samples=0, optimizer_steps=updater.updates, seconds={}
    )
    save_policy(ctx, updater, metadata, record, trained)
    return values(policy), policy.copies.get("ema")


UNITS = {"diffusion_nft": ALONE, "dgpo": GROUPS, "crd": GROUPS, "diffusion_dpo": PAIRS}
