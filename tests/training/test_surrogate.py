"""The surrogate reward of TDM-R1 on a network: what it is trained on, and what trains with it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ebbflow.algorithms.base import SURROGATE, SurrogateRows
from ebbflow.algorithms.built_in.tdm_r1 import TDMR1Config, compute_surrogate_loss
from ebbflow.flow.latents import NamedLatents
from ebbflow.flow.noise import SampleKeys
from ebbflow.models import load_model
from ebbflow.models.base import predict
from ebbflow.online.loop import run_online_stage
from ebbflow.online.workers import open_local_workers
from ebbflow.stage import MetricsRecorder, StageContext
from ebbflow.storage.artifacts import verify_folder
from ebbflow.training.batches import ForwardInputs
from ebbflow.training.latent_losses import list_latent_shares
from ebbflow.training.matching import (
    StudentSteps,
    build_matching_batch,
    sample_student_steps,
    sample_training_noise,
)
from ebbflow.training.policy import Policy
from ebbflow.training.policy_io import load_policy
from ebbflow.training.policy_metadata import read_policy_metadata, write_base_policy
from ebbflow.training.surrogate import (
    SurrogateBatch,
    add_surrogate_reward,
    build_surrogate_batch,
)
from ebbflow.training.update import PolicyUpdater
from tests.parameters import move, moved
from tests.training.training_cases import FULL, GROUPS, LORA, TEXTS, farthest, stage_of

PROMPTS = [4, 4, 4, 7, 7, 9]
KEYS = SampleKeys(5, PROMPTS, [0, 1, 2, 0, 1, 0])
ADVANTAGES = torch.tensor([1.0, 0.2, -1.2, 1.0, -1.0, 0.0])
STAGE = {"sampler": {"name": "ode", "steps": 3}}


def updater_of(model, config=FULL, **algorithm):
    """The teacher, the surrogate and its average differ from each other and the policy."""
    policy = Policy(model, config, 0)
    for number, name in enumerate(("fake", "teacher", *SURROGATE)):
        policy.copies[name] = moved(policy, 0.01 * number)
    optimizer = {"lr": 1e-3, "weight_decay": 0.0}
    keys = {"name": "tdm_r1", **algorithm}
    return PolicyUpdater(policy, stage_of(keys, optimizer=optimizer, **STAGE))


def steps_of(updater):
    model = updater.policy.model
    texts = [TEXTS[prompt % 6] for prompt in PROMPTS]
    return sample_student_steps(
        updater.policy,
        model.encode_texts(texts),
        KEYS,
        updater.stage.sampler,
        updater.sampler_sigmas,
        2,
    )


def surrogate_batch(updater, steps, draw=0, passes=2):
    config = updater.hyper
    return build_surrogate_batch(
        updater.policy,
        steps,
        GROUPS,
        ADVANTAGES,
        config,
        draw,
        passes,
        lambda rows: compute_surrogate_loss(rows, config),
        5.0,
        updater.latents,
    )


def wide(values):
    return values[:, None, None, None]


def test_a_group_shares_step_level_and_noise_and_has_the_published_target(base_folder):
    updater = updater_of(load_model(base_folder))
    steps = steps_of(updater)
    ends = set()
    for draw in range(6):
        batch = surrogate_batch(updater, steps, draw)
        for group in range(3):
            rows = np.flatnonzero(group == GROUPS)
            assert len(batch.step_share[rows].unique()) == len(batch.inputs.sigma[rows].unique())
            assert len(batch.step_share[rows].unique()) == 1
        step = (batch.step_share * 3).round().long() - 1
        ends |= set(step.tolist())
        rows = torch.arange(6)
        start = steps.sigmas[step]
        end = steps.sigmas[step + 1]
        t = batch.inputs.sigma
        # At least .3, and .02 above the end of the step before the shift by 3.
        unshifted = end / (3 - 2 * end) + 0.02
        least = torch.maximum(3 * unshifted / (1 + 2 * unshifted), torch.tensor(0.3))
        assert (t >= least - 1e-6).all()
        assert (t <= 1).all()
        reached = steps.latents[rows, step] - wide(start - end) * steps.velocity[rows, step]
        # alpha, beta and target_v as the published code writes them.
        alpha = (1 - t) / (1 - end)
        beta = (t**2 - (end * alpha) ** 2) ** 0.5
        noise = (batch.inputs.latents - wide(alpha) * reached) / wide(beta)
        for group in range(3):
            mine = noise[group == GROUPS]
            torch.testing.assert_close(mine, mine[:1].expand_as(mine), rtol=0, atol=1e-4)
        expected = -reached / wide(1 - end) + noise / wide(beta) * wide(
            t + end**2 * alpha / (1 - end)
        )
        torch.testing.assert_close(batch.target, expected, rtol=1e-3, atol=1e-3)
        for name in ("teacher", "surrogate_old"):
            with updater.policy.use_copy(name):
                velocity = predict(updater.policy.model, *batch.inputs.model_arguments(slice(None)))
            predicted = batch.teacher if name == "teacher" else batch.old
            torch.testing.assert_close(predicted, velocity, rtol=1e-4, atol=1e-5)
    assert ends == {0, 1, 2}


def test_late_steps_are_drawn_more_often():
    keys = SampleKeys(3, list(range(3000)), [0] * 3000)
    steps = StudentSteps(
        torch.zeros(1, 4, 1, 1, 1), torch.zeros(()), torch.linspace(1, 0, 5), None, keys
    )
    step = sample_training_noise(steps, keys, 0, torch.arange(1.0, 5.0))[0]
    shares = step.bincount(minlength=4) / 3000
    # The standard deviation of a share of 3,000 is below .01.
    assert shares.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=0.04)


@pytest.mark.parametrize("config", [FULL, LORA], ids=["full", "lora"])
def test_an_update_trains_the_surrogate_and_its_average_alone(base_folder, config):
    updater = updater_of(
        load_model(base_folder),
        config,
        clip_range=0.9,
        teacher_limit=100.0,
        surrogate_old={"min_decay": 0.25, "slope": 0, "max_decay": 0.5},
    )
    policy = updater.policy
    before = {
        name: {key: value.clone() for key, value in values.items()}
        for name, values in policy.copies.items()
    }
    own = {key: p.detach().clone() for key, p in policy.parameters.items()}
    batch = surrogate_batch(updater, steps_of(updater))
    # Its loss need not fall: the weight, what groups still have to gain, falls instead.
    gains = [updater.train_copy("surrogate", batch, 2)["surrogate/weight"] for _ in range(8)]
    assert gains[-1] < gains[0] - 0.05
    assert farthest(policy.parameters, own) == 0
    for name in ("fake", "teacher", "reference"):
        assert farthest(policy.copies[name], before[name]) == 0
    assert farthest(policy.copies["surrogate"], before["surrogate"]) > 1e-4

    average = {key: value.clone() for key, value in policy.copies["surrogate_old"].items()}
    updater.train_copy("surrogate", batch, 2)
    trained = policy.copies["surrogate"]
    expected = {key: 0.25 * average[key] + 0.75 * trained[key] for key in average}
    assert farthest(policy.copies["surrogate_old"], expected) < 1e-6


def test_the_optimiser_of_the_surrogate_has_its_own_rate_and_betas(base_folder):
    updater = updater_of(load_model(base_folder), surrogate_lr_factor=3.0)
    groups = {name: copy.optimizer.param_groups[0] for name, copy in updater.trained_copies.items()}
    assert updater.optimizer.param_groups[0]["betas"] == (0.0, 0.999)
    assert groups["fake"]["betas"] == (0.0, 0.999)
    assert groups["fake"]["lr"] == pytest.approx(4e-3)
    assert groups["surrogate"]["betas"] == (0.9, 0.999)
    assert groups["surrogate"]["lr"] == pytest.approx(3e-3)


def test_samples_of_several_latents_have_the_loss_of_each():
    shares = list_latent_shares(
        NamedLatents({"video": (2, 3), "sound": (1, 2)}), {"video": 1.0, "sound": 3.0}
    )
    generator = torch.Generator().manual_seed(0)
    velocity, target, teacher, old = (torch.randn(6, 8, generator=generator) for _ in range(4))
    advantage = torch.randn(6, 2, generator=generator)  # of each latent
    config = TDMR1Config()
    batch = SurrogateBatch(
        inputs=ForwardInputs(target, torch.full((6,), 0.5), None, torch.arange(6)),
        target=target,
        teacher=teacher,
        old=old,
        step_share=torch.ones(6),
        advantage=advantage,
        group_index=torch.from_numpy(GROUPS),
        advantage_clip=5.0,
        loss=lambda rows: compute_surrogate_loss(rows, config),
        latents=shares,
        keys=KEYS,
    )
    part = slice(0, 5)
    loss, metrics = batch.compute_loss(part, velocity[part])
    expected = []
    for number, elements in enumerate((slice(0, 6), slice(6, 8))):
        rows = SurrogateRows(
            *(values[part, elements] for values in (velocity, target, teacher, old)),
            step_share=torch.ones(5),
            advantage=advantage[part, number],
            group_index=torch.from_numpy(GROUPS)[part],
        )
        expected.append(compute_surrogate_loss(rows, config)[0])
    torch.testing.assert_close(loss, 0.25 * expected[0] + 0.75 * expected[1])
    assert metrics["loss/sound"].tolist() == expected[1].tolist()


def test_the_student_is_told_what_surrogate_and_teacher_make_of_its_samples(base_folder):
    updater = updater_of(load_model(base_folder))
    policy = updater.policy
    steps = steps_of(updater)
    batch = build_matching_batch(steps, ADVANTAGES, updater.hyper, 1)
    assert batch.rewarded_clean is None
    batch = add_surrogate_reward(policy, batch, steps, updater.hyper, 2, 3)
    again = build_matching_batch(steps, ADVANTAGES, updater.hyper, 1)
    assert torch.equal(batch.noised.latents, again.noised.latents)
    # The same samples whatever the passes, and by the copies that they are named after.
    one_pass = add_surrogate_reward(policy, again, steps, updater.hyper, 2, 1)
    for name in ("rewarded_clean", "base_clean"):
        torch.testing.assert_close(
            getattr(batch, name), getattr(one_pass, name), rtol=1e-4, atol=1e-5
        )
    assert (batch.rewarded_clean - batch.base_clean).abs().mean() > 1e-3
    policy.copies["surrogate"] = policy.copies["teacher"]
    same = add_surrogate_reward(policy, again, steps, updater.hyper, 2, 3)
    assert torch.equal(same.rewarded_clean, same.base_clean)
    assert torch.equal(same.base_clean, batch.base_clean)


def test_the_surrogate_starts_at_the_teacher(make_recipe, base_folder, tmp_path):
    algorithm = {"name": "tdm_r1", "teacher": "elsewhere"}
    recipe = make_recipe({"algorithm": algorithm, "sampler": {"steps": 2}})
    start = tmp_path / "start"
    write_base_policy(start, verify_folder(base_folder), recipe.digest, recipe.policy)
    other = Policy(load_model(base_folder), recipe.policy, 0)
    move(other)
    metadata = read_policy_metadata(start).model_copy(update={"version": 1})
    other.save_folder(tmp_path / "teacher", metadata)
    teachers = {"teacher": tmp_path / "teacher"}
    policy, _ = load_policy(StageContext(recipe, 0, 0), base_folder, start, teachers)
    for name in SURROGATE:
        assert farthest(policy.copies[name], policy.copies["teacher"]) == 0
    assert farthest(policy.copies["fake"], policy.parameters) == 0
    assert farthest(policy.copies["fake"], policy.copies["teacher"]) > 1e-4


def test_the_reward_rises_with_the_surrogate_and_not_without(
    make_recipe, make_prompts, base_folder, scorer
):
    """Darkness, which the stage takes no gradient of: the teacher is the policy at the start, so
    that the surrogate alone can make the samples darker.
    """
    gains = {}
    for weight in (0.0, 0.7):
        recipe = make_recipe(
            {
                "algorithm": {"name": "tdm_r1", "reward_weight": weight, "teacher_limit": 1.0},
                "sampler": {"steps": 2},
                "steps": 10,
                "prompts_per_step": 6,
                "updates_per_step": 1,
                "optimizer": {"lr": 1e-3},
            }
        )
        ctx = StageContext(recipe, 0, 0)
        policy = Policy(load_model(base_folder), recipe.policy, 0)
        policy.snapshot_copy("teacher")
        for name in ctx.following_copies:
            policy.ensure_copy(name)
        recorder = MetricsRecorder()
        updater = PolicyUpdater(policy, ctx.online_config)
        run_online_stage(ctx, open_local_workers(ctx, updater, scorer), make_prompts(6), recorder)
        rewards = [metrics["reward/mean"] for metrics in recorder.metrics_rows]
        error = recorder.metrics_rows[0]["reward/std"] / 24**0.5
        gains[weight] = (np.mean(rewards[-2:]) - rewards[0]) / error
    assert gains[0.7] > 10
    assert gains[0.7] > 3 * gains[0.0]
