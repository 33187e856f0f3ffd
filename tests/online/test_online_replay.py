"""A training step that is replayed shows what the policy saw: the bytes of its dump, its scores and
its advantages.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pyarrow as pa
import pytest

from ebbflow.data.prompts import write_prompts
from ebbflow.data.schema import PROMPTS
from ebbflow.online import replay, train_folder
from ebbflow.online.replay import replay_online_step
from ebbflow.online.train_folder import train_online_folder
from ebbflow.recipe import Recipe
from ebbflow.stage import MetricsRecorder, StageContext, StageFolders
from ebbflow.storage.artifacts import verify_folder
from ebbflow.training.checkpoint import Checkpoints
from ebbflow.training.policy_metadata import write_base_policy
from ebbflow.training.replay import ReplayError

NFT = {"algorithm": {"name": "diffusion_nft"}, "sampler": {"name": "ode", "steps": 3}}
STEPS = 4
CASES = {
    "sync": ({}, {}),
    "one-step-off-lora": ({"mode": "one_step_off"}, {"train": "lora", "rank": 2}),
    "nft-average": ({**NFT, "mode": "one_step_off"}, {"ema": {"slope": 0.5, "max_decay": 0.5}}),
    "async-running": ({"advantages": {"running": True}, "mode": "async", "staleness": 2}, {}),
}


class Files:
    """A metrics logger that keeps the files."""

    def __init__(self):
        self.files = {}

    def log_file(self, path, content):
        self.files[path] = content

    def ignore(self, *_):
        pass

    log_metrics = log_table = log_image = log_tags = ignore


@pytest.fixture
def train(make_recipe, make_prompts, base_folder, scorer, tmp_path, monkeypatch):
    """``train(policy, **online)``: a stage that dumps every step; (its context, start, prompts,
    checkpoints, rows, files).
    """
    monkeypatch.setattr(train_folder, "load_scorer", lambda rewards, guardrails: scorer)

    def run(policy, **online):
        prompts = [*make_prompts(9), *make_prompts(3, "validation")]
        write_prompts(
            pa.Table.from_pylist([vars(p) for p in prompts], PROMPTS), tmp_path / "prompts.parquet"
        )
        watched = {"dumps": {"every": 1, "samples": 100}, "validation": {"every": 2, "prompts": 3}}
        fast = {"optimizer": {"lr": 1e-2}, "max_hours": 5, "checkpoints": {"every": 2, "keep": 5}}
        ctx = StageContext(
            make_recipe(online={"steps": STEPS, **watched, **fast, **online}, policy=policy), 0, 0
        )
        write_base_policy(
            tmp_path / "start", verify_folder(base_folder), ctx.recipe.digest, ctx.recipe.policy
        )
        checkpoints = Checkpoints(ctx, tmp_path / "checkpoints")
        files = Files()
        recorder = MetricsRecorder(files)
        folders = StageFolders(
            base_folder, tmp_path / "start", tmp_path / "prompts.parquet", tmp_path / "trained"
        )
        train_online_folder(ctx, folders, recorder, checkpoints=checkpoints)
        return ctx, folders, checkpoints, recorder.rows, files.files

    return run


def dumped(files, step):
    """(rows, pictures) of a dump."""
    folder = f"dumps/step-{step:05d}/rollouts"
    rows = [json.loads(line) for line in files[f"{folder}/samples.jsonl"].splitlines()]
    return rows, [files[f"{folder}/{row.pop('image')}"] for row in rows]


@pytest.mark.parametrize(("online", "policy"), CASES.values(), ids=CASES)
def test_every_step_is_replayed_with_the_same_bytes(train, online, policy):
    ctx, folders, _, logged, files = train(policy, **online)
    shown = set()
    for step in range(STEPS):
        replayed = replay_online_step(ctx, folders, step)
        rows, pngs = dumped(files, step)
        assert replayed.pngs == pngs
        assert [{key: row[key] for key in row if key != "trained"} for row in replayed.rows] == rows
        assert replayed.metrics["reward/mean"] == logged[step]["reward/mean"]
        assert {name: logged[step][name] for name in replayed.metrics} == replayed.metrics
        shown.add(tuple(pngs))
    assert len(shown) == STEPS, "the steps differ"


def test_it_starts_at_a_checkpoint_and_leaves_it_as_it_was(train, monkeypatch):
    ctx, folders, checkpoints, _, files = train({})
    before = {path: path.read_bytes() for path in checkpoints.folder.rglob("*") if path.is_file()}
    newest = checkpoints.find_newest()
    assert newest
    assert newest[0].name == "step-00002"
    trained = []
    train_on = replay._ReplayLoop._train_on_batch

    async def watched(self, batch, advantages):
        trained.append(batch.step)
        return await train_on(self, batch, advantages)

    monkeypatch.setattr(replay._ReplayLoop, "_train_on_batch", watched)
    assert replay_online_step(ctx, folders, 3, checkpoints=checkpoints).pngs == dumped(files, 3)[1]
    assert trained == [2, 3], "from the checkpoint on"
    assert {
        path: path.read_bytes() for path in checkpoints.folder.rglob("*") if path.is_file()
    } == before


ELSEWHERE = {
    "placement": "ray",
    "resources": {"training": {"count": 2}, "rollout": {"count": 2}, "reward": {"count": 2}},
}


@pytest.mark.parametrize("change", [ELSEWHERE, {"max_hours": 1e-9}], ids=["on Ray", "budget spent"])
def test_where_a_stage_ran_and_for_how_long_it_may_changes_no_sample(train, change):
    ctx, folders, _, _, files = train({})
    stages = ctx.recipe.model_dump(mode="json")["stages"]
    elsewhere = Recipe.model_validate(
        ctx.recipe.model_dump(mode="json") | {"stages": [stages[0] | change, *stages[1:]]}
    )
    assert (
        replay_online_step(replace(ctx, recipe=elsewhere), folders, 2).pngs == dumped(files, 2)[1]
    )


def test_samples_without_a_score_are_not_trained_on(train, make_prompts):
    ctx, folders, *_ = train({}, advantages={"keep_extremes": 1})
    replayed = replay_online_step(ctx, folders, 0)
    assert (
        sum(row["trained"] for row in replayed.rows)
        == 2 * len({row["prompt_id"] for row in replayed.rows})
        < len(replayed.rows)
    )
    assert all(row["advantage"] == 0 for row in replayed.rows if not row["trained"])


@pytest.mark.parametrize("step", [-1, STEPS])
def test_a_step_that_the_stage_does_not_have(make_recipe, tmp_path, step):
    ctx = StageContext(make_recipe(online={"steps": STEPS}), 0, 0)
    with pytest.raises(ReplayError, match=f"1.1 online has the steps 0 to 3, not {step}"):
        replay_online_step(ctx, StageFolders(*[tmp_path] * 4), step)


def test_an_async_stage_on_ray_does_not_repeat(make_recipe, tmp_path):
    ctx = StageContext(make_recipe(online={"mode": "async", "placement": "ray"}), 0, 0)
    with pytest.raises(
        ReplayError, match="when a worker was free, so it does not repeat; see the dumps"
    ):
        replay_online_step(ctx, StageFolders(*[tmp_path] * 4), 0)
