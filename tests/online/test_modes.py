"""Sync, one-step-off and async: which weights make which rollouts, and what becomes of those that
are too old.
"""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from ebbflow.models import load_model
from ebbflow.online.loop import run_online_stage
from ebbflow.online.workers import LocalWorker, ResultLost, RolloutPool, open_local_workers
from ebbflow.recipe import RecipeError
from ebbflow.rewards.base import Reward, RewardResult
from ebbflow.rewards.combine import RewardError, Scorer
from ebbflow.stage import MetricsRecorder, StageContext
from ebbflow.training.policy import Policy
from ebbflow.training.update import PolicyUpdater

MODES = [{"mode": "sync"}, {"mode": "one_step_off"}, {"mode": "async", "staleness": 2}]
NFT = {"algorithm": {"name": "diffusion_nft"}, "sampler": {"name": "ode", "steps": 3}}
CRD = {**NFT, "algorithm": {"name": "crd"}}
TIMED = ("seconds", "ms_per", "images_per", "push", "utilisation")


@pytest.fixture
def run(make_recipe, make_prompts, base_folder, scorer):
    """Run an online stage; returns (policy, metrics of each step, what its generator was asked:
    (step, version, key rows)).
    """

    def stage(judge=scorer, policy=None, keys=None, around=lambda placement: placement, **online):
        online = {"prompts_per_step": 3, "micro_batch": 4, **online}
        ctx = StageContext(make_recipe(online=online, policy=policy or {}, **(keys or {})), 0, 0)
        trained = Policy(load_model(base_folder), ctx.recipe.policy, 0)
        for name in ctx.following_copies:
            trained.ensure_copy(name)
        placement = open_local_workers(ctx, PolicyUpdater(trained, ctx.online_config), judge)
        asked = []
        recorder = MetricsRecorder(None)
        generate = placement.rollout_worker.generate

        def watched(request, weights):
            keys = request.keys
            asked.append(
                (
                    request.step,
                    weights.version,
                    tuple(zip(keys.prompt_ids, keys.samples, strict=True)),
                )
            )
            return generate(request, weights)

        placement.rollout_worker.generate = watched
        run_online_stage(ctx, around(placement), make_prompts(9), recorder)
        return trained, recorder.metrics_rows, asked

    return stage


def learnt(metrics):
    return [
        {name: value for name, value in step.items() if not name.startswith(TIMED)}
        for step in metrics
    ]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode["mode"])
@pytest.mark.parametrize(
    "algorithm",
    [
        "mix_grpo",
        pytest.param("flow_grpo", marks=pytest.mark.exhaustive),
        pytest.param("grpo_guard", marks=pytest.mark.exhaustive),
    ],
)
def test_without_a_learning_rate_the_ratio_is_one_for_as_long_as_it_runs(run, mode, algorithm):
    # Twice as many steps as it takes to fill the queue and to move the window through the sampler.
    _, metrics, _ = run(
        **mode, algorithm={"name": algorithm}, steps=8, prompts_per_step=2, optimizer={"lr": 0}
    )
    assert len(metrics) == 8
    for step in metrics:
        assert step["ratio/mean"] == pytest.approx(1, abs=1e-6)
        assert step["ratio/deviation"] < 1e-6


@pytest.mark.parametrize("online", [{}, NFT, CRD], ids=["mix_grpo", "nft", "crd"])
@pytest.mark.parametrize(
    "policy",
    [
        pytest.param({}, id="full"),
        pytest.param({"train": "lora", "rank": 4}, id="lora", marks=pytest.mark.exhaustive),
    ],
)
def test_without_a_learning_rate_every_mode_is_the_same(run, online, policy):
    modes = [
        run(**mode, **online, policy=policy, steps=4, optimizer={"lr": 0})[1] for mode in MODES
    ]
    about_age = ("staleness", "rollout/")
    same = [
        [{k: v for k, v in step.items() if not k.startswith(about_age)} for step in learnt(mode)]
        for mode in modes
    ]
    assert same[0] == same[1] == same[2]
    watched = [
        step["rollout/delta_max"]
        for mode in modes[1:]
        for step in mode
        if "rollout/delta_max" in step
    ]
    assert max(watched, default=0.0) < 1e-6
    assert bool(watched) == (online == {})


class SlowAtFirst(Reward):
    """Darkness, of which the first part takes its time."""

    name = "darkness"

    def __init__(self, seconds):
        self.seconds = seconds
        self.asked = 0

    def __call__(self, images, prompts):
        self.asked += 1
        if self.asked == 1:
            time.sleep(self.seconds)
        return RewardResult(1 - images.mean((1, 2, 3)) / 255, {}, {})


@pytest.mark.any_cpu
def test_in_one_process_no_slow_reward_changes_the_order(run):
    """Several at once would let a later step be ready first."""
    online = {"mode": "async", "staleness": 2, "steps": 4, "resources": {"reward": {"count": 3}}}
    slow, usual = (
        run(judge=Scorer(((SlowAtFirst(seconds), 1.0),)), **online) for seconds in (0.5, 0)
    )
    assert [step for step, *_ in slow[2]] == [step for step, *_ in usual[2]]
    assert learnt(slow[1]) == learnt(usual[1])


def test_one_step_off_generates_with_the_weights_that_the_step_before_started_from(run):
    _, metrics, asked = run(mode="one_step_off", steps=4)
    assert [(step, version) for step, version, _ in asked[::3]] == [(0, 0), (1, 0), (2, 1), (3, 2)]
    assert [step["staleness/max"] for step in metrics] == [0, 1, 1, 1]
    assert [step["staleness/mean"] for step in metrics] == [0, 1, 1, 1]
    assert metrics[0]["ratio/first_deviation"] < 1e-6 < metrics[1]["ratio/first_deviation"]


@pytest.mark.any_cpu
@pytest.mark.parametrize("staleness", [1, 3])
def test_async_runs_as_far_ahead_as_it_may(run, staleness):
    _, metrics, asked = run(mode="async", staleness=staleness, steps=6)
    assert [version for step, version, _ in asked[::3]] == [
        max(0, step - staleness) for step in range(6)
    ]
    assert max(step["staleness/max"] for step in metrics) == staleness
    assert all(step["staleness/dropped_samples"] == 0 for step in metrics)


@pytest.mark.any_cpu
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode["mode"])
def test_everything_is_generated_once_and_every_push_leaves_it_be(run, mode):
    *_, asked = run(**mode, steps=5)
    samples = [sample for _, _, rows in asked for sample in rows]
    assert len(samples) == len(set(samples)) == 5 * 3 * 4


@pytest.mark.any_cpu
def test_the_mode_changes_no_noise_and_no_prompt(run):
    first, second, third = (
        [(step, rows) for step, _, rows in run(**mode, steps=3)[2]] for mode in MODES
    )
    assert first == second == third


class Straggler(LocalWorker):
    """A rollout worker whose first request of step 1 takes until four steps have been trained."""

    def __init__(self, target, workers):
        super().__init__(target)
        self.workers = workers
        self.late = False

    async def call(self, method, request, weights):
        made = await super().call(method, request, weights)
        if request.step == 1 and not self.late:
            self.late = True
            while self.workers.version < 4:
                await asyncio.sleep(0.01)
        return made


def with_a_straggler(workers):
    """The workers of this process, but two rollout workers, one of which straggles."""
    publish = workers.publish_weights
    workers.version = 0

    async def noted(version, copy=None):
        workers.version = version
        return await publish(version, copy)

    workers.publish_weights = noted
    straggling = Straggler(workers.rollout_worker, workers)
    workers.rollout = RolloutPool([straggling, LocalWorker(workers.rollout_worker, 1)], None)
    return workers


@pytest.mark.any_cpu
def test_async_overtakes_a_straggler_and_counts_what_came_too_late(run):
    """Steps 2, 3 and 4 train before step 1, whose samples are too old when its late part arrives:
    all are generated again.
    """
    two = {"placement": "ray", "resources": {"rollout": {"count": 2}}}
    _, metrics, asked = run(mode="async", staleness=2, steps=5, **two, around=with_a_straggler)
    assert [step["staleness/dropped_samples"] for step in metrics] == [0, 0, 0, 0, 12]
    assert [step["staleness/max"] for step in metrics] == [0, 1, 1, 1, 0]
    versions = [(step, version) for step, version, _ in asked]
    assert versions.count((1, 0)) == versions.count((1, 4)) == 3
    assert len(asked) == 5 * 3 + 3


def with_a_slow_first_step(workers):
    """Two rollout workers: one has generated its request of step 1 when all of step 2 are scored,
    and not before.
    """
    whole = workers.reward.run
    scored = []

    async def score(call, what):
        report = await whole(call, what)
        scored.append(what)
        return report

    class Slow(LocalWorker):
        slow = False

        async def call(self, method, request, weights):
            made = await super().call(method, request, weights)
            if request.step == 1 and not self.slow:
                self.slow = True
                while scored.count("scoring samples of step 2") < 3:
                    await asyncio.sleep(0.01)
                for _ in range(10):  # until the stage has seen it
                    await asyncio.sleep(0)
            return made

    workers.reward.run = score
    workers.rollout = RolloutPool(
        [Slow(workers.rollout_worker), LocalWorker(workers.rollout_worker, 1)], None
    )
    return workers


@pytest.mark.any_cpu
def test_one_step_off_keeps_the_order_of_its_steps_on_ray(run):
    """Or it would not repeat byte for byte: step 1 trains before step 2, whose rollouts are there
    first.
    """
    keys = {"mode": "one_step_off", "steps": 3}
    two = {"placement": "ray", "resources": {"rollout": {"count": 2}}}
    assert learnt(run(**keys, **two, around=with_a_slow_first_step)[1]) == learnt(run(**keys)[1])


def with_losses(workers):
    """Images are gone when they are to be scored for the first time, and rollouts when they are to
    be trained on.
    """
    score_images = workers.reward.run
    receive_rollouts = workers.training.receive
    lost = []

    async def score(*arguments):
        if "images" not in lost:
            lost.append("images")
            raise ResultLost("their machine is gone")
        return await score_images(*arguments)

    async def receive(*rollouts):
        # All rollouts of the step, and then those of its first request.
        if lost.count("rollouts") < 2:
            lost.append("rollouts")
            raise ResultLost("their machine is gone")
        return await receive_rollouts(*rollouts)

    workers.reward.run = score
    workers.training.receive = receive
    return workers


@pytest.mark.any_cpu
def test_samples_that_are_gone_are_generated_again(run, caplog):
    metrics, asked = run(mode="sync", around=with_losses)[1:]
    assert learnt(metrics) == learnt(run(mode="sync")[1])
    assert asked[1] == asked[0], "images of the first request"
    assert asked[4] == asked[0], "its rollouts"
    assert len(asked) == 2 * 3 + 2
    assert caplog.text.count("4 samples of step 0 are generated again: their machine is gone") == 2


@pytest.mark.any_cpu
def test_samples_that_are_gone_are_generated_again_with_the_weights_that_they_had(run):
    """One step ahead: those of step 1 are gone when the weights of version 1 are there."""

    def lose(workers):
        receive_rollouts = workers.training.receive
        num_calls = 0

        async def receive(*rollouts):
            nonlocal num_calls
            num_calls += 1
            if num_calls in (2, 3):
                raise ResultLost("their machine is gone")
            return await receive_rollouts(*rollouts)

        workers.training.receive = receive
        return workers

    versions = [
        (step, version) for step, version, _ in run(mode="one_step_off", steps=3, around=lose)[2]
    ]
    assert versions.count((1, 0)) == 4
    assert len(versions) == 3 * 3 + 1


class Counting(Reward):
    """Stub reward that notes in which threads it runs, and fails or hangs on some calls."""

    name = "darkness"

    def __init__(self, misbehave=lambda call: None):
        self.calls = 0
        self.threads = []
        self.misbehave = misbehave

    def __call__(self, images, prompts):
        self.calls += 1
        self.threads.append(threading.get_ident())
        self.misbehave(self.calls)
        return RewardResult(1 - images.mean((1, 2, 3)) / 255)


@pytest.mark.any_cpu
def test_rewards_are_scored_beside_the_rollouts(run):
    """A part is being scored while the next one is generated: the second rollout begins before the
    first score is there.
    """
    begun = threading.Event()
    order = []

    def wait_for_the_next_rollout(call):
        if call == 1:
            order.append(begun.wait(20))

    def around(placement):
        generate = placement.rollout_worker.generate

        def noted(request, weights):
            if len(order) == 0 and placement.rollout_worker.asked:
                begun.set()
            placement.rollout_worker.asked = True
            return generate(request, weights)

        placement.rollout_worker.asked = False
        placement.rollout_worker.generate = noted
        return placement

    reward = Counting(wait_for_the_next_rollout)
    run(judge=Scorer(((reward, 1.0),)), around=around, steps=1)
    assert order == [True]
    assert threading.get_ident() not in reward.threads


@pytest.mark.any_cpu
def test_rewards_are_in_order_however_long_each_takes(run):
    """Three threads; the first part takes longest."""
    plain = run(judge=Scorer(((Counting(), 1.0),)), steps=2)[1]
    late = Counting(lambda call: time.sleep(0.3 if call in (1, 4) else 0))
    mixed = run(judge=Scorer(((late, 1.0),)), steps=2, resources={"reward": {"count": 3}})[1]
    assert learnt(plain) == learnt(mixed)


@pytest.mark.any_cpu
def test_a_reward_that_fails_is_asked_again(run):
    def fail_once(call):
        if call == 2:
            raise OSError("the server is busy")

    plain = run(judge=Scorer(((Counting(), 1.0),)), steps=2)[1]
    flaky = run(judge=Scorer(((Counting(fail_once), 1.0),)), steps=2)[1]
    assert learnt(plain) == learnt(flaky)


def test_a_reward_that_hangs_costs_its_images_and_is_counted(run):
    """Two attempts; the four images of that part have no score, which the recipe allows or does
    not.
    """

    def hang(call):
        if call in (2, 3):  # both attempts at the second part
            time.sleep(2)

    stage = {"steps": 1, "scoring": {"timeout": 0.5, "retries": 1}}
    with pytest.raises(
        RewardError,
        match=r"4 of 12 images.*max_failed_share.*no answer after 0.5 s \(attempt 2 of 2\)",
    ):
        run(judge=Scorer(((Counting(hang), 1.0),)), **stage)
    _, (metrics,), _ = run(
        judge=Scorer(((Counting(hang), 1.0),)), keys={"max_failed_share": 0.5}, **stage
    )
    assert metrics["reward/scored_share"] == pytest.approx(8 / 12)
    assert metrics["workers/replaced"] == 2
    assert metrics["updates"] > 0


def test_invalid_combinations_are_rejected_with_a_fix(make_recipe):
    for keys, message in (
        (
            {"resources": {"rollout": {"count": 2}}},
            "rollout.count above 1 needs processes.*placement: ray",
        ),
        ({"staleness": 2}, "staleness.*mode: async"),
        ({"resources": {"training": {"cores": [0]}}}, "training.cores.*placement: ray"),
        ({"resources": {"rollout": {"gpus": 0.5}}}, "rollout.gpus.*placement: ray"),
        ({"resources": {"reward": {"cpus": 2}}}, "reward.cpus.*placement: ray"),
        ({"parity": {"max_shift": 0.1}}, "parity.*another engine.*vllm_omni"),
        ({"engine": "vllm_omni"}, "vllm_omni.*qwen_image.*sd3.*diffusers"),
    ):
        with pytest.raises(RecipeError, match=f"(?s){message}"):
            make_recipe(online=keys)
