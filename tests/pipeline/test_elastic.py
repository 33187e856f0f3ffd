"""The ranks of a training group on a machine without CUDA: forks that know where they are, and that end with their launcher."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

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
