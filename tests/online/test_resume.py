"""A stage that goes on from a checkpoint ends with the same bytes as one that never stopped."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal

import pyarrow as pa
import pytest

from ebbflow.data import prompt_windows
from ebbflow.data.prompts import write_prompts
from ebbflow.data.schema import PROMPTS
from ebbflow.online import monitor, train_folder, training_worker
from ebbflow.online.rollout_queue import RolloutQueue
from ebbflow.online.train_folder import train_online_folder
from ebbflow.rewards.combine import Scorer
from ebbflow.stage import MetricsRecorder, StageContext, StageFolders
from ebbflow.storage.artifacts import verify_folder
from ebbflow.training.checkpoint import CheckpointError, Checkpoints
from ebbflow.training.policy_metadata import write_base_policy
from ebbflow.training.stop_conditions import Preempted
from tests.conftest import Darkness

NFT = {"algorithm": {"name": "diffusion_nft"}, "sampler": {"name": "ode", "steps": 3}}
CRD = {
    "name": "crd",
    "old": {"min_decay": 0.2, "slope": 0.1},
    "sampling": {"slope": 0.3, "max_decay": 0.6},
}
OPTIMIZER = {
    "schedule": {"kind": "cosine", "warmup": 3},
    "lr_factors": [{"parameters": "*.lora_B.*", "factor": 4}],
}
TIMED = ("seconds", "ms_per", "images_per", "push", "utilisation")


class Flat(Darkness):
    """As ``Darkness``, but all samples of two prompts in three score the same."""

    def __call__(self, images, prompts):
        result = super().__call__(images, prompts)
        result.values[[prompt.prompt_id % 3 > 0 for prompt in prompts]] = 0.5
        return result


class Killed(Exception):
    """What the test ends a stage with."""


@pytest.fixture
def attempt(make_recipe, make_prompts, base_folder, scorer, tmp_path, monkeypatch):
    """``attempt("name", kill=3, **online)``: run a stage, killed (or ``preempted``) in the step
    with that number.

    (digest of the policy, rows, checkpoints).
    """
    prompts = [*make_prompts(9), *make_prompts(4, "validation")]
    write_prompts(
        pa.Table.from_pylist([vars(p) for p in prompts], PROMPTS), tmp_path / "prompts.parquet"
    )
    monkeypatch.setattr(train_folder, "load_scorer", lambda rewards, guardrails: scorer)

    def run(name, kill=None, preempted=None, policy=None, **online):
        recipe = make_recipe(
            online={"steps": 6, "checkpoints": {"every": 2}, **online}, policy=policy or {}
        )
        ctx = StageContext(recipe, 0, 0)
        start = tmp_path / f"start-{name}"
        write_base_policy(start, verify_folder(base_folder), recipe.digest, recipe.policy)
        checkpoints = Checkpoints(ctx, tmp_path / name)
        recorder = MetricsRecorder()
        with monkeypatch.context() as patch:
            next_batch = RolloutQueue.next_batch

            async def die(queue, version):
                if version == kill:
                    raise Killed
                if version == preempted:
                    os.kill(os.getpid(), signal.SIGTERM)
                return await next_batch(queue, version)

            patch.setattr(RolloutQueue, "next_batch", die)
            trained = tmp_path / f"trained-{name}"
            train_online_folder(
                ctx,
                StageFolders(base_folder, start, tmp_path / "prompts.parquet", trained),
                recorder,
                checkpoints=checkpoints,
            )
        untimed = [
            {key: value for key, value in row.items() if not key.startswith(TIMED)}
            for row in recorder.metrics_rows
        ]
        return (
            verify_folder(trained),
            untimed,
            sorted(path.name for path in (tmp_path / name).glob("step-*")),
        )

    return run


CASES = {
    "sync": ({}, {}),
    "one-step-off-lora": (
        {"mode": "one_step_off", "optimizer": OPTIMIZER},
        {"train": "lora", "rank": 2},
    ),
    "nft-average": (
        {**NFT, "mode": "one_step_off", "optimizer": {"name": "muon"}},
        {"ema": {"slope": 0.5, "max_decay": 0.5}},
    ),
    "crd-lora": (
        {"algorithm": CRD, "sampler": {"name": "ode", "steps": 3}},
        {"train": "lora", "rank": 2},
    ),
    "dmd2-lora": (
        {"algorithm": {"name": "dmd2", "fake_updates": 2}, "sampler": {"steps": 2}},
        {"train": "lora", "rank": 2},
    ),
    "tdm-r1-lora": (
        {
            "algorithm": {"name": "tdm_r1", "surrogate_old": {"slope": 0.2, "max_decay": 0.5}},
            "sampler": {"steps": 2},
            "updates_per_step": 2,
        },
        {"train": "lora", "rank": 2},
    ),
    "gardo-lora": (
        {
            "algorithm": {
                "name": "gardo",
                "auxiliary": ["brightness"],
                "diversity": "darkness",
                "share": 0.19,
            },
            "reference": {"reset_every": 3, "reset_above": None},
        },
        {"train": "lora", "rank": 2},
    ),
    "async-running": ({"advantages": {"running": True}, "mode": "async", "staleness": 2}, {}),
}
EIGHT_BIT = {
    "8bit": ({"optimizer": {"name": "adamw_8bit"}}, {}),
    "8bit-dmd2": (
        {
            "algorithm": {"name": "dmd2", "fake_updates": 2},
            "sampler": {"steps": 2},
            "optimizer": {"name": "adamw_8bit"},
        },
        {"train": "lora", "rank": 128},
    ),
}


@pytest.fixture(scope="module")
def results():
    """Case → what a stage that nothing interrupts returns."""
    return {}


@pytest.fixture
def finish(attempt, results):
    """``finish("sync")``: the result of the whole stage of a case, which is trained once."""

    def run(case):
        if case not in results:
            online, policy = CASES[case]
            results[case] = attempt("whole", policy=policy, **online)
        return results[case]

    return run


@pytest.mark.parametrize("case", CASES)
def test_a_killed_stage_ends_with_the_same_bytes(attempt, finish, case):
    """Killed between two checkpoints, and again, resumed, right after one."""
    online, policy = CASES[case]
    whole = finish(case)
    assert [row["step"] for row in whole[1]] == list(range(6))
    assert whole[2] == ["step-00002", "step-00004"]
    for kill in (3, 4):
        with pytest.raises(Killed):
            attempt("killed", kill=kill, policy=policy, **online)
    assert attempt("killed", policy=policy, **online) == whole


@pytest.mark.parametrize("online", [{}, {"mode": "async", "staleness": 2}], ids=["sync", "async"])
def test_a_killed_stage_that_encodes_in_windows_ends_with_the_same_bytes(
    attempt, monkeypatch, online
):
    # Two prompts a step: windows of two steps, as none of theirs are the same.
    monkeypatch.setattr(prompt_windows, "PROMPTS_PER_WINDOW", 4)
    encoded = []
    embed_prompts = training_worker.embed_prompts

    def watch(model, prompts, negatives):
        encoded.append([prompt.prompt_id for prompt in prompts])
        return embed_prompts(model, prompts, negatives)

    monkeypatch.setattr(training_worker, "embed_prompts", watch)
    whole = attempt("whole", **online)
    windows = list(encoded)
    assert [len(window) for window in windows] == [4, 4, 4]
    with pytest.raises(Killed):
        attempt("killed", kill=3, **online)
    encoded.clear()
    with pytest.raises(Killed):
        attempt("killed", kill=5, **online)
    # The checkpoint is that of the step before, in the second and in the third window.
    assert encoded == windows[1:]
    encoded.clear()
    assert attempt("killed", **online) == whole
    assert encoded == windows[2:]


def test_a_stage_resumes_with_rollouts_that_the_training_has_overtaken(attempt, monkeypatch):
    """On Ray, step 0 may still be in flight when the checkpoint of a later window is saved."""
    monkeypatch.setattr(prompt_windows, "PROMPTS_PER_WINDOW", 2)
    next_batch = RolloutQueue.next_batch

    async def let_the_first_step_wait(queue, version):
        queue.in_flight.sort(key=lambda step: step.step == 0)
        return await next_batch(queue, version)

    monkeypatch.setattr(RolloutQueue, "next_batch", let_the_first_step_wait)
    whole = attempt("whole", mode="one_step_off")
    with pytest.raises(Killed):
        attempt("killed", kill=3, mode="one_step_off")
    assert attempt("killed", mode="one_step_off") == whole


@pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None,
    reason=(
        "bitsandbytes is not installed: `make test-8bit` installs it into a folder of its own and"
        " runs this test"
    ),
)
@pytest.mark.parametrize(("online", "policy"), EIGHT_BIT.values(), ids=EIGHT_BIT)
def test_a_killed_stage_with_moments_of_8_bits_ends_with_the_same_bytes(attempt, online, policy):
    whole = attempt("whole", policy=policy, **online)
    with pytest.raises(Killed):
        attempt("killed", kill=3, policy=policy, **online)
    assert attempt("killed", policy=policy, **online) == whole


def test_a_killed_stage_whose_updates_reuse_forward_passes_ends_with_the_same_bytes(attempt):
    online = {"reuse_rollout_forward": True, "steps": 4, "checkpoints": {"every": 2}}
    whole = attempt("whole", **online)
    with pytest.raises(Killed):
        attempt("killed", kill=3, **online)
    assert attempt("killed", **online) == whole


@pytest.mark.parametrize("case", CASES)
def test_a_stage_that_is_preempted_saves_after_the_step(attempt, finish, case, caplog):
    """Again and again: in its first step, in the first after another checkpoint, in its last."""
    caplog.set_level(logging.INFO, "ebbflow")
    online, policy = CASES[case]
    resumed = None
    for preempted in (0, 2, 5):
        said = (
            rf"1.1 online was preempted \(SIGTERM\) after {preempted + 1} of 6 steps; a checkpoint"
            r" is saved"
        )
        with pytest.raises(Preempted, match=said):
            attempt("preempted", preempted=preempted, policy=policy, **online)
        if resumed is not None:
            assert f"resuming after step {resumed} of 6" in caplog.text
        resumed = preempted + 1
        caplog.clear()
    assert attempt("preempted", policy=policy, **online)[:2] == finish(case)[:2]
    assert "resuming after step 6 of 6" in caplog.text


@pytest.mark.parametrize(
    "window_size", [pytest.param(4096, marks=pytest.mark.exhaustive), 4], ids=["one", "several"]
)
def test_a_stage_that_chooses_its_prompts_ends_with_the_same_bytes(
    attempt, monkeypatch, window_size
):
    monkeypatch.setattr(prompt_windows, "PROMPTS_PER_WINDOW", window_size)
    monkeypatch.setattr(
        train_folder, "load_scorer", lambda rewards, guardrails: Scorer(((Flat(), 1.0),))
    )
    online = {"mode": "one_step_off", "refill_rounds": 2, "curriculum": {"weight": "low_reward"}}
    online["prompt_filter"] = {"prompts": 8, "samples": 2, "min_reward": 0.1}
    whole = attempt("whole", **online)
    assert sum(row["group/refilled"] for row in whole[1]) > 0
    assert 2 < whole[1][0]["prompts/kept"] <= 8
    with pytest.raises(Killed):
        attempt("killed", kill=3, **online)
    assert attempt("killed", **online) == whole


def test_a_spent_budget_ends_it_with_what_was_learnt(attempt):
    _, rows, _ = attempt("short", max_hours=1e-9, validation={"every": 100, "prompts": 4})
    assert [row["step"] for row in rows] == [0, 1]
    assert "loss" in rows[0]
    assert "validation/reward" in rows[1]


def test_a_stage_can_end_with_the_best_that_was_validated(attempt, tmp_path, monkeypatch):
    """The scores are made up: the best comes early, is then overwritten by worse ones, and survives
    a restart.
    """
    scores = {0: 9.0, 2: 0.7, 4: 0.3, 6: 0.5}
    means = monitor.average_metrics
    running = {"advantages": {"running": True}}
    watched = running | {
        "checkpoints": {"every": 2, "keep": 1},
        "validation": {"every": 2, "prompts": 4, "best": True},
    }
    validate = monitor.StageMonitor.validate_policy

    async def made_up(self, version, last=False):
        monkeypatch.setattr(
            monitor, "average_metrics", lambda table: means(table) | {"reward": scores[version]}
        )
        return await validate(self, version, last)

    monkeypatch.setattr(monitor.StageMonitor, "validate_policy", made_up)
    best = attempt("two", steps=2, **running)
    whole = attempt("whole", **watched)
    assert whole[2] == ["step-00002", "step-00004"]
    assert whole[1][-1]["validation/best_step"] == 2
    assert (
        len(
            {
                (tmp_path / f"trained-{name}" / "prompt_statistics.json").read_text()
                for name in ("two", "whole")
            }
        )
        == 1
    )
    with pytest.raises(Killed):
        attempt("killed", kill=5, **watched)
    assert attempt("killed", **watched) == whole
    assert best[1] == [
        {key: value for key, value in row.items() if "validation" not in key}
        for row in whole[1][:2]
    ]
    scores[6] = 0.8
    later = attempt("later", **watched)
    assert later[1][-1]["validation/best_step"] == 6
    assert later[0] != whole[0]


def test_a_stage_killed_before_its_first_checkpoint_begins_again(attempt, finish):
    with pytest.raises(Killed):
        attempt("killed", kill=1)
    assert attempt("killed") == finish("sync")


def test_another_recipe_does_not_go_on_from_it(attempt):
    with pytest.raises(Killed):
        attempt("killed", kill=3)
    with pytest.raises(CheckpointError, match=r"recipe = .*\(now .*remove it"):
        attempt("killed", optimizer={"lr": 1e-5})


@pytest.mark.parametrize(
    "mode", [{"mode": "sync"}, {"mode": "one_step_off"}, {"mode": "async", "staleness": 2}]
)
def test_how_often_there_is_a_checkpoint_changes_nothing(attempt, mode):
    often, never = (
        attempt(name, steps=4, checkpoints=every, **mode)
        for name, every in (("often", {"every": 1}), ("never", None))
    )
    assert often[1] == never[1]


def test_rollouts_in_flight_are_not_generated_again(attempt, monkeypatch):
    roll_out = RolloutQueue.generate_and_score
    steps = []

    def note(queue, request, weights):
        steps.append((request.step, weights.version))
        return roll_out(queue, request, weights)

    monkeypatch.setattr(RolloutQueue, "generate_and_score", note)
    with pytest.raises(Killed):
        attempt("killed", kill=3, mode="one_step_off")
    assert steps == [(0, 0), (1, 0), (2, 1), (3, 2), (4, 3)]
    steps.clear()
    attempt("killed", mode="one_step_off")
    assert steps == [(3, 2), (4, 3), (5, 4)]
