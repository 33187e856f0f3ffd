"""Two processes never work in one folder, and a lock ends with its process."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ebbflow.storage.disk import remove_path
from ebbflow.storage.locks import (
    FolderInUseError,
    create_locked,
    lock_folder,
    try_lock,
    wait_for_lock,
)
from tests.storage.lock_cases import locked_elsewhere


def test_a_folder_is_free_once_its_holder_was_killed(tmp_path: Path) -> None:
    holder = locked_elsewhere(tmp_path / "new")
    with pytest.raises(FolderInUseError), lock_folder(tmp_path / "new"):
        pass
    holder.kill()
    holder.communicate()
    for _ in range(2):
        with lock_folder(tmp_path / "new"):
            pass


def refuse_lock(*_: object) -> None:
    """As ``fcntl.flock`` of a file system without locks."""
    raise OSError(errno.ENOLCK, "No locks available")


def test_a_file_system_without_locks_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ebbflow.storage.locks.fcntl.flock", refuse_lock)
    with (
        pytest.warns(UserWarning, match=r"cannot be locked \(No locks available\): nothing keeps"),
        lock_folder(tmp_path),
    ):
        pass


def test_a_lock_that_is_taken_is_not_waited_for(tmp_path: Path) -> None:
    for path in (tmp_path / "folder", tmp_path / "file"):
        path.mkdir() if path.name == "folder" else path.touch()
        with try_lock(path) as mine, try_lock(path) as also_mine:
            assert (mine, also_mine) == (True, False)
        with try_lock(path) as mine:
            assert mine


def test_a_lock_that_is_waited_for_comes_when_it_is_free(tmp_path: Path) -> None:
    order = []

    def second() -> None:
        with wait_for_lock(tmp_path / "lock"):
            order.append("second")

    waiting = threading.Thread(target=second)
    with wait_for_lock(tmp_path / "lock"):
        waiting.start()
        waiting.join(0.2)
        order.append("first")
    waiting.join(10)
    assert order == ["first", "second"]


def test_a_lock_whose_file_was_removed_meanwhile_is_taken_on_the_next_one(tmp_path: Path) -> None:
    """Else two processes would have it: one on the file that was removed, one on its successor."""
    path = tmp_path / "lock"
    locked = threading.Event()
    seen = threading.Event()

    def second() -> None:
        with wait_for_lock(path):
            locked.set()
            seen.wait(10)

    waiting = threading.Thread(target=second)
    with wait_for_lock(path):
        waiting.start()
        waiting.join(0.2)
        path.unlink()
    assert locked.wait(10)
    try:
        with try_lock(path) as mine:
            assert not mine
    finally:
        seen.set()
        waiting.join(10)


def test_a_file_that_was_removed_meanwhile_is_not_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock"
    flock = fcntl.flock

    def replaced_first(descriptor: int, operation: int) -> None:
        path.unlink()
        path.touch()
        flock(descriptor, operation)

    path.touch()
    monkeypatch.setattr("ebbflow.storage.locks.fcntl.flock", replaced_first)
    with try_lock(path) as mine:
        assert not mine


@pytest.mark.parametrize(
    ("create", "call"),
    [(Path.mkdir, "os.open"), (Path.mkdir, "fcntl.flock"), (Path.touch, "fcntl.flock")],
)
def test_what_another_process_takes_for_abandoned_is_created_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    create: Callable[[Path], object],
    call: str,
) -> None:
    """It had created a folder and not yet locked it, when another process looked for abandoned
    ones.
    """
    path = tmp_path / "partial"
    removed = []
    real = {"os.open": os.open, "fcntl.flock": fcntl.flock}[call]

    def remove_first(*arguments: Any, **keywords: Any) -> Any:
        if not removed:
            removed.append(path.exists())
            remove_path(path)
        return real(*arguments, **keywords)

    monkeypatch.setattr(f"ebbflow.storage.locks.{call}", remove_first)
    with create_locked(path, create):
        assert removed == [True]
        assert path.exists()
        with try_lock(path) as is_abandoned:
            assert not is_abandoned


def test_without_locks_a_file_is_created_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ebbflow.storage.locks.fcntl.flock", refuse_lock)
    with create_locked(tmp_path / "partial", Path.mkdir):
        assert (tmp_path / "partial").is_dir()
