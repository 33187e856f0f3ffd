from __future__ import annotations

import hashlib
import json
import os
import shutil
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ebbflow.storage import artifacts
from ebbflow.storage.artifacts import (
    COMMIT,
    EXPORT,
    MANIFEST,
    ArtifactError,
    check_replaceable,
    commit_folder,
    verify_folder,
    write_new_folder,
)
from ebbflow.storage.disk import sha256_of_file
from ebbflow.storage.locks import try_lock

FILES = {
    "a.txt": b"first",
    "deep/b.bin": bytes(range(256)),
    "deep/er/c": b"",
    "manifest.json.txt": b"not the manifest",
}
in_place = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def write(folder, files=FILES):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def everything(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def folder(tmp_path):
    with write_new_folder(tmp_path / "artifact") as partial:
        write(partial)
    return tmp_path / "artifact"


def test_a_new_folder_is_committed_and_in_place(folder, tmp_path):
    contents = everything(folder)
    manifest = json.loads(contents.pop(MANIFEST))["files"]
    assert (
        contents.pop(COMMIT).decode()
        == hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
        == verify_folder(folder)
    )
    assert contents == FILES
    assert manifest == {
        n: {"bytes": len(c), "sha256": hashlib.sha256(c).hexdigest()} for n, c in FILES.items()
    }
    assert [path.name for path in tmp_path.iterdir()] == ["artifact"]


def test_the_digest_is_that_of_the_content(folder, tmp_path):
    with write_new_folder(tmp_path / "elsewhere") as partial:
        write(partial, dict(reversed(FILES.items())))
    assert verify_folder(tmp_path / "elsewhere") == verify_folder(folder)
    with write_new_folder(tmp_path / "other") as partial:
        write(partial, FILES | {"a.txt": b"First"})
    assert verify_folder(tmp_path / "other") != verify_folder(folder)
    shutil.copytree(folder, tmp_path / "copy")
    assert verify_folder(tmp_path / "copy") == verify_folder(folder)


names = st.sampled_from([*FILES, MANIFEST, COMMIT])


@in_place
@given(names, st.data())
def test_any_changed_byte_is_found(tmp_path, name, data):
    folder = tmp_path / "changed"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    write(folder)
    commit_folder(folder)
    content = bytearray((folder / name).read_bytes())
    if content:
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    else:
        content = bytearray(b"x")
    (folder / name).write_bytes(content)
    with pytest.raises(ArtifactError, match=r"changed.*(make it again|copy it again)"):
        verify_folder(folder)


@in_place
@given(names, st.data())
def test_any_truncated_file_is_found(tmp_path, name, data):
    folder = tmp_path / "cut"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    write(folder, FILES | {"deep/er/c": b"something"})
    commit_folder(folder)
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(ArtifactError):
        verify_folder(folder)


@pytest.mark.parametrize("name", [*FILES, MANIFEST, COMMIT])
def test_any_missing_file_is_found(folder, name):
    (folder / name).unlink()
    with pytest.raises(
        ArtifactError, match="no COMMIT" if name in (MANIFEST, COMMIT) else name.replace(".", r"\.")
    ):
        verify_folder(folder)


@pytest.mark.parametrize(
    "name", ["new", "deep/new", f"deep/{MANIFEST}", f"deep/{COMMIT}", ".hidden"]
)
def test_any_added_file_is_found(folder, name):
    (folder / name).write_bytes(b"")
    with pytest.raises(ArtifactError, match=name.replace(".", r"\.")):
        verify_folder(folder)


def test_swapped_files_are_found(folder):
    first = folder / "a.txt"
    second = folder / "deep" / "b.bin"
    one = first.read_bytes()
    other = second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)
    with pytest.raises(ArtifactError, match=r"a\.txt, deep/b\.bin"):
        verify_folder(folder)


def test_what_is_not_there_is_no_artifact(tmp_path):
    for folder in (tmp_path / "missing", tmp_path):
        with pytest.raises(ArtifactError, match="no COMMIT"):
            verify_folder(folder)


def fail_half_way(folder):
    with write_new_folder(folder) as partial:
        write(partial, {"a.txt": b"second"})
        raise RuntimeError("half way")


def test_an_exception_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError, match="half way"):
        fail_half_way(tmp_path / "artifact")
    assert not list(tmp_path.iterdir())


def test_an_exception_leaves_what_was_there_before(folder, tmp_path):
    old_contents = everything(folder)
    with pytest.raises(RuntimeError, match="half way"):
        fail_half_way(folder)
    assert everything(folder) == old_contents
    assert [path.name for path in tmp_path.iterdir()] == ["artifact"]
    verify_folder(folder)


def test_a_new_folder_takes_the_place_of_the_old_one(folder):
    with write_new_folder(folder) as partial:
        assert not list(partial.iterdir())
        write(partial, {"only": b"this"})
    verify_folder(folder)
    assert everything(folder).keys() == {"only", MANIFEST, COMMIT}


def test_a_folder_is_replaced_by_one_of_its_kind_alone(folder, tmp_path):
    with (
        pytest.raises(ArtifactError, match="holds an artifact of a run, not an export"),
        write_new_folder(folder, kind=EXPORT),
    ):
        pass
    verify_folder(folder)
    exported = tmp_path / "exported"
    for _ in range(2):
        with write_new_folder(exported, kind=EXPORT) as partial:
            write(partial)
        verify_folder(exported)
    with (
        pytest.raises(ArtifactError, match="holds an export, not an artifact of a run"),
        write_new_folder(exported),
    ):
        pass
    verify_folder(exported)


def test_a_file_that_is_saved_while_a_folder_is_replaced_is_kept(folder, monkeypatch):
    check = artifacts.check_replaceable

    def check_then_save(*args):
        check(*args)
        if checks:
            (folder / "thesis.tex").write_text("years of work")
        checks.append(args)

    checks = []
    monkeypatch.setattr(artifacts, "check_replaceable", check_then_save)
    with (
        pytest.raises(ArtifactError, match="changed while it was replaced. Nothing was deleted"),
        write_new_folder(folder) as partial,
    ):
        write(partial, {"only": b"this"})
    assert len(checks) == 2
    assert everything(folder).keys() == {*FILES, MANIFEST, COMMIT, "thesis.tex"}
    assert [path.name for path in folder.parent.iterdir()] == ["artifact"]


def test_it_does_not_exist_before_it_is_whole(tmp_path):
    with write_new_folder(tmp_path / "deep" / "artifact") as partial:
        write(partial)
        assert not (tmp_path / "deep" / "artifact").exists()
        with pytest.raises(ArtifactError):
            verify_folder(partial)
    verify_folder(tmp_path / "deep" / "artifact")


@pytest.mark.parametrize(
    "there", [{"thesis.tex": b"years of work"}, {"thesis.tex": b"", COMMIT: b"not ours"}, None]
)
def test_what_is_not_ours_is_never_replaced(tmp_path, there):
    target = tmp_path / "target"
    if there is None:
        target.write_text("a file")
    else:
        write(target, there)
    with (
        pytest.raises(ArtifactError, match="Nothing was deleted; name a new or empty folder"),
        write_new_folder(target),
    ):
        raise AssertionError("nothing is written first")
    assert target.read_text() == "a file" if there is None else everything(target) == there


def test_an_empty_folder_and_a_committed_one_are_replaced(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    for target in (folder, tmp_path / "empty"):
        with write_new_folder(target) as partial:
            write(partial, {"new": b"1"})
        assert everything(target)["new"] == b"1"


@pytest.mark.parametrize("name", ["notes.txt", "deep/notes.txt", "a.txt"])
def test_a_committed_folder_that_was_changed_is_never_replaced(folder, name):
    (folder / name).write_bytes(b"years of work")
    old_contents = everything(folder)
    for refuse in (lambda: check_replaceable(folder), lambda: fail_half_way(folder)):
        with pytest.raises(
            ArtifactError,
            match=rf"manifest \({name}\).*Nothing was deleted; name a new or empty folder",
        ):
            refuse()
    assert everything(folder) == old_contents


@pytest.mark.parametrize("there", ["nothing", "an empty folder", "a committed folder"])
def test_what_a_user_puts_there_meanwhile_is_never_replaced(folder, tmp_path, there):
    target = folder if there == "a committed folder" else tmp_path / "target"
    if there == "an empty folder":
        target.mkdir()
    with pytest.raises(ArtifactError, match="Nothing was deleted"), write_new_folder(target):
        write(target, {"notes.txt": b"years of work"})
    assert everything(target)["notes.txt"] == b"years of work"
    assert {path.name for path in tmp_path.iterdir()} == {"artifact", target.name}


def test_what_a_link_names_is_replaced_and_the_link_stays(folder, tmp_path):
    (tmp_path / "disk").mkdir()
    link = tmp_path / "link"
    for target in (tmp_path / "disk", folder):
        link.unlink(missing_ok=True)
        link.symlink_to(target, target_is_directory=True)
        with write_new_folder(link) as partial:
            write(partial, {"new": b"1"})
        assert link.readlink() == target
        assert everything(target)["new"] == b"1"


def test_only_a_new_or_empty_folder_is_written_unless_that_may_be_overwritten(folder, tmp_path):
    check_replaceable(folder)
    (tmp_path / "empty").mkdir()
    for free in ("nothing", "empty"):
        check_replaceable(tmp_path / free, overwrite=False)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for used in (folder, folder / "a.txt", tmp_path / "dangling"):
        with pytest.raises(ArtifactError, match="exists and is no empty folder; name a new one"):
            check_replaceable(used, overwrite=False)
        with (
            pytest.raises(ArtifactError, match="name a new one"),
            write_new_folder(used, overwrite=False),
        ):
            raise AssertionError("nothing is written first")


def test_links_that_a_manifest_cannot_hold_are_found(folder, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "weights").write_bytes(b"any")
    (folder / "more").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    with pytest.raises(ArtifactError, match="holds 'more', which is neither a file nor a folder"):
        verify_folder(folder)
    (folder / "more").unlink()
    (folder / "more").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ArtifactError, match="holds 'more'"):
        verify_folder(folder)


def test_contents_are_read_once_and_again_after_any_change(folder, monkeypatch):
    monkeypatch.setattr(artifacts, "CLOCK_TICK", 0)
    read = []
    monkeypatch.setattr(
        artifacts, "sha256_of_file", lambda path: read.append(path.name) or sha256_of_file(path)
    )
    digest = verify_folder(folder)
    assert sorted(read) == sorted(["manifest.json", "a.txt", "b.bin", "c", "manifest.json.txt"])
    read.clear()
    assert verify_folder(folder) == digest
    assert read == []
    times = (folder / "a.txt").stat()
    (folder / "a.txt").write_bytes(b"First")  # as long as before
    os.utime(folder / "a.txt", ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(ArtifactError, match=r"does not match its manifest \(a.txt\)"):
        verify_folder(folder)


def test_a_folder_that_changes_within_a_tick_of_the_clock_is_read_again(folder, monkeypatch):
    verify_folder(folder)
    frozen = artifacts._read_file_states(folder)
    # As a coarse clock would show it.
    monkeypatch.setattr(artifacts, "_read_file_states", lambda _: frozen)
    (folder / "a.txt").write_bytes(b"First")
    with pytest.raises(ArtifactError, match="does not match its manifest"):
        verify_folder(folder)


@pytest.fixture
def another_process(tmp_path, monkeypatch):
    """``another_process()``: what this process has verified is forgotten. Every folder is large,
    and records are in a new one.
    """
    for name, value in {"CLOCK_TICK": 0, "LARGE": 1}.items():
        monkeypatch.setattr(artifacts, name, value)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    artifacts._verify_state_once.cache_clear()
    yield artifacts._verify_state_once.cache_clear
    artifacts._verify_state_once.cache_clear()


def test_one_process_of_a_machine_reads_a_large_folder(
    folder, another_process, tmp_path, monkeypatch
):
    read = []
    monkeypatch.setattr(
        artifacts, "sha256_of_file", lambda path: read.append(path.name) or sha256_of_file(path)
    )
    digest = verify_folder(folder)
    assert len(read) == 5
    another_process()
    assert verify_folder(folder) == digest
    assert len(read) == 5
    (record,) = (
        path for path in (tmp_path / "temporary").rglob("verified-*") if path.suffix != ".lock"
    )
    assert record.parent.stat().st_mode & 0o077 == 0
    for damage in ("", digest[:-1], "0" * 64):  # a process was killed while it wrote the record
        record.write_text(damage)
        another_process()
        assert verify_folder(folder) == digest
        assert record.read_text() == digest


def test_records_of_yesterday_are_removed_when_one_is_written(folder, another_process, tmp_path):
    records = tmp_path / "temporary" / f"ebbflow-{os.getuid()}"
    records.mkdir(mode=0o700)
    yesterday = time.time() - 25 * 3600
    for name in ("old", "failed", "held", "used", "young"):
        lock = records / f"verified-{name}.lock"
        record = records / f"verified-{name}"
        lock.touch()
        if name != "failed":
            record.touch()
        for path, young in ((lock, name in ("used", "young")), (record, name == "young")):
            if path.exists() and not young:
                os.utime(path, (yesterday, yesterday))
    with try_lock(records / "verified-held.lock"):
        verify_folder(folder)
    left = {path.name.removeprefix("verified-") for path in records.iterdir()}
    others = {"held", "held.lock", "used", "used.lock", "young", "young.lock"}
    assert others < left
    assert len(left - others) == 2  # the new one and its lock


def test_a_large_folder_that_changed_is_read_again_by_all(folder, another_process):
    verify_folder(folder)
    another_process()
    (folder / "a.txt").write_bytes(b"First")
    for _ in range(2):
        with pytest.raises(ArtifactError, match="does not match its manifest"):
            verify_folder(folder)
        another_process()


def test_a_large_folder_is_read_once_it_is_old_enough(folder, another_process, monkeypatch):
    waited = []
    monkeypatch.setattr(artifacts, "CLOCK_TICK", 10**12)
    monkeypatch.setattr(artifacts.time, "sleep", waited.append)
    digest = verify_folder(folder)
    another_process()
    monkeypatch.setattr(
        artifacts, "_verify_contents", lambda folder: pytest.fail("it was read again")
    )
    assert verify_folder(folder) == digest
    assert waited == [1000.0, 1000.0]
