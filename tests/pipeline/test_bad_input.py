"""What is wrong with a recipe or its surroundings is said before minutes are spent, with how to fix
it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flyteidl.core.errors_pb2 import ErrorDocument
from flyteidl.core.literals_pb2 import Literal, LiteralMap, Scalar
from flytekit.bin.entrypoint import get_traceback_str
from flytekit.exceptions.user import FlyteUserRuntimeException
from google.protobuf import json_format
from google.protobuf.struct_pb2 import Struct

from ebbflow.data.prompts import PromptError
from ebbflow.models import ModelError
from ebbflow.recipe import Recipe, RecipeError
from ebbflow.tracking.store import TrackingError
from tasks.error_text import MessageFirst
from tasks.start_run import start_run
from tests.forked import run_forked
from tests.pipeline.conftest import PYFLYTE, ROOT, run_pipeline


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rouns": 2}, ["rouns", "did you mean 'rounds'?"]),
        ({"rounds": 0}, ["rounds = 0", "greater than or equal to 1"]),
    ],
)
def test_pyflyte_shows_what_is_wrong_with_a_recipe(
    tmp_path: Path, change: dict[str, Any], says: list[str]
) -> None:
    done = run_pipeline(tmp_path, change)
    assert done.returncode != 0
    shown = " ".join((done.stdout + done.stderr).replace("│", " ").split())
    for words in says:
        assert words in shown
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("as_text", [False, True])
def test_pyflyte_refuses_a_recipe_that_gives_a_key_twice(tmp_path: Path, as_text: bool) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text('{"rounds": 1, "rounds": 20}')
    given = recipe.read_text() if as_text else str(recipe)
    command = [str(PYFLYTE), "run", "workflows/post_training.py", "post_train", "--recipe", given]
    done = run_forked(command, cwd=ROOT, env=os.environ | {"HOME": str(tmp_path)}, timeout=900)
    assert done.returncode != 0
    assert "given twice: ['rounds']" in " ".join(
        (done.stdout + done.stderr).replace("│", " ").split()
    )


def _execute_in_pod(folder: Path, recipe: dict[str, Any]) -> str:
    """The message that Flyte's console shows of ``plan_run`` with a recipe that was typed into the
    launch form.
    """
    # The form sends a structure of protobuf, whose numbers are doubles.
    literal = Literal(scalar=Scalar(generic=json_format.ParseDict(recipe, Struct())))
    inputs = folder / "inputs.pb"
    inputs.write_bytes(LiteralMap(literals={"recipe": literal}).SerializeToString())
    resolver = ["--resolver", "flytekit.core.python_auto_container.default_task_resolver", "--"]
    command = [
        *[str(PYFLYTE.with_name("pyflyte-execute")), "--inputs", str(inputs)],
        *["--output-prefix", str(folder / "out"), "--raw-output-data-prefix", str(folder / "raw")],
        *[*resolver, "task-module", "tasks.plan_run", "task-name", "plan_run"],
    ]
    environment = os.environ | {"HOME": str(folder), "FLYTE_INTERNAL_EXECUTION_ID": "e"}
    done = run_forked(command, cwd=ROOT, env=environment, timeout=900)
    written = folder / "out" / "error.pb"
    assert written.exists(), done.stdout + done.stderr
    return ErrorDocument.FromString(written.read_bytes()).error.message


def test_the_console_shows_the_mistake_in_a_recipe_and_nothing_else(tmp_path: Path) -> None:
    stage = {"kind": "online", "algorithm": {"name": "mix_grpoo"}}
    message = _execute_in_pod(tmp_path, {"stages": [stage]})
    first, second, *_ = message.splitlines()
    assert first == "this recipe cannot be run:"
    assert "did you mean 'mix_grpo'?" in second
    assert "Traceback" not in message
    assert "Literal value" not in message


def _format_for_console(fail: Callable[[], None]) -> str:
    """The text of the error that a task raises, wrapped as flytekit wraps it."""
    with pytest.raises(Exception) as raised:  # noqa: PT011
        fail()
    wrapped = FlyteUserRuntimeException(raised.value)
    wrapped.__cause__ = raised.value
    return MessageFirst(get_traceback_str)(wrapped)


def test_the_console_shows_the_message_of_an_error_before_its_trace() -> None:
    def fail() -> None:
        raise ModelError("transformer is missing")

    text = _format_for_console(fail)
    assert text.startswith("ModelError: transformer is missing\n\nTrace:")
    assert ", in fail\n" in text


def test_the_console_shows_the_last_error_where_a_recipe_error_was_handled_before() -> None:
    def fail() -> None:
        try:
            raise RecipeError("an earlier mistake")
        except RecipeError:
            raise MemoryError("no memory is left") from None

    text = _format_for_console(fail)
    assert text.startswith("MemoryError: no memory is left\n\nTrace:")


def test_an_output_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        RecipeError, match=r"output = .*file/runs.* cannot be written .*set another folder"
    ):
        start_run(recipe=Recipe(output=str(tmp_path / "file" / "runs")))


def test_a_prompt_file_that_is_not_there(tmp_path: Path) -> None:
    recipe = Recipe.model_validate(
        {"output": str(tmp_path), "prompts": {"source": str(tmp_path / "none.txt")}}
    )
    with pytest.raises(RecipeError, match=r"prompts.source = .*none.txt.* no such file"):
        start_run(recipe=recipe)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("empty.txt", "\n\n", "no prompt"),
        ("bad.jsonl", '{"prompt": "a \\"B\\""}\n{"prompt": ', r"line 2"),
        ("mute.txt", "a cat\na dog\n", r"name no text to read"),
    ],
)
def test_a_prompt_file_that_cannot_be_used(tmp_path: Path, name: str, text: str, says: str) -> None:
    (tmp_path / name).write_text(text)
    recipe = Recipe.model_validate(
        {"output": str(tmp_path), "prompts": {"source": str(tmp_path / name)}}
    )
    with pytest.raises(PromptError, match=says):
        start_run(recipe=recipe)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_base_model_folder_that_is_not_one(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    recipe = Recipe.model_validate(
        {"output": str(tmp_path), "model": {"path": str(tmp_path / "base")}}
    )
    with pytest.raises(ModelError, match=r"base is not a glyph base model: transformer.* missing"):
        start_run(recipe=recipe)


def test_a_tracking_server_that_is_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{probe.getsockname()[1]}"
    recipe = Recipe.model_validate({"output": str(tmp_path), "tracking": {"uri": address}})
    with pytest.raises(TrackingError, match=address):
        start_run(recipe=recipe)
