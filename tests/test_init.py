"""``ebbflow init``: what it writes can be checked and tested at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ebbflow.cli import main
from ebbflow.recipe import load_recipe


def test_a_new_project_passes_its_check_and_its_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    created = CliRunner().invoke(main, ["init", "My Project"])
    assert created.exit_code == 0, created.output
    folder = tmp_path / "My Project"
    assert sorted(path.name for path in folder.iterdir()) == [
        "my_rewards.py",
        "prompts.txt",
        "recipe.yaml",
        "test_my_rewards.py",
    ]
    assert load_recipe(folder / "recipe.yaml").name == "my-project"
    checked = CliRunner().invoke(main, ["check", str(folder / "recipe.yaml")])
    assert checked.exit_code == 0, checked.output
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    tested = subprocess.run(command, capture_output=True, text=True, check=False)
    assert tested.returncode == 0, tested.stdout
    assert "1 passed" in tested.stdout


@pytest.mark.parametrize("name", ["2026", "1e3", "on", "null"])
def test_a_folder_may_be_called_what_yaml_takes_for_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    created = CliRunner().invoke(main, ["init", name])
    assert created.exit_code == 0, created.output
    recipe = load_recipe(tmp_path / name / "recipe.yaml")
    assert (recipe.name, recipe.promotion.model_name) == (name, name)


def test_nothing_of_a_folder_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("mine")
    refused = CliRunner().invoke(main, ["init", str(tmp_path)])
    assert refused.exit_code == 1
    assert "exists and is no empty folder; name a new one" in refused.output
    assert (tmp_path / "recipe.yaml").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 1
