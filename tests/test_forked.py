"""Programs that tests fork say where they hang."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests import two_processes
from tests.forked import CONTEXT, ROOT, ForkedProgram, separate_fork_server

HANGS = """
import os, sys, time

def wait_in_a_child():
    time.sleep(600)

def wait_for_the_child():
    open(sys.argv[1], "w").close()
    os.wait()

if os.fork() == 0:
    wait_in_a_child()
wait_for_the_child()
"""


def test_a_program_that_hangs_ends_with_the_stacks_of_its_processes(tmp_path: Path) -> None:
    script = tmp_path / "hangs.py"
    script.write_text(HANGS)
    ready = tmp_path / "ready"
    program = ForkedProgram(
        [str(script), str(ready)],
        cwd=ROOT,
        env=dict(os.environ),
        output=[tmp_path / "log"],
        new_session=True,
    )
    try:
        while not ready.exists():
            assert program.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.05)
        with pytest.raises(subprocess.TimeoutExpired) as raised:
            program.wait(0.1)
    finally:
        os.killpg(program.pid, signal.SIGKILL)
    (stacks,) = raised.value.__notes__
    assert "in wait_for_the_child" in stacks
    assert "in wait_in_a_child" in stacks


def test_a_rank_has_nothing_of_what_the_server_had_when_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store of ranks that the server kept would have one of two ranks wait for the other."""
    monkeypatch.setattr(os, "environ", {"EBBFLOW_RANKS_STORE": "of an earlier test"})
    seen: list[dict[str, str]] = []
    two_processes._run_further_rank(
        0, lambda: seen.append(dict(os.environ)), (), {"WORLD_SIZE": "2"}, str(tmp_path / "stacks")
    )
    assert seen == [{"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}]


def find_server() -> int:
    """The process that a program would be a fork of now."""
    program = CONTEXT.Process(target=time.sleep, args=(600,))
    program.start()
    server = psutil.Process(program.pid).ppid()
    program.kill()
    program.join()
    return server


def test_a_separate_server_ends_and_later_programs_are_forks_of_the_first() -> None:
    before = find_server()
    with separate_fork_server():
        CONTEXT.set_forkserver_preload([])
        separate = find_server()
    assert separate != before
    assert not psutil.pid_exists(separate)
    assert find_server() == before
