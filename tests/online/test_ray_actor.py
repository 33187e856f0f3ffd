"""Actors of a stage on Ray: what they load, where they may run, and what the loss of one means."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

# Where Flyte's plugin has made ray a lazy module, ``from ray.exceptions import`` would import the
# exceptions a second time, and ray would raise others than those that its users catch.
from ray import exceptions

from ebbflow.online.ray_actor import load_reward_gradients, pin_to_cores
from ebbflow.online.ray_workers import RayWorker, RecoverableStageError, ResultGone, TrainingDied
from ebbflow.online.workers import StageError, WorkerDied
from ebbflow.stage import StageContext
from tests.conftest import Darkness


class OnlyScores(Darkness):
    name = "only_scores"

    def __init__(self):
        pytest.fail("a network that only scores is loaded where the policy is trained")


@pytest.mark.parametrize(("algorithm", "columns"), [("draft", {"Darkness"}), ("flow_grpo", None)])
def test_a_training_rank_loads_the_rewards_with_a_gradient_alone(make_recipe, algorithm, columns):
    rewards = [
        {"name": "custom", "path": "tests.conftest:Darkness"},
        {"name": "custom", "path": f"{__name__}:OnlyScores", "weight": 0},
    ]
    recipe = make_recipe(online={"algorithm": {"name": algorithm}}, rewards=rewards)
    scorer = load_reward_gradients(StageContext(recipe, 0, 0))
    assert (scorer and set(scorer.reward_weights)) == columns


@pytest.mark.parametrize(
    ("role", "error", "means"),
    [
        ("rollout", exceptions.ActorUnavailableError("its machine is gone", None), WorkerDied),
        ("reward", exceptions.ObjectLostError("aa", None, ""), ResultGone),
        ("training", exceptions.ObjectLostError("aa", None, ""), ResultGone),
        ("training", exceptions.ActorUnavailableError("its machine is gone", None), TrainingDied),
        ("reward", exceptions.OwnerDiedError("aa", None, ""), TrainingDied),
    ],
)
def test_what_a_lost_machine_means(make_recipe, role, error, means):
    """Results that lay there are no death of the worker that was to be given them; only weights
    belong to a worker, rank 0.
    """
    ctx = StageContext(make_recipe(online={"placement": "ray"}), 0, 0)
    worker = RayWorker.__new__(RayWorker)
    worker.role, worker.index, worker.workers = role, 0, SimpleNamespace(ctx=ctx, step=2)
    cause = worker._explain_error(error)
    assert type(cause) is means
    assert issubclass(means, RecoverableStageError) is (means is not WorkerDied)


def test_cores_that_are_not_there_are_named():
    with pytest.raises(StageError, match=r"resources.rollout.cores = \[4000\].*may use \["):
        pin_to_cores([4000], "rollout")
