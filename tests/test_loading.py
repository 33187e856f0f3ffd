"""Commands import without looking for garbage, and end without it."""

from __future__ import annotations

import gc
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ebbflow.cli import main
from ebbflow.commands.loading import import_libraries

ENDING = """
import atexit, gc
# Functions run in the reverse order, so this one runs last.
atexit.register(lambda: print(gc.get_freeze_count() > 0, len(gc.get_objects()) < 100))
from ebbflow.commands.loading import reduce_garbage_collection
reduce_garbage_collection()
reduce_garbage_collection()
print(gc.get_freeze_count(), gc.isenabled())
"""


def test_a_command_ends_with_nothing_to_search() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDING], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["0", "True", "True", "True"]


def test_imports_are_not_searched_for_garbage(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with import_libraries("loading"):
        assert not gc.isenabled()
    assert gc.isenabled()
    assert caplog.messages == ["loading"]


def test_a_failed_import_leaves_garbage_collection_on() -> None:
    with pytest.raises(ModuleNotFoundError), import_libraries():
        importlib.import_module("none_of_this_name")
    assert gc.isenabled()


@pytest.mark.parametrize(
    "words",
    [
        ["adopt", "glyph", "--reason", "mine"],
        ["clean", "RECIPE", "--runs", "1"],
        ["compare", "one", "other"],
        ["draw", "glyph", "a sign"],
        ["evaluate", "glyph", "--recipe", "RECIPE"],
        ["export", "FOLDER", "target", "--base", "FOLDER"],
        ["gate-policy", "RECIPE"],
        ["label", "answers", "RECIPE"],
        ["make-key", "FOLDER"],
        ["replay", "glyph", "--stage", "1.1", "--step", "0"],
        ["rollback", "RECIPE"],
        ["sign", "glyph"],
        ["train-reward", "RECIPE"],
        ["ui"],
        ["verify", "glyph"],
    ],
    ids=lambda words: words[0],
)
def test_commands_that_import_for_seconds_say_so_first(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("name: mine\n")
    paths = {"RECIPE": str(recipe), "FOLDER": str(tmp_path)}
    caplog.set_level("INFO")
    CliRunner().invoke(main, [paths.get(word, word) for word in words])
    said = caplog.records[0]
    assert said.name == "ebbflow.commands.loading", said
    assert re.match("loading|opening|starting|drawing", said.getMessage())


def test_a_program_that_has_switched_garbage_collection_off_keeps_it_off() -> None:
    gc.disable()
    try:
        with import_libraries():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
