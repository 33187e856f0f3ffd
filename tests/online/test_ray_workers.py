"""An online stage on Ray: what one process computes, whoever dies or hangs on the way; and how it
ends when it must.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray
import ray_cases
import torch
from ray_stage_cases import CPUS, StageOutcome, assert_same, read_outcome, wait_until_gone
from ray_worker import forked_workers

from benchmarks.tiny_models import build_tiny
from ebbflow.algorithms.advantages import PromptStatistics
from ebbflow.data.prompts import Prompt, write_prompts
from ebbflow.data.schema import PROMPTS
from ebbflow.online import ray_workers
from ebbflow.online.loop import OnlineLoop
from ebbflow.online.ray_actor import ActorFolders
from ebbflow.online.ray_workers import NoReplacement, RayWorker, RayWorkers, TrainingDied
from ebbflow.online.train_folder import train_online_folder
from ebbflow.online.workers import StageError
from ebbflow.recipe import Recipe
from ebbflow.recipe.registry import configure_reward
from ebbflow.rollouts.generate import Rollouts
from ebbflow.rollouts.weights import TransferError, WeightsVersion
from ebbflow.stage import MetricsRecorder, StageContext, StageFolders
from ebbflow.storage.artifacts import verify_folder, write_new_folder
from ebbflow.training.checkpoint import Checkpoints
from ebbflow.training.policy_metadata import write_base_policy


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A small Ray of two cores, which workers share."""
    with (
        pytest.MonkeyPatch.context() as patch,
        forked_workers(tmp_path_factory.mktemp("ray") / "socket"),
    ):
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_worker_niceness", "0")  # else all other processes of the machine go first
        ray.init(
            num_cpus=CPUS,
            include_dashboard=False,
            object_store_memory=100 * 2**20,
            log_to_driver=False,
        )
        yield
        ray.shutdown()


@pytest.mark.parametrize(("mode", "answered"), [("token", True), ("disabled", False)])
def test_it_answers_only_who_has_its_token(mode: str, answered: bool) -> None:
    address = ray.get_runtime_context().gcs_address
    ask = (
        f"from ray._raylet import GcsClient; print(GcsClient({address!r}).internal_kv_keys(b'',"
        " namespace=None, timeout=60))"
    )
    done = subprocess.run(
        [sys.executable, "-c", ask],
        env=os.environ | {"RAY_AUTH_MODE": mode},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ("gcs_pid" in done.stdout) is answered, done.stderr
    assert ("InvalidAuthToken" in done.stderr) is not answered


@pytest.fixture(scope="module")
def prompts(make_prompts) -> list[Prompt]:
    return make_prompts(6)


@pytest.fixture(scope="module")
def context_of(make_recipe):
    """``context_of(workers, reward, ...)``: a stage whose steps have several parts, on Ray where it
    has ``workers``.
    """

    def make(
        workers: dict[str, Any] | None = None, reward: dict[str, Any] | None = None, **online: Any
    ) -> StageContext:
        small = {role: {"cpus": 0.1} for role in ("training", "rollout", "reward")}
        resources = {role: keys | (workers or {}).get(role, {}) for role, keys in small.items()}
        on_ray = {"placement": "ray", "resources": resources} if workers is not None else {}
        trained = {
            "name": "custom",
            "path": "ray_cases:Darkness",
            "label": "darkness",
            "options": reward or {},
        }
        rewards = {"rewards": [trained], "guardrails": [], "max_failed_share": 0.5}
        return StageContext(
            make_recipe(
                online={"micro_batch": 4, "prompts_per_step": 3, **on_ray, **online}, **rewards
            ),
            0,
            0,
        )

    return make


@pytest.fixture(scope="module")
def start(base_folder, tmp_path_factory):
    """``start(ctx)``: the policy folder of the untouched base model."""

    def write(ctx: StageContext) -> Path:
        folder = tmp_path_factory.mktemp("start") / "policy"
        write_base_policy(folder, verify_folder(base_folder), ctx.recipe.digest, ctx.recipe.policy)
        return folder

    return write


@pytest.fixture
def train(base_folder, start, tmp_path):
    """``train(ctx, prompts)``: the whole stage, from folder to folder; ``base`` is what workers ask
    for the base model.
    """

    def run(ctx: StageContext, prompts: list[Prompt], base: Any = None) -> StageOutcome:
        folder = start(ctx)
        recorder = MetricsRecorder()
        trained = tmp_path / f"trained-{ctx.online_config.placement}"
        write_prompts(
            pa.Table.from_pylist([vars(prompt) for prompt in prompts], PROMPTS),
            tmp_path / "prompts.parquet",
        )
        actors = ActorFolders(base or partial(Path, base_folder), partial(Path, folder))
        record = train_online_folder(
            ctx,
            StageFolders(base_folder, folder, tmp_path / "prompts.parquet", trained),
            recorder,
            actors=actors,
        )
        return read_outcome(trained, recorder, record)

    return run


# What one process computes.


@pytest.fixture
def rollouts(monkeypatch):
    """The rollouts that the stages of a test train on, part by part."""
    seen: list[Rollouts] = []
    train_on = OnlineLoop._train_on_batch

    async def watched(loop, batch, advantages):
        seen.extend([await loop.workers.fetch_value(part.rollouts) for part in batch.parts])
        return await train_on(loop, batch, advantages)

    monkeypatch.setattr(OnlineLoop, "_train_on_batch", watched)
    return seen


@pytest.mark.exhaustive
def test_three_rollout_workers_generate_what_one_does(
    context_of, train, prompts, rollouts, base_folder, tmp_path
):
    one = train(context_of(), prompts)
    workers = {"rollout": {"count": 3, "cores": [0]}}
    three = train(context_of(workers), prompts, partial(ray_cases.noted, base_folder, tmp_path))
    assert_same(one, three)
    assert three.replaced == 0
    here = rollouts[:6]
    there = rollouts[6:]
    assert torch.equal(here[0].trajectory.latents[:, 0], there[0].trajectory.latents[:, 0]), (
        "the noise"
    )
    for made, other in zip(here, there, strict=True):
        assert torch.equal(made.latents, other.latents)
        assert torch.equal(made.trajectory.latents, other.trajectory.latents)
    noted = {
        int(file.name): json.loads(file.read_text())
        for file in tmp_path.iterdir()
        if file.name.isdigit()
    }
    assert len(noted) == 4  # three rollout workers and the rank
    assert sum(note["cores"] == [0] for note in noted.values()) >= 3
    assert all(note["gpus"] == "" for note in noted.values()), "they asked for no GPU"
    wait_until_gone(list(noted))


@pytest.mark.exhaustive
def test_a_reward_of_latents_gets_them_from_the_rollout_worker(context_of, train, prompts):
    contexts = [context_of(workers) for workers in (None, {})]
    rewards = {"rewards": [configure_reward("ray_cases:Level")]}
    one, other = (
        train(replace(ctx, recipe=ctx.recipe.model_copy(update=rewards)), prompts)
        for ctx in contexts
    )
    assert_same(one, other)
    assert len({row["score/Level"] for row in one.metrics}) > 1


def test_dead_workers_are_replaced_and_their_work_is_repeated(
    context_of, train, prompts, base_folder, tmp_path, caplog
):
    alone = train(context_of(mode="one_step_off"), prompts)
    ctx = context_of(
        {"rollout": {"count": 2}, "reward": {"count": 2}},
        {"dies": str(tmp_path / "judge")},
        mode="one_step_off",
    )
    base = partial(ray_cases.with_a_dying_generator, base_folder, tmp_path / "generator")
    on_ray = train(ctx, prompts, base)
    started = [
        message
        for record in caplog.records
        if "another is started" in (message := record.getMessage())
    ]
    assert sorted(message.split()[0] for message in started) == ["reward", "rollout", "rollout"]
    assert sum("died before it was open" in message for message in started) == 1, (
        "a death that is not counted"
    )
    assert on_ray.replaced == 2
    assert_same(alone, on_ray)


@pytest.mark.exhaustive
def test_two_ranks_train_together_and_end_together(
    context_of, train, start, prompts, base_folder, tmp_path
):
    alone = train(context_of(), prompts)
    ctx = context_of({"training": {"count": 2}})
    flag = tmp_path / "now"
    base = partial(ray_cases.noted, base_folder, tmp_path)
    folders = ActorFolders(base, partial(ray_cases.with_a_dying_rank, start(ctx), flag, 1))
    with closing(RayWorkers(ctx, folders)) as workers:
        recorder = MetricsRecorder()

        async def twice():
            record = await OnlineLoop(ctx, workers, prompts, recorder).run()
            await workers.save_policy(tmp_path / "trained", record, PromptStatistics())
            flag.touch()
            with pytest.raises(
                TrainingDied, match=r"training rank 1 of 1.1 online died in step 0 .*Start it again"
            ):
                await OnlineLoop(ctx, workers, prompts, MetricsRecorder()).run()
            return record

        record = asyncio.run(twice())
        together = read_outcome(tmp_path / "trained", recorder, record)
    wait_until_gone([int(file.name) for file in tmp_path.iterdir() if file.name.isdigit()])
    for one, other in zip(alone.metrics, together.metrics, strict=True):
        apart = {
            "grad_variance": 0,
            "velocity_drift": 0,
        }  # measured on the first pass, which is another one
        assert other | apart == pytest.approx(one | apart, rel=1e-3, abs=1e-5)
    for name, value in alone.parameters.items():
        assert torch.allclose(value, together.parameters[name], atol=1e-5)


@pytest.mark.exhaustive
def test_two_ranks_that_share_tokens_learn_what_one_process_learns(context_of, prompts, tmp_path):
    base = tmp_path / "base"
    with write_new_folder(base) as unfinished:
        build_tiny("flux", unfinished)
    model = {"family": "flux", "path": str(base), "height": 64, "width": 64, "max_tokens": 32}
    write_prompts(
        pa.Table.from_pylist([vars(prompt) for prompt in prompts], PROMPTS),
        tmp_path / "prompts.parquet",
    )

    def train_flux(name: str, ctx: StageContext, context_parallel: int) -> StageOutcome:
        recipe = Recipe.model_validate(ctx.recipe.model_dump(mode="json") | {"model": model})
        start = tmp_path / f"start-{name}"
        write_base_policy(start, verify_folder(base), recipe.digest, recipe.policy)
        trained = tmp_path / f"trained-{name}"
        recorder = MetricsRecorder()
        record = train_online_folder(
            replace(ctx, recipe=recipe),
            StageFolders(base, start, tmp_path / "prompts.parquet", trained),
            recorder,
            context_parallel=context_parallel,
        )
        return read_outcome(trained, recorder, record)

    # Adam's first steps are signs otherwise, which turn rounding into full steps.
    online = {"steps": 2, "optimizer": {"lr": 0.05, "max_grad_norm": 0.5, "eps": 1.0}}
    alone = train_flux("alone", context_of(**online), 1)
    together = train_flux("together", context_of({"training": {"count": 2}}, **online), 2)
    # Ranks with rows of their own would measure ``grad_variance`` and ``velocity_drift`` on others.
    for one, other in zip(alone.metrics, together.metrics, strict=True):
        assert other == pytest.approx(one, rel=1e-3, abs=1e-5)
        assert one["grad_variance"] > 1e-3
    for name, value in alone.parameters.items():
        assert torch.allclose(value, together.parameters[name], atol=1e-5)


class Flagging(MetricsRecorder):
    """A recorder that leaves a flag at the end of the step before the last."""

    def __init__(self, flag: Path) -> None:
        super().__init__()
        self.flag = flag

    def log_metrics(self, values: Any, step: int) -> None:
        super().log_metrics(values, step)
        if step == 2:
            self.flag.touch()


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("error:The given NumPy array is not writable")
def test_a_stage_whose_rank_died_goes_on_from_its_checkpoint(
    context_of, train, start, prompts, base_folder, tmp_path
):
    """The rank is killed in the last step, after two checkpoints; the next attempt makes that step
    alone.
    """
    keys = {"steps": 4, "checkpoints": {"every": 1}, "mode": "one_step_off"}
    ctx = context_of({}, **keys)
    table = tmp_path / "prompts.parquet"
    folder = tmp_path / "trained"
    whole = train(context_of(**keys), prompts)
    dying = ActorFolders(
        partial(Path, base_folder),
        partial(ray_cases.with_a_dying_rank, start(ctx), tmp_path / "flag", 0),
    )
    checkpoints = Checkpoints(ctx, tmp_path / "checkpoints")
    kept = Flagging(tmp_path / "flag")
    with pytest.raises(TrainingDied, match="training rank 0 of 1.1 online died in step 3"):
        train_online_folder(
            ctx,
            StageFolders(base_folder, start(ctx), table, folder),
            kept,
            actors=dying,
            checkpoints=checkpoints,
        )
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-00002",
        "step-00003",
    ]
    again = MetricsRecorder()
    record = train_online_folder(
        ctx,
        StageFolders(base_folder, start(ctx), table, folder),
        again,
        checkpoints=checkpoints,
    )
    assert_same(whole, read_outcome(folder, again, record))


# What goes wrong.


@pytest.mark.exhaustive
def test_hanging_rewards_are_replaced_and_in_the_end_masked(context_of, train, prompts, tmp_path):
    hanging = [
        replace(prompt, target="HANG") if prompt.prompt_id == 0 else prompt
        for prompt in prompts[:3]
    ]
    ctx = context_of(
        {}, {"hangs": str(tmp_path / "once")}, steps=1, scoring={"timeout": 4, "retries": 1}
    )
    on_ray = train(ctx, hanging)
    assert (
        on_ray.replaced == 3
    )  # one over the part that hung once, two over the prompt that always does
    assert on_ray.metrics[0]["reward/scored_share"] == pytest.approx(2 / 3)
    assert on_ray.metrics[0]["group/dropped_samples"] == 4
    assert on_ray.record.optimizer_steps == 1


def test_damaged_weights_are_not_generated_with(
    context_of, train, prompts, base_folder, tmp_path, monkeypatch
):
    whole = RayWorkers.publish_weights

    async def damaged(workers: RayWorkers, version: int, copy: str | None = None) -> WeightsVersion:
        weights = await whole(workers, version, copy)
        if version == 0:
            return weights
        bucket = ray.get(weights.buckets[0])
        next(iter(bucket.values())).view(-1)[0] += 1e-3
        return replace(weights, buckets=(ray.put(bucket), *weights.buckets[1:]))

    monkeypatch.setattr(RayWorkers, "publish_weights", damaged)
    with pytest.raises(TransferError, match="the weights of version 1 arrived as"):
        train(context_of({}), prompts, partial(ray_cases.noted, base_folder, tmp_path))
    wait_until_gone([int(file.name) for file in tmp_path.iterdir() if file.name.isdigit()])


@pytest.mark.parametrize(
    ("workers", "words"),
    [
        (
            {"rollout": {"count": 4, "cpus": 1}},
            r"asks for 4.2 CPU \(.*rollout 4 x 1 CPU 0 GPU.*\) and Ray has 2: lower resources",
        ),
        ({"training": {"gpus": 0.5}}, r"asks for 0.5 GPU .* and Ray has 0: lower resources.*gpus"),
    ],
)
def test_a_cluster_that_is_too_small_is_an_error_before_anything_starts(
    context_of, start, base_folder, workers, words, monkeypatch
):
    monkeypatch.setattr(ray_workers, "PLACEMENT_SECONDS", 0)
    ctx = context_of(workers)
    with pytest.raises(StageError, match=words):
        RayWorkers(ctx, ActorFolders(partial(Path, base_folder), partial(Path, start(ctx))))
    wait_until_gone([])


def test_a_stage_waits_for_machines_that_join_later(
    context_of, start, base_folder, monkeypatch, caplog
):
    """As after a deleted head, whose workers join anew."""
    caplog.set_level(logging.INFO, ray_workers.__name__)
    whole = ray.cluster_resources
    readings = iter([{"CPU": 0.0}, {"CPU": 0.1}])
    monkeypatch.setattr(ray, "cluster_resources", lambda: next(readings, None) or whole())
    ctx = context_of({})
    workers = RayWorkers(ctx, ActorFolders(partial(Path, base_folder), partial(Path, start(ctx))))
    workers.close()
    assert next(readings, None) is None
    (line,) = [text for text in caplog.messages if "waiting" in text]
    assert re.fullmatch(r"Ray has 0 of [\d.]+ CPU: waiting up to 300 s for machines", line), line
    wait_until_gone([])


@pytest.mark.parametrize("role", ["rollout", "reward"])
def test_a_worker_for_whom_there_is_no_room_any_more(context_of, role, monkeypatch, caplog):
    """As when its machine is gone: Ray waits for ever for a place that fits."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(ray_workers, "PLACEMENT_SECONDS", 0.5)
    monkeypatch.setattr(ray_workers, "SAY_EVERY_SECONDS", 0.3)
    nowhere = ray.remote(ray_cases.die).options(resources={"a machine that is gone": 1})
    workers = RayWorkers.__new__(RayWorkers)
    workers.ctx = context_of({"rollout": {"cpus": 7}, "reward": {"gpus": 1}})
    stopped = []

    def start(role: str, index: int) -> RayWorker:
        worker = RayWorker.__new__(RayWorker)
        worker.role, worker.index, worker.placed, worker.opened = (
            role,
            index,
            nowhere.remote(),
            nowhere.remote(),
        )
        worker.stop = lambda: stopped.append(index)
        return worker

    workers._start_worker = start
    asked = {"rollout": "7 CPU", "reward": "0.1 CPU and 1 GPU"}[role]
    says = (
        rf"{role} worker 3 of 1.1 online is gone, .* no machine had room .* asks for {asked},"
        r" .*count"
    )
    with pytest.raises(NoReplacement, match=says):
        asyncio.run(workers._replace_worker(role, 3))
    assert f"{role} worker 3 waits for {asked}" in caplog.text
    assert stopped == [3]
