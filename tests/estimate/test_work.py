"""The work of a stage, against a network that counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ebbflow.data.prompt_windows import PROMPTS_PER_WINDOW
from ebbflow.estimate.main_memory import count_encoded_prompts, encodes_between_steps
from ebbflow.estimate.run import estimate_recipe
from ebbflow.estimate.work import (
    KEY_BYTES,
    PNG_BYTES_PER_PIXEL,
    count_selected_samples,
    rollout_shard_bytes,
)
from ebbflow.models import load_model
from ebbflow.models.sizes import measure_model
from ebbflow.offline.advantages import write_advantages
from ebbflow.offline.rollouts import generate_shard
from ebbflow.offline.scoring import score_shard
from ebbflow.offline.training import train_epochs
from ebbflow.online.loop import run_online_stage
from ebbflow.online.workers import open_local_workers
from ebbflow.rewards.combine import Scorer
from ebbflow.stage import MetricsRecorder, StageContext
from ebbflow.training.policy import Policy
from ebbflow.training.update import PolicyUpdater
from tests.conftest import Darkness


class Counter:
    """Counts the samples that pass through a transformer, with a gradient and without."""

    def __init__(self, transformer: nn.Module) -> None:
        self.rows = {True: 0, False: 0}
        transformer.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module, args, keys):
        self.rows[torch.is_grad_enabled()] += len(keys["hidden_states"])


MORE = {"prompts_per_step": 2, "group_size": 4, "micro_batch": 4, "updates_per_step": 2, "steps": 3}
FEW = {"sampler": {"name": "ode", "steps": 3}}
ONLINE = [
    {"algorithm": {"name": "mix_grpo"}, "window": {"size": 2}},
    {
        "algorithm": {"name": "mix_grpo"},
        "window": {"size": 2, "tail": 0.4},
        "sampler": {"steps": 8},
    },
    {"algorithm": {"name": "mix_grpo"}, "window": {"size": 2}, "correction": {"mode": "decoupled"}},
    {"algorithm": {"name": "flow_grpo"}, "sampler": {"steps": 5}},
    {"algorithm": {"name": "flow_grpo_fast"}},
    {"algorithm": {"name": "dance_grpo"}, "sampler": {"steps": 6}},
    {"algorithm": {"name": "tempflow_grpo"}, "sampler": {"steps": 5}},
    {"algorithm": {"name": "branch_grpo"}, "sampler": {"steps": 5}, "updates_per_step": 1},
    {"algorithm": {"name": "diffusion_nft"}, **FEW},
    {"algorithm": {"name": "awm"}, **FEW},
    {"algorithm": {"name": "sft"}, **FEW, "updates_per_step": 1},
    {"algorithm": {"name": "diffusion_dpo"}, **FEW, "updates_per_step": 1},
    {"algorithm": {"name": "dgpo"}, **FEW},
    {"algorithm": {"name": "crd"}, **FEW},
    {"algorithm": {"name": "draft"}, "sampler": {"steps": 3}},
    {"algorithm": {"name": "srpo"}, "sampler": {"steps": 3}},
    {"algorithm": {"name": "dmd2", "fake_updates": 2}, "sampler": {"steps": 3}},
    {"algorithm": {"name": "tdm_r1", "fake_updates": 2}, "sampler": {"steps": 3}},
]


@pytest.mark.parametrize(
    "keys", ONLINE, ids=lambda keys: " ".join([keys["algorithm"]["name"], *list(keys)[1:]])
)
def test_an_online_stage_evaluates_the_network_as_often(
    make_recipe, make_prompts, base_folder, scorer, keys
):
    recipe = make_recipe(MORE | keys)
    ctx = StageContext(recipe, 0, 0)
    model = load_model(base_folder)
    policy = Policy(model, recipe.policy, 0)
    counter = Counter(model.transformer)
    for name in (*ctx.following_copies, *(["teacher"] if ctx.starts_as_teacher else [])):
        policy.ensure_copy(name)
    run_online_stage(
        ctx,
        open_local_workers(ctx, PolicyUpdater(policy, ctx.online_config), scorer),
        make_prompts(8),
        MetricsRecorder(),
    )
    work = estimate_recipe(recipe).work["1.1 online"]
    assert (work.samples, work.shards) == (3 * 2 * 4, 0)
    assert counter.rows == {True: work.training, False: work.denoising + work.comparing}


@pytest.mark.parametrize("guided", [False, True])
def test_guidance_doubles_the_work_of_a_real_family(tiny_recipe, make_prompts, scorer, guided):
    stage = {
        "kind": "online",
        **MORE,
        "steps": 1,
        "algorithm": {"name": "flow_grpo"},
        "sampler": {"name": "flow_sde", "steps": 3},
    }
    recipe = tiny_recipe(
        "sd3", {"guidance": 4.0 if guided else 1.0}, stages=[stage], policy={"train": "lora"}
    )
    model = load_model(Path(recipe.model.path), recipe.model)
    policy = Policy(model, recipe.policy, 0)
    counter = Counter(model.transformer)
    ctx = StageContext(recipe, 0, 0)
    run_online_stage(
        ctx,
        open_local_workers(ctx, PolicyUpdater(policy, ctx.online_config), scorer),
        make_prompts(4),
        MetricsRecorder(),
    )
    work = estimate_recipe(recipe).work["1.1 online"]
    assert counter.rows == {True: work.training, False: work.denoising + work.comparing}
    assert work.denoising == 8 * 3 * (1 + guided)


def test_a_guided_reference_is_two_evaluations_of_each_term(tiny_recipe, make_prompts, scorer):
    """The policy, its copies and the rollouts are not guided, and the drift is still measured
    without guidance.
    """
    stage = {
        "kind": "online",
        **MORE,
        "steps": 1,
        "algorithm": {"name": "crd", "noise_levels": 2},
        **FEW,
    }
    stage["reference"] = {"guidance": 4.5}
    recipe = tiny_recipe("sd3", stages=[stage], policy={"train": "lora"})
    model = load_model(Path(recipe.model.path), recipe.model)
    policy = Policy(model, recipe.policy, 0)
    counter = Counter(model.transformer)
    ctx = StageContext(recipe, 0, 0)
    assert ctx.config.reference.guidance == 4.5
    for name in (*ctx.following_copies, *(["teacher"] if ctx.starts_as_teacher else [])):
        policy.ensure_copy(name)
    run_online_stage(
        ctx,
        open_local_workers(ctx, PolicyUpdater(policy, ctx.online_config), scorer),
        make_prompts(4),
        MetricsRecorder(),
    )
    work = estimate_recipe(recipe).work["1.1 online"]
    assert counter.rows == {True: work.training, False: work.denoising + work.comparing}
    assert (work.denoising, work.training) == (8 * 3, 8 * 2)
    assert work.comparing > (1 + 2) * work.training


@pytest.mark.parametrize(
    ("algorithm", "training", "comparing"),
    [
        ({"name": "tdm", "guidance": 4.5}, 3, 2 + 2 + 1),
        # The surrogate's pass; its average, and twice the teacher and the guided surrogate.
        ({"name": "tdm_r1", "guidance": 4.5, "surrogate_guidance": 2.0}, 4, 2 + 2 + 1 + 5),
    ],
    ids=["tdm", "tdm_r1"],
)
def test_a_guided_teacher_is_two_evaluations_of_each_term(
    tiny_recipe, make_prompts, scorer, algorithm, training, comparing
):
    stage = {"kind": "online", **MORE, "steps": 1, "algorithm": algorithm | {"fake_updates": 2}}
    recipe = tiny_recipe(
        "sd3", stages=[stage | {"sampler": {"steps": 2}}], policy={"train": "lora"}
    )
    model = load_model(Path(recipe.model.path), recipe.model)
    ctx = StageContext(recipe, 0, 0)
    policy = Policy(model, recipe.policy, 0)
    counter = Counter(model.transformer)
    for name in ("teacher", *ctx.following_copies):
        policy.ensure_copy(name)
    run_online_stage(
        ctx,
        open_local_workers(ctx, PolicyUpdater(policy, ctx.online_config), scorer),
        make_prompts(4),
        MetricsRecorder(),
    )
    work = estimate_recipe(recipe).work["1.1 online"]
    assert counter.rows == {True: work.training, False: work.denoising + work.comparing}
    assert (work.denoising, work.training) == (8 * 2, 8 * training)
    assert work.comparing - 8 * comparing == 2  # of the base model, at some rows of each update


def test_an_offline_stage_generates_trains_and_stores_as_much(tiny_recipe, make_prompts, tmp_path):
    stage = {
        "kind": "offline",
        "prompts": 4,
        "shards": 1,
        "group_size": 4,
        "epochs": 2,
        "batch_size": 8,
        "micro_batch": 8,
    }
    recipe = tiny_recipe(
        "sd3", stages=[stage | {"sampler": {"steps": 2}}], policy={"train": "lora"}
    )
    ctx = StageContext(recipe, 0, 0)
    model = load_model(Path(recipe.model.path), recipe.model)
    policy = Policy(model, recipe.policy, 0)
    counter = Counter(model.transformer)
    prompts = make_prompts(4)
    policy.ensure_copy("old")
    shard = tmp_path / "rollouts.parquet"
    generate_shard(ctx, model, policy, 0, prompts, 0, shard)
    made = estimate_recipe(recipe)
    work = made.work["1.1 offline"]
    assert counter.rows[False] == work.denoising == 16 * 2
    assert shard.stat().st_size == pytest.approx(work.shards, rel=0.2)
    train_on(ctx, model, policy, prompts, shard, tmp_path)
    assert counter.rows == {True: work.training, False: work.denoising + work.comparing}


def train_on(ctx, model, policy, prompts, shard, folder):
    """Score a shard with the stub, and train on it."""
    scores = folder / "scores.parquet"
    advantages = folder / "advantages.parquet"
    score_shard(ctx, Scorer(((Darkness(), 1.0),)), prompts, shard, scores)
    write_advantages(ctx, [scores], advantages)
    updater = PolicyUpdater(policy, ctx.offline_config)
    train_epochs(ctx, model, updater, prompts, [shard], advantages, MetricsRecorder())


def test_a_shard_is_keys_latents_and_pictures(tiny_recipe):
    recipe = tiny_recipe("sd3")
    _, sample = measure_model(recipe.model)
    assert rollout_shard_bytes(sample, 10) == 10 * (
        KEY_BYTES + 4 * 4 * 8 * 8 + PNG_BYTES_PER_PIXEL * 64 * 64
    )


def test_all_prompts_of_the_largest_stage_lie_encoded_on_the_disk(make_recipe):
    evaluated = {"validation": 1, "held_out": 2}

    def estimate(steps):
        online = {"steps": steps, "prompts_per_step": 3}
        return estimate_recipe(make_recipe(online, {"prompts": 4}, prompts=evaluated))

    online = estimate(5)
    offline = estimate(1)
    assert online.embeddings == 5 * 3 * online.prompt
    assert offline.embeddings == 4 * offline.prompt


@pytest.mark.parametrize("kind", ["online", "offline"])
def test_of_many_prompts_two_windows_lie_encoded_on_the_disk(make_recipe, kind):
    def estimate(prompts, count=2048, **keys):
        few = {"steps": 1, "prompts_per_step": 2}
        many = {"steps": prompts // 2, "prompts_per_step": 2} | keys
        if kind == "online":
            return estimate_recipe(make_recipe(many, {"prompts": 2}, prompts={"count": count}))
        return estimate_recipe(make_recipe(few, {"prompts": prompts, "shards": 4} | keys))

    def encoding_of(estimate):
        (memory,) = [
            memory.encoding
            for name, memory in estimate.memory.items()
            if name.endswith(f"{kind} training")
        ]
        return memory

    at_once = estimate(PROMPTS_PER_WINDOW)
    in_windows = estimate(4 * PROMPTS_PER_WINDOW)
    assert at_once.embeddings == PROMPTS_PER_WINDOW * at_once.prompt
    assert in_windows.embeddings == 2 * PROMPTS_PER_WINDOW * in_windows.prompt
    # Between two steps the state of the optimiser is there, too.
    assert encoding_of(in_windows) > encoding_of(at_once)
    if kind == "online":
        # One window has all prompts that rewards may choose, however long the stage is.
        chosen = estimate(4 * PROMPTS_PER_WINDOW, 3000, curriculum={})
        assert chosen.embeddings == 3000 * chosen.prompt
        assert encoding_of(chosen) == encoding_of(at_once)
        # Two windows, and two groups that were chosen too late for them.
        chosen = estimate(4 * PROMPTS_PER_WINDOW, 90000, curriculum={})
        assert chosen.embeddings == (2 * PROMPTS_PER_WINDOW + 4) * chosen.prompt
        assert encoding_of(chosen) == encoding_of(in_windows)
        # Two prompts a step and those of a refill round; the first pass of a filter takes all.
        refilled = estimate(PROMPTS_PER_WINDOW, 90000, refill_rounds=1)
        assert refilled.embeddings == 2 * PROMPTS_PER_WINDOW * refilled.prompt
        tried = {"prompts": 6000, "max_reward": 1}
        filtered = estimate(2, 90000, prompt_filter=tried)
        assert filtered.embeddings == 6000 * filtered.prompt


def test_a_validation_has_a_window_of_its_prompts_beside_those_of_the_steps(make_recipe):
    def build(count):
        keys = {"steps": 5, "prompts_per_step": 3, "validation": {"every": 5, "prompts": count}}
        recipe = make_recipe(keys, prompts={"count": 90000, "validation": count})
        return StageContext(recipe, 0, 0)

    few = build(100)
    many = build(4 * PROMPTS_PER_WINDOW)
    assert count_encoded_prompts(few) == 5 * 3 + 100
    assert count_encoded_prompts(many) == 5 * 3 + PROMPTS_PER_WINDOW
    assert not encodes_between_steps(few)
    assert encodes_between_steps(many)


@pytest.mark.parametrize(
    ("held_out", "at_a_time"),
    [(6000, 6020), (4 * PROMPTS_PER_WINDOW, 2 * PROMPTS_PER_WINDOW)],
)
def test_an_evaluation_of_many_prompts_has_two_windows_on_the_disk(
    make_recipe, held_out, at_a_time
):
    recipe = make_recipe(
        {"steps": 5}, prompts={"count": 20000, "validation": 20, "held_out": held_out}
    )
    estimate = estimate_recipe(recipe)
    assert estimate.embeddings == at_a_time * estimate.prompt


def test_extremes_alone_are_trained_on(make_recipe):
    few = make_recipe({"group_size": 8, "advantages": {"keep_extremes": 1}})
    assert count_selected_samples(StageContext(few, 0, 0)) == (2 * 2, 1)


def test_policies_hold_their_copies_and_there_is_one_for_every_stage(make_recipe):
    nft = {"algorithm": {"name": "diffusion_nft"}, "sampler": {"name": "ode"}}
    made = estimate_recipe(make_recipe(nft, rounds=3, policy={"ema": {}}))
    sizes = made.sizes
    assert made.work["1.1 online"].policy == 4 * (
        3 * sizes.parameters + sizes.buffers
    )  # served, old, iterate
    assert made.stored["policies"] == 3 * sum(work.policy for work in made.work.values())
