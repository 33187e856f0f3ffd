"""Rollout correction: exact rollouts need none, others are put right, and what is rejected is not
there.
"""

from __future__ import annotations

import pytest
import torch
from training_cases import rollout, samples, updater_of

from ebbflow.models import load_model
from ebbflow.training.batches import build_trajectory_batch
from ebbflow.training.rollout_correction import apply_rollout_correction
from tests.parameters import move, values

DECOUPLED = {"mode": "decoupled", "weights": "truncated"}
BYPASS = {"mode": "bypass", "weights": "none"}
STEPS = (0, 1, 2)


def stage_keys(correction, **rest):
    return {"sampler": {"steps": 5}, "correction": correction, "micro_batch": 5, **rest}


def correct(updater, made):
    """(what the correction says of a rollout, its metrics, the rows that it leaves)."""
    trajectory, conditioning, keys = made
    found, metrics = trajectory, {}
    if updater.correction is not None:
        found, metrics = apply_rollout_correction(updater, trajectory, conditioning, keys)
    advantage = samples(updater.policy.model)[2]
    return (
        found,
        metrics,
        build_trajectory_batch(found, conditioning, advantage, keys, updater.stage.sampler),
    )


def update(updater, made):
    return updater.update_policy(correct(updater, made)[2], 2)


@pytest.mark.parametrize("sampler", ["flow_sde", "dance_sde"])
@pytest.mark.parametrize(
    "correction", [DECOUPLED, {"weights": "masked"}, {"reject": "k3", "weights": "none"}], ids=str
)
def test_exact_rollouts_need_no_correction(model, correction, sampler):
    stage = stage_keys(correction) | {"sampler": {"name": sampler, "steps": 5}}
    updater = updater_of(model, "mix_grpo", **stage)
    move(updater.policy)
    made = rollout(model, updater.stage.sampler, STEPS)
    found, metrics, batch = correct(updater, made)
    assert metrics["rollout/delta_max"] < 1e-6
    assert metrics["rollout/chi2_sum"] == pytest.approx(0, abs=2e-3)
    assert (
        metrics["rollout/rejected"]
        == metrics["rollout/clipped_up"]
        == metrics["rollout/clipped_down"]
        == 0
    )
    assert found.keep.all()
    assert torch.allclose(found.weight, torch.ones(6, 3), atol=1e-3)  # exp(512 delta)
    assert torch.allclose(found.log_probs, made[0].log_probs, atol=1e-6)
    assert torch.allclose(found.means, made[0].means, atol=1e-5)
    assert len(batch.inputs) == 18


def test_a_correction_of_exact_rollouts_changes_no_step(base_folder):
    after = []
    for correction in (None, DECOUPLED):
        updater = updater_of(load_model(base_folder), "mix_grpo", **stage_keys(correction))
        move(updater.policy)
        update(updater, rollout(updater.policy.model, updater.stage.sampler, STEPS))
        after.append(values(updater.policy))
    assert all(torch.allclose(after[0][name], after[1][name], atol=1e-5) for name in after[0])


def test_without_a_correction_the_rollout_stands_as_it_is(model):
    updater = updater_of(model, "mix_grpo", **stage_keys(None))
    assert updater.correction is None
    made = rollout(model, updater.stage.sampler, STEPS, "bfloat16")
    with pytest.raises(AssertionError, match="the caller asks"):
        apply_rollout_correction(updater, *made)
    batch = correct(updater, made)[2]
    assert len(batch.inputs) == 18
    assert torch.equal(batch.old_log_prob, made[0].log_probs.flatten())
    assert torch.equal(batch.weight, torch.ones(18))


def test_the_ratio_of_a_rough_rollout_is_against_what_the_mode_says(model):
    """Rolled out in bfloat16: the ratio starts off 1 in bypass mode, and at 1 against the training
    policy's own log-probs.
    """
    first = {}
    for name, correction in {"none": None, "bypass": BYPASS, "decoupled": DECOUPLED}.items():
        updater = updater_of(model, "mix_grpo", lr=0, **stage_keys(correction))
        first[name] = update(updater, rollout(model, updater.stage.sampler, STEPS, "bfloat16"))[
            "ratio/deviation"
        ]
    assert first["decoupled"] < 1e-6 < first["bypass"]
    assert first["bypass"] == pytest.approx(first["none"], rel=1e-6)


def test_rough_rollouts_are_weighted_by_the_ratio_of_the_densities(model):
    updater = updater_of(model, "mix_grpo", **stage_keys({"weights": "truncated", "high": 1.01}))
    made = rollout(model, updater.stage.sampler, STEPS, "bfloat16")
    found, metrics, batch = correct(updater, made)
    delta = found.log_probs - made[0].log_probs
    assert metrics["rollout/delta_max"] == pytest.approx(delta.abs().max().item(), rel=1e-4)
    assert metrics["rollout/delta_max"] > 1e-6
    assert {f"rollout/delta_step_{step}" for step in STEPS} <= metrics.keys()
    dims = made[0].latents[0, 0].numel()
    torch.testing.assert_close(found.weight, (dims * delta.double()).exp().clamp_max(1.01).float())
    assert 0 < metrics["rollout/clipped_up"] < 1
    assert found.keep.all()
    assert torch.equal(batch.weight, found.weight.flatten())


def test_stale_rollouts_are_those_of_another_policy(model):
    """Rolled out by a policy that has since moved: the log-probs are recomputed under the one that
    trains.
    """
    updater = updater_of(model, "mix_grpo", **stage_keys(DECOUPLED))
    made = rollout(model, updater.stage.sampler, STEPS)
    move(updater.policy, 0.01)
    found, metrics, batch = correct(updater, made)
    assert metrics["rollout/delta_mean"] > 1e-5
    assert updater.update_policy(batch, 2)["ratio/deviation"] < 1e-6
    with updater.policy.use_copy("reference"):
        again = correct(updater, made)[1]
    assert again["rollout/delta_max"] < 1e-6
    assert not found.weight.requires_grad


def test_rejected_terms_leave_the_mean(model):
    """A step on what is left over is a step on those rows alone: the others count in no
    denominator.
    """
    updater = updater_of(
        model, "mix_grpo", lr=0, **stage_keys({"weights": "masked", "low": 0.95, "high": 1.05})
    )
    made = rollout(model, updater.stage.sampler, STEPS, "bfloat16")
    found, metrics, batch = correct(updater, made)
    kept = int(found.keep.sum())
    assert 2 <= kept < 18
    assert len(batch.inputs) == kept
    assert metrics["rollout/clipped_up"] + metrics["rollout/clipped_down"] == pytest.approx(
        1 - kept / 18
    )
    # At the first step every ratio is 1, and the loss of a term is -A times its weight.
    advantage = samples(model)[2][:, None].expand(6, 3)
    expected = (-advantage * found.weight)[found.keep].mean().item()
    assert updater.update_policy(batch, 2)["loss"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("reject", ["k1", "k2", "k3"])
def test_a_rejection_drops_the_terms_above_the_threshold(model, reject):
    updater = updater_of(
        model, "mix_grpo", **stage_keys({"weights": "none", "reject": reject, "reject_above": 1e-9})
    )
    made = rollout(model, updater.stage.sampler, STEPS, "bfloat16")
    delta = correct(updater, made)[0].log_probs - made[0].log_probs
    dims = made[0].latents[0, 0].numel()
    divergence = {
        "k1": dims * delta.abs(),
        "k2": (dims * delta) ** 2 / 2,
        "k3": torch.expm1(dims * delta) - dims * delta,
    }[reject]
    threshold = divergence.median().item()
    updater.correction = updater.correction.model_copy(update={"reject_above": threshold})
    found, metrics, batch = correct(updater, made)
    assert len(batch.inputs) == int(found.keep.sum())
    assert abs(len(batch.inputs) - 9) <= 1
    assert metrics["rollout/rejected"] == pytest.approx(1 - len(batch.inputs) / 18)
    assert (batch.weight == 1).all()
