"""What a person reads of a run: INFO lines on stderr, once, from the first rank alone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import logging
from ebbflow.logs import configure_logging
configure_logging()
configure_logging()
log = logging.getLogger("ebbflow.online.loop")
log.debug("a detail")
log.info("step %d", 3)
log.warning("careful")
logging.getLogger("other").info("not ours")
"""


def run(program: str = PROGRAM, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("EBBFLOW_LOG_LEVEL", "RANK")
    }
    return subprocess.run(
        [sys.executable, "-c", program],
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({}, ["step 3", "careful"]),
        ({"EBBFLOW_LOG_LEVEL": "debug"}, ["a detail", "step 3", "careful"]),
        ({"EBBFLOW_LOG_LEVEL": "WARNING"}, ["careful"]),
        ({"RANK": "0"}, ["step 3", "careful"]),
        ({"RANK": "1"}, ["careful"]),
    ],
)
def test_lines_are_shown_by_level_and_rank(environment: dict[str, str], shown: list[str]) -> None:
    done = run(**environment)
    assert done.stdout == ""
    assert [
        line.partition("ebbflow.online.loop: ")[2] for line in done.stderr.splitlines()
    ] == shown


def test_an_unknown_level_is_an_error() -> None:
    assert (
        "EBBFLOW_LOG_LEVEL=LOUD is no log level; set DEBUG, INFO"
        in run(EBBFLOW_LOG_LEVEL="LOUD").stderr
    )


def test_handlers_of_the_program_are_left_alone() -> None:
    program = "import logging; logging.basicConfig(format='mine %(message)s')\n" + PROGRAM
    assert run(program).stderr.splitlines() == ["mine step 3", "mine careful"]


WARNED = """
import logging, warnings
from ebbflow.logs import configure_logging
configure_logging()
for _ in range(2):
    warnings.warn("say it once", stacklevel=1)
    exec(compile("warnings.warn('say it once')", "/elsewhere/ebbflow/x.py", "exec"))
    logging.getLogger("ebbflow.storage").warning("an event of %s", "this process")
    logging.getLogger("ebbflow.storage").error("an error")
"""


@pytest.mark.parametrize(("rank", "own"), [("0", ["say it once"]), ("1", [])])
def test_a_warning_is_said_once_and_in_one_line(rank: str, own: list[str]) -> None:
    said = run(WARNED, RANK=rank).stderr.splitlines()
    texts = [line.split(": ", 1)[1] for line in said]
    elsewhere = ["UserWarning: say it once (<string>:6)"] if rank == "0" else []
    assert texts == [*elsewhere, *own, "an event of this process", "an error", "an error"]
