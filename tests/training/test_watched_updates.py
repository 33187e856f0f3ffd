"""What is watched of an update: the drift from the base model, and the norm and the variance of
gradients.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from training_cases import (
    NFT,
    forward_rows,
    quietly,
    sgd,
    stage_of,
    trajectory_rows,
    updater_of,
)

from ebbflow.algorithms.base import Algorithm
from ebbflow.flow.noise import SampleKeys
from ebbflow.models import Conditioning
from ebbflow.models.base import predict
from ebbflow.recipe.algorithms import ForwardConfig
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.training.batches import ForwardBatch, ForwardInputs
from ebbflow.training.distributed import Ranks
from ebbflow.training.update import PolicyUpdater
from tests.parameters import move


class Linear(ForwardConfig):
    """An algorithm of this file."""


LINEAR = Algorithm(Linear, lambda rows, config: ((rows.velocity * rows.noise).sum(1), {}))

# The drift alarm.


def test_the_drift_alarm_warns_once_and_stays_on(model):
    updater = updater_of(model, NFT, lr=0.05, drift_alarm=1e-9)
    batch = forward_rows(model, updater.stage)
    assert quietly(updater.update_policy, batch, 2)["alarm/velocity_drift"] == 0
    assert not updater.alarms
    with pytest.warns(
        UserWarning,
        match=r"velocity drift .* above drift_alarm = 1e-09 after 2 .*reference\.weight",
    ) as warned:
        assert updater.update_policy(batch, 2)["alarm/velocity_drift"] == 1
    assert len(warned) == 1
    assert quietly(updater.update_policy, batch, 2)["alarm/velocity_drift"] == 1
    assert len(updater.alarms) == 1
    assert "above drift_alarm = 1e-09 after 2 optimiser steps" in updater.alarms[0]


@pytest.mark.parametrize("passes", [1, 2, 5])
@pytest.mark.parametrize("penalty", [0.0, 0.1], ids=["some rows", "all rows"])
def test_the_drift_is_that_of_every_seventeenth_row_however_many_passes(model, passes, penalty):
    """Or of all of them, where the reference penalty predicts with the base model anyway."""
    updater = updater_of(model, "mix_grpo", lr=0, reference={"weight": penalty})
    batch = trajectory_rows(model, updater.stage)
    move(updater.policy, 0.005)
    inputs = batch.inputs.model_arguments(slice(None) if penalty else slice(None, None, 17))
    with updater.policy.use_copy("reference"):
        base = predict(model, *inputs)
    with torch.no_grad():
        expected = ((predict(model, *inputs) - base) ** 2).mean().item()
    assert len(batch.inputs) == 18
    assert len(base) == (18 if penalty else 2)
    assert updater.update_policy(batch, passes)["velocity_drift"] == pytest.approx(
        expected, rel=1e-4
    )


def test_after_the_first_updates_every_fourth_is_watched(model, monkeypatch):
    updater = updater_of(model, "sft", lr=1e-3, reference={"weight": 0})
    swapped = []
    using = updater.policy.use_copy
    monkeypatch.setattr(
        updater.policy, "use_copy", lambda name: swapped.append(updater.updates) or using(name)
    )
    batch = forward_rows(model, updater.stage)
    drifts = [updater.update_policy(batch, 1)["velocity_drift"] for _ in range(14)]
    assert swapped == [*range(8), 8, 12]
    assert len(set(drifts[:9])) == 9
    assert drifts[8] == drifts[9] == drifts[10] == drifts[11] != drifts[12] == drifts[13]


def test_another_alarm_does_not_silence_the_drift_alarm(model):
    updater = updater_of(model, NFT, lr=0.05, drift_alarm=1e-9)
    updater.alarms.append("left out: a shard")
    batch = forward_rows(model, updater.stage)
    updater.update_policy(batch, 2)
    with pytest.warns(UserWarning, match="^velocity drift"):
        updater.update_policy(batch, 2)
    assert [alarm.split(" ")[0] for alarm in updater.alarms] == ["left", "velocity"]


def test_a_policy_that_stays_near_the_base_raises_no_alarm(model):
    updater = updater_of(model, NFT, lr=1e-3)
    for _ in range(3):
        assert (
            quietly(updater.update_policy, forward_rows(model, updater.stage), 2)[
                "alarm/velocity_drift"
            ]
            == 0
        )
    assert not updater.alarms


# Weights and gradient variance, on a policy whose per-term gradients are given: v = w, loss of a
# term = <w, g_i>.


def linear_policy(elements):
    weight = torch.nn.Parameter(torch.zeros(elements))
    model = SimpleNamespace(
        predict_velocity=lambda latents, sigma, conditioning: weight.expand(len(latents), elements),
        sigmas=lambda steps: torch.linspace(1, 0, steps + 1),
        precision="float32",
        latent_shape=(elements,),
    )
    return SimpleNamespace(
        parameters={"weight": weight},
        model=model,
        copies={},
        use_copy=lambda name: nullcontext(),
        set_gradient_reduction=lambda wanted: None,
        average_gradients=lambda: None,
        has_whole_gradients=True,
        ranks=Ranks(0, 1),
        row_ranks=Ranks(0, 1),
        keep_gathered=nullcontext,
        config=PolicyConfig(),
        context_parallel=1,
        gradient_factor=1,
    )


def given_gradients(gradients, weight=None):
    count = len(gradients)
    inputs = ForwardInputs(
        gradients, torch.zeros(count), Conditioning({"embeds": gradients}), torch.arange(count)
    )
    weight = torch.ones(count) if weight is None else weight
    group_index = torch.arange(count)
    keys = SampleKeys(0, group_index.tolist(), group_index.tolist())
    return ForwardBatch(inputs, weight, group_index, gradients, gradients, torch.zeros(count), keys)


def linear_updater(elements, lr=0.1):
    policy = linear_policy(elements)
    return PolicyUpdater(
        policy,
        stage_of({"name": "custom", "path": f"{__name__}:LINEAR"}),
        optimizer=sgd(policy, lr),
    )


def gradient_metrics(gradients, passes):
    return linear_updater(gradients.shape[1]).update_policy(given_gradients(gradients), passes)


@pytest.mark.parametrize("passes", [1, 3])
def test_the_weight_of_a_term_scales_its_loss_and_leaves_the_denominator(passes):
    gradients = torch.randn(7, 5, generator=torch.Generator().manual_seed(1))
    weight = torch.tensor([1.0, 0.0, 0.5, 2.0, 1.25, 0.0, 1.0])
    updater = linear_updater(5, lr=1.0)
    metrics = updater.update_policy(given_gradients(gradients, weight), passes)
    mean = (weight[:, None] * gradients).sum(0) / 7
    torch.testing.assert_close(updater.policy.parameters["weight"].detach(), -mean)
    assert metrics["grad_norm"] == pytest.approx(mean.norm().item(), rel=1e-5)
    updater.policy.parameters["weight"].data.fill_(1.0)
    assert updater.update_policy(given_gradients(gradients, weight), passes)[
        "loss"
    ] == pytest.approx(mean.sum().item(), rel=1e-4)


def test_gradient_norm_and_variance_of_known_gradients():
    gradients = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    metrics = gradient_metrics(gradients, passes=3)
    small = gradients[:4].mean(0).norm().item()
    whole = gradients.mean(0).norm().item()
    assert metrics["grad_norm"] == pytest.approx(whole, rel=1e-5)
    assert metrics["grad_variance"] == pytest.approx(
        (small**2 - whole**2) / (1 / 4 - 1 / 12), rel=1e-4
    )
    assert "grad_variance" not in gradient_metrics(gradients, passes=1)

    # Passes of 3, 2 and 2 rows.
    uneven = gradient_metrics(gradients[:7], passes=3)
    small = gradients[:3].mean(0).norm().item()
    whole = gradients[:7].mean(0).norm().item()
    assert uneven["grad_variance"] == pytest.approx(
        (small**2 - whole**2) / (1 / 3 - 1 / 7), rel=1e-4
    )


def test_gradient_variance_is_the_trace_of_the_covariance_on_average():
    generator = torch.Generator().manual_seed(0)
    spread = torch.tensor([0.5, 1.0, 2.0])
    trials = [
        gradient_metrics(
            torch.tensor([3.0, -1.0, 0.0]) + spread * torch.randn(16, 3, generator=generator), 4
        )["grad_variance"]
        for _ in range(800)
    ]
    assert np.mean(trials) == pytest.approx(
        (spread**2).sum().item(), abs=4 * np.std(trials) / len(trials) ** 0.5
    )


def test_equal_gradients_have_no_variance():
    assert gradient_metrics(torch.ones(8, 3), passes=4)["grad_variance"] == pytest.approx(
        0, abs=1e-5
    )
