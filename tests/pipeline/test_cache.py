"""Flyte's cache of local runs: it lies with the runs of a clone, and other Flyte projects keep
theirs.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from flytekit import FlyteContextManager
from flytekit.core import local_cache
from flytekit.core.type_engine import TypeEngine
from flytekit.types.directory import FlyteDirectory
from pydantic import BaseModel, Field

import ebbflow
import tasks.cache
from ebbflow.data.buckets import fit_picture
from ebbflow.data.captioned import read_captioned
from ebbflow.models.families import load_adapter
from ebbflow.models.pipeline_loading import load_pipeline
from ebbflow.offline.shards import build_rollout_batch
from ebbflow.recipe import Recipe
from ebbflow.recipe.families import FAMILIES
from tasks import local_cache as cache_of_runs
from tasks.cache import cache_for_all_runs
from tasks.encode_data import SOURCES
from tasks.types import BaseModelArtifact, ChampionPolicy, EvaluatedPolicy, TrainedPolicy
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


DAMAGED_OUTPUTS = """
import shutil
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from ebbflow.storage.artifacts import write_new_folder
from tasks.cache import ONCE_PER_RUN
from tasks.types import BaseModelArtifact

HOME = Path(sys.argv[1])

@task(cache=ONCE_PER_RUN)
def make_table(run: str) -> FlyteFile:
    print("table")
    pq.write_table(pa.table({"a": [1]}), HOME / "table.parquet")
    return FlyteFile(str(HOME / "table.parquet"))

@task(cache=ONCE_PER_RUN)
def make_folder(run: str) -> BaseModelArtifact:
    print("folder")
    shutil.rmtree(HOME / "base", ignore_errors=True)  # as make_node_output
    with write_new_folder(HOME / "base") as folder:
        (folder / "weights").write_bytes(b"weights")
    made = FlyteDirectory(str(HOME / "base"))
    return BaseModelArtifact(folder=made, seconds=1.0, finished_at=1.0)

def make_both():
    return Path(make_table(run="one").path), Path(make_folder(run="one").folder.path)

make_both()
table, folder = make_both()
print("whole")
table.write_bytes(b"")  # as after a power loss
make_both()
print("empty table")
table, folder = make_both()
table.write_bytes(table.read_bytes()[:20])
make_both()
print("cut table")
table, folder = make_both()
(folder / "weights").write_bytes(b"other..")
make_both()
print("damaged folder")
make_both()
"""


def test_an_output_that_is_damaged_is_made_again(tmp_path: Path) -> None:
    script = tmp_path / "damaged.py"
    script.write_text(DAMAGED_OUTPUTS)
    own = {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "FLYTE_LOCAL_CACHE_ENABLED": "true"}
    environment = os.environ | own | {"EBBFLOW_LOCAL_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, str(script), str(tmp_path)]
    done = run_forked(command, cwd=tmp_path, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [
        "table",
        "folder",
        "whole",
        "table",
        "empty table",
        "table",
        "cut table",
        "folder",
        "damaged folder",
    ]
    assert "make_table runs again:" in done.stderr
    assert "make_folder runs again:" in done.stderr


def test_the_paths_of_a_recipe_are_no_outputs(tmp_path: Path) -> None:
    recipe = Recipe.model_validate(
        {"model": {"family": "sd3", "path": str(tmp_path / "gone")}, "output": str(tmp_path)}
    )
    context = FlyteContextManager.current_context()

    def list_paths(value: object) -> list[Path]:
        expected = TypeEngine.to_literal_type(type(value))
        literal = TypeEngine.to_literal(context, value, type(value), expected)
        return list(cache_of_runs.iterate_local_paths(literal))

    assert list_paths(recipe) == []
    (tmp_path / "base").mkdir()
    base = BaseModelArtifact(
        folder=FlyteDirectory(str(tmp_path / "base")), seconds=0.0, finished_at=0.0
    )
    # Flyte has copied the folder to where it keeps outputs.
    (path,) = list_paths(base)
    assert path.is_absolute()
    assert path.is_dir()


@pytest.mark.parametrize("output", [TrainedPolicy, EvaluatedPolicy, ChampionPolicy])
def test_no_output_looks_like_a_recipe(output: type[BaseModel]) -> None:
    assert not output.model_fields.keys() <= Recipe.model_fields.keys()


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


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_cache_of_latents_follows_the_code_that_encodes_pictures(family: str) -> None:
    library = Path(ebbflow.__file__).parent
    sources = [library / source for source in SOURCES]
    adapter = load_adapter(family)
    functions: list[Any] = [build_rollout_batch, read_captioned, fit_picture, load_pipeline]
    functions.append(adapter.encode_images)
    # What ``encode_images`` calls, of the families with a pipeline.
    for name in ("_encode_pixels", "_encode_with_vae", "_scale_latents"):
        functions += [getattr(adapter, name)] if hasattr(adapter, name) else []
    for function in functions:
        file = Path(inspect.unwrap(function).__code__.co_filename)
        assert any(file.is_relative_to(source) for source in sources), file


def test_a_version_of_the_cache_follows_the_fields_of_the_output() -> None:
    class Inner(BaseModel):
        seconds: float

    class Output(BaseModel):
        """One text."""

        inner: Inner

    class Reworded(BaseModel):
        """Another text."""

        inner: Inner = Field(description="Help.")

    Reworded.__name__ = "Output"
    Reworded.model_config["title"] = "Output"
    Reworded.model_rebuild(force=True)

    class Changed(BaseModel):
        inner: Inner
        finished_at: float

    version = cache_for_all_runs(Output).version
    assert cache_for_all_runs(Reworded).version == version
    assert cache_for_all_runs(Changed).version != version
    with_source = cache_for_all_runs(Output, "seeding.py").version
    assert with_source.startswith(version)
    assert with_source != version
