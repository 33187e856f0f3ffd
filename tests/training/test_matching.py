"""Distribution matching on a network: the student's own steps, what is noised again, and the fake
score beside the policy.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from ebbflow.algorithms.built_in.dmd2 import DMD2Config
from ebbflow.algorithms.built_in.tdm import TDMConfig
from ebbflow.flow.noise import SampleKeys
from ebbflow.models import load_model
from ebbflow.models.base import predict
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.recipe.stages import OnlineStageConfig
from ebbflow.rollouts.generate import generate_samples
from ebbflow.training import matching
from ebbflow.training.matching import (
    FakeScoreBatch,
    build_matching_batch,
    sample_student_steps,
)
from ebbflow.training.passes import TrainingError
from ebbflow.training.policy import Policy
from ebbflow.training.update import PolicyUpdater
from tests.training.training_cases import FULL, LORA, TEXTS, farthest, sgd

KEYS = SampleKeys(5, list(range(6)), [3] * 6)
SAMPLERS = {
    "dmd2": SamplerConfig(name="cps", eta=1.0, steps=3),
    "tdm": SamplerConfig(name="ode", steps=3),
}
CONFIGS = {"dmd2": DMD2Config(), "tdm": TDMConfig()}


def steps_of(model, name, passes=2):
    policy = SimpleNamespace(model=model, keep_gathered=nullcontext)
    sampler = SAMPLERS[name]
    return sample_student_steps(
        policy,
        model.encode_texts(TEXTS),
        KEYS,
        sampler,
        model.compute_sigmas(sampler.steps),
        passes,
    )


def batch_of(model, name, draw=0):
    return build_matching_batch(steps_of(model, name), torch.zeros(6), CONFIGS[name], draw)


def updater_of(model, name, config=FULL, offload=False, **stage):
    """Plain gradient descent of both: Adam's first step is a sign."""
    policy = Policy(model, config, 0, cpu_offload=offload)
    policy.snapshot_copy("teacher")
    policy.snapshot_copy("fake")
    algorithm = {"name": name, "fake_lr_factor": 1.0} | stage.pop("algorithm", {})
    optimizer = {"lr": 0.05, "weight_decay": 0.0, "eps": 1.0, "max_grad_norm": 1e9} | stage.pop(
        "optimizer", {}
    )
    sampler = SAMPLERS[name].model_dump(exclude_unset=True)
    config = OnlineStageConfig.model_validate(
        {"algorithm": algorithm, "sampler": sampler, "optimizer": optimizer, **stage}
    )
    return PolicyUpdater(policy, config, optimizer=None if offload else sgd(policy))


def train_fake(updater, batch, passes):
    return updater.train_copy("fake", FakeScoreBatch(batch, updater.latents), passes)


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_steps_are_those_of_a_rollout(model, name):
    steps = steps_of(model, name)
    sampler = SAMPLERS[name]
    end = steps.latents[:, -1] - steps.sigmas[-2] * steps.velocity[:, -1]
    latents = generate_samples(
        model, model.encode_texts(TEXTS), KEYS, sampler, micro_batch=3
    ).latents
    torch.testing.assert_close(end, latents, rtol=1e-5, atol=1e-6)


def test_the_steps_are_taken_while_sharded_weights_stay_gathered(model, monkeypatch):
    policy = SimpleNamespace(model=model)
    states = []
    gathered = []

    @contextmanager
    def kept_gathered():
        gathered.append(True)
        yield
        gathered.pop()

    policy.keep_gathered = kept_gathered
    monkeypatch.setattr(
        matching, "predict", lambda *inputs: states.append(bool(gathered)) or predict(*inputs)
    )
    sampler = SAMPLERS["tdm"]
    sample_student_steps(
        policy, model.encode_texts(TEXTS), KEYS, sampler, model.compute_sigmas(sampler.steps), 2
    )
    assert states == [True] * 6
    assert not gathered


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sample_is_noised_again_from_where_its_step_leads(model, name):
    steps = steps_of(model, name)
    batches = [
        build_matching_batch(steps, torch.zeros(6), CONFIGS[name], draw) for draw in range(3)
    ]
    rows = [
        (batch, row, step) for batch in batches for row, step in enumerate(batch.steps.tolist())
    ]
    assert {step for _, _, step in rows} == {0, 1, 2}
    for batch, row, step in rows:
        level = batch.noised.sigma[row]
        latents = steps.latents[row, step]
        velocity = steps.velocity[row, step]
        low, high = (steps.sigmas[step + 1], steps.sigmas[step]) if name == "tdm" else (0.0, 1.0)
        assert max(low, 0.02) <= level <= min(high, 0.98)
        torch.testing.assert_close(batch.inputs.latents[row], latents, rtol=0, atol=0)
        end = steps.sigmas[step + 1] if name == "tdm" else 0.0
        reached = latents + (end - steps.sigmas[step]) * velocity
        kept = (1 - level) / (1 - end)
        fresh = (batch.noised.latents[row] - kept * reached) / (level**2 - (kept * end) ** 2).sqrt()
        beta = (level**2 - (kept * end) ** 2).sqrt() / level
        expected = (fresh - beta * batch.noised.latents[row]) / (1 - level)
        torch.testing.assert_close(batch.scale[row], (1 - end) * beta, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(batch.target[row], (1 - end) * expected, rtol=1e-3, atol=1e-4)
        assert 0.8 < fresh.std() < 1.2


def test_rows_depend_on_their_sample_alone(model):
    whole = batch_of(model, "tdm")
    steps = steps_of(model, "tdm", passes=6)
    again = build_matching_batch(steps, torch.zeros(6), CONFIGS["tdm"], 0)
    torch.testing.assert_close(whole.noised.latents, again.noised.latents, rtol=1e-5, atol=1e-6)
    other = batch_of(model, "tdm", draw=1)
    assert (whole.noised.sigma != other.noised.sigma).all()


@pytest.mark.parametrize(("config", "lr"), [(FULL, 3e-3), (LORA, 3e-2)], ids=["full", "lora"])
def test_the_fake_score_learns_the_student_and_leaves_it_alone(base_folder, config, lr):
    updater = updater_of(load_model(base_folder), "dmd2", config, optimizer={"lr": lr, "eps": 1e-8})
    policy = updater.policy
    before = {
        name: {key: value.clone() for key, value in values.items()}
        for name, values in policy.copies.items()
    }
    own = {key: p.detach().clone() for key, p in policy.parameters.items()}
    batch = batch_of(policy.model, "dmd2")
    for p in policy.parameters.values():  # of the policy's last update
        p.grad = torch.ones_like(p)
    errors = [train_fake(updater, batch, 2)["fake/loss"] for _ in range(8)]
    assert errors[-1] < 0.95 * errors[0]
    assert farthest(policy.copies["fake"], before["fake"]) > 1e-4
    assert farthest(policy.parameters, own) == 0
    assert farthest(policy.copies["teacher"], before["teacher"]) == 0
    assert all(p.grad is None for p in policy.parameters.values())
    with policy.use_copy("fake"), torch.no_grad():
        velocity = predict(policy.model, *batch.noised.model_arguments(slice(None)))
    assert ((velocity - batch.target) ** 2).mean().item() < errors[-1]


@pytest.mark.parametrize("name", SAMPLERS)
def test_an_update_follows_the_gradient_written_by_hand(base_folder, name):
    updater = updater_of(load_model(base_folder), name)
    policy = updater.policy
    model = updater.policy.model
    train_fake(updater, batch_of(model, name, draw=1), 1)
    with torch.no_grad():  # a teacher of its own
        for value in policy.copies["teacher"].values():
            value.mul_(1.05)
    batch = batch_of(model, name)
    velocity = predict(model, *batch.inputs.model_arguments(slice(None)))
    found = {}
    for copy in ("teacher", "fake"):
        with policy.use_copy(copy):
            found[copy] = batch.noised.latents - batch.noised.sigma[:, None, None, None] * predict(
                model, *batch.noised.model_arguments(slice(None))
            )
    clean = batch.inputs.latents - batch.inputs.sigma[:, None, None, None] * velocity
    distance = (clean.detach() - found["teacher"]).abs().mean((1, 2, 3), keepdim=True)
    (clean * (found["fake"] - found["teacher"]) / distance).mean().backward()
    expected = {key: p.detach() - 0.1 * p.grad for key, p in policy.parameters.items()}
    assert farthest(expected, {key: p.detach() for key, p in policy.parameters.items()}) > 1e-5
    metrics = updater.update_policy(batch, 2)
    assert farthest(expected, policy.parameters) < 1e-6
    assert metrics["matching/distance"] == pytest.approx(distance.mean().item(), rel=1e-4)


def test_copies_in_main_memory_train_alike(base_folder):
    ends = []
    for offload in (False, True):
        updater = updater_of(load_model(base_folder), "dmd2", LORA, offload)
        for draw in range(2):
            train_fake(updater, batch_of(updater.policy.model, "dmd2", draw), 2)
        ends.append(updater.policy.copies["fake"])
    assert farthest(*ends) < 1e-6


def test_a_fake_score_that_is_not_finite_stops_the_stage(base_folder):
    updater = updater_of(load_model(base_folder), "dmd2")
    batch = batch_of(updater.policy.model, "dmd2")
    batch.target[4] = float("nan")
    before = {key: value.clone() for key, value in updater.policy.copies["fake"].items()}
    where = (
        rf"prompt 4, sample 3, denoising step {batch.steps[4]}, noised to sigma"
        rf" {batch.noised.sigma[4]:.4f}"
    )
    with pytest.raises(
        TrainingError,
        match=f"not finite: the fake copy's error of {where} .*Lower algorithm.fake_lr_factor",
    ):
        train_fake(updater, batch, 2)
    assert farthest(updater.policy.copies["fake"], before) == 0


def test_a_gradient_of_the_fake_score_that_is_not_finite_stops_the_stage(base_folder, monkeypatch):
    updater = updater_of(load_model(base_folder), "dmd2")
    batch = batch_of(updater.policy.model, "dmd2")
    monkeypatch.setattr(
        "ebbflow.training.trained_copy.compute_gradient_norm",
        lambda policy: torch.tensor(float("inf")),
    )
    with pytest.raises(
        TrainingError,
        match="not finite: the fake copy's gradient .gradient norm inf.; the step was not taken",
    ):
        train_fake(updater, batch, 1)
