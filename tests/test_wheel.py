"""The wheel, which an installation without a clone has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]
BUILT_FROM = (
    "LICENSE",
    "NOTICE",
    "README.md",
    "pyproject.toml",
    "datasets",
    "ebbflow",
    "tasks",
    "workflows",
)
BUILD = "from setuptools import build_meta; import sys; build_meta.build_wheel(sys.argv[1])"


USED = """
from ebbflow.recipe.paths import resolve_local_path
from tasks.cache import LOCAL_CACHE

print(resolve_local_path("ebbflow:datasets/signs/prompts.txt").is_file(), LOCAL_CACHE)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    clone = folder / "clone"
    clone.mkdir()
    for name in BUILT_FROM:  # in a copy, as setuptools leaves folders behind
        source = ROOT / name
        shutil.copytree(source, clone / name, symlinks=True) if source.is_dir() else shutil.copy(
            source, clone
        )
    built = subprocess.run(
        [sys.executable, "-c", BUILD, str(folder)],
        cwd=clone,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert built.returncode == 0, built.stderr
    (found,) = folder.glob("*.whl")
    return found


def test_it_has_the_files_that_are_no_modules(wheel: Path) -> None:
    with ZipFile(wheel) as opened:
        names = {name for name in opened.namelist() if ".dist-info/" not in name}
    assert {name.split("/")[0] for name in names} == {"ebbflow", "tasks", "workflows"}, (
        "'datasets' would be Hugging Face's"
    )
    data = [
        path
        for folder in ("ebbflow", "workflows")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".html", ".yaml", ".safetensors")
    ] + list(ROOT.glob("ebbflow/rewards/templates/*.txt"))
    assert {path.relative_to(ROOT).as_posix() for path in data} <= names
    prompts = {
        f"ebbflow/{path.relative_to(ROOT).as_posix()}"
        for path in ROOT.glob("datasets/*/prompts.txt")
    }
    assert len(prompts) == 6
    assert prompts <= names
    assert "ebbflow/datasets/glyph_pictures/pictures.parquet" in names


def test_what_is_installed_reads_its_prompts_and_writes_beside_the_runs(
    wheel: Path, tmp_path: Path
) -> None:
    with ZipFile(wheel) as opened:
        opened.extractall(tmp_path / "site")
    environment = {
        name: value for name, value in os.environ.items() if name != "EBBFLOW_LOCAL_CACHE"
    }
    environment |= {"PYTHONPATH": str(tmp_path / "site")}
    used = subprocess.run(
        [sys.executable, "-c", USED],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert used.stdout.split() == ["True", str(tmp_path / "runs" / "flyte" / "cache")], used.stderr
