import socket
import sys
from importlib.metadata import version
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from ebbflow.cli import main
from ebbflow.recipe import Recipe, load_recipe
from ebbflow.recipe.registry import REWARDS
from ebbflow.recipe.samplers import SAMPLERS
from ebbflow.rewards.built_in.tesseract import Tesseract

RECIPES = Path(__file__).parents[1] / "workflows" / "recipes"


def test_check_prints_a_recipe_that_means_the_same(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["check", str(RECIPES / "glyph.yaml")])
    assert result.exit_code == 0
    (tmp_path / "resolved.yaml").write_text(result.output)
    resolved = load_recipe(tmp_path / "resolved.yaml")
    assert resolved == load_recipe(RECIPES / "glyph.yaml")
    assert resolved.digest in result.output


def test_check_refuses_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("rouns: 3\n")
    result = CliRunner().invoke(main, ["check", str(tmp_path / "bad.yaml")])
    assert result.exit_code == 1
    assert "did you mean 'rounds'?" in result.output


def test_check_asks_the_store_that_a_recipe_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"tracking: {{uri: 'http://127.0.0.1:{port}'}}\n")
    result = CliRunner().invoke(main, ["check", str(recipe)])
    assert result.exit_code == 1
    assert f"the MLflow store http://127.0.0.1:{port} does not answer" in result.output


def test_check_names_a_missing_file(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["check", str(tmp_path / "none.yaml")])
    assert result.exit_code == 1
    assert "none.yaml" in result.output


def test_the_folder_of_the_recipe_comes_before_the_working_directory_in_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "recipe.yaml").write_text("name: mine\n")
    monkeypatch.chdir(tmp_path)
    # A command without a recipe.
    assert CliRunner().invoke(main, ["defaults"]).exit_code == 0
    assert sys.path[-1] == str(tmp_path)
    # The command line has added the working directory before it reads the recipe.
    result = CliRunner().invoke(main, ["check", "recipes/recipe.yaml"])
    assert result.exit_code == 0, result.output
    assert sys.path[-2:] == [str(folder), str(tmp_path)]
    assert sys.path.count(str(tmp_path)) == 1


def test_keys_reach_into_every_choice() -> None:
    shown = CliRunner().invoke(main, ["keys"]).output
    for key in (
        "rounds = 1",
        "stages[](OnlineStage).algorithm(FlowGRPO).clip_range = ",
        "rewards[](Ocr).layout = line",
    ):
        assert key in shown
    assert "Number of validation prompts, which choose the best round." in shown


def test_keys_prints_a_heading_above_each_group_of_a_stage() -> None:
    lines = CliRunner().invoke(main, ["keys"]).output.splitlines()
    heading = lines.index("# stages[](OnlineStage): workers and their schedule")
    assert lines[heading + 1] == "stages[](OnlineStage).mode = sync"
    headings = [line for line in lines if line.startswith("# stages[](OnlineStage): ")]
    assert len(headings) == 7


def listed() -> dict[str, dict[str, str]]:
    """``ebbflow list``: of each kind, the names with the rest of their lines."""
    result = CliRunner().invoke(main, ["list"])
    assert result.exit_code == 0, result.output
    tables: dict[str, dict[str, str]] = {}
    for line in result.output.splitlines():
        if line.startswith("  "):
            name, _, rest = line.strip().partition(" ")
            tables[list(tables)[-1]][name] = rest.strip()
        elif " " not in line:
            tables[line] = {}
    return tables


def test_list_has_everything_that_a_recipe_can_name() -> None:
    schema = Recipe.model_json_schema()["$defs"]
    tables = listed()
    assert list(tables["windows"]) == schema["WindowConfig"]["properties"]["kind"]["enum"]
    assert list(tables["samplers"]) == list(SAMPLERS)
    assert all(
        f"{name}: " in schema["SamplerConfig"]["properties"]["name"]["description"]
        for name in SAMPLERS
    )
    algorithms = schema["OnlineStageConfig"]["properties"]["algorithm"]["discriminator"]["mapping"]
    assert set(tables["algorithms"]) == set(algorithms) - {"custom"}
    assert list(tables["rewards"])[: len(REWARDS)] == list(
        REWARDS
    )  # why some are not here comes after them
    assert all(text for table in tables.values() for text in table.values())


def test_list_says_where_an_algorithm_runs_and_what_a_sampler_gives() -> None:
    tables = listed()
    assert tables["algorithms"]["flow_grpo"].startswith("online  ")
    assert tables["algorithms"]["diffusion_nft"].startswith("online, offline  ")
    assert {name for name, text in tables["samplers"].items() if text.startswith("log-probs")} == {
        "flow_sde",
        "dance_sde",
        "cps",
    }


def test_list_says_which_reward_cannot_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "not installed" not in listed()["rewards"]["similarity"]
    monkeypatch.setattr(
        Tesseract, "explain_unavailable", lambda self: "no such program; install it"
    )
    result = CliRunner().invoke(main, ["list"])
    assert listed()["rewards"]["tesseract"].startswith("not installed  ")
    assert "\n  no such program; install it\n" in result.output


def test_list_leads_to_the_page_about_ones_own() -> None:
    output = CliRunner().invoke(main, ["list"]).output
    pages = {word.strip("().,:") for word in output.split() if "docs/" in word}
    assert "docs/extending.md" in pages
    assert all((RECIPES.parents[1] / page).is_file() for page in pages)


def test_version_is_the_packages() -> None:
    assert (
        CliRunner().invoke(main, ["--version"], prog_name="ebbflow").output
        == f"ebbflow {version('ebbflow')}\n"
    )


@pytest.mark.parametrize(
    ("given", "processes"),
    [({}, "2"), ({"PROCESSES": "3"}, "3"), ({"PROCESSES": "3", "NODES": "2"}, "6")],
)
def test_a_replay_has_the_processes_of_all_nodes(monkeypatch, given, processes):
    for name in ("PROCESSES", "NODES"):
        monkeypatch.delenv(f"EBBFLOW_TRAIN_{name}", raising=False)
    for name, value in given.items():
        monkeypatch.setenv(f"EBBFLOW_TRAIN_{name}", value)
    command = main.commands["replay"]
    (option,) = [param for param in command.params if param.name == "processes"]
    assert option.get_default(click.Context(command)) == processes
