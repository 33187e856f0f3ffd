"""An online stage of a few steps, in this process."""

from __future__ import annotations

import pytest
import torch

from ebbflow.models import load_model
from ebbflow.online.loop import run_online_stage
from ebbflow.online.workers import open_local_workers
from ebbflow.stage import MetricsRecorder, StageContext
from ebbflow.training.policy import Policy
from ebbflow.training.update import PolicyUpdater
from tests.parameters import moved, values


@pytest.fixture
def run(make_recipe, make_prompts, base_folder, scorer):
    """Run an online stage; returns (policy, its parameters before, logged metrics, record)."""

    def stage(prompts=None, judge=scorer, policy_config=None, sgd=None, **online):
        recipe = make_recipe(online=online, policy=policy_config or {})
        ctx = StageContext(recipe, 0, 0)
        model = load_model(base_folder)
        recorder = MetricsRecorder()
        policy = Policy(model, recipe.policy, 0)
        before = values(policy)
        policy.copies["teacher"] = moved(policy, 0.02)
        for name in ctx.following_copies:
            policy.ensure_copy(name)
        optimizer = torch.optim.SGD(policy.parameters.values(), sgd) if sgd else None

        updater = PolicyUpdater(policy, ctx.online_config, optimizer=optimizer)
        record = run_online_stage(
            ctx, open_local_workers(ctx, updater, judge), prompts or make_prompts(6), recorder
        )
        assert [metrics["step"] for metrics in recorder.metrics_rows] == list(
            range(ctx.online_config.steps)
        )
        return policy, before, recorder.metrics_rows, record

    return stage
