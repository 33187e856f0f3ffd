"""A full disk: an error that names the place, nothing that looks whole is left, and the next
attempt succeeds.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

from ebbflow.offline.rollouts import generate_shard
from ebbflow.offline.scoring import score_shard
from ebbflow.stage import StageContext
from ebbflow.storage import artifacts
from ebbflow.storage.artifacts import verify_folder, write_new_folder
from ebbflow.storage.disk import (
    DiskFullError,
    open_scratch_folder,
    path_of_scratch_folder,
    write_text,
)
from ebbflow.storage.tables import count_rows, read_table_metadata, write_table
from ebbflow.training.checkpoint import write_part
from ebbflow.training.policy import Policy
from ebbflow.training.policy_metadata import PolicyMetadata
from ebbflow.training.update import PolicyUpdater


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """In the block a write past ``size`` bytes of a file fails in this process, in every library
    and language.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def require_refused_then_written(path: Path, write: Callable[[], None], size: int) -> None:
    """``write`` finds no room and says so, leaves what was there before, and succeeds once there is
    room.
    """
    old_files = sorted(path.parent.rglob("*"))
    with (
        no_file_above(size),
        pytest.raises(
            DiskFullError, match=f"^{path} could not be written: the disk is full.*MiB free"
        ),
    ):
        write()
    assert sorted(path.parent.rglob("*")) == old_files
    write()
    assert path.exists()


@pytest.mark.parametrize("train", ["full", "lora"])
def test_policy_folder_on_a_full_disk_is_refused_then_written(model, make_recipe, tmp_path, train):
    recipe = make_recipe(policy={"train": train})
    policy = Policy(model, recipe.policy, 0)
    policy.ensure_copy("old")
    metadata = PolicyMetadata(
        base_digest="b", recipe_digest="r", config=recipe.policy, version=1, copies=("old",)
    )
    folder = tmp_path / "policy"
    require_refused_then_written(folder, partial(policy.save_folder, folder, metadata), size=40_000)
    digest = verify_folder(folder)
    require_refused_then_written(
        folder,
        partial(policy.save_folder, folder, metadata.model_copy(update={"version": 2})),
        size=40_000,
    )
    assert verify_folder(folder) != digest


def test_checkpoint_on_a_full_disk_is_refused_then_written(model, make_recipe, tmp_path):
    recipe = make_recipe()
    updater = PolicyUpdater(Policy(model, recipe.policy, 0), recipe.stages[0])
    folder = tmp_path / "step-00002"

    def write() -> None:
        with write_new_folder(folder) as partial:
            write_part(partial, updater)

    require_refused_then_written(folder, write, size=40_000)
    verify_folder(folder)


def test_rollouts_and_scores_on_a_full_disk_are_refused_then_written(
    model, make_recipe, make_prompts, scorer, tmp_path
):
    ctx = StageContext(make_recipe(), 0, 1)
    prompts = make_prompts(4)
    policy = Policy(model, ctx.recipe.policy, 0)
    policy.ensure_copy("old")
    rollouts = tmp_path / "rollouts.parquet"
    scores = tmp_path / "scores.parquet"
    generate = partial(generate_shard, ctx, model, policy, 0, prompts, 0, rollouts)
    require_refused_then_written(rollouts, generate, size=10_000)
    require_refused_then_written(
        scores, partial(score_shard, ctx, scorer, prompts, rollouts, scores), size=500
    )
    assert count_rows(scores) == count_rows(rollouts) == 8


def test_text_file_on_a_full_disk_keeps_the_earlier_one(tmp_path):
    path = tmp_path / "report.html"
    path.write_text("the report of the attempt before")
    with (
        no_file_above(1000),
        pytest.raises(DiskFullError, match="report.html could not be written"),
    ):
        write_text(path, "x" * 2000)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {
        "report.html": "the report of the attempt before"
    }


@pytest.mark.parametrize("there", [True, False], ids=["over another", "new"])
def test_no_room_at_any_point_of_a_folder(tmp_path, monkeypatch, there):
    """At the n-th call that changes the disk, for every n: what stands there is the old folder or
    the new one, whole.
    """
    folder = tmp_path / "artifact"

    def write(text: str) -> None:
        with write_new_folder(folder) as partial:
            (partial / "a").write_text(text)
            (partial / "b").write_text(text)

    class Full:
        def __init__(self, calls: int) -> None:
            self.left = calls

        def instead_of(self, call: Callable[..., object]) -> Callable[..., object]:
            def counted(*arguments: object, **named: object) -> object:
                self.left -= 1
                if self.left == 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return call(*arguments, **named)

            return counted

    if there:
        write("old")
    expected = {"old"} if there else set()
    for calls in range(1, 100):
        with monkeypatch.context() as patched:
            full = Full(calls)
            for owner, name in (
                (Path, "write_text"),
                (Path, "mkdir"),
                (Path, "rename"),
                (artifacts, "sync_path"),
            ):
                patched.setattr(owner, name, full.instead_of(getattr(owner, name)))
            try:
                write("new")
            except DiskFullError:
                texts = {path.read_text() for path in folder.glob("[ab]")}
                assert texts in (expected, {"new"}), f"after {calls} calls"
                assert texts == expected or full.left == 0
                if folder.exists():
                    verify_folder(folder)
                assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
                if texts == {"new"}:
                    # it already stood there when the parent folder could not be synchronised
                    expected = texts
            else:
                break
    assert calls > 8
    verify_folder(folder)
    assert {path.read_text() for path in folder.glob("[ab]")} == {"new"}


WRITER = """
import sys, time
from pathlib import Path
from ebbflow.storage.artifacts import write_new_folder
with write_new_folder(Path(sys.argv[1])) as partial:
    (partial / "weights").write_bytes(bytes(1000))
    print("writing", flush=True)
    time.sleep(600)
"""


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path):
    folder = tmp_path / "step-00010"
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, folder], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        try:
            with write_new_folder(folder) as partial:
                (partial / "weights").write_text("of another")
            (partial_folder,) = tmp_path.glob(f".step-00010.partial-{writer.pid}-*")
            assert (partial_folder / "weights").is_file()
        finally:
            writer.send_signal(signal.SIGKILL)
    assert len(list(tmp_path.iterdir())) == 2
    with write_new_folder(folder) as partial:
        (partial / "weights").write_text("of the next attempt")
    assert [path.name for path in tmp_path.iterdir()] == ["step-00010"]
    assert (folder / "weights").read_text() == "of the next attempt"


@pytest.mark.parametrize("name", [".out.partial-99", ".out.partial-99-0123abcd", ".out.partial-x"])
def test_a_users_folder_with_the_name_of_a_partial_is_kept(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "thesis.tex").write_text("years of work")
    with write_new_folder(tmp_path / "out") as partial:
        (partial / "weights").write_text("x")
    assert (tmp_path / name / "thesis.tex").read_text() == "years of work"


ON_A_SMALL_DISK = """
import os, sys
from pathlib import Path
import pyarrow as pa
from ebbflow.storage.artifacts import write_new_folder, verify_folder
from ebbflow.storage.tables import write_table
from ebbflow.storage.disk import DiskFullError, write_text
from safetensors.torch import save_file
import torch

disk, schema = Path(sys.argv[1]), pa.schema([("bytes", pa.binary())])

def weights(megabytes):
    with write_new_folder(disk / "policy") as partial:
        save_file({"w": torch.ones(megabytes, 2**18)}, partial / "parameters.safetensors")

def table(megabytes):
    batches = (pa.record_batch([[os.urandom(2**20)]], schema) for _ in range(megabytes))
    write_table(disk / "t.parquet", schema, batches, {})

for write in (weights, table):
    try:
        write(20)
    except DiskFullError as error:
        assert "the disk is full" in str(error), error
    else:
        raise AssertionError("it was written")
    assert not list(disk.iterdir()), list(disk.iterdir())
weights(3)
table(3)
verify_folder(disk / "policy")
"""


def test_a_disk_that_is_really_full(tmp_path):
    mounted = f"mount -t tmpfs -o size=8m tmpfs {tmp_path}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mounted], capture_output=True).returncode != 0:
        pytest.skip("no file system can be mounted here")
    run = f'{mounted} && exec "$0" -c "$1" {tmp_path}'
    process = subprocess.run(
        ["unshare", "-rm", "sh", "-c", run, sys.executable, ON_A_SMALL_DISK],
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr


def test_errors_of_other_kinds_stay_what_they_are(tmp_path):
    schema = pa.schema([("number", pa.int64())])

    def batches() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch([[1]], schema)
        raise PermissionError("not yours")

    with pytest.raises(PermissionError, match="not yours"):
        write_table(tmp_path / "t.parquet", schema, batches(), {})
    write_table(tmp_path / "t.parquet", schema, [], {"seconds": time.time() * 0})
    assert read_table_metadata(tmp_path / "t.parquet") == {"seconds": 0}


def test_a_scratch_folder_is_where_other_processes_find_it_and_leaves_nothing(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with open_scratch_folder("things") as folder:
        assert folder == path_of_scratch_folder("things", os.getpid())
        (folder / "file").touch()
        killed = path_of_scratch_folder("things", 1)
        (killed / "deep").mkdir(parents=True)
    assert list(killed.parent.iterdir()) == [killed]
    with open_scratch_folder("things") as folder:
        assert list(killed.parent.iterdir()) == [folder]
        assert not list(folder.iterdir())
