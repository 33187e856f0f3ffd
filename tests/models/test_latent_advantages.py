"""Advantages of each latent of LTX-2: a reward moves the latents that it judges, and no other."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pipeline_cases import SHORT, prompts

from ebbflow.algorithms.advantages import (
    PromptStatistics,
    compute_advantages,
    compute_latent_advantages,
)
from ebbflow.flow.noise import SampleKeys
from ebbflow.models.base import predict
from ebbflow.online.loop import run_online_stage
from ebbflow.online.step_advantages import compute_step_advantages
from ebbflow.online.workers import open_local_workers
from ebbflow.recipe.base import RecipeError
from ebbflow.recipe.choices import AdvantagesConfig
from ebbflow.recipe.latents import list_judges
from ebbflow.recipe.recipe import Recipe
from ebbflow.rewards.combine import ScoreTable, load_scorer
from ebbflow.stage import MetricsRecorder, StageContext
from ebbflow.training.kinds.base import StepSamples, trainable_kind
from ebbflow.training.policy import Policy
from ebbflow.training.update import PolicyUpdater
from tests.glyph_stages import small_stage

JPEG = [
    {"name": "jpeg_compressibility", "latents": ["video"]},
    {"name": "jpeg_incompressibility", "latents": ["sound"]},
]
"""Of one picture the one is minus the other, so the advantages of the two latents are opposite."""
NFT = {"name": "diffusion_nft", "noise_levels": 1}
GRPO = {"name": "mix_grpo"}
LEARNS_FROM_BRANCH = {"name": "distillation", "teacher": "branch:glyphs"}


def read(rewards, family="ltx2", branches=(), stages=(), **stage):
    model = {"family": family, "path": "models/base", "guidance": 1.0}
    if family == "ltx2":
        model["frames"] = 9
    return Recipe.model_validate(
        {
            "model": model,
            "prompts": {"source": "prompts.txt"},
            "rewards": rewards,
            "policy": {"train": "lora", "rank": 4, "alpha": 8},
            "branches": dict(branches),
            "stages": list(stages) or [small_stage({"kind": "online", "algorithm": NFT, **stage})],
        }
    )


def test_each_latent_has_the_advantages_of_the_rewards_that_judge_it():
    scores = {
        "pictures": np.array([0.0, 1.0, 5.0, 5.0]),
        "hearing": np.array([3.0, 1.0, 2.0, 6.0]),
        "both": np.array([1.0, 2.0, 4.0, 0.0]),
    }
    weights = {"pictures": 1.5, "hearing": 0.5, "both": 1.0}
    prompt_ids = np.array([0, 0, 1, 1])
    config = AdvantagesConfig(std="none")
    judges = {"video": ["pictures", "both"], "sound": ["hearing", "both"], "text": []}
    result = compute_latent_advantages(scores, weights, prompt_ids, config, judges)
    # By hand: the scores less the means of their groups, times the weights, added.
    video = [1.5 * -0.5 - 0.5, 1.5 * 0.5 + 0.5, 2.0, -2.0]
    sound = [0.5 * 1.0 - 0.5, 0.5 * -1.0 + 0.5, 0.5 * -2.0 + 2.0, 0.5 * 2.0 - 2.0]
    assert result.of_latents.dtype == np.float32
    assert np.allclose(result.of_latents, np.stack([video, sound, [0.0] * 4], 1))
    assert result.row_advantages.shape == (4, 1, 3)
    # All others are of all rewards, as without latents; beside them stand those of each latent.
    whole = compute_advantages(scores, weights, prompt_ids, config)
    assert np.array_equal(result.values, whole.values)
    assert whole.metrics.items() <= result.metrics.items()
    assert result.metrics["advantage/max_magnitude/video"] == pytest.approx(2.0)
    assert result.metrics["reward/mean/sound"] == pytest.approx((2.5 + 2.5 + 5 + 3) / 4)
    assert not any(name.endswith("/text") for name in result.metrics)


def test_a_sample_without_one_of_its_scores_is_trained_on_no_latent():
    scores = {"a": np.array([1.0, 2.0, 4.0]), "b": np.array([1.0, np.nan, 3.0])}
    judges = {"video": ["a"], "sound": ["b"]}
    result = compute_latent_advantages(
        scores, {"a": 1.0, "b": 1.0}, np.zeros(3, int), AdvantagesConfig(std="none"), judges
    )
    assert result.keep.tolist() == [True, False, True]
    # Nor does it pull the mean of the reward that it has.
    assert result.of_latents.tolist() == [[-1.5, -1.0], [0.0, 0.0], [1.5, 1.0]]


def test_a_group_is_trained_where_one_latent_alone_has_a_spread():
    scores = {"a": np.array([1.0, 1.0]), "b": np.array([1.0, 3.0])}
    judges = {"video": ["a"], "sound": ["b"]}
    result = compute_latent_advantages(
        scores, {"a": 1.0, "b": 1.0}, np.zeros(2, int), AdvantagesConfig(std="none"), judges
    )
    assert result.keep.tolist() == [True, True]
    assert result.of_latents.tolist() == [[0.0, -1.0], [0.0, 1.0]]


def test_prompts_that_no_reward_of_a_latent_scores_do_not_widen_its_spread():
    """Prompt 2 is of a set without a reward of the sound: its 0 is no score."""
    scores = {
        "pictures": np.array([0.0, 1.0, 5.0, 7.0]),
        "hearing": np.array([30.0, 32.0, np.nan, np.nan]),
    }
    judges = {"video": ["pictures"], "sound": ["hearing"]}
    result = compute_latent_advantages(
        scores,
        {"pictures": 1.0, "hearing": 1.0},
        np.array([1, 1, 2, 2]),
        AdvantagesConfig(std="global", combine="sum"),
        judges,
        scored=np.ones(4, bool),
    )
    # The scores less their mean, over the standard deviation of 30 and 32, the square root of 2.
    assert result.of_latents[:, 1] == pytest.approx([-(0.5**0.5), 0.5**0.5, 0, 0], rel=1e-3)
    assert result.keep.all()


def test_samples_that_a_latent_is_trained_on_are_not_counted_as_dropped():
    """The extremes of each latent are all four samples, those of the sum of both are two."""
    scores = {"a": np.array([0.0, 1.0, 2.0, 9.0]), "b": np.array([2.0, 9.0, 0.0, 1.0])}
    config = AdvantagesConfig(std="none", combine="sum", keep_extremes=1)
    judges = {"video": ["a"], "sound": ["b"]}
    result = compute_latent_advantages(
        scores, {"a": 1.0, "b": 1.0}, np.zeros(4, int), config, judges
    )
    assert result.keep.all()
    assert result.metrics["group/dropped_samples"] == 0
    assert result.metrics["group/dropped_samples/sound"] == 2


def test_the_rewards_of_a_branch_judge_its_latents():
    recipe = read(
        [{"name": "jpeg_compressibility"}],
        branches={"glyphs": {"rewards": JPEG}},
        stages=[
            small_stage({"kind": "online", "algorithm": NFT, "branch": "glyphs"}),
            small_stage({"kind": "online", "algorithm": LEARNS_FROM_BRANCH}),
        ],
    )
    columns = {reward["name"]: np.array([1.0, 2.0, 4.0]) for reward in JPEG}
    batch = SimpleNamespace(
        prompt_ids=np.zeros(3, int), scores=ScoreTable(np.ones(3), columns, [None] * 3)
    )
    weights = dict.fromkeys(columns, 1.0)
    contexts = [StageContext(recipe, 0, stage) for stage in (0, 1)]
    of_stages = [
        compute_step_advantages(ctx, batch, weights, PromptStatistics(), ctx.latent_judges)
        for ctx in contexts
    ]
    assert of_stages[0].of_latents.shape == (3, 2)
    assert of_stages[1].of_latents is None


@pytest.fixture
def begin(open_tiny):
    """``begin(rewards, **stage)``: the stage in a recipe of LTX-2, and its updater."""

    def start(rewards, **stage):
        model = open_tiny("ltx2", frames=9, guidance=1.0, max_tokens=16)
        recipe = read(rewards, **{"group_size": 2, "micro_batch": 4, "drift_alarm": 1e9} | stage)
        recipe = recipe.model_copy(update={"model": model.config})
        ctx = StageContext(recipe, 0, 0)
        policy = Policy(model, recipe.policy, seed=0)
        for name in ctx.following_copies:
            policy.ensure_copy(name)
        return ctx, PolicyUpdater(policy, ctx.config)

    return start


@pytest.mark.parametrize("judged", ["video", "sound"])
def test_a_reward_of_one_latent_has_no_gradient_at_the_other(begin, judged):
    """At the old policy, where the gradient of NFT is 2 p - 1 times that of the error: 0 of an
    advantage of 0. Weights of 1 each, so that the advantages alone keep the latents apart.
    """
    ctx, updater = begin(JPEG, reference={"weight": 0})
    model = updater.policy.model
    wanted = prompts("ltx2", SHORT[:2])
    names = list(model.latent_shape.parts)
    of_latents = np.zeros((2, 1, 2), np.float32)
    of_latents[:, 0, names.index(judged)] = [2.0, -1.0]
    step = StepSamples(
        updater=updater,
        keys=SampleKeys(0, [0, 1], [0, 0]),
        prompts=wanted,
        conditioning=model.encode_prompts(wanted),
        sample_index=np.arange(2),
        advantages=of_latents,
        latents=torch.randn(2, *model.latent_shape, generator=torch.Generator().manual_seed(0)),
    )
    batch, _ = trainable_kind("forward").build_batch(step, [np.array([0]), np.array([1])], 1)
    with torch.no_grad():
        velocity = predict(model, *batch.inputs.model_arguments(slice(None)))
    velocity.requires_grad_()
    copies = {"old": velocity.detach()}
    loss, _ = updater._compute_split_loss(batch, slice(None), velocity, copies)
    (gradient,) = torch.autograd.grad(loss.sum(), velocity)
    parts = model.latent_shape.slice_parts()
    (other,) = parts.keys() - {judged}
    largest = gradient[:, parts[judged]].abs().amax(1)
    assert (largest > 0).all()
    # The two halves of the loss cancel up to their rounding.
    assert (gradient[:, parts[other]].abs().amax(1) < 1e-5 * largest).all()


@pytest.mark.parametrize("algorithm", [NFT, GRPO])
def test_an_online_stage_trains_each_latent_on_its_own_rewards(begin, monkeypatch, algorithm):
    sampling = {"sampler": {"steps": 3}, "steps": 1, "prompts_per_step": 2, "updates_per_step": 1}
    if algorithm is GRPO:
        sampling["window"] = {"size": 2}
    ctx, updater = begin(JPEG, algorithm=algorithm, **sampling)
    batches = []
    update = updater.update_policy
    monkeypatch.setattr(
        updater, "update_policy", lambda batch, *rest: batches.append(batch) or update(batch, *rest)
    )
    recorder = MetricsRecorder()
    workers = open_local_workers(ctx, updater, load_scorer(ctx.recipe.rewards, []))
    run_online_stage(ctx, workers, prompts("ltx2", SHORT[:2]), recorder)
    (metrics,) = recorder.metrics_rows
    assert metrics["grad_norm"] > 0
    (batch,) = batches
    # The two rewards of a picture add up to 0, and so do the advantages of all of a sample.
    assert metrics["reward/std"] == pytest.approx(0, abs=1e-9)
    video, sound = batch.advantage.unbind(1)
    assert video.abs().min() > 0
    assert torch.allclose(video, -sound, rtol=1e-5)


def test_a_reward_that_hears_is_trained_on_online_and_moves_the_sound_alone(begin, monkeypatch):
    sampling = {"sampler": {"steps": 3}, "steps": 1, "prompts_per_step": 2, "updates_per_step": 1}
    ctx, updater = begin([JPEG[0], {"name": "audio_video_sync", "latents": ["sound"]}], **sampling)
    batches = []
    update = updater.update_policy
    monkeypatch.setattr(
        updater, "update_policy", lambda batch, *rest: batches.append(batch) or update(batch, *rest)
    )
    recorder = MetricsRecorder()
    workers = open_local_workers(ctx, updater, load_scorer(ctx.recipe.rewards, []))
    run_online_stage(ctx, workers, prompts("ltx2", SHORT[:2]), recorder)
    (metrics,) = recorder.metrics_rows
    assert metrics["reward/scored_share"] == 1
    (batch,) = batches
    video, sound = batch.advantage.unbind(1)
    # Two rewards that know nothing of each other: no latent has the advantages of the other.
    assert sound.abs().max() > 0
    assert not torch.allclose(video, sound)
    assert not torch.allclose(video, -sound)


@pytest.mark.parametrize(
    ("rewards", "changes", "message"),
    [
        ([{**JPEG[0], "latents": ["audio"]}], {}, "names 'audio', and .* has video, sound"),
        (JPEG, {"family": "sd3"}, "'sd3' is one latent; leave latents out"),
        (
            JPEG[:1],
            {},
            "none judges the latent sound; .* or set stages.0.latent_weights.sound to 0",
        ),
        (JPEG, {"kind": "offline"}, "stages.0.kind: .* set kind: online"),
        (JPEG, {"algorithm": {"name": "refl"}}, "refl has one loss of the whole sample"),
        (JPEG, {"algorithm": {"name": "sft"}}, "sft has none in its loss: rewards choose its"),
        (JPEG, {"algorithm": {"name": "diffusion_dpo"}}, "diffusion_dpo has none in its loss"),
        (JPEG, {"advantages": {"running": True}}, r"advantages\.running: .* leave it out"),
        (
            JPEG,
            {"algorithm": {"name": "gardo", "auxiliary": ["x"], "diversity": None}},
            r"advantages: .* gardo reshapes those of whole samples",
        ),
        (JPEG, {"algorithm": {"name": "branch_grpo"}}, "tree: .* leave 'tree' out"),
    ],
)
def test_a_recipe_rejects_rewards_of_latents_that_nothing_can_train(rewards, changes, message):
    with pytest.raises(RecipeError, match=message):
        read(rewards, **changes)


def test_judges_are_listed_only_where_a_reward_names_latents():
    both = {"name": "jpeg_compressibility"}
    assert list_judges(read([both]).rewards, read([both]).model) == {}
    recipe = read([JPEG[0], {"name": "jpeg_incompressibility"}])
    assert list_judges(recipe.rewards, recipe.model) == {
        "video": ["jpeg_compressibility", "jpeg_incompressibility"],
        "sound": ["jpeg_incompressibility"],
    }
    read(JPEG[:1], latent_weights={"sound": 0})


def test_a_reward_that_is_not_trained_on_judges_no_latent():
    watched = {"name": "jpeg_incompressibility", "weight": 0}
    recipe = read([JPEG[0], watched], latent_weights={"sound": 0})
    assert list_judges(recipe.rewards, recipe.model) == {
        "video": ["jpeg_compressibility"],
        "sound": [],
    }
    recipe = read([{"name": "jpeg_compressibility"}, watched | {"latents": ["video"]}])
    assert list_judges(recipe.rewards, recipe.model) == {}
