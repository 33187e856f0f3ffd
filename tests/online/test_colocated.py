"""A group of processes that each generate, score and train on a share of every step learns what one
process learns, from the same samples.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from colocated_cases import (
    CASES,
    check_metrics,
    check_weights,
    prepare_folder,
    recipe_of,
    run_as_rank,
    run_attempt,
    run_stage,
)

from ebbflow.data import prompt_windows
from ebbflow.online import colocated
from ebbflow.online.colocated import ColocatedQueue
from ebbflow.online.prompt_sampler import PromptSampler
from ebbflow.online.workers import LocalWorker, RolloutPool, StageError
from ebbflow.stage import StageContext
from ebbflow.storage.artifacts import verify_folder
from ebbflow.training.distributed import TIMEOUT_MINUTES, PeerLost, Ranks
from tests.two_processes import as_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("colocated")
    prepare_folder(folder)
    return folder


@pytest.fixture(scope="module")
def results(base_folder, folder):
    """``results(world, replicated)``: what every rank says of every case."""
    known: dict[tuple[int, bool], list[dict[str, Any]]] = {}

    def run(world: int, replicated: bool = True) -> list[dict[str, Any]]:
        if (world, replicated) not in known:
            stages = {case: recipe_of(case, "colocated") for case in CASES}
            as_ranks(world, run_as_rank, base_folder, folder, stages, replicated)
            name = f"{world}-{'replicas' if replicated else 'shards'}"
            known[world, replicated] = [
                json.loads((folder / f"results-{name}-{rank}.json").read_text())
                for rank in range(world)
            ]
        return known[world, replicated]

    return run


@pytest.fixture(scope="module")
def alone(base_folder, folder):
    """``alone(case)``: what one process says, with the placement in_process."""
    known: dict[str, dict[str, Any]] = {}

    def run(case: str) -> dict[str, Any]:
        if case not in known:
            known[case] = run_stage(
                base_folder, folder, f"{case}-alone", recipe_of(case, "in_process")
            )
        return known[case]

    return run


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_learn_what_one_process_learns(case, folder, results, alone):
    check_same_stage(case, folder, results(2), alone(case), "2-replicas")


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_with_a_sharded_model_learn_the_same(case, folder, results, alone):
    check_same_stage(case, folder, results(2, replicated=False), alone(case), "2-shards")


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES)
def test_four_ranks_learn_the_same(case, folder, results, alone):
    check_same_stage(case, folder, results(4), alone(case), "4-replicas")


@pytest.mark.parametrize(
    ("case", "replicated", "happens"),
    [
        ("average", True, "killed"),
        ("one step off", False, "preempted"),
        pytest.param("one step off", True, "killed", marks=pytest.mark.exhaustive),
        pytest.param("chosen prompts", False, "killed", marks=pytest.mark.exhaustive),
        pytest.param("student", True, "preempted", marks=pytest.mark.exhaustive),
    ],
)
def test_a_stage_that_loses_a_rank_resumes_with_the_same_bytes(
    base_folder, folder, case, replicated, happens
):
    recipe = recipe_of(case, "colocated", checkpoints={"every": 1})
    name = f"{case}-{happens}-{replicated}"
    attempt = (base_folder, folder, name, recipe, replicated)
    if happens == "killed":
        with pytest.raises(Exception, match="SIGKILL"):
            as_ranks(2, run_attempt_or_lose_peer, *attempt, happens)
    else:
        as_ranks(2, run_attempt, *attempt, happens)
        for rank in range(2):
            said = (folder / f"preempted-{name}-{rank}").read_text()
            assert "was preempted" in said
    saved = sorted((folder / f"checkpoints-{name}").glob("step-*"))
    assert saved
    parts = {path.name for path in saved[-1].glob("parameters-*")}
    count = 1 if replicated else 2
    assert parts == {f"parameters-{part:05d}-of-{count:05d}.safetensors" for part in range(count)}
    as_ranks(2, run_attempt, *attempt)
    as_ranks(2, run_attempt, base_folder, folder, f"{name}-whole", recipe, replicated)
    assert verify_folder(folder / f"trained-{name}") == verify_folder(
        folder / f"trained-{name}-whole"
    )


def test_ranks_that_encode_in_windows_resume_with_the_same_bytes(base_folder, folder):
    recipe = recipe_of("one step off", "colocated", checkpoints={"every": 1})
    attempt = (base_folder, folder, "windows", recipe, False)
    as_ranks(2, run_attempt_in_windows, *attempt, "preempted")
    as_ranks(2, run_attempt_in_windows, *attempt)
    as_ranks(2, run_attempt_in_windows, base_folder, folder, "windows-whole", recipe, False)
    whole = verify_folder(folder / "trained-windows-whole")
    assert verify_folder(folder / "trained-windows") == whole


def test_a_rank_generates_nothing_after_a_request_that_failed(make_recipe, make_prompts):
    """The other ranks are in the passes of that request, and its error must reach them."""
    attempts = []

    class Engine:
        def generate(self, request, weights):
            attempts.append(request)
            raise MemoryError("no room for a request")

    async def start_worker(index):
        raise AssertionError("the worker of this process is never replaced")

    ctx = StageContext(
        make_recipe(online={"placement": "colocated", "prompts_per_step": 6, "micro_batch": 4}),
        0,
        0,
    )
    policy = SimpleNamespace(sharded=True)
    workers = SimpleNamespace(
        ranks=Ranks(0, 2),
        context_parallel=1,
        keep_gathered=nullcontext,
        steps_before=0,
        rollout=RolloutPool([LocalWorker(Engine())], start_worker),
        rollout_worker=Engine(),
        trainer=SimpleNamespace(updater=SimpleNamespace(policy=policy)),
    )

    async def start_rollouts():
        sampler = PromptSampler(ctx, make_prompts(9))
        queue = ColocatedQueue(ctx, workers, sampler, MagicMock(), MagicMock())
        try:
            await queue.start_rollouts()
        finally:
            assert len(queue.in_flight[0].requests) == 6
            await queue.aclose()

    with pytest.raises(MemoryError, match="no room"):
        asyncio.run(start_rollouts())
    assert len(attempts) == 1


def test_a_rank_whose_reward_hangs_says_so_before_the_others_end(
    make_recipe, make_prompts, monkeypatch
):
    """Its retries may take longer than the other ranks wait in their collective."""
    assert colocated.MAX_SCORING_MINUTES < TIMEOUT_MINUTES
    monkeypatch.setattr(colocated, "MAX_SCORING_MINUTES", 1e-3)
    ctx = StageContext(make_recipe(online={"placement": "colocated"}), 0, 0)
    workers = SimpleNamespace(
        ranks=Ranks(1, 2),
        context_parallel=1,
        steps_before=0,
        reward_weights={"ocr": 1.0, "pickscore": 0.5},
    )

    async def wait():
        queue = ColocatedQueue(
            ctx, workers, PromptSampler(ctx, make_prompts(9)), MagicMock(), MagicMock()
        )
        loop = asyncio.get_running_loop()
        # One after the other within the limit, and all of them far beyond it: slow is not hung.
        slow = [loop.create_future() for _ in range(5)]
        for number, request in enumerate(slow):
            loop.call_later(0.04 * (number + 1), request.set_result, number)
        assert await queue._wait_for_scores(slow, 3) == [0, 1, 2, 3, 4]
        scored, hung = loop.create_future(), loop.create_future()
        scored.set_result("scores")
        assert await queue._wait_for_scores([scored], 4) == ["scores"]
        try:
            await queue._wait_for_scores([scored, hung], 4)
        finally:
            assert hung.cancelled()

    message = r"rank 1 of 2 .* 1 of its 2 requests of step 4 \(ocr, pickscore\)"
    with pytest.raises(StageError, match=message):
        asyncio.run(wait())


def run_attempt_in_windows(*arguments: Any) -> None:
    """Run an attempt whose windows are a step each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_windows, "PROMPTS_PER_WINDOW", 1)
        run_attempt(*arguments)


def run_attempt_or_lose_peer(*arguments: Any) -> None:
    """As ``run_attempt``, where the other rank ends meanwhile."""
    with suppress(PeerLost):
        run_attempt(*arguments)


def check_same_stage(
    case: str, folder: Path, ranks: list[dict[str, Any]], one: dict[str, Any], group: str
) -> None:
    first, *others = [result[case] for result in ranks]
    for other in others:
        assert other["metrics"] == first["metrics"]
    assert first["samples"].keys() == one["samples"].keys()
    # In the first step no weight has moved, so samples are the same to the last bit; with the first
    # update comes its rounding.
    untouched = [key for key in one["samples"] if key.startswith("0/")]
    assert untouched
    for key in untouched:
        assert first["samples"][key] == one["samples"][key]
    check_metrics(first["metrics"], one["metrics"])
    check_weights(folder / f"trained-{case}-alone", folder / f"trained-{case}-{group}", 2e-6)
