"""Steps that are not taken: what is not finite is named, and the policy stays as it was."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from training_cases import NFT, UNITS, forward_rows, spoilt, stage_of, trajectory_rows, updater_of

from ebbflow.algorithms.base import Algorithm, mean_per_row
from ebbflow.models import load_model
from ebbflow.recipe.algorithms import ForwardConfig
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.training.optimizer import build_optimizer
from ebbflow.training.passes import TrainingError
from tests.parameters import same, values

NAN = float("nan")
INF = float("inf")


class Own(ForwardConfig):
    """An algorithm of this file."""


def root_of_nothing(rows, config):
    """Backwards 0 / 0, in the rows whose clean latent is 0."""
    there = (rows.clean.flatten(1)[:, 0] != 0).float()
    return (rows.velocity.flatten(1).abs().sum(1) * there).sqrt(), {}


ROOT = Algorithm(Own, root_of_nothing)
INFINITE = Algorithm(Own, lambda rows, config: (mean_per_row(rows.velocity) + INF, {}))


def own(name):
    return {"name": "custom", "path": f"{__name__}:{name}"}


# Nonsense in one row: the step is not taken, and the row is named.


def state(updater):
    """Everything that a step changes."""
    policy = updater.policy
    copies = {
        f"{name} {key}": value.clone()
        for name, copy in policy.copies.items()
        for key, value in copy.items()
    }
    momenta = {
        f"{i} {key}": torch.as_tensor(value).clone()
        for i, of in updater.optimizer.state_dict()["state"].items()
        for key, value in of.items()
    }
    return values(policy) | copies | momenta | {"updates": torch.tensor(updater.updates)}


def read_refusal(updater, batch, passes=3):
    """The message of a step that is not taken."""
    before = state(updater)
    with pytest.raises(TrainingError) as error:
        updater.update_policy(batch, passes)
    assert same(state(updater), before)
    text = str(error.value)
    assert "the step was not taken" in text
    assert "optimizer.lr" in text
    return text


def with_adam(updater, batch):
    """The updater after a first good step, so that its optimiser and its copies have something to
    lose.
    """
    updater.optimizer = build_optimizer(updater.policy, updater.stage.optimizer)
    updater.update_policy(batch, 1)
    return updater


@pytest.mark.any_cpu
@pytest.mark.parametrize("row", [0, 3, 5])
@pytest.mark.parametrize(
    ("field", "wrong"), [("clean", NAN), ("clean", INF), ("advantage", NAN), ("noise", -INF)]
)
def test_nonsense_in_a_sample_names_it_and_stops_the_step(model, field, wrong, row):
    updater = updater_of(model, NFT, PolicyConfig(ema={"max_decay": 0.5}))
    batch = forward_rows(model, updater.stage)
    text = read_refusal(with_adam(updater, batch), spoilt(batch, field, row, wrong))
    assert (
        f"of prompt {row}, sample 7, noised to sigma {batch.inputs.sigma[row].item():.4f}" in text
    )
    assert "not finite: " in text
    assert "loss" in text.split(" of prompt")[0]


@pytest.mark.any_cpu
@pytest.mark.parametrize("wrong", [NAN, INF])
@pytest.mark.parametrize("field", ["old_log_prob", "next_latents", "advantage"])
def test_nonsense_in_a_step_of_a_trajectory_names_sample_and_step(model, field, wrong):
    updater = updater_of(model, "mix_grpo")
    batch = trajectory_rows(model, updater.stage)
    text = read_refusal(
        with_adam(updater, batch), spoilt(batch, field, 10, wrong)
    )  # three steps a sample: the second of the fourth
    assert (
        f"of prompt 3, sample 7, denoising step 1 (sigma {batch.inputs.sigma[10].item():.4f})"
        in text
    )


def test_what_is_wrong_with_a_term_is_said_by_its_metrics(model):
    updater = updater_of(model, "mix_grpo")
    batch = trajectory_rows(model, updater.stage)
    named = (
        read_refusal(updater, spoilt(batch, "old_log_prob", 4, NAN))
        .split("not finite: ")[1]
        .split(" of prompt")[0]
        .split(", ")
    )
    assert {"loss", "ratio/mean", "kl/old", "the gradient"} <= set(named)
    assert not {"velocity_drift", "kl/reference"} & set(named)


@pytest.mark.any_cpu
@pytest.mark.parametrize("algorithm", ["dgpo", "crd", "diffusion_dpo"])
def test_nonsense_in_a_group_names_the_group(model, algorithm):
    """What is wrong with one sample of a group is wrong with all of them: the first is named."""
    updater = updater_of(model, algorithm)
    group_index = UNITS[algorithm]
    batch = forward_rows(model, updater.stage, group_index)
    text = read_refusal(updater, spoilt(batch, "clean", 4, NAN), passes=2)
    wrong = group_index[batch.keys.prompt_ids[4]]
    members = [f"prompt {row}," for row in range(6) if group_index[row] == wrong]
    assert any(member in text for member in members)


def test_a_gradient_that_alone_is_not_finite_names_its_sample(model):
    updater = updater_of(model, own("ROOT"))
    batch = spoilt(forward_rows(model, stage_of(NFT)), "clean", 2, 0.0)
    text = read_refusal(updater, batch)
    assert (
        "not finite: the gradient of prompt 2, sample 7, noised to sigma"
        f" {batch.inputs.sigma[2].item():.4f}" in text
    )


def test_a_gradient_that_overflows_on_its_way_back_names_the_parameter(model):
    updater = updater_of(model, NFT)
    name = sorted(updater.policy.parameters)[3]
    hook = updater.policy.parameters[name].register_hook(lambda gradient: gradient * INF)
    assert f"the gradient of {name} and" in read_refusal(
        updater, forward_rows(model, updater.stage)
    )
    hook.remove()
    assert np.isfinite(updater.update_policy(forward_rows(model, updater.stage), 1)["grad_norm"])


def test_a_loss_that_alone_is_not_finite_stops_the_step(model):
    updater = updater_of(model, own("INFINITE"))
    assert "not finite: loss of prompt 0" in read_refusal(
        updater, forward_rows(model, stage_of(NFT))
    )


def test_a_loss_that_is_not_finite_is_no_overflow(base_folder):
    updater = updater_of(load_model(base_folder), NFT)
    updater.loss_scale = 2.0**16
    batch = spoilt(forward_rows(updater.policy.model, updater.stage), "clean", 1, float("nan"))
    with pytest.raises(TrainingError, match="not finite"):
        updater.update_policy(batch, passes=1)
    assert updater.loss_scale == 2.0**16
