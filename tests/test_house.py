"""The house rules: which room may import what."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ALL_OF_THE_LIBRARY = (
    "import importlib, pkgutil, ebbflow; "
    "[importlib.import_module(m.name) for m in pkgutil.walk_packages(ebbflow.__path__, 'ebbflow.')]"
)


def _imported(statement: str) -> set[str]:
    """Top-level packages in memory after a statement ran in a fresh interpreter."""
    code = f"{statement}\nimport sys\nprint(' '.join(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_the_library_knows_no_flyte() -> None:
    loaded = _imported(ALL_OF_THE_LIBRARY)
    assert {"torch", "mlflow", "diffusers"} <= loaded
    assert not loaded & {"flytekit", "tasks", "workflows"}


HEAVY = {"torch", "diffusers", "transformers", "peft", "mlflow", "ray", "onnxruntime"}


def test_registering_needs_no_gpu_stack() -> None:
    loaded = _imported("import workflows.post_training")
    assert "flytekit" in loaded
    # Flyte's Elastic plugin itself asks torch for the number of nodes, and its Ray plugin imports ray.
    assert not loaded & (HEAVY - {"torch", "ray"})


@pytest.mark.parametrize("path", sorted([*ROOT.glob("tasks/*.py"), *ROOT.glob("workflows/*.py")]), ids=lambda path: path.name)
def test_tasks_and_workflows_import_nothing_heavy_at_the_top(path: Path) -> None:
    imports = [node for node in ast.parse(path.read_text()).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in imports if isinstance(node, ast.ImportFrom)}
    assert not {name.split(".")[0] for name in names} & HEAVY


def test_recipes_are_light() -> None:
    assert not _imported("import ebbflow.recipe") & {"torch", "mlflow", "pandas", "pyarrow", "numpy"}


def test_datasets_is_no_package() -> None:
    assert (ROOT / "datasets").is_dir()
    assert not list((ROOT / "datasets").rglob("__init__.py")), "it would shadow Hugging Face's datasets"
