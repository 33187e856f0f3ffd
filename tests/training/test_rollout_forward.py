"""The rows of an update in the order of the rollout's forward passes, with the predictions that it
made there.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ebbflow.flow.noise import SampleKeys
from ebbflow.flow.windows import Plan
from ebbflow.models.base import predict
from ebbflow.rollouts.generate import generate_samples
from ebbflow.training.batches import build_trajectory_batch, split_into_passes
from ebbflow.training.rollout_forward import reuse_rollout_forward
from tests.training.training_cases import TEXTS, samples, updater_of

PASSES = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
"""(micro-batch, trained step) of a rollout of six samples in micro-batches of four."""


@pytest.fixture
def make(model):
    """``make(keep)``: (updater, rows [6, 3] that are kept as a usual batch, the same in the order
    of the rollout).

    The prompt with the number ``broken`` is not finite.
    """

    def build(keep, broken=None):
        updater = updater_of(
            model,
            {"name": "flow_grpo", "clip_range": 1e-3},
            window={"kind": "all"},
            sampler={"steps": 4},
        )
        conditioning = model.encode_texts(TEXTS)
        keys = SampleKeys(2, list(range(6)), [7] * 6)
        sampler = updater.stage.sampler
        if broken is not None:
            conditioning["embeds"][broken] = torch.nan
        made = generate_samples(
            model,
            conditioning,
            keys,
            sampler,
            Plan((0, 1, 2), (0, 1, 2), with_means=True),
            4,
            with_graph=True,
        )
        rollout = replace(made.trajectory, keep=torch.from_numpy(keep))
        batch = build_trajectory_batch(rollout, conditioning, samples(model)[2], keys, sampler)
        return updater, batch, reuse_rollout_forward(batch, np.flatnonzero(keep), made.velocities)

    return build


def some(*dropped):
    keep = np.ones((6, 3), dtype=bool)
    keep[dropped] = False
    return keep


KEPT = {
    "all": some([], []),
    "first and last rows of passes dropped": some([0, 1, 3, 5], [0, 0, 1, 2]),
    "passes dropped": some([0, 1, 2, 4], [1, 1, 1, 0]),
}


@pytest.mark.parametrize("keep", KEPT.values(), ids=KEPT)
def test_every_row_has_the_prediction_of_its_own_pass(model, make, keep):
    _, plain, batch = make(keep)
    slices = split_into_passes(batch.group_index, len(batch.inputs.predicted))
    found = []
    for part in slices:
        prompts, (step,) = (
            batch.keys.select_samples(part).prompt_ids,
            batch.steps[part].unique().tolist(),
        )
        found.append((int(prompts[0] >= 3), step))
        assert prompts == [
            sample for sample in range(6) if (sample >= 3) == found[-1][0] and keep[sample, step]
        ]
        assert torch.allclose(
            batch.inputs.predicted[part.start],
            predict(model, *batch.inputs.model_arguments(part)),
            atol=1e-5,
        )
    assert found == [
        where for where in PASSES if keep[[3 * where[0] + i for i in range(3)], where[1]].any()
    ]
    order = np.lexsort((batch.steps, batch.keys.prompt_ids))  # as the usual batch has its rows
    for name in ("weight", "next_latents", "steps", "old_mean", "old_log_prob", "advantage"):
        assert torch.equal(getattr(batch, name)[order], getattr(plain, name)), name
    for name in ("latents", "sigma", "sample_index"):
        assert torch.equal(getattr(batch.inputs, name)[order], getattr(plain.inputs, name)), name


@pytest.mark.parametrize("keep", KEPT.values(), ids=KEPT)
def test_its_gradient_is_that_of_the_rows_in_any_other_order(make, keep):
    updater, plain, batch = make(keep)
    gradients = []
    for rows, passes in ((batch, len(batch.inputs.predicted)), (plain, 4)):
        start = {name: value.detach().clone() for name, value in updater.policy.parameters.items()}
        updater.update_policy(rows, passes)
        gradients.append(
            {name: value.grad.clone() for name, value in updater.policy.parameters.items()}
        )
        updater.policy.assign_parameters(start)
    assert batch.inputs.predicted == {}
    for name, gradient in gradients[1].items():
        assert torch.allclose(
            gradients[0][name], gradient, atol=1e-5 * float(gradient.abs().max()), rtol=1e-3
        ), name


def test_a_sample_that_is_not_finite_does_not_spoil_the_others(make):
    """Its row has no loss, and zero times what it has become is no zero: its passes are predicted
    again without it.
    """
    updater, plain, batch = make(some(1), broken=1)
    assert len(batch.inputs.predicted) == 3
    assert batch.group_index.unique().tolist() == list(range(6))
    updater.update_policy(batch, 6)
    gradients = [value.grad.clone() for value in updater.policy.parameters.values()]
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert any(gradient.any() for gradient in gradients)


def test_passes_that_are_repeated_after_an_overflow_predict_again(make):
    """A graph is good for one backward pass."""
    updater, _, batch = make(KEPT["all"])
    updater.loss_scale = 2.0**127
    updater.update_policy(replace(batch, advantage=1e6 * batch.advantage), 6)
    assert updater.loss_scale < 2.0**127
    gradient = torch.cat([value.grad.flatten() for value in updater.policy.parameters.values()])
    assert gradient.isfinite().all()
    assert gradient.any()


def test_a_rollout_with_graphs_is_the_same_to_the_last_bit(model, make):
    updater, _, _ = make(KEPT["all"])
    keys = SampleKeys(2, list(range(6)), [7] * 6)
    plan = Plan((1, 2), (2,))
    arguments = (model, model.encode_texts(TEXTS), keys, updater.stage.sampler, plan, 4)
    plain = generate_samples(*arguments)
    kept = generate_samples(*arguments, with_graph=True)
    assert plain.velocities == ()
    assert [[value.shape[0] for value in part] for part in kept.velocities] == [[3], [3]]
    assert all(value.requires_grad for part in kept.velocities for value in part)
    assert torch.equal(plain.latents, kept.latents)
    assert not kept.latents.requires_grad
    for name, value in plain.trajectory.list_columns().items():
        assert torch.equal(value, getattr(kept.trajectory, name))
        assert not getattr(kept.trajectory, name).requires_grad
    assert kept.move_to(torch.device("cpu")).velocities is kept.velocities
