"""The benchmark of speed: both sides of a row evaluate the network as often, and the ratio is
theirs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest
import torch

from benchmarks import speed, speed_report
from benchmarks.gpu_sides import SIZES, build_random_model, generate_random_prompts
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.training.drift import WATCHED_ROWS
from ebbflow.training.policy import Policy


@pytest.fixture
def bench() -> speed.Bench:
    return new_bench()


def new_bench() -> speed.Bench:
    torch.manual_seed(0)
    device = torch.device("cpu")
    prompts = generate_random_prompts(SIZES["tiny"], 4, speed.GUIDANCE, device, torch.float32)
    return speed.Bench(build_random_model(SIZES["tiny"], device, "float32"), prompts, 4)


def rows_of(bench: speed.Bench, call: Callable[[], object]) -> int:
    """Rows through the network in a call."""
    rows: list[int] = []
    hook = bench.model.transformer.register_forward_hook(
        lambda module, arguments, given, output: rows.append(len(given["hidden_states"])),
        with_kwargs=True,
    )
    call()
    hook.remove()
    return sum(rows)


def test_both_sides_of_a_rollout_evaluate_as_many_rows(bench):
    ours, bare = (rows_of(bench, side) for side in speed.build_rollout_sides(bench))
    assert ours == bare == 2 * 4 * speed.STEPS


def test_an_update_evaluates_what_a_bare_one_does_and_the_rows_that_are_watched(bench):
    policy = Policy(bench.model, PolicyConfig(train="full"), 0)
    ours, bare = (rows_of(bench, side) for side in speed.build_update_sides(bench, policy))
    rows = 4 * len(speed.TRAINED)
    assert bare == speed.WATCHED_EVERY * 2 * rows
    assert ours == bare + 2 * math.ceil(rows / WATCHED_ROWS)


def test_a_step_that_reuses_passes_has_none_in_its_update():
    benches = {reuse: new_bench() for reuse in (False, True)}
    plain, reused = (
        rows_of(it, speed.build_policy_gradient_step(it, speed.TRAINED, reuse))
        for reuse, it in benches.items()
    )
    assert plain - reused == 2 * 4 * len(speed.TRAINED)
    assert reused == 2 * 4 * speed.STEPS + 2 * math.ceil(4 * len(speed.TRAINED) / WATCHED_ROWS)


def test_the_ratio_is_that_of_the_turns(monkeypatch):
    seconds = {"one": 3.0, "other": 2.0}
    clock = [0.0]
    calls = []

    def side(name: str) -> Callable[[], None]:
        def call() -> None:
            calls.append(name)
            clock[0] += seconds[name]

        return call

    monkeypatch.setattr(speed.time, "process_time", lambda: clock[0])
    found = speed.time_both_sides(side("one"), side("other"), repeat=3)
    assert (found.ratio, found.seconds, found.other_seconds) == (1.5, 3.0, 2.0)
    assert calls == ["one", "other", "other", "one", "one", "other", "other", "one"]


def test_the_page_has_the_rows_of_other_benchmarks(tmp_path):
    def runs(name: str, *seconds: float) -> list[dict]:
        curves = [
            [{"ocr": 0.8, "cpu_seconds": 0.0}, {"ocr": 1.0, "cpu_seconds": 2 * each}]
            for each in seconds
        ]
        return [{"name": name, "cpu": "x", "curve": curve} for curve in curves]

    # One of the two entries alone, on another processor: there is nothing to compare it with.
    newer = [run | {"cpu": "y"} for run in runs(speed_report.QUICK, 1, 1, 1)]
    latents = {"epoch, shards": 1.25, "read ms": 0.5, "KiB": 99.6}
    results = {
        "algorithms": {
            "runs": [
                *runs(speed_report.QUICK, 9, 10, 12),
                *runs(speed_report.ALL_STEPS, 40),
                *newer,
            ]
        },
        "glyph_seeds": {"runs": {"0": {"wall_seconds": 120, "node_seconds": 100}}},
        "scale": {
            "now latents float32": latents,
            "now latents bfloat16": latents | {"read ms": 0.25},
        },
    }
    for name, found in results.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    assert [found for _, found, _, _ in speed_report.list_other_measures(tmp_path)] == [
        "0.25 (10.0 ÷ 40.0)",
        "1.20",
        "1.2",
        "0.25 ms, 100 KiB",
        "0.50 ms, 100 KiB",
    ]
