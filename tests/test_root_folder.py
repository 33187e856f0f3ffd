"""Commands that are started in ``/`` write nothing there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from ebbflow.cli import main
from ebbflow.commands.options import OutputPath

NAME = "ebbflow-test-of-the-root-folder"
WRITTEN = {"--output", "--out", "output", "target"}
"""What options and arguments are called that name something to write."""
WROTE_BY_DEFAULT = {
    "certify": (["diffusers", "RUN"], "certificate"),
    "draw": (["glyph", "a sign"], "drawn"),
    "evaluate": (["glyph", "--recipe", "RECIPE"], "evaluations"),
    "replay": (["RUN", "--stage", "1.1", "--step", "0"], "replay-1.1-0"),
    "train-reward": (["RECIPE"], "runs"),
}
"""Arguments of each command that writes without being told where, and what it would write;
``compare``, which needs two runs for that, is in ``tests/comparison``.
"""


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, str]:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("name: mine\n")
    return {"RECIPE": str(recipe), "RUN": str(tmp_path)}


@pytest.mark.parametrize("command", WROTE_BY_DEFAULT)
def test_a_command_that_is_started_in_the_root_folder_writes_nothing_there(
    command: str, paths: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words, written = WROTE_BY_DEFAULT[command]
    before = set(Path("/").iterdir())
    monkeypatch.chdir("/")
    result = CliRunner().invoke(main, [command, *(paths.get(word, word) for word in words)])
    assert result.exit_code != 0
    assert f"'{written}' would be /{written}, as the working directory is /;" in result.output
    assert set(Path("/").iterdir()) == before


@pytest.mark.parametrize(
    "words",
    [
        ["init", NAME],
        ["make-key", NAME],
        ["label", NAME, "RUN"],
        ["write-rubrics", "RECIPE", NAME, "--url", "http://127.0.0.1:9", "--model", "m"],
        ["export", "RUN", NAME, "--base", "RUN"],
    ],
    ids=lambda words: words[0],
)
def test_a_relative_path_is_refused_in_the_root_folder(
    words: list[str], paths: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    result = CliRunner().invoke(main, [paths.get(word, word) for word in words])
    assert result.exit_code == 2
    assert f"'{NAME}' would be /{NAME}, as the working directory is /;" in result.output
    assert not Path("/", NAME).exists()


def test_paths_to_write_are_checked_in_every_command() -> None:
    # A new command with an output of click's own type would write into / again. Two commands make
    # a default of their arguments, and check it themselves.
    unchecked = {
        name
        for name, parameter in _list_path_parameters()
        if WRITTEN & {*parameter.opts, parameter.name}
        and not isinstance(parameter.type, OutputPath)
    }
    assert unchecked == {"compare", "replay"}


def test_a_relative_path_is_taken_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["init", "mine"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "mine" / "recipe.yaml").is_file()


def _list_path_parameters() -> Iterator[tuple[str, click.Parameter]]:
    for name, command in main.commands.items():
        for parameter in command.params:
            if isinstance(parameter.type, click.Path):
                yield name, parameter
