"""The house rules: which room may import what."""

from __future__ import annotations

import ast
import json
import logging
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import ebbflow
from benchmarks.startup import list_imported_modules

ROOT = Path(__file__).parents[1]
ROOMS = re.findall(r"^- (\w+): ", ebbflow.__doc__ or "", re.MULTILINE)
"""Lowest first, as the docstring of ``ebbflow`` lists them; a room is a package or a module right
below ``ebbflow``.
"""
ALL_OF_THE_LIBRARY = (
    "import importlib, pkgutil, ebbflow; "
    "[importlib.import_module(m.name) for m in pkgutil.walk_packages(ebbflow.__path__, 'ebbflow.')]"
)


FORKS = """
import json, logging, os, sys

def report():
    lazy = "_LazyModule"
    modules = [name for name, module in sys.modules.items() if type(module).__name__ != lazy]
    root, ours = logging.getLogger(), logging.getLogger("ebbflow")
    packages = sorted({name.split(".")[0] for name in modules})
    print(json.dumps([packages, len(root.handlers), ours.level]), flush=True)

common, *statements = json.loads(sys.argv[1])
exec(common)
for statement in statements:
    if (child := os.fork()) == 0:
        exec(statement)
        report()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(statement)
"""


class State(NamedTuple):
    """Of an interpreter: top-level packages in memory, not those that flytekit would load lazily,
    and its logging.
    """

    loaded: set[str]
    handlers: int
    level: int
    """Of the logger ``ebbflow``."""


def _after(*statements: str, common: str = "") -> list[State]:
    """The state after each statement: forks of one fresh interpreter, which runs ``common`` before
    them.
    """
    command = [sys.executable, "-c", FORKS, json.dumps([common, *statements])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return [State(set(loaded), handlers, level) for loaded, handlers, level in found]


def test_the_library_knows_no_flyte_and_leaves_logging_alone() -> None:
    (library,) = _after(ALL_OF_THE_LIBRARY)
    assert {"torch", "mlflow", "diffusers"} <= library.loaded
    assert not library.loaded & {"flytekit", "tasks", "workflows"}
    assert (library.handlers, library.level) == (0, logging.NOTSET)


def test_importing_tasks_configures_logging() -> None:
    (tasks,) = _after("import tasks")
    assert (tasks.handlers, tasks.level) == (1, logging.INFO)


HEAVY = {"torch", "diffusers", "transformers", "peft", "mlflow", "ray", "onnxruntime"}


def test_registering_needs_no_gpu_stack() -> None:
    (registering,) = _after("import workflows.post_training")
    assert "flytekit" in registering.loaded
    assert not registering.loaded & {*HEAVY, "pandas", "pyarrow", "matplotlib", "scipy"}


WITHOUT_TORCH = [
    "prepare_prompts",
    "start_policy",
    "compute_advantages",
    "score_rollouts",
    "score_both_sides",
    "choose_candidate",
    "decide_promotion",
    "request_approval",
    "register_policy",
    "promote_policy",
    "write_report",
]


@pytest.fixture(scope="module")
def light_pods() -> dict[str, State]:
    """After what each of these tasks imports, as its file is read and as it runs."""
    modules = {task: list_imported_modules(ROOT / "tasks" / f"{task}.py") for task in WITHOUT_TORCH}
    assert all(modules.values())
    imports = [f"import tasks.{task}, {', '.join(names)}" for task, names in modules.items()]
    states = _after(
        *imports, common="import tasks, mlflow, pandas, pyarrow"
    )  # the slow ones of those that are allowed
    return dict(zip(WITHOUT_TORCH, states, strict=True))


@pytest.mark.parametrize("task", WITHOUT_TORCH)
def test_a_pod_that_computes_nothing_imports_no_torch(
    task: str, light_pods: dict[str, State]
) -> None:
    assert "flytekit" in light_pods[task].loaded
    assert not light_pods[task].loaded & {"torch", "diffusers", "transformers", "ray"}


@pytest.mark.parametrize(
    "path",
    sorted([*ROOT.glob("tasks/*.py"), *ROOT.glob("workflows/*.py")]),
    ids=lambda path: path.name,
)
def test_tasks_and_workflows_import_nothing_heavy_at_the_top(path: Path) -> None:
    imports = [
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    names = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in imports if isinstance(node, ast.ImportFrom)}
    assert not {name.split(".")[0] for name in names} & HEAVY


def test_importing_recipes_loads_no_heavy_library() -> None:
    (recipes,) = _after("import ebbflow.recipe")
    assert not recipes.loaded & {"torch", "mlflow", "pandas", "pyarrow", "numpy"}


@pytest.mark.parametrize("size", [{}, {"height": 512, "width": 512}], ids=["its own", "given"])
def test_a_check_of_a_base_model_folder_loads_no_torch(
    tmp_path: Path, size: dict[str, int]
) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    recipe = {"output": str(tmp_path), "model": {"family": "flux", "path": str(tmp_path), **size}}
    (checked,) = _after(
        "from ebbflow.preflight import check_recipe; from ebbflow.recipe import Recipe;"
        f"check_recipe(Recipe.model_validate({recipe!r}), '', on_cluster=False)"
    )
    assert "pyarrow" in checked.loaded, "nothing was checked"
    assert not checked.loaded & {"torch", "diffusers", "transformers", "mlflow"}


def test_datasets_is_no_package() -> None:
    assert (ROOT / "datasets").is_dir()
    assert not list((ROOT / "datasets").rglob("__init__.py")), (
        "it would shadow Hugging Face's datasets"
    )


class Import(NamedTuple):
    """One module of the library imports another: at the top, in a function or for types only."""

    by: str
    line: int
    module: str

    def __str__(self) -> str:
        return f"{self.by}:{self.line} imports {self.module}"


@cache
def _modules() -> dict[str, Path]:
    paths = {
        path.relative_to(ROOT).with_suffix(""): path for path in (ROOT / "ebbflow").rglob("*.py")
    }
    return {".".join(name.parts).removesuffix(".__init__"): path for name, path in paths.items()}


def _imports() -> Iterator[Import]:
    for by, path in _modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{by}:{node.lineno}: import by the full name"
                below = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if name in _modules() else node.module or "" for name in below]
            yield from (
                Import(by, node.lineno, name)
                for name in names
                if name.split(".")[0] == "ebbflow" and name != by
            )


def _room(module: str) -> str:
    return module.split(".")[1]


def test_every_room_is_in_the_list() -> None:
    assert sorted(ROOMS) == sorted({_room(module) for module in _modules() if module != "ebbflow"})


def test_rooms_import_only_lower_ones() -> None:
    upward = [
        one for one in _imports() if ROOMS.index(_room(one.module)) > ROOMS.index(_room(one.by))
    ]
    assert not upward, "\n".join(map(str, upward))


def test_ray_is_imported_before_its_modules() -> None:
    """Where Flyte's plugin has made ray a lazy module, ``from ray.exceptions import`` loads ray and
    then the exceptions once more: ray raises others than those that the file catches.
    """
    for path in [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]:
        lines = path.read_text().splitlines()
        of_ray = [line for line in lines if re.match(r"(import ray|from ray)\b", line)]
        assert not of_ray or re.match(r"import ray$|from ray import", of_ray[0]), path


def test_modules_import_in_no_circle() -> None:
    graph: dict[str, set[str]] = defaultdict(set)
    for one in _imports():
        graph[one.by].add(one.module)
    TopologicalSorter(graph).prepare()


def test_test_files_have_names_of_their_own() -> None:
    """Pytest imports a test file of a folder that is no package by its name alone, and refuses the
    second of a name.
    """
    loose = [
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if not (path.parent / "__init__.py").exists()
    ]
    assert [name for name, count in Counter(path.name for path in loose).items() if count > 1] == []


MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
FOLDERS = ("ebbflow", "tasks", "workflows", "examples", "tests", "benchmarks")
"""Where sources lie."""


def test_no_file_is_longer_than_the_limit() -> None:
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    lengths = {path.relative_to(ROOT): len(path.read_text().splitlines()) for path in paths}
    assert len(lengths) > 900, "The sources are not found."
    assert {path: count for path, count in lengths.items() if count > MAX_FILE_LINES} == {}


def test_no_function_is_longer_than_the_limit() -> None:
    too_long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION_LINES
    ]
    assert too_long == []


TOLERANCE = re.compile(
    r"\b(approx|allclose|assert_allclose|assert_close|assert_equal_to_rounding|isclose)\("
    r"|[<>] 1e-\d"
)


def _any_cpu_tests(path: Path) -> Iterator[tuple[str, str]]:
    """Name and source of each test of a file that carries the mark ``any_cpu``, by itself or with
    all of its file.
    """
    source = path.read_text()
    tree = ast.parse(source)
    whole_file = "pytestmark = pytest.mark.any_cpu" in source
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
            continue
        if whole_file or any("any_cpu" in ast.unparse(mark) for mark in node.decorator_list):
            yield f"{path.stem}::{node.name}", ast.get_source_segment(source, node) or ""


def test_what_older_instructions_may_leave_out_compares_no_floats_within_a_tolerance() -> None:
    """Files that start ranks are the exception: they compare them with one process, whose kernels
    are those of the tests beside them.
    """
    marked = []
    with_tolerance = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        tests = list(_any_cpu_tests(path))
        marked += [name for name, _ in tests]
        if "as_two_ranks" not in path.read_text():
            with_tolerance += [name for name, source in tests if TOLERANCE.search(source)]
    assert not with_tolerance
    assert len(marked) > 100, "The mark any_cpu is not found where it is given."
