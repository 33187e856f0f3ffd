"""The extras: the core works without any of them, and a missing one is an error that names it."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ebbflow.extras import (
    EXTRAS,
    MissingExtraError,
    explain_import_error,
    explain_missing,
    require,
)

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = PROJECT["optional-dependencies"]
INSTALLED_BY_HAND = {"8bit", "float8", "movies", "postgresql", "tensorboard", "wandb"}
"""Extras that are not for every environment; each has an error of its own."""
OURS = {"ebbflow", "tasks", "workflows"}

CORE = """
import importlib, pkgutil, sys
import torch
import ebbflow

for room in sys.argv[1].split(","):
    package = importlib.import_module("ebbflow." + room)
    for module in pkgutil.walk_packages(getattr(package, "__path__", []), package.__name__ + "."):
        importlib.import_module(module.name)

from ebbflow.algorithms.loss_terms import compute_clipped_loss
from ebbflow.recipe import load_recipe

ratio = torch.tensor([1.05, 1.3], requires_grad=True)
losses, _ = compute_clipped_loss(ratio, torch.tensor([2.0, 2.0]), 0.1)
loss = losses.mean()
loss.backward()
print(round(loss.item(), 4), ratio.grad.tolist(), load_recipe(sys.argv[2]).name)
"""
COMMANDS = """
import json, sys
from click.testing import CliRunner
from ebbflow.cli import main

results = {line: CliRunner().invoke(main, line.split()) for line in sys.argv[1:]}
print(json.dumps({line: [result.exit_code, result.output] for line, result in results.items()}))
"""
CORE_ROOMS = (
    "extras",
    "recipe",
    "storage",
    "data",
    "flow",
    "algorithms",
    "models",
    "rewards.base",
    "rewards.combine",
    "stage",
    "training",
    "rollouts",
    "offline",
    "estimate",
    "preflight",
    "run_list",
    "launch",
    "commands",
    "cli",
)


def list_distributions(requirements: list[str]) -> set[str]:
    """The installed distributions that requirements need, with all that those need in turn."""
    names: set[str] = set()
    open_requirements = [(Requirement(text), "") for text in requirements]
    seen = set()
    while open_requirements:
        requirement, extra = open_requirements.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        for wanted in ("", *requirement.extras):
            if (name, wanted) in seen:
                continue
            seen.add((name, wanted))
            try:
                needs = distribution(name).requires or []
            except PackageNotFoundError:
                continue  # CUDA's libraries where torch was built for CPUs
            names.add(name)
            open_requirements += [(Requirement(text), wanted) for text in needs]
    return names


@pytest.fixture(scope="module")
def core_environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of links to what the core's dependencies installed: site-packages without extras."""
    folder = tmp_path_factory.mktemp("core")
    for name in sorted(list_distributions(PROJECT["dependencies"])):
        files = distribution(name).files or []
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            target = Path(str(distribution(name).locate_file(top)))
            link = folder / top
            if target.exists() and not link.exists():
                link.symlink_to(target)
    # Ebbflow itself, as a wheel would put it there.
    site_packages = Path(str(distribution("torch").locate_file("")))
    for path in [*(ROOT / name for name in OURS), *site_packages.glob("ebbflow-*.dist-info")]:
        (folder / path.name).symlink_to(path)
    return folder


def run_python(site: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run an interpreter that sees the standard library and the folder ``site`` alone."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [sys.executable, "-S", *arguments],
        cwd=folder,
        env={**kept, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_core_imports_computes_a_loss_and_reads_a_recipe_without_any_extra(
    core_environment: Path, tmp_path: Path
) -> None:
    recipe = ROOT / "workflows" / "recipes" / "sd35_medium_ocr.yaml"
    completed = run_python(
        core_environment, tmp_path, "-c", CORE, ",".join(CORE_ROOMS), str(recipe)
    )
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.split() == ["-2.15", "[-1.0,", "0.0]", "sd35-medium-ocr"]


RECIPE = str(ROOT / "workflows" / "recipes" / "tiny.yaml")
WORKING_COMMANDS = ("keys", "list", "defaults flow_grpo", f"estimate {RECIPE}", "runs --help")
REFUSALS = {
    f"run {RECIPE}": (
        "ebbflow run needs flytekit, mlflow, cv2, matplotlib, pandas:"
        " pip install 'ebbflow[evaluation,flyte,mlflow]'"
    ),
    f"check {RECIPE}": (
        "the reward 'similarity' is trained on and cannot run here: it needs cv2, matplotlib:"
        " pip install 'ebbflow[evaluation]'"
    ),
    f"rollback {RECIPE}": "ebbflow rollback needs mlflow: pip install 'ebbflow[mlflow]'",
    "verify some-model": "ebbflow verify needs mlflow: pip install 'ebbflow[mlflow]'",
    "ui": "ebbflow ui needs mlflow: pip install 'ebbflow[mlflow]'",
    "serve-reward jpeg": "ebbflow serve-reward needs uvicorn: pip install 'ebbflow[serve]'",
}


@pytest.fixture(scope="module")
def results_in_the_core(
    core_environment: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[int, str]]:
    """Exit code and output of each command, all in one process that sees the core alone."""
    folder = tmp_path_factory.mktemp("commands")
    completed = run_python(core_environment, folder, "-c", COMMANDS, *WORKING_COMMANDS, *REFUSALS)
    assert completed.returncode == 0, completed.stderr
    return {line: tuple(result) for line, result in json.loads(completed.stdout).items()}


@pytest.mark.parametrize("command", WORKING_COMMANDS, ids=lambda line: line.split()[0])
def test_a_command_that_looks_at_recipes_works_without_any_extra(
    command: str, results_in_the_core: dict[str, tuple[int, str]]
) -> None:
    exit_code, output = results_in_the_core[command]
    assert exit_code == 0, output
    assert output
    if command == "list":
        assert "pip install 'ebbflow[ocr]'" in output


@pytest.mark.parametrize("command", REFUSALS, ids=lambda line: line.split()[0])
def test_a_command_that_needs_an_extra_names_it(
    command: str, results_in_the_core: dict[str, tuple[int, str]]
) -> None:
    exit_code, output = results_in_the_core[command]
    assert exit_code == 1
    # `check` names the line of the recipe first.
    assert output.splitlines()[-1].endswith(REFUSALS[command])


def list_imported_modules() -> dict[str, list[str]]:
    """The foreign top-level modules that the sources import anywhere, with the files that do."""
    modules: dict[str, list[str]] = {}
    for path in (path for folder in sorted(OURS) for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for top in {name.partition(".")[0] for name in names}:
                if top not in sys.stdlib_module_names and top not in OURS:
                    modules.setdefault(top, []).append(path.relative_to(ROOT).as_posix())
    return modules


def test_every_imported_package_is_of_the_core_or_of_the_extra_that_the_error_names() -> None:
    by_hand = {Requirement(text).name for name in INSTALLED_BY_HAND for text in OPTIONAL[name]}
    core = list_distributions(PROJECT["dependencies"])
    extras = {extra: list_distributions(OPTIONAL[extra]) for extra in set(EXTRAS.values())}
    providers = packages_distributions()
    for module, files in list_imported_modules().items():
        if module in by_hand or module == "flyte":  # Flyte 2, in an environment of its own
            continue
        names = {canonicalize_name(name) for name in providers[module]}
        allowed = extras[EXTRAS[module]] if module in EXTRAS else core
        assert names & allowed, f"{module}, imported by {files[0]}, is not in ebbflow/extras.py"


def test_no_module_of_an_extra_is_in_the_core() -> None:
    providers = packages_distributions()
    core = list_distributions(PROJECT["dependencies"])
    modules = [name for name in EXTRAS if {canonicalize_name(n) for n in providers[name]} & core]
    assert modules == []


def test_all_has_every_extra_but_those_that_are_installed_by_hand() -> None:
    (everything,) = map(Requirement, OPTIONAL["all"])
    assert everything.extras == set(OPTIONAL) - {"all"} - INSTALLED_BY_HAND
    assert set(EXTRAS.values()) <= everything.extras


def test_every_extra_is_in_the_table_of_the_guide() -> None:
    guide = (ROOT / "docs" / "running.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", guide, re.MULTILINE) == sorted(OPTIONAL)


def test_an_error_names_all_missing_modules_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbflow.extras.find_spec", lambda module: None)
    with pytest.raises(
        MissingExtraError, match=r"^a needs ray, mlflow: pip install 'ebbflow\[mlflow,ray\]'$"
    ) as caught:
        require("a", "ray", "mlflow")
    assert caught.value.name == "ray"


def test_nothing_is_said_about_what_is_installed_or_is_of_no_extra() -> None:
    require("a", "mlflow", "ray")
    assert explain_missing("a", "mlflow") is None
    assert explain_import_error("a", ModuleNotFoundError("no", name="mine.reward")) is None
    assert (
        explain_import_error("a", ModuleNotFoundError("no", name="mlflow.entities"))
        == "a needs mlflow: pip install 'ebbflow[mlflow]'"
    )
