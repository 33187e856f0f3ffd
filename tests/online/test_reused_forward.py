"""A stage whose updates go back through the rollout's own forward passes learns what one that
repeats them learns.
"""

from __future__ import annotations

import weakref
from itertools import product
from pathlib import Path

import pytest
import torch

from ebbflow.models import load_model
from ebbflow.models.base import predict
from ebbflow.models.compile import compile_blocks
from ebbflow.online.loop import run_online_stage
from ebbflow.online.workers import open_local_workers
from ebbflow.rewards.combine import Scorer
from ebbflow.rollouts import generate as rollouts_module
from ebbflow.stage import MetricsRecorder, StageContext
from ebbflow.training import passes as passes_module
from ebbflow.training.policy import Policy
from ebbflow.training.update import PolicyUpdater
from tests.online.test_resume import TIMED, Flat
from tests.parameters import values

POLICIES = {"full": {"train": "full"}, "lora": {"train": "lora", "rank": 2, "alpha": 4}}
STAGE = {
    "micro_batch": 4,
    "prompts_per_step": 3,
    "group_size": 2,
    "updates_per_step": 1,
    "steps": 2,
    "sampler": {"steps": 4},
}
REUSED = {"reuse_rollout_forward": True}


@pytest.fixture
def contexts(make_recipe, tiny_recipe, base_folder):
    """``contexts(family, train, **online)``: a stage on the glyph model or on the tiny SD3 with
    guidance.
    """

    def make(family, train, model=None, **online):
        keys = {"algorithm": {"name": "mix_grpo"}} | STAGE | online
        if keys["algorithm"]["name"] == "mix_grpo":
            keys.setdefault("window", {"size": 2, "steps_per_window": 1})
        if family == "glyph":
            recipe = make_recipe(
                keys, policy=POLICIES[train], model={"path": str(base_folder), **(model or {})}
            )
        else:
            guided = {"guidance": 3.0, **(model or {})}
            stages = [{"kind": "online", **keys}]
            recipe = tiny_recipe(family, guided, policy=POLICIES[train], stages=stages)
        return StageContext(recipe, 0, 0)

    return make


@pytest.fixture
def train(make_prompts, scorer, monkeypatch):
    """``train(ctx)``: (parameters, gradients of every update, metrics but for times, network passes
    by whether with gradient).
    """

    def run(ctx, judge=scorer, repeated=False, sgd=None):
        gradients = []
        passes = {True: 0, False: 0}
        policy = Policy(
            load_model(Path(ctx.recipe.model.path), ctx.recipe.model), ctx.recipe.policy, 0
        )
        if ctx.recipe.model.compile == "blocks":
            compile_blocks(policy.model)
        optimizer = torch.optim.SGD(policy.parameters.values(), sgd) if sgd else None
        updater = PolicyUpdater(policy, ctx.online_config, optimizer=optimizer)
        recorder = MetricsRecorder()
        step = updater.optimizer.step
        update = updater.update_policy

        def note_gradients():
            gradients.append({name: p.grad.clone() for name, p in policy.parameters.items()})
            step()

        def without_graphs(batch, *arguments):
            assert batch.inputs.predicted
            if repeated:  # the same passes, and the graphs of the rollout are not there
                batch.inputs.predicted.clear()
            return update(batch, *arguments)

        def counted(*arguments):
            passes[torch.is_grad_enabled()] += 1
            return predict(*arguments)

        updater.optimizer.step = note_gradients
        if ctx.online_config.reuse_rollout_forward:
            updater.update_policy = without_graphs
        with monkeypatch.context() as patch:
            for module in (rollouts_module, passes_module):
                patch.setattr(module, "predict", counted)
            run_online_stage(
                ctx, open_local_workers(ctx, updater, judge), make_prompts(6), recorder
            )
        untimed = [
            {key: value for key, value in row.items() if not key.startswith(TIMED)}
            for row in recorder.metrics_rows
        ]
        return values(policy), gradients, untimed, passes

    return run


def same(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) for name, value in one.items()
    )


IN_16_BITS = {"precision": "bfloat16"}
CHECKPOINTED = {"gradient_checkpointing": True}
COMPILED = {"compile": "blocks"}
CASES = [
    ("glyph", "flow_grpo", "full", {}),
    ("sd3", "mix_grpo", "lora", {}),
    *(
        pytest.param(*case, {}, marks=pytest.mark.exhaustive)
        for case in product(["glyph", "sd3"], ["flow_grpo", "mix_grpo"], POLICIES)
        if case not in {("glyph", "flow_grpo", "full"), ("sd3", "mix_grpo", "lora")}
    ),
    *(
        pytest.param("sd3", "mix_grpo", policy, model, marks=pytest.mark.exhaustive)
        for model in (IN_16_BITS, CHECKPOINTED)
        for policy in POLICIES
    ),
    pytest.param("glyph", "mix_grpo", "lora", COMPILED, marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("family", "name", "policy", "model"), CASES)
def test_gradients_and_weights_are_those_of_repeated_passes(
    contexts, train, family, name, policy, model
):
    """Of 6 samples in micro-batches of 4 and 2, with a KL to the reference; guidance is in the
    graphs of the tiny SD3. Compiled, 4 samples in micro-batches of 2: each number of rows is
    compiled by itself.
    """
    online = {"algorithm": {"name": name, "clip_range": 1e-3}, "reference": {"weight": 0.02}}
    if model == COMPILED:
        online |= {"prompts_per_step": 2, "micro_batch": 2}
    ctx = contexts(family, policy, model, **online, **REUSED)
    parameters, gradients, metrics, passes = train(ctx)
    again, their_gradients, their_metrics, their_passes = train(ctx, repeated=True)
    assert same(parameters, again)
    assert len(gradients) == 2
    assert all(any(gradient.any() for gradient in update.values()) for update in gradients)
    assert all(same(*updates) for updates in zip(gradients, their_gradients, strict=True))
    assert metrics == their_metrics
    assert all(row["ratio/first_deviation"] < 1e-6 for row in metrics)
    trained = {"flow_grpo": 3, "mix_grpo": 2}[name]
    assert passes[True] == 2 * 2 * trained  # steps, micro-batches: the rollout's alone
    assert their_passes == {True: 2 * passes[True], False: passes[False]}


def test_negative_prompts_without_gradient_are_reused_as_repeated_passes_have_them(contexts, train):
    split = contexts("sd3", "lora", negative_gradient=False, **REUSED)
    parameters, gradients, metrics, _ = train(split)
    again, their_gradients, their_metrics, _ = train(split, repeated=True)
    assert same(parameters, again)
    assert all(same(*updates) for updates in zip(gradients, their_gradients, strict=True))
    assert metrics == their_metrics
    assert all(row["ratio/first_deviation"] < 1e-6 for row in metrics)
    whole = train(contexts("sd3", "lora", **REUSED))[1]
    assert not same(gradients[0], whole[0])


@pytest.mark.parametrize("policy", [pytest.param("full", marks=pytest.mark.exhaustive), "lora"])
def test_a_stage_without_the_key_agrees_up_to_rounding(contexts, train, policy):
    """Its passes have other rows; its rollouts are the same to the last bit as long as the weights
    are.
    """
    reused, plain = (train(contexts("glyph", policy, **keys), sgd=0.01) for keys in (REUSED, {}))
    for name, gradient in plain[1][0].items():
        assert torch.allclose(
            reused[1][0][name], gradient, atol=1e-5 * float(gradient.abs().max()), rtol=1e-3
        )
    for name, metric in plain[2][0].items():
        if name.startswith(("reward/", "score/", "advantage/", "group/")):
            assert reused[2][0][name] == metric
        elif not name.startswith(("grad_variance", "ratio/", "kl/old", "velocity_drift")):
            assert reused[2][0][name] == pytest.approx(metric, rel=1e-3, abs=1e-6), name


def test_rows_that_are_not_trained_have_no_gradient_and_keep_no_memory(
    contexts, train, monkeypatch
):
    """All samples of two prompts in three score alike; when a step's first micro-batch begins, the
    graphs of others are gone.
    """
    graphs = []
    denoise = rollouts_module._denoise_micro_batch

    def noted(*arguments):
        if len(graphs) % 2 == 0:
            assert [graph() for graph in graphs] == [None] * len(graphs)
        made = denoise(*arguments)
        graphs.append(weakref.ref(made.velocities[0][0]))
        return made

    with monkeypatch.context() as patch:
        patch.setattr(rollouts_module, "_denoise_micro_batch", noted)
        reused = train(
            contexts("glyph", "full", **REUSED), judge=Scorer(((Flat(), 1.0),)), sgd=0.01
        )
    assert len(graphs) == 4
    plain = train(contexts("glyph", "full"), judge=Scorer(((Flat(), 1.0),)), sgd=0.01)
    assert plain[2][0]["group/dropped_samples"] == 4
    for name, gradient in plain[1][0].items():
        assert torch.allclose(
            reused[1][0][name], gradient, atol=1e-5 * float(gradient.abs().max()), rtol=1e-3
        )
