"""Online stages whose steps have images of several sizes."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from benchmarks.tiny_models import build_tiny
from ebbflow.models import ModelError, load_model
from ebbflow.models.base import generate_in_size
from ebbflow.online.loop import OnlineLoop, run_online_stage
from ebbflow.online.rollout_queue import RolloutQueue, choose_image_size
from ebbflow.online.workers import LocalWorkers, open_local_workers
from ebbflow.recipe import Recipe, RecipeError
from ebbflow.recipe.model import resize_model
from ebbflow.stage import MetricsRecorder, StageContext
from ebbflow.training import passes
from ebbflow.training.checkpoint import Checkpoints
from ebbflow.training.policy import Policy
from ebbflow.training.update import PolicyUpdater
from tests.glyph_stages import small_stage

SIZES = [
    {"height": 32, "width": 64},
    {"height": 64, "width": 32, "weight": 2},
    {"height": 64, "width": 64},
]
ONLINE = {
    "kind": "online",
    "steps": 3,
    "prompts_per_step": 2,
    "group_size": 2,
    "micro_batch": 4,
    "sampler": {"steps": 3},
}
TRAJECTORIES = {"window": {"size": 1}}
REUSED = TRAJECTORIES | {"reuse_rollout_forward": True, "updates_per_step": 1}
GRADIENTS = {
    "algorithm": {"name": "draft", "last_steps": 1},
    "sampler": {"name": "ode", "steps": 3},
}
FINAL_LATENTS = {"algorithm": {"name": "awm"}, "sampler": {"name": "ode", "steps": 3}}


@pytest.fixture(scope="module")
def flux(tmp_path_factory):
    """Its schedule is shifted by the number of tokens."""
    folder = tmp_path_factory.mktemp("models") / "flux"
    build_tiny("flux", folder)
    return folder


def context(folder, stage):
    model = {"family": "flux", "path": str(folder), "height": 64, "width": 64, "max_tokens": 8}
    stages = [small_stage(ONLINE | {"sizes": SIZES} | stage)]
    policy = {"train": "lora", "rank": 2, "alpha": 2}
    return StageContext(
        Recipe.model_validate({"model": model, "policy": policy, "stages": stages}), 0, 0
    )


def workers_of(ctx, folder, scorer) -> LocalWorkers:
    policy = Policy(load_model(folder, ctx.recipe.model), ctx.recipe.policy, seed=0)
    for name in ctx.following_copies:
        policy.ensure_copy(name)
    return open_local_workers(ctx, PolicyUpdater(policy, ctx.config), scorer)


def parameters(workers):
    return {
        name: value.detach().clone()
        for name, value in workers.trainer.updater.policy.parameters.items()
    }


def with_seed(folder, seed):
    ctx = context(folder, TRAJECTORIES)
    return StageContext(ctx.recipe.model_copy(update={"seed": seed}), 0, 0)


def test_steps_have_sizes_by_their_weights_and_the_seed(flux):
    ctx = with_seed(flux, 0)
    found = Counter(choose_image_size(ctx, step) for step in range(2000))
    assert found.keys() == {(32, 64), (64, 32), (64, 64)}
    assert found[64, 32] == pytest.approx(1000, abs=100)
    assert found[32, 64] == pytest.approx(500, abs=80)
    again, other = (
        [choose_image_size(with_seed(flux, seed), step) for step in range(50)] for seed in (0, 1)
    )
    assert again == [choose_image_size(ctx, step) for step in range(50)] != other


@pytest.mark.parametrize(
    "stage",
    [TRAJECTORIES, pytest.param(REUSED, marks=pytest.mark.exhaustive), FINAL_LATENTS, GRADIENTS],
    ids=["trajectories", "reused forward", "final latents", "gradients"],
)
def test_a_stage_generates_and_trains_each_step_in_its_size(
    flux, make_prompts, scorer, monkeypatch, stage
):
    ctx = context(flux, stage)
    recorder = MetricsRecorder()
    trained = []
    drawn = []
    sizes = [choose_image_size(ctx, step) for step in range(3)]
    assert len(set(sizes)) > 1
    workers = workers_of(ctx, flux, scorer)
    model = workers.trainer.updater.policy.model
    predict = passes.predict
    decode = type(model).decode_latents

    def watched_decode(self, latents):
        images = decode(self, latents)
        drawn.append(images.shape[1:3])
        return images

    def watched_predict(model, latents, *rest):
        trained.append((latents.shape[1:], (model.height, model.width)))
        return predict(model, latents, *rest)

    monkeypatch.setattr(type(model), "decode_latents", watched_decode)
    monkeypatch.setattr(passes, "predict", watched_predict)
    before = parameters(workers)
    pixels = 64 // model.latent_shape[1]
    run_online_stage(ctx, workers, make_prompts(8), recorder)

    assert drawn == sizes
    assert [size for _, size in dict.fromkeys(trained)] == list(dict.fromkeys(sizes))
    assert all(
        shape == (model.latent_shape[0], height // pixels, width // pixels)
        for shape, (height, width) in trained
    )
    assert [(row["size/height"], row["size/width"]) for row in recorder.metrics_rows] == sizes
    assert (model.height, model.width) == (64, 64)
    assert any(not torch.equal(before[name], value) for name, value in parameters(workers).items())
    if stage in (
        TRAJECTORIES,
        REUSED,
    ):  # the same schedule in rollout and training, whose shift depends on the size
        assert all(row["ratio/first_deviation"] < 1e-5 for row in recorder.metrics_rows)


def test_the_shift_of_the_schedule_follows_the_size(flux, scorer):
    ctx = context(flux, TRAJECTORIES)
    updater = workers_of(ctx, flux, scorer).trainer.updater
    model = updater.policy.model
    own = updater.sampler_sigmas
    with generate_in_size(model, (128, 128)):
        large = updater.sampler_sigmas
    direct = load_model(flux, resize_model(ctx.recipe.model, 128, 128)).compute_sigmas(3)
    assert torch.equal(large, direct)
    assert not torch.equal(large, own)
    assert torch.equal(updater.sampler_sigmas, own)


def test_a_size_that_cannot_be_drawn_leaves_the_model_as_it_was(flux):
    model = load_model(flux, context(flux, TRAJECTORIES).recipe.model)
    with pytest.raises(ModelError, match="model.height = 40"), generate_in_size(model, (40, 64)):
        pass
    assert (model.height, model.width, model.latent_shape[1:]) == (64, 64, model.latent_shape[1:])
    with (
        pytest.raises(ModelError, match="SimpleNamespace has no set_image_size"),
        generate_in_size(SimpleNamespace(), (64, 64)),
    ):
        pass


class Killed(Exception):
    """What the test ends a stage with."""


def test_a_killed_stage_of_several_sizes_ends_with_the_same_bytes(
    flux, make_prompts, scorer, monkeypatch, tmp_path
):
    ctx = context(flux, TRAJECTORIES | {"mode": "one_step_off", "checkpoints": {"every": 1}})

    def run(name, kill=None):
        workers = workers_of(ctx, flux, scorer)
        recorder = MetricsRecorder()
        next_batch = RolloutQueue.next_batch

        async def die(queue, version):
            if version == kill:
                raise Killed
            return await next_batch(queue, version)

        with monkeypatch.context() as patch:
            patch.setattr(RolloutQueue, "next_batch", die)
            checkpoints = Checkpoints(ctx, tmp_path / name)
            asyncio.run(
                OnlineLoop(ctx, workers, make_prompts(8), recorder, checkpoints=checkpoints).run()
            )
        return parameters(workers), [
            (row["loss"], row["size/height"]) for row in recorder.metrics_rows
        ]

    whole, rows = run("whole")
    with pytest.raises(Killed):
        run("killed", kill=2)
    resumed, resumed_rows = run("killed")
    assert resumed_rows == rows
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


@pytest.mark.parametrize(
    ("model", "stage", "message"),
    [
        ({}, {}, "stages.0.sizes: the glyph model draws the size that it was trained on"),
        (
            {"family": "qwen_image_edit", "path": "x"},
            {},
            "qwen_image_edit draws the images that it edits in one size",
        ),
        (
            {"family": "sd3", "path": "x"},
            {"engine": "vllm_omni"},
            "engine = 'vllm_omni' generates in one size",
        ),
        (
            {"family": "sd3", "path": "x"},
            {"sizes": [SIZES[0], SIZES[0]]},
            "sizes has 32 x 64 twice",
        ),
    ],
)
def test_what_has_one_size(model, stage, message):
    stages = [{"kind": "online", "sizes": SIZES} | stage]
    with pytest.raises(RecipeError, match=message):
        Recipe.model_validate({"model": model, "stages": stages})


def test_no_sizes_leave_the_digest_as_it_was():
    written, left_out = (
        Recipe.model_validate({"stages": [{"kind": "online"} | keys]})
        for keys in ({"sizes": []}, {})
    )
    assert written == left_out
    assert written.digest == left_out.digest
