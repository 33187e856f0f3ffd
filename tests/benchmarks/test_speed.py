"""The benchmark of speed: both sides of a row evaluate the network as often, and the ratio is theirs."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from benchmarks import speed
from benchmarks.gpu_sides import SIZES, random_model, random_prompts
from ebbflow.recipe.recipe import PolicyConfig
from ebbflow.stage import WATCHED_ROWS
from ebbflow.training.policy import Policy


@pytest.fixture
def bench() -> speed.Bench:
    torch.manual_seed(0)
    device = torch.device("cpu")
    prompts = random_prompts(SIZES["tiny"], 4, speed.GUIDANCE, device, torch.float32)
    return speed.Bench(random_model(SIZES["tiny"], device, "float32"), prompts, 4)


def rows_of(bench: speed.Bench, call: Callable[[], object]) -> int:
    """Rows through the network in a call."""
    rows: list[int] = []
    hook = bench.model.transformer.register_forward_hook(
        lambda module, arguments, given, output: rows.append(len(given["hidden_states"])), with_kwargs=True
    )
    call()
    hook.remove()
    return sum(rows)


def test_both_sides_of_a_rollout_evaluate_as_many_rows(bench):
    ours, bare = (rows_of(bench, side) for side in speed.rollout_sides(bench))
    assert ours == bare == 2 * 4 * speed.STEPS


def test_an_update_evaluates_what_a_bare_one_does_and_the_rows_that_are_watched(bench):
    policy = Policy(bench.model, PolicyConfig(train="full"), 0)
    ours, bare = (rows_of(bench, side) for side in speed.update_sides(bench, policy))
    rows = 4 * len(speed.TRAINED)
    assert bare == speed.WATCHED_EVERY * 2 * rows
    assert ours == bare + 2 * math.ceil(rows / WATCHED_ROWS)


def test_the_ratio_is_that_of_the_turns(monkeypatch):
    seconds = {"one": 3.0, "other": 2.0}
    clock, calls = [0.0], []

    def side(name: str) -> Callable[[], None]:
        def call() -> None:
            calls.append(name)
            clock[0] += seconds[name]

        return call

    monkeypatch.setattr(speed.time, "process_time", lambda: clock[0])
    found = speed.compare(side("one"), side("other"), repeat=3)
    assert (found.ratio, found.seconds, found.other_seconds) == (1.5, 3.0, 2.0)
    assert calls == ["one", "other", "other", "one", "one", "other", "other", "one"]
