"""The ranks of a training group on a machine without CUDA: forks that know where they are, and that end with their launcher."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forked import ForkedProgram

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


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux alone")
def test_a_rank_is_where_its_launcher_is_and_ends_with_it(tmp_path: Path) -> None:
    said = tmp_path / "said.json"
    launcher = ForkedProgram([str(CASES), str(said)], cwd=tmp_path, env=os.environ, output=[tmp_path / "printed"])
    wait_until(lambda: said.exists() or launcher.poll() is not None)
    assert said.exists(), (tmp_path / "printed").read_text()
    about = json.loads(said.read_text())
    assert (about["folder"], about["LATE"], about["imported"]) == (str(tmp_path), "after the server", True)
    assert about["server"] != launcher.pid
    launcher.kill()
    wait_until(lambda: not runs(about["rank"]) and not runs(about["server"]))
