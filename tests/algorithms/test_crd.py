"""CRD: the implied reward regressed on the advantage, both centred inside the group, against a
closed form in numpy.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from algorithm_rows import at_velocity, doubles, forward_rows, gradient, target, wide

from ebbflow.algorithms.built_in.crd import ALGORITHM, CRDConfig

ADVANTAGES = [1.0, -0.4, 0.3, -2.0, 1.2, 0.8]  # that are not centred already
GROUPS = [0, 0, 1, 1, 1, 1]
BETAS = [0.3, 1.0]
CLIPS = [5.0, 2.0]


def group_rows(seed=0):
    return forward_rows(ADVANTAGES, GROUPS, seed)


def centred(values):
    """By hand, of GROUPS."""
    return np.concatenate([values[:2] - values[:2].mean(), values[2:] - values[2:].mean()])


def published(rows, beta, clip):
    """(loss of each row, its gradient with respect to the velocity), float64, written out from the
    published port.

    The port's target is A / clip / 2 + 1/2 within [0, 1]; it takes no gradient of the group's mean
    and none of the weights.
    """
    u = (rows.noise - rows.clean).numpy()
    velocity = rows.velocity.detach().numpy()
    old = rows.copies["old"].numpy()
    weights = [np.abs(each - u).mean((1, 2)) for each in (velocity, old)]
    errors = [
        ((each - u) ** 2).mean((1, 2)) / weight
        for each, weight in zip((velocity, old), weights, strict=True)
    ]
    preference = np.clip(rows.advantage.numpy() / clip / 2 + 0.5, 0, 1)
    miss = beta * centred(errors[1] - errors[0]) - centred(preference)
    slope = -2 * (velocity - u) / u[0].size / weights[0][:, None, None]
    return clip / beta * miss**2, (2 * clip * miss)[:, None, None] * slope


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_are_the_published_ones(beta, clip, seed):
    rows = replace(group_rows(seed), advantage_clip=clip)
    config = CRDConfig(beta=beta)
    loss, slope = published(rows, beta, clip)
    np.testing.assert_allclose(ALGORITHM.loss(rows, config)[0].detach().numpy(), loss, rtol=1e-12)
    found = gradient(ALGORITHM, rows, config, rows.velocity).numpy()
    np.testing.assert_allclose(found, slope, rtol=1e-10, atol=1e-12)


def test_two_samples_of_one_element_by_hand():
    """With one element r = |v_old - u| - |v - u|: .3 and -.1; A / 10 = .2 and -.3. Centred .2, -.2
    and .25, -.25.
    """
    one = [
        doubles(values).view(2, 1, 1) for values in ([0.0, 0.0], [1.0, 1.0], [1.2, 1.4], [1.5, 0.7])
    ]
    rows = replace(
        forward_rows([2.0, -3.0], [0, 0]), clean=one[0], noise=one[1], copies={"old": one[3]}
    )
    rows = at_velocity(rows, one[2])
    loss, metrics = ALGORITHM.loss(rows, CRDConfig())
    assert loss.tolist() == pytest.approx([5 * 0.05**2] * 2)
    assert metrics["crd/implied"].tolist() == pytest.approx([0.3, -0.1])
    # 2 * 5 * miss * dr / dv, with the misses -.05 and .05 and dr / dv = -2 sign(v - u): the weight
    # takes no gradient.
    assert gradient(
        ALGORITHM, rows, CRDConfig(), rows.velocity
    ).flatten().tolist() == pytest.approx([1, -1])


def test_the_target_can_be_reached():
    """Gradient descent brings the loss to 0 with predictions near the target: a policy can have the
    wanted implied rewards.
    """
    rows = forward_rows([5.0, -5.0, 5.0, -5.0, 5.0, -5.0], GROUPS)
    rows = at_velocity(rows, rows.copies["old"])
    start = ALGORITHM.loss(rows, CRDConfig())[0].sum().item()
    for _ in range(400):
        rows = at_velocity(
            rows, rows.velocity - 0.02 * gradient(ALGORITHM, rows, CRDConfig(), rows.velocity)
        )
    assert ALGORITHM.loss(rows, CRDConfig())[0].sum().item() < 1e-6 * start
    assert (rows.velocity - target(rows)).abs().max() < 10


@pytest.mark.parametrize("beta", BETAS)
def test_at_the_old_policy_the_gradient_does_not_depend_on_beta(beta):
    rows = group_rows()
    rows = at_velocity(rows, rows.copies["old"])
    loss, metrics = ALGORITHM.loss(rows, CRDConfig(beta=beta))
    np.testing.assert_allclose(
        loss.detach().numpy(), 5 / beta * centred(rows.advantage.numpy() / 10) ** 2, rtol=1e-12
    )
    assert (metrics["crd/implied"] == 0).all()
    found, expected = (
        gradient(ALGORITHM, rows, CRDConfig(beta=each), rows.velocity) for each in (beta, 1.0)
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_a_constant_on_the_advantages_of_a_group_changes_nothing():
    rows = group_rows()
    config = CRDConfig()
    shifted = replace(rows, advantage=rows.advantage + doubles([3.0, 3.0, -1.7, -1.7, -1.7, -1.7]))
    torch.testing.assert_close(
        ALGORITHM.loss(rows, config)[0], ALGORITHM.loss(shifted, config)[0], rtol=1e-12, atol=1e-12
    )
    here, there = (gradient(ALGORITHM, each, config, each.velocity) for each in (rows, shifted))
    torch.testing.assert_close(here, there, rtol=1e-12, atol=1e-12)


def test_equal_advantages_at_the_old_policy_teach_nothing():
    rows = forward_rows([2.0, 2.0, -1.0, -1.0, -1.0, -1.0], GROUPS)
    rows = at_velocity(rows, rows.copies["old"])
    assert gradient(ALGORITHM, rows, CRDConfig(), rows.velocity).abs().max() < 1e-14


def test_groups_do_not_mix():
    rows = group_rows()
    config = CRDConfig()
    velocity = rows.velocity.detach().clone()
    advantage = rows.advantage.clone()
    velocity[2] += 1
    advantage[3] += 1
    other = replace(at_velocity(rows, velocity), advantage=advantage)
    here, there = (ALGORITHM.loss(each, config)[0] for each in (rows, other))
    assert torch.equal(here[:2], there[:2])
    assert (here[2:] != there[2:]).all()
    here, there = (gradient(ALGORITHM, each, config, each.velocity) for each in (rows, other))
    assert torch.equal(here[:2], there[:2])


def test_a_prediction_without_error_keeps_its_weight_above_zero():
    rows = group_rows()
    perfect = at_velocity(rows, target(rows))
    loss, _ = ALGORITHM.loss(perfect, CRDConfig())
    assert loss.isfinite().all()
    assert gradient(ALGORITHM, perfect, CRDConfig(), perfect.velocity).isfinite().all()


def test_agreement_counts_the_rows_whose_change_has_the_sign_of_the_advantage():
    rows = group_rows()
    old = rows.copies["old"]
    sign = wide(torch.from_numpy(centred(rows.advantage.numpy())).sign())
    right, wrong = (old + by * sign * (target(rows) - old) for by in (0.3, -0.3))
    agreement = [
        ALGORITHM.loss(at_velocity(rows, each), CRDConfig())[1]["crd/agreement"].tolist()
        for each in (right, wrong)
    ]
    assert agreement == [[1] * 6, [0] * 6]


def test_the_sampler_is_not_the_reference():
    assert ALGORITHM.generates == "sampling"
    assert ALGORITHM.copies(CRDConfig()) == {"old"}
    assert ALGORITHM.list_following_copies(CRDConfig()) == ("old", "sampling")


def test_each_copy_follows_by_its_published_schedule():
    """The published one counts optimiser steps, of which a rollout step has two."""
    updates = CRDConfig.stage_defaults["updates_per_step"]
    for step in (1, 2, 37, 38, 39, 74, 75, 76, 104, 105, 1000):
        old, sampling = (ALGORITHM.follows[name](CRDConfig(), step) for name in ("old", "sampling"))
        assert old == pytest.approx(min(0.25 + 0.005 * updates * step, 0.999))
        # Its 75 optimiser steps are 37.5 rollout steps, and a warm-up has whole ones.
        published = min(0.0075 * max(updates * step - 75, 0), 0.999)
        assert published <= sampling <= published + 0.0075 + 1e-9
