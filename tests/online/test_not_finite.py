"""A sample that the model gives no numbers for is masked and counted, and never scored."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ebbflow.models import load_model
from ebbflow.online.loop import run_online_stage
from ebbflow.online.workers import open_local_workers
from ebbflow.rewards.combine import NO_PICTURE, RewardError
from ebbflow.rollouts.generate import Diffusers
from ebbflow.stage import MetricsRecorder, StageContext
from ebbflow.training.policy import Policy
from ebbflow.training.update import PolicyUpdater


@pytest.fixture
def broken(monkeypatch):
    """One sample of every part has a latent that is not finite."""
    whole = Diffusers.generate

    def generate(engine, *arguments, **options):
        rollouts, images = whole(engine, *arguments, **options)
        latents = rollouts.latents.clone()
        latents[1].flatten()[3] = float("nan")
        return replace(rollouts, latents=latents), images

    monkeypatch.setattr(Diffusers, "generate", generate)


@pytest.fixture
def run(make_recipe, make_prompts, base_folder, scorer):
    def train(**keys):
        ctx = StageContext(make_recipe(online={"dumps": {"every": 1, "samples": 8}}, **keys), 0, 0)
        updater = PolicyUpdater(
            Policy(load_model(base_folder), ctx.recipe.policy, 0), ctx.online_config
        )
        recorder = Files()
        run_online_stage(ctx, open_local_workers(ctx, updater, scorer), make_prompts(6), recorder)
        return recorder

    return train


class Files(MetricsRecorder):
    def log_file(self, path, content):
        if path.endswith("samples.jsonl"):
            self.dumped = content.decode()


@pytest.mark.usefixtures("broken")
def test_it_is_masked_and_counted(run):
    recorder = run(max_failed_share=0.2)
    assert recorder.dumped.count(NO_PICTURE) == 1
    assert recorder.dumped.count('"failure": null') == 7
    assert all(np.isfinite(row["loss"]) for row in recorder.metrics_rows)


@pytest.mark.usefixtures("broken")
def test_too_many_end_the_stage(run):
    with pytest.raises(RewardError, match=f"1 of 8 images .*{NO_PICTURE}"):
        run(max_failed_share=0.1)
