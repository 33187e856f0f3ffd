"""Odd names in a recipe's paths: they work, or ``ebbflow check`` says why not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from ebbflow.cli import main
from ebbflow.recipe import Recipe, RecipeError, load_recipe
from ebbflow.tracking.store import TrackingError, resolve_tracking_uri
from tests.nested import replaced

STAGES = [
    {"kind": "online", "algorithm": {"name": "distillation", "teacher": "teacher"}},
    {"kind": "offline", "pairs": "pairs.parquet", "algorithm": {"name": "diffusion_dpo"}},
]
GIVEN = {
    "name": "run",
    "output": "runs",
    "model": {"path": "base"},
    "prompts": {"source": "prompts.txt", "held_out_source": "benchmark.csv", "held_out": 2},
    "policy": {"start": {"path": "start"}},
    "promotion": {"model_name": "model"},
    "tracking": {"experiment": "experiment", "uri": "sqlite:///mlflow.db"},
    "stages": STAGES,
}
PATHS = [
    ("output",),
    ("model", "path"),
    ("prompts", "source"),
    ("prompts", "held_out_source"),
    ("policy", "start", "path"),
    ("stages", 0, "algorithm", "teacher"),
    ("stages", 1, "pairs"),
]
NAMES = [("name",), ("promotion", "model_name"), ("tracking", "experiment")]
GOOD = [
    "\u00a0\u202fü #@:;&=+{x}' 100%",
    "a/" + "b" * 255,
    "s3://bucket/a%20b",
    "https://host/a?b=c",
    "a\\b",
    "-",
]


def refusal(path: tuple, value: str) -> str:
    with pytest.raises(RecipeError) as error:
        Recipe.model_validate(replaced(GIVEN, path, value))
    return str(error.value)


@pytest.mark.parametrize("path", PATHS, ids=str)
@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("a\0b", "a control character"),
        ("a\nb", "a control character"),
        ("s3://bucket/a\0b", "a control character"),
        ("a?b", "are patterns"),
        ("[x]/a", "are patterns"),
        ("s3://bucket/a?", "are patterns"),
        ("gs://bucket/[x]", "are patterns"),
        ("https://host/*", "are patterns"),
        ("~", "write the path out"),
        ("~/a", "write the path out"),
        ("~somebody/a", "write the path out"),
        ("a/" + "b" * 300 + "/c", "at most 255 bytes; shorten"),
        ("é" * 128, "at most 255 bytes; shorten"),
        ("a/" * 3000, "at most 4000 bytes"),
    ],
)
def test_a_path_that_no_file_can_have_is_refused(path: tuple, value: str, said: str) -> None:
    assert str(path[-1]) in refusal(path, value)
    assert said in refusal(path, value)


@pytest.mark.parametrize("path", PATHS, ids=str)
@pytest.mark.parametrize("value", GOOD)
def test_an_odd_path_that_works_is_taken(path: tuple, value: str) -> None:
    Recipe.model_validate(replaced(GIVEN, path, value))


def test_teachers_of_prompt_sets_are_looked_for_next_to_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there" / "teacher").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    teachers = {"path": "teacher", "b": "elsewhere", "c": "s3://bucket/teacher"}
    stage = {"kind": "online", "algorithm": {"name": "distillation", "teachers": teachers}}
    mixture = [{"name": name, "source": f"{name}.txt"} for name in teachers]
    (tmp_path / "there" / "recipe.yaml").write_text(
        yaml.safe_dump({"prompts": {"mixture": mixture}, "stages": [stage]})
    )
    found = load_recipe(tmp_path / "there" / "recipe.yaml").stages[0].hyper_parameters
    assert found.teachers == teachers | {"path": "there/teacher"}


@pytest.mark.parametrize("path", NAMES, ids=str)
def test_a_name_that_is_too_long_is_refused(path: tuple) -> None:
    assert "at most 128 characters" in refusal(path, "n" * 300)
    Recipe.model_validate(replaced(GIVEN, path, "n" * 128))


@pytest.mark.parametrize("path", [*NAMES, ("stages", 0, "kind"), ("model", "attention")], ids=str)
def test_no_text_holds_a_nul(path: tuple) -> None:
    given = replaced(GIVEN, ("model",), {"path": "base", "family": "sd3", "attention": "native"})
    with pytest.raises(RecipeError):
        Recipe.model_validate(replaced(given, path, "a\0b"))


@pytest.mark.parametrize(
    "uri",
    [
        "sqlite:///:memory:",
        "sqlite://",
        "sqlite:///",
        "sqlite:mlflow.db",
        "sqlite+pysqlite:///mlflow.db",
        "sqlite:///file:mlflow.db?uri=true",
        "sqlite:///mlflow.db?timeout=5",
        "sqlite:///a%20b.db",
        "sqlite:///~/mlflow.db",
        "sqlite:///" + "a" * 300,
        "sqlite:///a\0b",
        "http://server\0",
    ],
)
def test_a_store_that_is_no_file_is_refused_wherever_it_is_named(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "tracking.uri" in refusal(("tracking", "uri"), uri)
    if "\0" not in uri:  # which no variable of the environment can hold
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        with pytest.raises(TrackingError, match="cannot be used"):
            resolve_tracking_uri(Recipe())


@pytest.mark.parametrize("output", ["a%20b", "/x/%41/y"])
def test_an_output_that_reads_as_another_in_a_uri_is_refused(output: str) -> None:
    assert "another character in a URI; rename the folder" in refusal(("output",), output)


def test_a_working_folder_that_cannot_hold_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a%20b").mkdir()
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path / "a%20b")
    with pytest.raises(
        TrackingError, match=r"a%20b/runs/mlflow\.db cannot be used: .*'output' to another folder"
    ):
        resolve_tracking_uri(Recipe())


@pytest.mark.parametrize("value", ["a\0b", "~/runs", "b" * 300, "a%20b"])
def test_the_command_says_so(tmp_path: Path, value: str) -> None:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"output": value}))
    done = CliRunner().invoke(main, ["check", str(tmp_path / "recipe.yaml")])
    assert done.exit_code == 1
    assert "output" in done.output
    assert os.listdir(tmp_path) == ["recipe.yaml"]
