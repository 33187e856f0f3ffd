"""How much of Ebbflow a reader passes on the way to a first loss: ``python -m benchmarks.first_loss
[--list] [--algorithm flow_grpo]``.

Counts the functions of ``ebbflow/`` that the first step of an online stage calls, and their files:
from the beginning of the step (``OnlineLoop._train_steps``) until the first backward pass
(``torch.Tensor.backward``), in all threads, for one process without Ray. Methods and properties
count; comprehensions, lambdas and what a dataclass generates do not, and neither does what happens
before the step: loading the model, reading the recipe, encoding the prompts. The reward is one of
this file, so the path has no network of a reward in it. Also counts the classes of ``ebbflow/`` of
which the step creates objects.

``--list`` names each function with its length in lines and its callers on this path, and the
classes.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np

from ebbflow.data.prompts import Prompt
from ebbflow.models.families.glyph import build_glyph_model
from ebbflow.online.loop import run_online_stage
from ebbflow.online.workers import open_local_workers
from ebbflow.recipe import Recipe
from ebbflow.recipe.model import GlyphTrainingConfig
from ebbflow.rewards.base import Reward, RewardResult
from ebbflow.rewards.combine import Scorer
from ebbflow.stage import MetricsRecorder, StageContext
from ebbflow.training.policy import Policy
from ebbflow.training.update import PolicyUpdater
from ebbflow.watchdog import watch

ROOT = Path(__file__).parents[1]
LIBRARY = str(ROOT / "ebbflow")
FIRST_FUNCTION = "OnlineLoop._train_steps"


class Function(NamedTuple):
    """A function of the library, by its file, relative to the repository, and its first line."""

    path: str
    name: str
    line: int


@dataclass
class CallRecorder:
    """Records the calls of a step, from its beginning until the first backward pass.

    Attributes:
        callers: the names of the functions that called each one, of the library or not.
        created_types: classes of the library of which objects were created.
    """

    callers: dict[Function, set[str]] = field(default_factory=lambda: defaultdict(set))
    created_types: set[type] = field(default_factory=set)
    has_begun: bool = False
    has_ended: bool = False

    def record_call(self, frame: FrameType, event: str, argument: Any) -> None:
        """A function for ``sys.setprofile``."""
        # A coroutine or generator that goes on is a call again, which the set of callers hides.
        if event != "call" or self.has_ended:
            return
        code = frame.f_code
        if code.co_qualname == FIRST_FUNCTION:
            self.has_begun = True
        if self.has_begun and code.co_qualname == "Tensor.backward":
            self.has_ended = True
        if self.has_begun:
            self.created_types |= _find_created_type(frame)
        # The names of comprehensions and lambdas begin with ``<``: they are part of the function
        # that they stand in. What a dataclass generates has no file.
        if self.has_begun and not self.has_ended and _is_function_of_library(code):
            path = str(Path(code.co_filename).relative_to(ROOT))
            caller = frame.f_back.f_code.co_qualname if frame.f_back else "a thread"
            self.callers[Function(path, code.co_qualname, code.co_firstlineno)].add(caller)

    @property
    def files(self) -> list[str]:
        return sorted({function.path for function in self.callers})


def _is_function_of_library(code: CodeType) -> bool:
    # The body of a class, which runs where a module is imported inside a step, has no fast locals.
    is_function = bool(code.co_flags & inspect.CO_OPTIMIZED)
    is_named = not code.co_name.startswith("<")
    return is_function and is_named and code.co_filename.startswith(LIBRARY)


def _find_created_type(frame: FrameType) -> set[type]:
    """Find the class of the library that a call creates an object of, if it is one."""
    created: set[type] = set()
    if frame.f_code.co_name == "__init__":  # a dataclass has one, too
        created = {type(frame.f_locals["self"])} if "self" in frame.f_locals else set()
    elif "_cls" in frame.f_locals:  # the ``__new__`` of a named tuple
        created = {frame.f_locals["_cls"]}
    return {one for one in created if one.__module__.startswith("ebbflow.")}


class Darkness(Reward):
    """How dark an image is, from 0 to 1."""

    name = "darkness"

    def __call__(self, images: np.ndarray, prompts: Sequence[Prompt]) -> RewardResult:
        return RewardResult(1 - images.mean((1, 2, 3)) / 255)


def record_first_step(algorithm: str = "flow_grpo") -> CallRecorder:
    """Run an online stage of one small step on a glyph model with random weights, and record it."""
    recipe = Recipe.model_validate(
        {
            # All parameters, as adapters only add their own functions to the path.
            "policy": {"train": "full"},
            "stages": [
                {
                    "kind": "online",
                    "algorithm": {"name": algorithm},
                    "steps": 1,
                    "prompts_per_step": 2,
                    "group_size": 4,
                    # Both groups in one request, so that nothing is done twice.
                    "micro_batch": 8,
                    "updates_per_step": 1,
                    "sampler": {"steps": 4},
                }
            ],
        }
    )
    ctx = StageContext(recipe, 0, 0)
    # In memory: a stage from folder to folder would load and save models around the step. Watched,
    # as when a stage loads its model, which starts the watchdog's thread. A thread that began
    # within the step would be recorded or not: it looks around every 15 seconds.
    with watch("building the model"):
        policy = Policy(build_glyph_model(GlyphTrainingConfig()), recipe.policy, 0)
    updater = PolicyUpdater(policy, ctx.online_config)
    workers = open_local_workers(ctx, updater, Scorer(((Darkness(), 1.0),)))
    prompts = [
        Prompt(number, f'"{text}"', "", text, "words", "train", "{}")
        for number, text in enumerate(("ABCD", "EFGH", "IJKL"))
    ]
    recorder = CallRecorder()
    # Noise is generated in a thread and images are scored in one; both start within the step.
    threading.setprofile(recorder.record_call)
    sys.setprofile(recorder.record_call)
    try:
        run_online_stage(ctx, workers, prompts, MetricsRecorder())
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return recorder


def count_lines(path: str) -> dict[int, int]:
    """Count the lines of every function of a file, by its first line, decorators included."""
    lengths = {}
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            # Python says that a decorated function begins with its first decorator.
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            lengths[first] = (node.end_lineno or node.lineno) - node.lineno + 1
    return lengths


def print_functions(recorder: CallRecorder) -> None:
    """Print each function with its lines and its callers, by file, and the classes."""
    for path in recorder.files:
        functions = sorted(function for function in recorder.callers if function.path == path)
        lengths = count_lines(path)
        print(f"{path}: {len(functions)}")
        for function in sorted(functions, key=lambda function: function.line):
            callers = ", ".join(sorted(recorder.callers[function]))
            print(f"  {function.name}, {lengths[function.line]} lines, from {callers}")
    names = sorted(f"{created.__module__}.{created.__name__}" for created in recorder.created_types)
    print("\n".join(["objects of:", *(f"  {name}" for name in names)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--algorithm", default="flow_grpo")
    parser.add_argument("--list", action="store_true", help="name the functions")
    arguments = parser.parse_args()
    recorder = record_first_step(arguments.algorithm)
    if arguments.list:
        print_functions(recorder)
    print(
        f"{len(recorder.callers)} functions in {len(recorder.files)} files,"
        f" {len(recorder.created_types)} types"
    )


if __name__ == "__main__":
    main()
