"""Costs that grow linearly: twice the prompts, runs, samples or stages cost about twice as much.

Operations are counted, not timed: the instructions of Python, the elements that NumPy reads and
writes, and the bytes that are held at once are the same on every machine.
"""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import yaml

from ebbflow.data import sampling
from ebbflow.estimate.run import estimate_from_sizes, measure_sizes
from ebbflow.evaluation.image_statistics import measure_diversity_across, measure_diversity_within
from ebbflow.models.sizes import measure_model
from ebbflow.online.prompt_sampler import PromptSampler
from ebbflow.recipe.recipe_file import parse_recipe
from ebbflow.run_list import RESOLVED_RECIPE, list_runs
from ebbflow.stage import StageContext
from ebbflow.storage.locks import LOCK

MAX_GROWTH = 2.3
"""Of the cost for each doubling: 2 is linear, 4 is quadratic."""


class CountedArray(np.ndarray):
    """An array whose elements are counted when an operation of NumPy reads or writes them, and the
    arrays that come out of it likewise.
    """

    elements = 0

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        plain = [np.asarray(value) for value in inputs]
        if "out" in options:
            options["out"] = tuple(np.asarray(value) for value in options["out"])
        result = np.asarray(getattr(ufunc, method)(*plain, **options))
        CountedArray.elements += result.size + sum(value.size for value in plain)
        return result.view(CountedArray)


def count_instructions(call: Callable[[], object]) -> int:
    """Count the bytecode instructions of a call, those of libraries included."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def require_linear(costs: list[int]) -> None:
    """Require that each cost is at most ``MAX_GROWTH`` times the one of half the size."""
    growths = [large / small for small, large in zip(costs, costs[1:], strict=False)]
    assert max(growths) <= MAX_GROWTH, costs


def test_the_nearest_other_picture_takes_one_product() -> None:
    points = np.random.default_rng(0).random((400, 4096), dtype=np.float32)
    costs = []
    for count in (50, 100, 200, 400):
        CountedArray.elements = 0
        measure_diversity_across(points[:count].view(CountedArray))
        costs.append(CountedArray.elements)
    require_linear(costs)


def test_samples_of_a_prompt_are_compared_in_linear_memory() -> None:
    points = np.random.default_rng(0).random((128, 2048), dtype=np.float32)
    costs = []
    for count in (16, 32, 64, 128):
        tracemalloc.start()
        measure_diversity_within([7] * count, points[:count])
        costs.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    require_linear(costs)


@pytest.mark.parametrize("with_mixture", [False, True])
def test_steps_walk_through_one_permutation_of_each_epoch(
    make_recipe, make_prompts, monkeypatch, with_mixture: bool
) -> None:
    permuted = 0
    make_generator = sampling.make_generator

    class CountingGenerator:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.generator = make_generator(*arguments, **options)

        def permutation(self, count: int) -> np.ndarray:
            nonlocal permuted
            permuted += count
            return self.generator.permutation(count)

    monkeypatch.setattr(sampling, "make_generator", CountingGenerator)
    costs = []
    for count in (64, 128, 256, 512):
        sampling._permute_epoch.cache_clear()
        permuted = 0
        steps = count // 8
        recipe = make_recipe(online={"steps": steps, "prompts_per_step": 4})
        prompts = make_prompts(count)
        sampler = PromptSampler(StageContext(recipe, 0, 0), prompts)
        if with_mixture:
            sampler.counts = {prompts[0].source: 4}
        instructions = count_instructions(sampler.list_windows)
        costs.append(permuted + instructions)
    require_linear(costs)


def write_run(folder: Path, number: int, recipe: dict[str, Any]) -> None:
    home = folder / f"glyph-{number}"
    home.mkdir(parents=True)
    (home / LOCK).touch()
    (home / RESOLVED_RECIPE).write_text(yaml.safe_dump(recipe, sort_keys=False))


def test_the_list_of_runs_grows_with_the_runs_and_not_with_their_recipes(tmp_path: Path) -> None:
    recipe = {"name": "glyph", "seed": 3, "stages": [{"kind": "online", "steps": 10}] * 4}
    costs = []
    for count in (4, 8, 16, 32):
        folder = tmp_path / str(count)
        for number in range(count):
            write_run(folder, number, recipe)
        costs.append(count_instructions(lambda folder=folder: list_runs(folder)))
    require_linear(costs)
    long = tmp_path / "long"
    for number in range(4):
        write_run(long, number, recipe | {"stages": recipe["stages"] * 50})
    assert count_instructions(lambda: list_runs(long)) < 1.2 * costs[0]


def test_reading_and_estimating_a_recipe_grows_with_its_stages(make_recipe) -> None:
    stages = make_recipe().model_dump(mode="json")["stages"]
    recipe = make_recipe()
    sizes, sample, evaluated = measure_sizes(recipe, measure_model)
    costs = []
    for count in (4, 8, 16, 32):
        text = yaml.safe_dump({"rounds": 1, "stages": stages[:1] * count}, sort_keys=False)

        def read_and_estimate(text: str = text) -> None:
            longer = parse_recipe(text, "recipe.yaml")
            estimate_from_sizes(longer, 1, sizes, sample, evaluated=evaluated)

        costs.append(count_instructions(read_and_estimate))
    require_linear(costs)
