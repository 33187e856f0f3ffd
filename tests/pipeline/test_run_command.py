"""``ebbflow run`` in a process of its own: an error is a message, and with ``--debug`` a
traceback."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.forked import ROOT, run_forked

EBBFLOW = Path(sys.executable).with_name("ebbflow")


@pytest.mark.parametrize("debug", [False, True])
def test_an_error_is_its_message(tmp_path: Path, debug: bool) -> None:
    (tmp_path / "recipe.yaml").write_text("name: mine\nprompts: {source: none.txt}\n")
    command = [str(EBBFLOW), "run", "recipe.yaml", *["--debug"] * debug]
    environment = os.environ | {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = run_forked(command, cwd=tmp_path, env=environment, timeout=900)
    said = done.stderr.strip().splitlines()
    assert done.returncode == 1
    assert ("Traceback" in done.stderr) is debug
    if debug:
        assert "no such file" in said[-1]
    else:
        assert said[-2].startswith("start_run: recipe.yaml:2: prompts.source = ")
        assert "no such file" in said[-2]
        assert said[-1] == "start again with: ebbflow run recipe.yaml"
    assert (tmp_path / "runs" / "flyte").is_dir()
