"""The ranks of a training group: they hear of a SIGTERM; forked ones know where they are, and end with their launcher."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from flytekit.exceptions.user import FlyteRecoverableException

from tasks.train_offline import train_offline

CASES = Path(__file__).with_name("elastic_cases.py")


def wait_until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end, "waited for a minute"
        time.sleep(0.05)


def runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ignores(process: int, number: int) -> bool:
    (mask,) = re.findall(r"^SigIgn:\s*(\w+)$", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux alone")
def test_a_rank_is_where_its_launcher_is_and_ends_with_it(tmp_path: Path) -> None:
    said = tmp_path / "said.json"
    with (tmp_path / "printed").open("w") as printed:
        command = [sys.executable, str(CASES), str(said)]
        launcher = subprocess.Popen(command, cwd=tmp_path, stdout=printed, stderr=printed)
    wait_until(lambda: said.exists() or launcher.poll() is not None)
    assert said.exists(), (tmp_path / "printed").read_text()
    about = json.loads(said.read_text())
    assert (about["folder"], about["LATE"], about["imported"]) == (str(tmp_path), "after the server", True)
    assert about["server"] != launcher.pid
    assert ignores(about["server"], signal.SIGTERM), "it ends after the ranks"
    assert not ignores(about["rank"], signal.SIGTERM)
    launcher.kill()
    launcher.wait()
    wait_until(lambda: not runs(about["rank"]) and not runs(about["server"]))
    assert "resource_tracker" not in (tmp_path / "printed").read_text(), "its process was taken for a fork server's"


def test_its_processes_are_terminated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_offline, "terminated", False)
    ranks = [MagicMock(), MagicMock()]
    monkeypatch.setattr("tasks.elastic.multiprocessing.active_children", lambda: ranks)
    train_offline._pass_on(signal.SIGTERM, None)
    assert [rank.terminate.call_count for rank in ranks] == [1, 1]


def test_without_processes_nobody_would_save_and_flyte_starts_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_offline, "terminated", False)
    monkeypatch.setattr("tasks.elastic.multiprocessing.active_children", list)
    with pytest.raises(FlyteRecoverableException, match="train_offline was terminated before it had processes"):
        train_offline._pass_on(signal.SIGTERM, None)
