"""Two ranks learn from a step of an online stage what one learns, however unevenly its rows are
left to them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from ebbflow.algorithms.advantages import AdvantageResult
from ebbflow.data.prompts import Prompt
from ebbflow.flow.noise import SampleKeys
from ebbflow.flow.windows import Plan
from ebbflow.models import load_model
from ebbflow.models.base import ModelError
from ebbflow.online.messages import RolloutRequest
from ebbflow.online.sample_workers import RolloutWorker
from ebbflow.online.training_worker import TrainingWorker
from ebbflow.recipe import Recipe
from ebbflow.rewards.base import Reward
from ebbflow.rewards.combine import Scorer
from ebbflow.rollouts.generate import Diffusers, Rollouts, generate_samples
from ebbflow.rollouts.weights import TransferError
from ebbflow.stage import StageContext
from ebbflow.training.batches import count_shared_micro_batches, shard_for_rank
from ebbflow.training.distributed import Ranks, join_process_group
from ebbflow.training.policy import Policy
from ebbflow.training.update import PolicyUpdater
from tests.conftest import Darkness
from tests.glyph_stages import small_stage
from tests.two_processes import as_two_ranks

# Two processes with FSDP2 on five groups of three samples, of which the last one says nothing:
# nothing divides by two.

TEXTS = ["ABCD", "EFGH", "IJKL", "MNOP", "QRST"]
LORA = {"train": "lora", "rank": 4, "alpha": 8}
ROUGH = {"rollout_precision": "bfloat16"}
ODE = {"sampler": {"name": "ode", "steps": 3}}
DECOUPLED = {"weights": "truncated", "normalise": True, "reject": "k1", "reject_above": 0.03}
BYPASS = {"mode": "bypass", "reject": "k1", "reject_above": 0.03, "reject_level": "sequence_max"}
SHIFTED = {"correction": {**DECOUPLED, "reject_above": 100}}
CASES = {
    "as it is": {"algorithm": {"name": "mix_grpo"}},
    "decoupled": {
        "algorithm": {"name": "grpo_guard"},
        **ROUGH,
        "correction": DECOUPLED,
        "policy": LORA,
    },
    "bypass": {"algorithm": {"name": "flow_dppo"}, **ROUGH, "correction": BYPASS},
    "samples": {"algorithm": {"name": "diffusion_nft", "noise_levels": 1}, **ODE, "policy": LORA},
    "groups": {"algorithm": {"name": "dgpo", "noise_levels": 2}, **ODE},
    "two copies": {
        "algorithm": {"name": "crd", "old": {"slope": 0.5}, "sampling": {"slope": 0.7}},
        **ODE,
        "policy": LORA,
    },
    "a group an update": {
        "algorithm": {"name": "dgpo", "noise_levels": 2},
        **ODE,
        "updates_per_step": 4,
    },
    "reward gradients": {
        "algorithm": {"name": "draft", "last_steps": 2},
        "sampler": {"name": "ode", "steps": 3},
        "policy": LORA,
    },
    "whole weights": {
        "algorithm": {"name": "draft", "last_steps": 2},
        "sampler": {"name": "ode", "steps": 3},
    },
    "branches": {
        "algorithm": {"name": "srpo", "discount": [200, 300], "target": None},
        **ODE,
        "policy": LORA,
    },
    "student": {
        "algorithm": {"name": "tdm", "fake_updates": 2},
        "sampler": {"name": "ode", "steps": 3},
        "policy": LORA,
    },
    "whole student": {
        "algorithm": {"name": "tdm", "fake_updates": 2},
        "sampler": {"name": "ode", "steps": 3},
    },
    "rewarded student": {
        "algorithm": {"name": "tdm_r1", "reward_weight": 5.0},
        "sampler": {"name": "ode", "steps": 3},
        "policy": LORA,
    },
    "one term": {"algorithm": {"name": "mix_grpo"}, **SHIFTED, "updates_per_step": 1},
    "nothing": {"algorithm": {"name": "mix_grpo"}, **SHIFTED},
}
LEFT = {"one term": [(4, 1)], "nothing": []}
"""(sample, column) of the rows that are not rejected, where the others are made to be: fewer than
ranks, and none.
"""


def recipe_of(case: str) -> Recipe:
    stage = {
        "kind": "online",
        "group_size": 3,
        "prompts_per_step": 5,
        "micro_batch": 4,
        "updates_per_step": 2,
    }
    stage |= {
        "sampler": {"steps": 4},
        "reference": {"weight": 0.1, "guidance": 1},
        "optimizer": {
            "max_grad_norm": 0.5,
            "eps": 1.0,
        },  # of a fake score, whose first step would be a sign, too
        **CASES[case],
    }
    policy = stage.pop("policy", {"train": "full"})
    if stage["sampler"].get("name") != "ode":
        stage["window"] = {"kind": "fixed", "size": 2}
    return Recipe.model_validate({"stages": [small_stage(stage)], "policy": policy})


def train_arguments(
    base: Path, ctx: StageContext, case: str
) -> tuple[list[RolloutRequest], AdvantageResult, Rollouts]:
    """A step's rollouts by the untouched base model: the same in every process."""
    model = load_model(base)
    config = ctx.online_config
    sample_index = np.arange(5).repeat(3)
    keys = SampleKeys(ctx.stage_seed, sample_index.tolist(), [*range(3)] * 5)
    conditioning = model.encode_texts(TEXTS)
    rows = conditioning.select_rows(torch.from_numpy(sample_index))
    compares_means = config.hyper_parameters.compares_means
    chosen = Plan((0, 1), (0, 1), with_means=compares_means) if config.window else None
    rollouts = generate_samples(
        model, rows, keys, config.sampler, chosen, 4, config.rollout_precision
    )
    if case in LEFT:
        left = [rollouts.trajectory.log_probs[row].clone() for row in LEFT[case]]
        rollouts.trajectory.log_probs.add_(1)
        for row, value in zip(LEFT[case], left, strict=True):
            rollouts.trajectory.log_probs[row] = value
    values = np.array([2, -1, -1, 1, 0.5, -1.5, -1, -0.5, 1.5, 3, -1, -2, 0, 0, 0], np.float32)
    prompts = [Prompt(index, text, "", None, "", "train", "{}") for index, text in enumerate(TEXTS)]
    shown = [prompts[index] for index in sample_index]
    request = RolloutRequest(0, shown, conditioning, sample_index, keys, config.sampler, chosen)
    return [request], AdvantageResult(values, sample_index < 4, {}), rollouts


def trainer_of(base: Path, ctx: StageContext, ranks: Ranks) -> TrainingWorker:
    policy = Policy(load_model(base), ctx.recipe.policy, 0, shard=ranks.world > 1)
    for name in ctx.following_copies:
        policy.ensure_copy(name)
    if ctx.starts_as_teacher:
        policy.copies["teacher"] = {
            key: p.detach() + 0.1 for key, p in policy.parameters.items()
        }  # not the policy itself
    # Adam's first step is a sign, which turns rounding into full steps.
    updater = PolicyUpdater(
        policy, ctx.online_config, optimizer=torch.optim.SGD(policy.parameters.values(), lr=0.05)
    )
    return TrainingWorker(ctx, updater, rank=ranks.rank, scorer=Scorer(((Darkness(), 1.0),)))


def two_steps(base: Path, case: str, file: Path, ranks: Ranks) -> dict[str, Any]:
    """Two steps on the same rollouts, which are stale at the second; rank 0 writes the
    parameters."""
    ctx = StageContext(recipe_of(case), 0, 0)
    trainer = trainer_of(base, ctx, ranks)
    arguments = train_arguments(base, ctx, case)
    first = trainer.publish(0)
    reports = [trainer.train(*arguments) for _ in range(2)]
    last = trainer.publish(2, "current")
    generates = trainer.publish(2)
    if ranks.rank == 0:
        save_file({name: value for bucket in last.buckets for name, value in bucket.items()}, file)
    return {
        "metrics": [report.metrics for report in reports],
        "updates": reports[-1].updates,
        "published": [
            [weights.digest, weights.size, len(weights.buckets)] for weights in (first, generates)
        ],
    }


def train_as_a_rank(base: Path, output: Path) -> None:
    with join_process_group() as ranks:
        said = {
            case: two_steps(base, case, output / f"{case}.safetensors", ranks) for case in CASES
        }
    (output / f"said-{ranks.rank}.json").write_text(json.dumps(said))


@pytest.fixture(scope="module")
def together(base_folder, tmp_path_factory):
    """What two gloo processes say of every case, this one and a spawned one, and the folder of the
    parameters.
    """
    output = tmp_path_factory.mktemp("two-ranks")
    as_two_ranks(train_as_a_rank, base_folder, output)
    return [json.loads((output / f"said-{rank}.json").read_text()) for rank in range(2)], output


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_learn_what_one_learns(base_folder, together, tmp_path, case):
    alone = two_steps(base_folder, case, tmp_path / "alone.safetensors", Ranks(0, 1))
    (first, second), folder = [said[case] for said in together[0]], together[1]
    assert first["metrics"] == second["metrics"]
    assert first["updates"] == second["updates"] == alone["updates"]
    # The first part of a batch has other rows on two ranks, unless both take all of them.
    same = case in ("a group an update", "one term", "nothing")
    of_the_first_part = {} if same else {"grad_variance": 0, "velocity_drift": 0}
    for one, other in zip(alone["metrics"], first["metrics"], strict=True):
        assert one | of_the_first_part == pytest.approx(
            other | of_the_first_part, rel=2e-3, abs=1e-6
        )
    expected = load_file(tmp_path / "alone.safetensors")
    found = load_file(folder / f"{case}.safetensors")
    untouched = trainer_of(
        base_folder, StageContext(recipe_of(case), 0, 0), Ranks(0, 1)
    ).updater.policy.parameters
    assert farthest(expected, found) < 1e-6
    assert (farthest(expected, untouched) > 1e-4) == (case != "nothing")


class OfLatents(Reward):
    scores = "latents"
    has_gradient = True
    name = "of_latents"

    def __call__(self, latents, prompts):
        raise NotImplementedError

    def score_with_gradient(self, latents, prompts):
        raise NotImplementedError


def test_a_family_that_does_not_decode_with_gradient_is_refused_before_the_first_step():
    ctx = StageContext(recipe_of("reward gradients"), 0, 0)
    updater = SimpleNamespace(policy=SimpleNamespace(model=SimpleNamespace(decode_latents=None)))
    with pytest.raises(
        ModelError,
        match=r"draft learns .*, and SimpleNamespace has no decode_with_gradient\(latents\)",
    ):
        TrainingWorker(ctx, updater, scorer=Scorer(((Darkness(), 1.0),)))
    TrainingWorker(ctx, updater, scorer=Scorer(((OfLatents(), 1.0),)))  # which decodes nothing
    updater.policy.model.decode_with_gradient = updater.policy.model.decode_latents
    TrainingWorker(ctx, updater, scorer=Scorer(((Darkness(), 1.0),)))


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_publish_whole_weights(base_folder, together, case):
    trainer = trainer_of(base_folder, StageContext(recipe_of(case), 0, 0), Ranks(0, 1))
    alone = trainer.publish(0)
    (first, _), (nothing, _) = [said[case]["published"] for said in together[0]]
    assert first == [alone.digest, alone.size, len(alone.buckets)]
    assert nothing == ["", 0, 0]


@pytest.mark.parametrize(
    ("case", "updates", "skipped"),
    [("as it is", 4, 0), ("a group an update", 8, 0), ("nothing", 0, 2)],
)
def test_an_update_without_terms_is_counted(together, case, updates, skipped):
    said = together[0][0][case]
    assert said["updates"] == updates
    assert [metrics["skipped_updates"] for metrics in said["metrics"]] == [skipped] * 2


def test_what_the_cases_are_about_happens(together):
    """Terms are dropped, and means are of the whole batch: otherwise equality would say little."""
    said = {case: result["metrics"] for case, result in together[0][0].items()}
    assert 0 < said["decoupled"][0]["rollout/rejected"] < 1
    assert 0 < said["bypass"][0]["rollout/rejected"] < 1
    assert said["one term"][0]["rollout/rejected"] == pytest.approx(29 / 30)
    assert said["nothing"][0]["rollout/rejected"] == 1


def test_workers_generate_with_the_weights_that_the_trainer_publishes(base_folder):
    """Every version is received once and verified; damaged weights are not generated with."""
    ctx = StageContext(recipe_of("samples"), 0, 0)
    trainer = trainer_of(base_folder, ctx, Ranks(0, 1))
    requests, advantages, rollouts = train_arguments(base_folder, ctx, "samples")
    worker = RolloutWorker(Diffusers(ctx, Policy(load_model(base_folder), ctx.recipe.policy, 0)))
    request = replace(requests[0], prompts=[], plan=None)
    latents = [rollouts.latents]
    for version in (1, 2):
        trainer.train(requests, advantages, rollouts)
        weights = trainer.publish(version)
        reports = []
        for _ in range(2):
            found, _, report = worker.generate(request, weights)
            reports.append(report)
        assert [report.version for report in reports] == [version, version]
        assert reports[0].receive_seconds > 0 == reports[1].receive_seconds
        assert (found.latents - latents[-1]).abs().max() > 1e-5
        latents.append(found.latents)
    trainer.train(requests, advantages, rollouts)
    weights = trainer.publish(3)
    next(iter(weights.buckets[0].values())).view(-1)[0] += 1e-3
    with pytest.raises(TransferError, match="the weights of version 3 arrived as"):
        worker.generate(request, weights)


@given(st.integers(1, 20), st.integers(1, 6), st.integers(1, 4), st.integers(1, 9))
def test_every_rank_has_a_part_of_every_pass(count, world, draws, size):
    units = [np.array([2 * number, 2 * number + 1]) for number in range(count)]
    shares = [shard_for_rank(units, Ranks(rank, world)) for rank in range(world)]
    passes = count_shared_micro_batches(units, world, draws, size)
    assert 1 <= passes <= min(map(len, shares)) * draws
    times = np.unique(np.concatenate([np.concatenate(mine) for mine in shares]), return_counts=True)
    assert times[0].tolist() == list(range(2 * count))
    assert set(times[1]) == {world if count < world else 1}, (
        "every unit counts as much as any other"
    )


def farthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)
