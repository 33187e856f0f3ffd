"""``ebbflow label``: its answers outlive it, and it says what is wrong with its arguments."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from click.testing import CliRunner
from label_cases import rate, send_answers, write_evaluation

from ebbflow.cli import main


@contextmanager
def command_line(*arguments: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """``ebbflow label`` as a process of its own, and the address that it prints."""
    code = "from ebbflow.cli import main; main()"
    command = [sys.executable, "-c", code, "label", *map(str, arguments), "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            yield process, next(line.strip() for line in process.stdout if line.startswith("http"))
        finally:
            process.kill()


@pytest.mark.parametrize(
    "how",
    [
        signal.SIGINT,
        # As SIGINT, but that Python raises nothing.
        pytest.param(signal.SIGTERM, marks=pytest.mark.exhaustive),
        signal.SIGKILL,
    ],
)
def test_however_the_command_ends_the_answers_are_there(tmp_path, how):
    champion = write_evaluation(tmp_path / "a.parquet", "a", range(10, 20))
    candidate = write_evaluation(tmp_path / "b.parquet", "b", range(60, 70))
    arguments = [tmp_path / "answers", champion, candidate]
    with command_line(*arguments) as (process, address):
        assert send_answers(address, "anna", 3) == 3
        process.send_signal(how)
        assert process.wait(60) == (0 if how == signal.SIGINT else -how)
    assert len((tmp_path / "answers" / "answers.jsonl").read_text().splitlines()) == 3
    assert (tmp_path / "answers" / "evidence.json").exists() == (how != signal.SIGKILL)
    with command_line(*arguments) as (process, address):
        assert send_answers(address, "anna", 100) == 7
        process.send_signal(signal.SIGINT)
        process.wait(60)
    assert (
        json.loads((tmp_path / "answers" / "evidence.json").read_text())["pairs"]["answered"] == 10
    )


@pytest.fixture
def command(tmp_path, monkeypatch):
    """``ebbflow label FOLDER ...`` in which every server answers three pairs of anna's and ends."""
    sessions = []

    def label(*arguments):
        monkeypatch.setattr(
            "ebbflow.labeling.server.run_label_server",
            lambda session, *address: sessions.append(
                (session, rate(session, "anna", 3), address[:2])
            ),
        )
        return CliRunner().invoke(main, ["label", *map(str, arguments)]), sessions

    return label


def test_label_command_resumes_its_session(command, tmp_path):
    champion = write_evaluation(tmp_path / "a.parquet", "a", range(10, 20))
    candidate = write_evaluation(tmp_path / "b.parquet", "b", range(60, 70))
    arguments = [tmp_path / "answers", champion, candidate, "--all-pairs"]
    for count in (3, 6, 9):
        result, sessions = command(*arguments)
        assert result.exit_code == 0, result.output
        assert result.output.startswith("10 pairs; the results go to")
        assert len(sessions[-1][0].answers.standing) == count
    assert sessions[0][2] == ("127.0.0.1", 8080)
    result, _ = command(*arguments, "--seed", "7")
    assert result.exit_code == 1
    assert "answers to something else (seed = 0)" in result.output


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--error-rate", "0"),
        ("--error-rate", "1"),
        ("--seed", "-1"),
        ("--max-pairs", "0"),
        ("--port", "99999"),
    ],
)
def test_the_command_refuses_numbers_that_mean_nothing(command, tmp_path, option, value):
    result, sessions = command(tmp_path / "answers", tmp_path, option, value)
    assert (result.exit_code, sessions) == (2, [])


@pytest.mark.parametrize(
    ("sources", "reason"),
    [(["."], "no summary.json"), (["bad.parquet"] * 2, "is no whole Parquet file")],
)
def test_the_command_says_what_is_wrong(command, tmp_path, monkeypatch, sources, reason):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    result, _ = command("answers", *sources)
    assert result.exit_code == 1
    assert reason in result.output
    assert not (tmp_path / "answers").exists()
