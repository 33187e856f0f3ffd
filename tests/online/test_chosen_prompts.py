"""Prompts that rewards choose are encoded in windows ahead of their step, or late."""

from __future__ import annotations

import numpy as np
import pytest
from varied_reward import VariedReward, ids

from ebbflow.data import prompt_windows
from ebbflow.models import encoding, load_model
from ebbflow.online import training_worker
from ebbflow.online.loop import run_online_stage
from ebbflow.online.prompt_sampler import PromptSampler
from ebbflow.online.workers import open_local_workers
from ebbflow.rewards.combine import Scorer
from ebbflow.stage import MetricsRecorder, StageContext
from ebbflow.training.policy import Policy
from ebbflow.training.update import PolicyUpdater

TIMED = ("seconds", "ms_per", "images_per", "push", "utilisation")


@pytest.fixture
def build_sampler(make_recipe, make_prompts):
    """``build_sampler(12, **online)``: the sampler of a stage on so many prompts."""
    return lambda count, **online: PromptSampler(
        StageContext(make_recipe(online=online), 0, 0), make_prompts(count)
    )


def test_refills_take_candidates_alone_whatever_varies(build_sampler):
    sampler = build_sampler(60, prompts_per_step=4, refill_rounds=3)
    generator = np.random.default_rng(0)
    for step in range(20):
        candidates = set(ids(sampler.list_candidates(step)))
        assert len(candidates) == 4 * sampler.config.candidates_per_prompt == 16
        taken = sampler.sample_batch(step)
        varied = []
        for _ in range(sampler.config.refill_rounds):
            varied += [prompt for prompt in ids(taken) if generator.random() < 0.3]
            taken = taken + sampler.sample_replacements(step, taken, set(varied))
        assert set(ids(taken)) <= candidates


def test_a_curriculum_seldom_takes_others_than_the_candidates(build_sampler):
    """Half of the prompts have come up; they weigh .2 to 1, and .8 on average with the others."""
    sampler = build_sampler(400, prompts_per_step=8, refill_rounds=1, curriculum={})
    candidates = [ids(sampler.list_candidates(step)) for step in range(30)]
    # Nothing is known: the first of them, in their order.
    assert [ids(sampler.sample_batch(step)) for step in range(30)] == [
        step[:8] for step in candidates
    ]
    deviations = np.linspace(0.2, 1, 200)
    sampler.state.prompt_rewards |= {
        2 * number: (0.5, deviation) for number, deviation in enumerate(deviations)
    }
    # Rewards do not move them, so a stage that resumes encodes the same.
    assert [ids(sampler.list_candidates(step)) for step in range(30)] == candidates
    batches = [ids(sampler.sample_batch(step)) for step in range(30)]
    assert any(batch != step[:8] for batch, step in zip(batches, candidates, strict=True))
    for batch, step in zip(batches, candidates, strict=True):
        assert set(batch) <= set(step)


@pytest.fixture
def run(make_recipe, make_prompts, base_folder, monkeypatch):
    """``run(size, reward, **online)``: (rows, parameters, the ids that were encoded together), with
    windows of so many of the 10 prompts.
    """

    def run_stage(window_size, reward, **online):
        monkeypatch.setattr(prompt_windows, "PROMPTS_PER_WINDOW", window_size)
        # Each by itself: its rounding depends on what it is encoded with.
        monkeypatch.setattr(encoding, "PROMPTS_PER_FILE", 1)
        encoded = []
        embed_prompts = training_worker.embed_prompts

        def watch(model, prompts, negatives):
            encoded.append(sorted(set(ids(prompts))))
            return embed_prompts(model, prompts, negatives)

        keys = {"steps": 4, "group_size": 2, "micro_batch": 4, **online}
        ctx = StageContext(make_recipe(online=keys), 0, 0)
        recorder = MetricsRecorder()
        policy = Policy(load_model(base_folder), ctx.recipe.policy, 0)
        workers = open_local_workers(
            ctx, PolicyUpdater(policy, ctx.online_config), Scorer(((reward, 1.0),))
        )
        with monkeypatch.context() as patch:
            patch.setattr(training_worker, "embed_prompts", watch)
            run_online_stage(ctx, workers, make_prompts(10), recorder)
        rows = [
            {name: value for name, value in row.items() if not name.startswith(TIMED)}
            for row in recorder.metrics_rows
        ]
        parameters = {name: value.tolist() for name, value in policy.parameters.items()}
        return rows, parameters, encoded

    return run_stage


FILTER = {"samples": 2, "min_std": 1e-6}
CASES = {
    "refills": {"refill_rounds": 1},
    "a curriculum": {"curriculum": {"floor": 0.001}},
    "a filter": {"prompt_filter": FILTER},
    "all of them": {"refill_rounds": 1, "curriculum": {}, "prompt_filter": FILTER},
    "all of them, ahead": {
        "refill_rounds": 1,
        "curriculum": {},
        "prompt_filter": FILTER,
        "mode": "one_step_off",
    },
}


@pytest.mark.parametrize("case", CASES)
def test_a_stage_in_windows_is_the_stage_in_one_window(run, case):
    reward = VariedReward({1, 2, 5, 6, 8})
    rows, parameters, encoded = run(10, reward, **CASES[case])
    assert encoded == [list(range(10))]
    for row in rows:
        assert row.pop("prompts/encoded_late", 0) == 0
    # Fewer than the prompts, and no fewer than the candidates of a step.
    size = 8 if case.startswith("all") else 4
    rows_of_windows, parameters_of_windows, encoded = run(size, reward, **CASES[case])
    for row in rows_of_windows:
        row.pop("prompts/encoded_late", None)
    assert rows_of_windows == rows
    assert parameters_of_windows == parameters
    assert max(map(len, encoded)) <= size
    assert len(encoded) > 1


def test_prompts_that_a_curriculum_chooses_too_late_are_encoded_when_a_step_takes_them(run):
    """One prompt of ten varies: once it has come up, the others that have weigh next to nothing."""
    reward = VariedReward({5})
    keys = {"curriculum": {"floor": 0.001}, "steps": 8}
    rows, _, encoded = run(4, reward, **keys)
    late = [group for group in encoded if len(group) == 2]
    assert 0 < len(late) < 8
    assert sum(row["prompts/encoded_late"] for row in rows) == 2 * len(late)
    assert all(group in reward.seen for group in late)


def test_candidates_are_listed_for_the_windows_that_are_encoded_alone(build_sampler, monkeypatch):
    """To order all prompts for each step of a long stage takes minutes."""
    monkeypatch.setattr(prompt_windows, "PROMPTS_PER_WINDOW", 24)
    sampler = build_sampler(60, prompts_per_step=4, refill_rounds=1, steps=1000)
    listed = []
    list_candidates = sampler.list_candidates
    monkeypatch.setattr(
        sampler, "list_candidates", lambda step: listed.append(step) or list_candidates(step)
    )
    windows = sampler.list_windows()
    assert listed == []
    # Of 8 candidates each.
    assert [window.steps for window in windows[:2]] == [range(3), range(3, 6)]
    assert windows[-1].steps == range(999, 1000)
    assert len(windows[1].list_prompts()) == 24
    assert listed == [3, 4, 5]
