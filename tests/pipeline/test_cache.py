"""Flyte's cache of local runs: it lies with the runs of a clone, and other Flyte projects keep
theirs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from flytekit.core import local_cache

import tasks.cache
from tests.forked import run_forked

ROOT = Path(__file__).parents[2]
CACHED_TASK = """
import sys
from flytekit import task
from tasks.cache import ONCE_PER_RUN

@task(cache=ONCE_PER_RUN)
def count(run: str) -> int:
    print("computed")
    return 1

count(run="one")
count(run="one")
"""


def test_a_cached_task_leaves_the_cache_of_other_projects_alone(tmp_path: Path) -> None:
    script = tmp_path / "cached.py"
    script.write_text(CACHED_TASK)
    own = {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "FLYTE_LOCAL_CACHE_ENABLED": "true"}
    environment = os.environ | own | {"EBBFLOW_LOCAL_CACHE": str(tmp_path / "cache")}
    done = run_forked([sys.executable, str(script)], cwd=tmp_path, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split().count("computed") == 1
    assert (tmp_path / "cache" / "cache.db").exists()
    assert not (tmp_path / ".flyte" / "local-cache").exists()


def test_without_another_folder_it_lies_in_the_runs_of_this_clone() -> None:
    where = (
        "import tasks.cache; from flytekit.core import local_cache;"
        " print(local_cache.CACHE_LOCATION)"
    )
    environment = {
        name: value for name, value in os.environ.items() if name != "EBBFLOW_LOCAL_CACHE"
    }
    done = subprocess.run(
        [sys.executable, "-c", where],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.strip() == str(ROOT / "runs" / "flyte" / "cache"), done.stderr
    assert str(tasks.cache.LOCAL_CACHE) == local_cache.CACHE_LOCATION


def test_make_clean_removes_what_lies_in_the_clone_and_nothing_else() -> None:
    outer = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "VENV")  # of the make that runs these tests
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    done = subprocess.run(
        ["make", "--dry-run", "clean"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["rm -rf .venv runs"]
