"""The wheel, which an installation without a clone has."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parents[1]
BUILT_FROM = ("LICENSE", "README.md", "pyproject.toml", "datasets", "ebbflow", "tasks", "workflows")
BUILD = "from setuptools import build_meta; import sys; build_meta.build_wheel(sys.argv[1])"


def test_it_has_the_files_that_are_no_modules(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    clone.mkdir()
    for name in BUILT_FROM:  # in a copy, as setuptools leaves folders behind
        source = ROOT / name
        shutil.copytree(source, clone / name, symlinks=True) if source.is_dir() else shutil.copy(source, clone)
    built = subprocess.run([sys.executable, "-c", BUILD, str(tmp_path)], cwd=clone, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with ZipFile(wheel) as opened:
        names = {name for name in opened.namelist() if ".dist-info/" not in name}
    assert {name.split("/")[0] for name in names} == {"ebbflow", "tasks", "workflows"}, "'datasets' would be Hugging Face's"
    data = [
        path for folder in ("ebbflow", "workflows") for path in (ROOT / folder).rglob("*") if path.suffix in (".html", ".yaml")
    ]
    assert {path.relative_to(ROOT).as_posix() for path in data} <= names
    prompts = {f"ebbflow/{path.relative_to(ROOT).as_posix()}" for path in ROOT.glob("datasets/*/prompts.txt")}
    assert len(prompts) == 2
    assert prompts <= names
