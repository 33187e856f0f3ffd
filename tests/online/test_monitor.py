"""Validations, dumps, profiles and the timeline of an online stage, which change nothing in it."""

from __future__ import annotations

import gzip
import io
import json
import math
import time
from functools import partial

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from ebbflow.data.images import decode_pngs
from ebbflow.data.prompt_windows import PromptWindow
from ebbflow.data.prompts import Prompt, write_prompts
from ebbflow.data.sampling import SamplingError
from ebbflow.data.schema import PROMPTS
from ebbflow.evaluation.evaluate import evaluate_on_prompts
from ebbflow.models import load_model
from ebbflow.online import monitor, training_worker
from ebbflow.online.loop import run_online_stage
from ebbflow.online.monitor import read_validation_prompts
from ebbflow.online.sample_workers import RolloutWorker
from ebbflow.online.timeline import Timeline
from ebbflow.online.training_worker import TrainingWorker
from ebbflow.online.workers import LocalWorkers, open_local_workers
from ebbflow.recipe import RecipeError
from ebbflow.rewards.base import Reward, RewardResult
from ebbflow.rewards.combine import RewardError, Scorer
from ebbflow.rollouts.generate import Diffusers
from ebbflow.stage import MetricsRecorder, StageContext
from ebbflow.storage.tables import read_table
from ebbflow.training.policy import Policy
from ebbflow.training.update import PolicyUpdater

NFT = {
    "algorithm": {"name": "diffusion_nft"},
    "sampler": {"name": "ode", "steps": 3},
    "optimizer": {"lr": 1e-3},
}
EMA = {"ema": {"slope": 0.5, "max_decay": 0.5}}
WATCHED = {
    "validation": {"every": 2, "prompts": 3},
    "dumps": {"every": 2, "samples": 5},
    "profile": {"steps": [1]},
}


class Redness(Reward):
    """Stub guardrail: the mean of the red channel."""

    name = "redness"

    def __call__(self, images, prompts):
        return RewardResult(images[..., 0].mean((1, 2)) / 255)


class Shown:
    """A metrics_logger that remembers what it is shown."""

    def __init__(self):
        self.metrics = []
        self.tables = {}
        self.images = {}
        self.files = {}

    def log_metrics(self, values, step):
        self.metrics.append((step, dict(values)))

    def log_table(self, name, table):
        self.tables[name] = table.to_pylist()

    def log_image(self, key, image, step):
        self.images[key, step] = image

    def log_file(self, path, content):
        assert path not in self.files
        self.files[path] = content

    def log_tags(self, tags):
        self.tags = tags

    def validated(self):
        found = {
            step: values
            for step, values in self.metrics
            if any(name.startswith("validation/") for name in values)
        }
        return {
            step: {name.removeprefix("validation/"): value for name, value in values.items()}
            for step, values in found.items()
        }

    def lines(self, folder):
        return [
            json.loads(line) for line in self.files[f"{folder}/samples.jsonl"].decode().splitlines()
        ]


@pytest.fixture
def validation(make_prompts):
    """Four prompts, of which the stages of this module take three; the second is one that the stub
    reward fails on.
    """
    prompts = make_prompts(4, "validation")
    prompts[1] = Prompt(**{**vars(prompts[1]), "target": "FAIL"})
    return [Prompt(**{**vars(prompt), "prompt_id": 100 + prompt.prompt_id}) for prompt in prompts]


@pytest.fixture
def run(make_recipe, make_prompts, base_folder, scorer, validation):
    """Run an online stage; returns (context, policy, metrics logger, recorded metrics, record)."""

    def stage(
        policy=None,
        prompts=None,
        judge=None,
        own_weights=False,
        metrics_logger=None,
        keys=None,
        **online,
    ):
        ctx = StageContext(make_recipe(online=online, policy=policy or {}, **(keys or {})), 0, 0)
        trained = opened(ctx, base_folder)
        metrics_logger = metrics_logger or Shown()
        updater = PolicyUpdater(trained, ctx.online_config)
        judge = judge or Scorer(scorer.rewards, (Redness(),))
        placement = open_local_workers(ctx, updater, judge)
        if own_weights:
            engine = Diffusers(ctx, Policy(load_model(base_folder), ctx.recipe.policy, 0))
            placement = LocalWorkers(TrainingWorker(ctx, updater), judge, RolloutWorker(engine))
        recorder = MetricsRecorder(metrics_logger)
        wanted = (
            validation[: ctx.online_config.validation.prompts]
            if ctx.online_config.validation
            else []
        )
        record = run_online_stage(ctx, placement, prompts or make_prompts(6), recorder, wanted)
        return ctx, trained, metrics_logger, recorder.metrics_rows, record

    return stage


def opened(ctx, base_folder):
    policy = Policy(load_model(base_folder), ctx.recipe.policy, 0)
    for name in ctx.following_copies:
        policy.ensure_copy(name)
    if ctx.recipe.policy.ema:
        policy.ensure_copy("ema")
    return policy


def evaluated(ctx, policy, scorer, prompts, tmp_path):
    """(means, rows) of an evaluation of the policy as it is."""
    held_out = [Prompt(**{**vars(prompt), "split": "held_out"}) for prompt in prompts]
    judge = Scorer(scorer.rewards, (Redness(),))
    path = tmp_path / "samples.parquet"
    found = evaluate_on_prompts(ctx.recipe, policy.model, policy, 0, judge, held_out, "peer", path)
    return found.held_out, read_table(path).to_pylist()


@pytest.mark.parametrize(
    "stage", [{}, NFT, {"mode": "one_step_off"}, {"mode": "async", "staleness": 2}], ids=str
)
@pytest.mark.parametrize(
    "own_weights",
    [pytest.param(False, id="shared", marks=pytest.mark.exhaustive), pytest.param(True, id="sent")],
)
def test_being_watched_changes_nothing(run, stage, own_weights):
    """Same policy to the last bit and same metrics, also where the old copy generates and the
    average is validated.
    """
    stage = {"steps": 3, "policy": EMA, "own_weights": own_weights, **stage}
    (_, plain, _, before, _), (_, watched, _, after, _) = (
        run(**stage, **keys) for keys in ({}, WATCHED)
    )
    for values, others in (
        (plain.parameters, watched.parameters),
        *((plain.copies[n], watched.copies[n]) for n in plain.copies),
    ):
        assert all(torch.equal(value, others[name]) for name, value in values.items())
    timed = ("seconds", "ms_per", "images_per", "push", "utilisation", "validation")
    for one, other in zip(before, after, strict=False):
        assert {k: v for k, v in one.items() if not k.startswith(timed)} == {
            k: v for k, v in other.items() if not k.startswith(timed)
        }


@pytest.mark.parametrize("own_weights", [False, True], ids=["shared", "sent"])
@pytest.mark.parametrize(
    ("policy", "stage"), [({}, {}), ({}, NFT), (EMA, NFT)], ids=["current", "old", "average"]
)
def test_a_validation_is_an_evaluation_of_what_would_be_served(
    run, policy, stage, own_weights, scorer, validation, base_folder, tmp_path
):
    """Before the first step, every second one and after the last; with guardrails, and with what
    failed left out of the means.
    """
    ctx, trained, metrics_logger, kept, _ = run(
        policy, steps=3, own_weights=own_weights, **stage, **WATCHED
    )
    assert list(metrics_logger.validated()) == [0, 2, 3]
    assert set(metrics_logger.tables) == {
        "validation/step-00000",
        "validation/step-00002",
        "validation/step-00003",
    }
    assert set(metrics_logger.images) == {("validation", 0), ("validation", 2), ("validation", 3)}
    assert len(kept) == 4
    for step, peer in ((0, opened(ctx, base_folder)), (3, trained)):
        with peer.use_copy("ema" if policy else "current"):
            means, samples = evaluated(ctx, peer, scorer, validation[:3], tmp_path)
        logged = metrics_logger.validated()[step]
        assert logged.pop("scored_share") == pytest.approx(2 / 3)
        assert logged == pytest.approx(means, rel=1e-6)
        assert "redness" in logged
        table = metrics_logger.tables[f"validation/step-0000{step}"]
        assert [row["reward"] is None for row in table] == [False, True, False]
        for row, sample in zip(table, samples, strict=True):
            assert (row["prompt"], row["target"], row["redness"]) == (
                sample["prompt"],
                sample["target"],
                sample["redness"],
            )
    first, last = (metrics_logger.tables[f"validation/step-0000{step}"] for step in (0, 3))
    assert first != last


def build_window_of_each_batch(batches):
    """Windows of validation alone: those of training encode, and so round, as they do."""
    return [
        PromptWindow(range(step, step + 1), partial(list, batch))
        for step, batch in enumerate(batches)
    ]


def test_a_validation_in_windows_has_the_samples_of_one_window(run, monkeypatch):
    encoded = []
    embed_prompts = training_worker.embed_prompts

    def watch(model, prompts, negatives):
        if prompts[0].split == "validation":
            encoded.append(len(prompts))
        return embed_prompts(model, prompts, negatives)

    monkeypatch.setattr(training_worker, "embed_prompts", watch)
    keys = {"steps": 2, "group_size": 2, "micro_batch": 2, "validation": {"every": 1, "prompts": 3}}
    _, whole_policy, whole, *_ = run(**keys)
    assert encoded == [3]  # once, for the validations of steps 0, 1 and 2
    encoded.clear()
    monkeypatch.setattr(monitor, "build_prompt_windows", build_window_of_each_batch)
    _, policy, in_windows, *_ = run(**keys)
    assert encoded == [2, 1] * 3
    assert in_windows.tables == whole.tables
    assert in_windows.validated() == whole.validated()
    for name, values in whole_policy.parameters.items():
        assert torch.equal(policy.parameters[name], values)


def test_without_validation_the_guards_rest(run):
    _, _, metrics_logger, (first, *_), _ = run()
    assert "score/redness" not in first
    assert metrics_logger.validated() == metrics_logger.tables == metrics_logger.images == {}
    assert set(metrics_logger.files) == {"timeline.json", "timeline.png"}


def test_validation_prompts_are_the_first_of_their_split(
    make_recipe, make_prompts, validation, tmp_path
):
    def table(prompts):
        write_prompts(
            pa.Table.from_pylist([vars(prompt) for prompt in prompts], PROMPTS),
            tmp_path / "prompts.parquet",
        )
        return tmp_path / "prompts.parquet"

    def ctx(count):
        return StageContext(make_recipe(online={"validation": {"prompts": count}}), 0, 0)

    everything = table([*make_prompts(6), *validation])
    assert read_validation_prompts(StageContext(make_recipe(), 0, 0), everything) == []
    assert read_validation_prompts(ctx(3), everything) == validation[:3]
    with pytest.warns(
        UserWarning, match=r"validation.prompts = 16 and the split 'validation' has 4"
    ):
        assert read_validation_prompts(ctx(16), everything) == validation
    with pytest.raises(SamplingError, match="set prompts.validation"):
        read_validation_prompts(ctx(3), table(make_prompts(6)))


def test_dumps_hold_the_first_samples_and_all_about_them(run, make_prompts):
    broken = [
        Prompt(**{**vars(p), "target": "FAIL"}) if p.prompt_id == 2 else p for p in make_prompts(4)
    ]
    online = {
        **WATCHED,
        "dumps": {"every": 2, "samples": 6},
        "prompts_per_step": 4,
        "mode": "one_step_off",
    }
    ctx, _, metrics_logger, kept, _ = run(
        prompts=broken, steps=4, keys={"max_failed_share": 0.5}, **online
    )
    folders = {path.rsplit("/", 1)[0] for path in metrics_logger.files if path.startswith("dumps/")}
    assert folders == {
        "dumps/step-00000/rollouts",
        "dumps/step-00002/rollouts",
        "dumps/step-00000/validation",
        "dumps/step-00002/validation",
        "dumps/step-00004/validation",
    }
    for step, version in ((0, 0), (2, 1)):
        lines = metrics_logger.lines(f"dumps/step-0000{step}/rollouts")
        assert len(lines) == 6
        for index, line in enumerate(lines):
            (image,) = decode_pngs(
                [metrics_logger.files[f"dumps/step-0000{step}/rollouts/{line['image']}"]]
            )
            failed = line["prompt_id"] == 2
            darkness = None if failed else pytest.approx(1 - image.mean() / 255)
            assert line["reward"] == line["scores"]["darkness"] == darkness
            assert (line["failure"] is None) == (not failed)
            assert (line["policy_version"], line["seed"], line["sample"]) == (
                version,
                ctx.stage_seed,
                step * 4 + index % 4,
            )
            assert line["prompt"] == broken[line["prompt_id"]].prompt
            assert math.isfinite(line["advantage"])
    lines = metrics_logger.lines("dumps/step-00004/validation")
    assert [
        (line["prompt_id"], line["policy_version"], line["reward"] is None) for line in lines
    ] == [
        (100, 4, False),
        (101, 4, True),
        (102, 4, False),
    ]
    assert "advantage" not in lines[0]
    assert all("redness" in line["scores"] for line in lines)


def test_advantages_of_a_dump_are_those_that_were_trained_on(run):
    """One group is four samples: their advantages follow their rewards and are centred."""
    _, _, metrics_logger, _, _ = run(steps=1, prompts_per_step=1, dumps={"samples": 4})
    lines = metrics_logger.lines("dumps/step-00000/rollouts")
    rewards, advantages = (
        np.array([line[name] for line in lines]) for name in ("reward", "advantage")
    )
    assert advantages.sum() == pytest.approx(0, abs=1e-5)
    assert (np.argsort(rewards) == np.argsort(advantages)).all()


def test_profiles_are_of_the_named_steps_and_roles(run):
    _, _, metrics_logger, _, _ = run(
        steps=3,
        prompts_per_step=4,
        profile={"steps": [0, 2], "roles": ["rollout", "training"]},
        validation={},
    )
    profiles = {path for path in metrics_logger.files if path.startswith("profile/")}
    assert profiles == {
        f"profile/step-0000{step}/{role}-0.json.gz"
        for step in (0, 2)
        for role in ("rollout", "training")
    }
    ops = {}
    for path in profiles:
        events = json.loads(gzip.decompress(metrics_logger.files[path]))["traceEvents"]
        ops[path] = {event["name"] for event in events}
        assert "aten::linear" in ops[path] or "aten::addmm" in ops[path]
    assert any("backward" in name.lower() for name in ops["profile/step-00002/training-0.json.gz"])
    assert not any(
        "backward" in name.lower() for name in ops["profile/step-00002/rollout-0.json.gz"]
    )
    only = run(steps=2, profile={"steps": [1], "roles": ["training"]})[2]
    assert [path for path in only.files if path.startswith("profile/")] == [
        "profile/step-00001/training-0.json.gz"
    ]


def test_profiles_that_cannot_be_are_refused(make_recipe):
    with pytest.raises(
        RecipeError,
        match=r"(?s)profile.roles has 'reward'.*one profiler per process.*placement: ray",
    ):
        make_recipe(online={"profile": {"steps": [0], "roles": ["reward"]}})
    with pytest.raises(
        RecipeError, match=r"(?s)profile.steps has 2, and the stage's steps are 0 to 1"
    ):
        make_recipe(online={"profile": {"steps": [1, 2]}})
    assert make_recipe(online={"placement": "ray", "profile": {"roles": ["reward"]}}).stages[
        0
    ].profile.roles == ["reward"]


def test_the_timeline_holds_all_work_and_its_sums_are_the_records(run):
    _, _, metrics_logger, kept, record = run(steps=3, validation=WATCHED["validation"])
    table = json.loads(metrics_logger.files["timeline.json"])
    spent = {}
    for busy in table["spans"]:
        assert busy["end"] >= busy["start"] > time.time() - 3600
        spent[busy["task"]] = spent.get(busy["task"], 0) + busy["end"] - busy["start"]
    assert {"encoding": record.seconds["encoding"], **spent} == pytest.approx(record.seconds)
    assert set(spent) == {"rollout", "scoring", "training", "validation"}
    assert {
        (busy["role"], busy["task"]) for busy in table["spans"] if busy["task"] == "validation"
    } == {
        ("rollout", "validation"),
        ("reward", "validation"),
    }
    assert [step["step"] for step in table["steps"]] == [0, 1, 2]
    walls = [step["end"] - step["start"] for step in table["steps"]]
    assert [metrics["seconds/step"] for metrics in kept[:3]] == pytest.approx(walls)
    for metrics in kept[:3]:
        for role, task in (("rollout", "rollout"), ("training", "training"), ("reward", "scoring")):
            expected = metrics[f"seconds/{task}"] / metrics["seconds/step"]
            assert metrics[f"utilisation/{role}"] == pytest.approx(expected, rel=0.05, abs=0.02)
    assert Image.open(io.BytesIO(metrics_logger.files["timeline.png"])).width == 1200


def test_a_stage_that_fails_leaves_its_timeline(run, make_prompts):
    metrics_logger = Shown()
    broken = [Prompt(**{**vars(prompt), "target": "FAIL"}) for prompt in make_prompts(6)]
    with pytest.raises(RewardError, match="max_failed_share"):
        run(prompts=broken, metrics_logger=metrics_logger)
    assert {
        busy["task"] for busy in json.loads(metrics_logger.files["timeline.json"])["spans"]
    } == {"rollout", "scoring"}


def test_a_timeline_that_nobody_keeps_is_not_drawn(
    make_recipe, make_prompts, base_folder, scorer, monkeypatch
):
    """As on all ranks of a group but the first."""
    ctx = StageContext(make_recipe(online={"steps": 1}), 0, 0)
    updater = PolicyUpdater(opened(ctx, base_folder), ctx.online_config)
    placement = open_local_workers(ctx, updater, scorer)
    monkeypatch.setattr(Timeline, "render_png", lambda timeline: pytest.fail("it was drawn"))
    record = run_online_stage(ctx, placement, make_prompts(6), MetricsRecorder())
    assert record.steps == 1


def test_work_ahead_is_told_when_it_is_known(run):
    """With rollouts a step ahead, the first utilisation is that of step 0, once step 1 has been
    taken; both ran in its time.
    """
    _, _, metrics_logger, kept, _ = run(steps=3, mode="one_step_off")
    assert ["utilisation/rollout" in metrics for metrics in kept] == [False, True, True]
    spent = kept[0]["seconds/rollout"] + kept[1]["seconds/rollout"]
    assert kept[1]["utilisation/rollout"] == pytest.approx(
        spent / kept[0]["seconds/step"], rel=1e-3
    )
