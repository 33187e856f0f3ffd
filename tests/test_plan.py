"""The plan of an online stage: its simulation against the loop's own queue, what more GPUs change,
and what is measured.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import textwrap
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from benchmarks import plan as benchmark
from ebbflow.cli import main
from ebbflow.data.model_sizes import ModelSizes, SampleSize
from ebbflow.estimate.plan import (
    PlanError,
    Split,
    TaskTimes,
    build_online_work,
    estimate_task_times,
    explain_scaling_limit,
    find_best_plan,
    find_scaling_limit,
    plan_colocated,
    read_task_times,
    seconds_with_split,
)
from ebbflow.estimate.plan_text import describe_plans
from ebbflow.estimate.run import estimate_from_sizes
from ebbflow.estimate.schedule import MEASURED, Stage, TaskSeconds, simulate_stage
from ebbflow.online.rollout_queue import RolloutQueue, count_steps_ahead
from ebbflow.online.sample_workers import RewardWorker, RolloutWorker
from ebbflow.online.workers import RewardPool, RolloutPool
from ebbflow.recipe import Recipe
from ebbflow.rollouts.weights import WeightsVersion
from ebbflow.stage import StageContext
from tasks.deployment import DeploymentConfig

SIZES = ModelSizes(
    parameters=10**9,
    blocks=10,
    width=1000,
    linears={"to_q": (1000, 1000)},
    lora_targets=["to_q"],
    text_encoders=0,
    vae=0,
    text_width=1,
    stored=0,
)
SAMPLE = SampleSize(
    (16, 64, 64),
    pixels=512 * 512,
    tokens=1124,
    joint=True,
    text_tokens=100,
    conditioning=1,
    passes=1,
)
MODES = ("sync", "one_step_off", "async")


def stage_of(mode: str = "sync", staleness: int = 1, **keys: Any) -> StageContext:
    stale = {"staleness": staleness} if mode == "async" else {}
    stage = {"kind": "online", "placement": "ray", "mode": mode, "steps": 20, **stale, **keys}
    return StageContext(Recipe.model_validate({"stages": [stage]}), 0, 0)


# --- the simulation is the loop: the same queue and pools, on a clock that jumps between events


class VirtualTime(asyncio.SelectorEventLoop):
    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready:
            self.now = min(handle.when() for handle in self._scheduled if not handle.cancelled())
        super()._run_once()


class SleepingWorker:
    """A worker that takes seconds."""

    def __init__(self, index: int, seconds: TaskSeconds) -> None:
        self.index = index
        self.seconds = seconds
        self.version = -1

    async def call(self, method: Any, *arguments: Any) -> Any:
        if method is RewardWorker.score:
            return await asyncio.sleep(self.seconds.scoring)
        version = arguments[1].version
        taken = self.seconds.rollout + self.seconds.receive * (version != self.version)
        self.version = version
        await asyncio.sleep(taken)
        return version


class Queue(RolloutQueue):
    """The stage's own, for requests without content."""

    async def build_requests(self, step: int, chosen: object = None) -> Any:
        return [SimpleNamespace(step=step)] * self.num_requests

    async def generate_and_score(
        self, request: Any, weights: Any, with_guards: bool = False
    ) -> Any:
        version = await self.workers.rollout.run(
            lambda worker: worker.call(RolloutWorker.generate, request, weights or self.weights)
        )
        await self.workers.reward.run(lambda worker: worker.call(RewardWorker.score))
        return SimpleNamespace(request=request, report=SimpleNamespace(version=version))

    async def _receive_step(self, step: object) -> bool:
        return True


def looped(
    ctx: StageContext, seconds: TaskSeconds, requests: int, rollout: int, reward: int
) -> list[float]:
    """When the steps of a stage end, its queue and pools being real."""

    async def run() -> list[float]:
        def sleepers(count: int) -> list[SleepingWorker]:
            return [SleepingWorker(index, seconds) for index in range(count)]

        workers = SimpleNamespace(
            rollout=RolloutPool(sleepers(rollout), None),
            reward=RewardPool(sleepers(reward), None, ctx.online_config.scoring),
        )
        queue = Queue(ctx, workers, [], None, None)
        ends = []
        queue.num_requests = requests
        for step in range(
            ctx.online_config.steps - count_steps_ahead(ctx.online_config)
        ):  # at the end nothing is generated ahead
            queue.weights = WeightsVersion(step)
            await queue.start_rollouts()
            await queue.next_batch(step)
            await asyncio.sleep(seconds.training + seconds.between)
            ends.append(asyncio.get_running_loop().time())
        await queue.aclose()
        return ends

    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        return runner.run(run())


@pytest.mark.parametrize(
    "training", [0.7, 3.1, 9.3], ids=["rollouts are slow", "balanced", "training is slow"]
)
@pytest.mark.parametrize("mode", MODES)
def test_the_simulation_is_the_loop(mode: str, training: float) -> None:
    ctx = stage_of(mode, staleness=2)
    seconds = TaskSeconds(rollout=1.37, scoring=0.23, training=training, receive=0.19, between=0.11)
    ends = looped(ctx, seconds, requests=7, rollout=3, reward=2)
    stage = Stage(7, count_steps_ahead(ctx.online_config), newest=mode == "async")
    found = simulate_stage(stage, seconds, rollout_workers=3, reward_workers=2)
    expected = (ends[-1] - ends[-1 - MEASURED]) / MEASURED
    assert found.step == pytest.approx(expected, rel=0.02)
    assert found.training == pytest.approx(training / found.step)
    assert 0 < found.rollout <= 1.01


def test_what_a_mode_costs_in_closed_form() -> None:
    seconds = TaskSeconds(rollout=1.0, scoring=0.0, training=2.0, between=0.5)
    sync, ahead = (simulate_stage(Stage(8, steps), seconds, 2, 8) for steps in (0, 1))
    assert (sync.step, sync.staleness) == (pytest.approx(4 + 2.5), 0)
    assert (ahead.step, ahead.staleness) == (pytest.approx(4), 1)
    assert (sync.rollout, ahead.rollout) == (pytest.approx(4 / 6.5), pytest.approx(1))
    with pytest.raises(ValueError, match="takes no time"):
        simulate_stage(Stage(8, 0), seconds, 0, 1)


# --- the best split


def work_and_times(
    tflops: float = 100, network: float = 50, mode: str = "sync", **keys: Any
) -> tuple[Any, TaskTimes]:
    ctx = stage_of(mode, **keys)
    made = estimate_from_sizes(ctx.recipe, 1, SIZES, SAMPLE)
    work = build_online_work(made, ctx)
    return work, estimate_task_times(made, work, tflops, network)


def test_the_best_split_is_that_of_trying_all() -> None:
    work, times = work_and_times(prompts_per_step=8, micro_batch=16)
    for mode in MODES:
        best = find_best_plan(work, times, mode, 12)
        stage = Stage(work.requests, work.steps_ahead(mode), newest=mode == "async")
        every = [
            simulate_stage(
                stage,
                seconds_with_split(work, times, Split(ranks, 12 - ranks, 0)),
                12 - ranks,
                work.requests,
            ).step
            for ranks in range(1, 12)
        ]
        assert best.schedule.step == pytest.approx(min(every)), mode


def test_more_gpus_are_never_worse_and_stop_being_better() -> None:
    work, times = work_and_times(prompts_per_step=4, micro_batch=16)
    plans = {
        gpus: find_best_plan(work, times, "one_step_off", gpus) for gpus in (4, 8, 16, 64, 512)
    }
    steps = [plan.schedule.step for plan in plans.values()]
    assert steps == sorted(steps, reverse=True)
    assert find_scaling_limit(plans) < 512
    assert plans[512].split.num_gpus < 512, "what is of no use is not taken"
    assert plans[512].split.rollout <= 2 * work.requests
    assert "prompts_per_step" in explain_scaling_limit(work, times, plans[512])


def test_ranks_on_several_nodes_wait_for_a_slow_network() -> None:
    (work, fast), (_, slow) = work_and_times(), work_and_times(network=0.01)
    one_node = Split(8, 1, 0)
    two_nodes = Split(16, 1, 0)
    assert (
        seconds_with_split(work, slow, one_node).training
        == seconds_with_split(work, fast, one_node).training
    )
    assert (
        seconds_with_split(work, fast, two_nodes).training
        < seconds_with_split(work, fast, one_node).training
    )
    assert (
        seconds_with_split(work, slow, two_nodes).training
        > seconds_with_split(work, fast, one_node).training
    )


def test_rewards_on_gpus_get_their_share() -> None:
    work, times = work_and_times(
        resources={"reward": {"gpus": 1}}, prompts_per_step=32, micro_batch=16
    )
    busy = TaskTimes(times.rollout, times.rollout, times.training, times.between, times.network)
    split = find_best_plan(work, busy, "one_step_off", 32).split
    assert abs(split.reward - split.rollout) <= 1
    with pytest.raises(PlanError, match="2 GPUs are fewer than the roles"):
        find_best_plan(work, busy, "sync", 2)


def test_an_optimizer_that_cannot_be_divided_trains_in_one_process() -> None:
    work, times = work_and_times(optimizer={"name": "adamw_8bit"}, updates_per_step=1)
    slow = TaskTimes(
        times.rollout, times.scoring, 1e3 * times.rollout, times.between, times.network
    )
    plan = find_best_plan(work, slow, "one_step_off", 16)
    assert plan.split.training == 1
    assert (
        explain_scaling_limit(work, slow, plan)
        == "optimizer.name = 'adamw_8bit' trains in one process: take adamw"
    )


# --- all of them together


def test_colocated_gpus_generate_and_then_train_without_a_push() -> None:
    work, times = work_and_times(prompts_per_step=8, micro_batch=16)
    scored = TaskTimes(times.rollout, 0.5, times.training, times.between, times.network)
    assert work.requests == 8
    plan = plan_colocated(work, scored, "sync", 4)
    training = times.training * work.training_share(4)
    assert plan.schedule.step == pytest.approx(2 * times.rollout + 0.5 + training)
    ahead = plan_colocated(work, scored, "one_step_off", 4)
    assert plan.schedule.step - ahead.schedule.step == pytest.approx(0.5)
    # More GPUs than requests wait while the others generate.
    many = plan_colocated(work, times, "sync", 16)
    assert many.split.rollout == 8
    assert many.schedule.step == pytest.approx(
        times.rollout + times.training * work.training_share(16)
    )


@pytest.mark.parametrize("gpus", [8, 32])
def test_the_keys_of_a_plan_are_those_of_a_recipe_and_a_deployment(gpus: int) -> None:
    ctx = stage_of(prompts_per_step=32, micro_batch=16)
    made = estimate_from_sizes(ctx.recipe, 1, SIZES, SAMPLE)
    text = describe_plans(made, gpus, 100, None, 50, price=2)
    pasted = [
        yaml.safe_load(textwrap.dedent(block))
        for block in re.findall(r"\n\n((?:    .+\n)+)(?=\n)", text)
    ]
    stages = [keys for keys in pasted if "placement" in keys]
    deployments = [keys for keys in pasted if "train_processes" in keys]
    assert stages[0] == {"mode": "sync", "placement": "colocated"}
    for keys in stages:
        Recipe.model_validate({"stages": [{"kind": "online", **keys}]})
    (deployment,) = deployments
    decided = DeploymentConfig(**deployment)
    assert decided.train_processes * decided.train_nodes == gpus
    assert decided.train_sharding == "replicated"  # a fifth of the GPU's memory


def test_a_plan_says_how_many_processes_share_a_sample_that_fits_no_gpu() -> None:
    ctx = stage_of(prompts_per_step=32, micro_batch=16)
    video = dataclasses.replace(SAMPLE, tokens=12 * SAMPLE.tokens)
    texts = {
        sample.tokens: describe_plans(
            estimate_from_sizes(ctx.recipe, 1, SIZES, sample), 8, 100, None, 50
        )
        for sample in (SAMPLE, video)
    }
    said = re.findall(r"None fits. With train_context_parallel: (\d),", texts[video.tokens])
    assert "train_context_parallel" not in texts[SAMPLE.tokens]
    (sharing,) = map(int, said)
    needs = {
        count: estimate_from_sizes(
            ctx.recipe.model_copy(
                update={"stages": [ctx.config.model_copy(update={"placement": "colocated"})]}
            ),
            8,
            SIZES,
            video,
            context_parallel=count,
        )
        .memory["1.1 online training"]
        .peak_bytes
        for count in (sharing // 2, sharing)
    }
    usable = 0.9 * 79 * 2**30  # of an H100
    assert needs[sharing] <= usable < needs[sharing // 2]


def test_gpu_hours_and_prices_are_of_all_rounds() -> None:
    ctx = stage_of(prompts_per_step=32, micro_batch=16)
    hours = {}
    for rounds in (1, 3):
        recipe = ctx.recipe.model_copy(update={"rounds": rounds})
        text = describe_plans(
            estimate_from_sizes(recipe, 1, SIZES, SAMPLE), 8, 1, None, 50, price=2
        )
        row = next(line for line in text.splitlines() if "colocated sync" in line)
        hours[rounds] = [float(cell.replace(",", "")) for cell in row.split()[-2:]]
    assert hours[3] == pytest.approx([3 * value for value in hours[1]], rel=0.01)
    assert hours[1][1] == pytest.approx(2 * hours[1][0], rel=0.01)


# --- times of a run


def timeline(tmp_path: Any, steps: int = 6) -> Any:
    """Steps of 10 s: 4 of rollouts and rewards, 5 of training on two ranks, and 1 of nothing."""
    spans = []
    long = []
    for step in range(steps):
        start = 10.0 * step
        long.append({"step": step, "start": start, "end": start + 10})
        tasks = [("rollout", "rollout", 0, 0, 3), ("reward", "scoring", 0, 3, 4)]
        tasks += [("training", "training", rank, 4, 9) for rank in (0, 1)]
        spans += [
            {
                "role": role,
                "worker": worker,
                "task": task,
                "step": step,
                "start": start + begin,
                "end": start + end,
            }
            for role, task, worker, begin, end in tasks
        ]
    (tmp_path / "timeline.json").write_text(json.dumps({"steps": long, "spans": spans}))
    return tmp_path / "timeline.json"


def test_a_timeline_says_what_tasks_take(tmp_path: Any) -> None:
    work, _ = work_and_times()
    times = read_task_times(work, timeline(tmp_path), network=50)
    assert (times.rollout, times.scoring, times.training, times.between) == (
        3,
        1,
        pytest.approx(10),
        pytest.approx(1),
    )
    assert seconds_with_split(work, times, Split(2, 1, 0)).training == pytest.approx(5)


def test_what_is_no_timeline_is_refused(tmp_path: Any) -> None:
    work, _ = work_and_times()
    with pytest.raises(PlanError, match="no timeline of a stage with four steps"):
        read_task_times(work, timeline(tmp_path, steps=3), 50)
    (tmp_path / "timeline.json").write_text('{"steps": 3}')
    with pytest.raises(PlanError, match="take timeline.json of an online stage"):
        read_task_times(work, tmp_path / "timeline.json", 50)


# --- the command


def test_the_text_names_split_modes_and_end(tmp_path: Any) -> None:
    ctx = stage_of(prompts_per_step=8, micro_batch=16)
    made = estimate_from_sizes(ctx.recipe, 1, SIZES, SAMPLE)
    text = describe_plans(made, 64, None, timeline(tmp_path), 50)
    assert "64 GPUs colocated, and the best split of them in each mode" in text
    assert all(f"{mode} scales to " in text for mode in MODES)
    assert "Rewards run on CPUs" in text
    assert "Rewards are not counted" in describe_plans(made, 64, 300, None, 50)
    assert "colocated sync (0 ahead)" in describe_plans(made, 64, None, None, 50)
    with pytest.raises(PlanError, match="either --tflops or --timeline"):
        describe_plans(made, 64, 300, timeline(tmp_path), 50)
    offline = Recipe.model_validate({"stages": [{"kind": "offline"}]})
    with pytest.raises(PlanError, match="has no online stage"):
        describe_plans(estimate_from_sizes(offline, 1, SIZES, SAMPLE), 64, 300, None, 50)


def test_the_command_plans_a_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbflow.estimate.measured.measure_cached", lambda model: (SIZES, SAMPLE))
    run = partial(CliRunner().invoke, main)
    done = run(["plan", "workflows/recipes/tiny.yaml", "--gpus", "1000", "--tflops", "300"])
    assert done.exit_code == 0, done.output
    assert "1,000 GPUs colocated, and the best split" in done.output
    known = run(["plan", "workflows/recipes/tiny.yaml", "--gpus", "8", "--gpu", "a100-80gb"])
    assert known.exit_code == 0, known.output
    assert "of 80 of a GPU (a100-80gb)" in known.output


# --- against what was measured


def test_the_committed_table_is_that_of_the_committed_measurements() -> None:
    rows = benchmark.compare_with_measured(json.loads(benchmark.MEASURED.read_text()))
    assert benchmark.RESULTS.read_text() == benchmark.format_report(rows)
    assert len(rows) == 6
    assert max(abs(row["predicted"] / row["measured"] - 1) for row in rows) < 0.1
