"""A registered version on its own: in Python, over HTTP, from the command line, and by the commands
of docs/serving.md.
"""

from __future__ import annotations

import ast
import base64
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import packages_distributions
from importlib.metadata import version as installed
from pathlib import Path

import mlflow.pyfunc
import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner, Result
from fastapi.testclient import TestClient
from mlflow.pyfunc import scoring_server
from PIL import Image
from serving_cases import Served, serve_base

from ebbflow.cli import main
from ebbflow.data.sounds import Sounds, encode_wavs, read_sound
from ebbflow.evaluation import serve as evaluation
from ebbflow.models import load_model
from ebbflow.recipe.model import ModelConfig
from ebbflow.registry.model_version import REQUIREMENTS, compute_model_files_digest
from ebbflow.registry.serving import ServedPolicy, how_to_draw, how_to_load
from tests.mlflow_settings import restored_tracking_uri

DOCS = Path(__file__).parents[2] / "docs" / "serving.md"
NAME = "ebbflow-glyph"
TOO_LONG = "this glyph model draws 4 letters at most and was asked for 'TOOLONG'"


@pytest.fixture(scope="session")
def serve(
    store: Path, base_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Served]:
    """``serve(name, model)``: the policy of the untouched base model as champion."""

    def make(name: str, model: ModelConfig = ModelConfig()) -> Served:
        return serve_base(name, model, base_folder, store, tmp_path_factory.mktemp("served"))

    return make


@pytest.fixture(scope="session")
def served(serve: Callable[..., Served]) -> Served:
    return serve(NAME)


def size(png: bytes) -> tuple[int, int]:
    return Image.open(io.BytesIO(png)).size


# What a version brings along


def test_the_requirements_are_on_the_package_index(served: Served) -> None:
    lines = (served.model / "requirements.txt").read_text().split()
    versions = dict(line.split("==") for line in lines)
    assert versions.keys() == {"mlflow", *REQUIREMENTS}
    assert not [line for line in lines if "+" in line]
    assert versions["torch"] == installed("torch").partition("+")[0]


ALONE = """
import json, sys
import mlflow.pyfunc, pandas as pd
model = mlflow.pyfunc.load_model(sys.argv[1])
drawn = model.predict(pd.DataFrame({"prompt": ["EBBS", "TOOLONG"]}))
ours = [module.__file__ for name, module in sys.modules.items() if name.split(".")[0] == "ebbflow"]
print(json.dumps([ours, [image is not None for image in drawn["image"]], list(drawn["error"])]))
"""


def test_a_version_is_served_by_its_own_code_and_requirements(
    served: Served, tmp_path: Path
) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-B", "-c", ALONE, str(served.model)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    ours, drawn, errors = json.loads(done.stdout.splitlines()[-1])
    assert (drawn, errors) == ([True, False], [None, TOO_LONG])
    assert len(ours) > 30
    assert [path for path in ours if not Path(path).is_relative_to(served.model / "code")] == []
    packages = packages_distributions()
    needed = {
        name
        for path in ours
        for name in _imported(Path(path))
        if name not in sys.stdlib_module_names
    } - {"ebbflow"}
    known = {name.replace("-", "_").lower() for name in [*REQUIREMENTS, "mlflow"]}
    missing = [
        name
        for name in needed
        if not known & {found.replace("-", "_").lower() for found in packages[name]}
    ]
    assert missing == []


def _imported(path: Path) -> set[str]:
    """Top-level packages that a module imports as it is read."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
    return found


def test_the_sources_of_an_own_family_come_along_and_nothing_else_of_its_package(
    serve: Callable[..., Served],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    package = tmp_path / "path" / "mypackage"
    (package / "deep").mkdir(parents=True)
    source = (
        "from ebbflow.models.families.glyph import GlyphModel\nclass Mine(GlyphModel):\n    pass\n"
    )
    for name, text in {
        "__init__.py": "",
        "deep/family.py": source,
        "weights.bin": "0",
        ".env": "TOKEN=1",
    }.items():
        (package / name).write_text(text)
    monkeypatch.syspath_prepend(package.parent)
    code = (
        serve("own-family", ModelConfig(family="mypackage.deep.family:Mine", path="x")).model
        / "code"
    )
    assert sorted(path.name for path in code.iterdir()) == ["ebbflow", "mypackage"]
    found = {
        path.relative_to(code / "mypackage").as_posix()
        for path in (code / "mypackage").rglob("*")
        if path.is_file()
    }
    blocks = {"__pycache__", "deep/__pycache__"}  # files, so that Python writes no bytecode
    assert found == {"__init__.py", "deep/family.py"} | blocks
    assert (code / "ebbflow" / "report" / "report.html").is_file()
    assert not [path for path in code.rglob("*") if path.is_symlink() or path.suffix == ".pyc"]
    assert "is not installed here" not in caplog.text
    serve("absent-family", ModelConfig(family="nowhere.family:Mine", path="x"))
    assert "the version lacks nowhere.family, which is not installed here" in caplog.text


def test_the_digest_covers_the_code_and_bytecode_beside_it(served: Served, tmp_path: Path) -> None:
    model = tmp_path / "model"
    (model / "code" / "ebbflow").mkdir(parents=True)
    (model / "MLmodel").write_text("{}")
    (model / "code" / "ebbflow" / "cli.py").write_text("import os")
    before = compute_model_files_digest(model)
    (model / "code" / "ebbflow" / "__pycache__").mkdir()
    (model / "code" / "ebbflow" / "__pycache__" / "cli.cpython-311.pyc").write_bytes(b"code")
    assert compute_model_files_digest(model) != before
    shutil.rmtree(model / "code" / "ebbflow" / "__pycache__")
    assert compute_model_files_digest(model) == before
    (model / "code" / "ebbflow" / "cli.py").write_text("import sys")
    assert compute_model_files_digest(model) != before
    (model / "code" / "ebbflow" / "cli.py").write_text("import os")
    (model / "code" / "sitecustomize.py").write_text("import sys")
    assert compute_model_files_digest(model) != before


# Predictions


def test_every_row_has_an_image_or_an_error(served: Served) -> None:
    model = mlflow.pyfunc.load_model(str(served.model))
    rows = pd.DataFrame(
        {"prompt": ["EBBS", "TOOLONG", None, "ebbs", "TIDE"], "seed": [0, 0, 0, 1, -1]}
    )
    drawn = model.predict(rows)
    assert (
        list(drawn.columns)
        == model.metadata.get_output_schema().input_names()
        == ["image", "error", "warning", "sound"]
    )
    assert [image and size(image) for image in drawn["image"]] == [
        (32, 16),
        None,
        None,
        (32, 16),
        None,
    ]
    expected = [
        None,
        TOO_LONG,
        "the row has no prompt; give it one",
        None,
        "seed = -1: give 0 or more",
    ]
    assert drawn["error"].tolist() == expected
    warning = "it was trained on 4 capital letters A-Z and reads 'EBBS' in 'ebbs'"
    assert drawn["warning"].tolist() == [None, None, None, warning, None]


def test_loading_a_version_loads_its_model_and_not_its_first_prediction(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = []
    monkeypatch.setattr(
        evaluation, "load_model", lambda *given: loads.append(given) or load_model(*given)
    )
    evaluation._load_policy_model.cache_clear()
    model = mlflow.pyfunc.load_model(str(served.model))
    assert len(loads) == 1
    model.predict(pd.DataFrame({"prompt": ["EBBS"]}))
    assert len(loads) == 1


def test_an_image_that_cannot_be_read_is_an_error_of_its_row(served: Served) -> None:
    rows = pd.DataFrame({"prompt": ["EBBS"] * 3, "image": [None, b"png", "/etc/hostname"]})
    drawn = ServedPolicy(served.base, served.policy).predict(rows)
    assert [image is None for image in drawn["image"]] == [False, True, True]
    assert drawn["error"][1].startswith("image is no PNG or JPEG or WEBP image that can be read")
    assert drawn["error"][2] == "image is no bytes; give the content of an image file"


def test_nothing_is_predicted_of_nothing(served: Served) -> None:
    drawn = ServedPolicy(served.base, served.policy).predict(pd.DataFrame({"prompt": []}))
    assert (len(drawn), list(drawn.columns)) == (0, ["image", "error", "warning", "sound"])


# The command


def draw(*arguments: object, **environment: str) -> Result:
    return CliRunner().invoke(main, ["draw", *map(str, arguments)], env=environment)


def test_a_registered_model_is_drawn(served: Served, tmp_path: Path) -> None:
    done = draw(
        NAME,
        "EBBS",
        'a "B"',
        "--samples",
        2,
        "--seed",
        7,
        "--out",
        tmp_path / "out",
        MLFLOW_TRACKING_URI=served.uri,
    )
    assert done.exit_code == 0, done.output
    names = ["EBBS-7.png", "EBBS-8.png", "a-B-7.png", "a-B-8.png"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    assert done.stdout.splitlines() == [str(tmp_path / "out" / name) for name in names]
    assert done.stderr.count("it was trained on 4 capital letters A-Z and reads 'AB'") == 2
    predicted = mlflow.pyfunc.load_model(str(served.model)).predict(
        pd.DataFrame({"prompt": ["EBBS"], "seed": [8]})
    )
    drawn = Image.open(tmp_path / "out" / "EBBS-8.png")
    same = Image.open(io.BytesIO(predicted["image"][0]))
    assert max(abs(a - b) for a, b in zip(drawn.tobytes(), same.tobytes(), strict=True)) <= 1


def test_a_policy_folder_is_drawn_with_the_base_of_its_run(served: Served, tmp_path: Path) -> None:
    nodes = tmp_path / "run" / "nodes"
    policy = Path(shutil.copytree(served.policy, nodes / "1.1-online" / "policy"))
    elsewhere = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/elsewhere.db"}
    refused = draw(policy, "EBBS", "--out", tmp_path / "out", **elsewhere)
    assert (refused.exit_code, (tmp_path / "out").exists()) == (1, False)
    assert (
        "neither in its run nor in a registered version; give its folder with --base"
        in refused.output
    )
    registered = draw(
        policy, "EBBS", "--out", tmp_path / "registered", MLFLOW_TRACKING_URI=served.uri
    )
    assert registered.exit_code == 0, registered.output
    named = draw(policy, "EBBS", "--out", tmp_path / "named", "--base", served.base)
    shutil.copytree(served.base, nodes / "base-model" / "base")
    found = draw(policy, "EBBS", "--out", tmp_path / "found", **elsewhere)
    assert (named.exit_code, found.exit_code) == (0, 0), named.output + found.output
    (picture,) = {
        (tmp_path / folder / "EBBS-0.png").read_bytes()
        for folder in ("named", "found", "registered")
    }
    assert picture.startswith(b"\x89PNG")


def test_no_file_is_overwritten(served: Served, tmp_path: Path) -> None:
    (tmp_path / "EBBS-0.png").write_text("somebody's")
    (tmp_path / "EBBS-0-2.png").symlink_to(tmp_path / "nothing")
    command = (served.policy, "EBBS", "--out", tmp_path, "--base", served.base)
    for _ in range(2):  # the second time the picture is there already
        done = draw(*command)
        assert done.stdout.split() == [str(tmp_path / "EBBS-0-3.png")]
    assert (tmp_path / "EBBS-0.png").read_text() == "somebody's"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "EBBS-0-2.png",
        "EBBS-0-3.png",
        "EBBS-0.png",
    ]


def test_sound_is_written_beside_its_picture_and_overwrites_nothing(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = Sounds(np.arange(-50, 50, dtype=np.int16).reshape(1, 50, 2), 24000)
    monkeypatch.setattr(evaluation, "decode_sounds", lambda *_: sound)
    (tmp_path / "EBBS-0.wav").write_text("somebody's")
    command = (served.policy, "EBBS", "--out", tmp_path, "--base", served.base)
    for _ in range(2):  # the second time both files are there already
        done = draw(*command)
        assert done.stdout.split() == [str(tmp_path / "EBBS-0-2.png")]
    assert (tmp_path / "EBBS-0.wav").read_text() == "somebody's"
    assert (tmp_path / "EBBS-0-2.wav").read_bytes() == encode_wavs(sound)[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "EBBS-0-2.png",
        "EBBS-0-2.wav",
        "EBBS-0.wav",
    ]


def test_an_image_to_edit_that_cannot_be_read_is_named(served: Served, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole.png", tmp_path / "broken.png"
    Image.new("RGB", (8, 8)).save(whole)
    broken.write_bytes(b"text")
    options = ("--image", whole, "--image", broken, "--base", served.base)
    failed = draw(served.policy, "EBBS", "--out", tmp_path / "out", *options)
    assert failed.exit_code == 1
    assert f"--image {whole}, {broken} at position 2 is no PNG or JPEG" in failed.output


def test_names_of_files_are_safe(served: Served, tmp_path: Path) -> None:
    prompts = ["../../AB", "/", "-A", "水 A", "A" * 3 + "/" * 300]
    done = draw(served.policy, "--out", tmp_path / "out", "--base", served.base, "--", *prompts)
    assert done.exit_code == 0, done.output
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"AB-0.png", "prompt-0.png", "A-0.png", "水-A-0.png", "AAA-0.png"}


def test_a_prompt_that_cannot_be_drawn_is_reported_and_the_others_are_drawn(
    served: Served, tmp_path: Path
) -> None:
    done = draw(served.policy, "EBBS", "TOOLONG", "--out", tmp_path, "--base", served.base)
    assert done.exit_code == 1
    assert [path.name for path in tmp_path.iterdir()] == ["EBBS-0.png"]
    assert f"TOOLONG: not drawn\n  {TOO_LONG}\n" in done.stderr
    assert "1 of 2 pictures could not be drawn" in done.output


def test_a_model_that_is_not_there_is_named(served: Served, tmp_path: Path) -> None:
    done = draw("nobody", "EBBS", "--out", tmp_path, MLFLOW_TRACKING_URI=served.uri)
    assert (done.exit_code, "no version of 'nobody' has the alias 'champion'" in done.output) == (
        1,
        True,
    )


# What is printed for people


def test_the_line_that_loads_a_version_loads_it(served: Served) -> None:
    names = {}
    with restored_tracking_uri():
        exec(how_to_load(served.uri, NAME, served.version), names)
    assert (
        names["model"]
        .predict(pd.DataFrame({"prompt": ["EBBS"]}))["image"][0]
        .startswith(b"\x89PNG")
    )


def test_the_line_that_draws_draws(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store, command, *arguments = shlex.split(
        how_to_draw(served.uri, NAME, served.version, '"EBBS"')
    )
    key, _, value = store.partition("=")
    assert (command, arguments[0]) == ("ebbflow", "draw")
    assert CliRunner().invoke(main, arguments, env={key: value}).exit_code == 0
    assert (tmp_path / "drawn" / "EBBS-0.png").is_file()


# The page


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", DOCS.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture
def workplace(served: Served, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where a run was, with the environment that the page asks for."""
    (tmp_path / "runs").symlink_to(store, target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    (name, value), *_ = [
        line.removeprefix("export ").split("=", 1) for line in blocks("sh")[0].splitlines()
    ]
    monkeypatch.setenv(name, value)
    return tmp_path


def test_the_command_of_the_page_draws_what_the_page_says(workplace: Path) -> None:
    (command,) = [block for block in blocks("sh") if block.startswith("ebbflow draw")]
    done = CliRunner().invoke(main, shlex.split(command)[1:])
    assert done.exit_code == 0, done.output
    written = [path.name for path in sorted((workplace / "pictures").iterdir())]
    assert written == re.findall(r"(\w+-\d\.png)`", DOCS.read_text())[:4]


def test_the_python_of_the_page_prints_what_the_page_says(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with restored_tracking_uri():
        exec(blocks("python")[0], {})
    assert capsys.readouterr().out == blocks("output")[0]
    assert sorted(path.name for path in workplace.glob("*.png")) == ["0.png", "1.png", "3.png"]


def test_the_request_of_the_page_is_answered_as_the_page_says(
    served: Served, workplace: Path
) -> None:
    """The server's own application, in this process: ``mlflow models serve`` runs it."""
    (shown,) = [block for block in blocks("sh") if block.startswith("curl")]
    request, _, picture = shown.partition("\npython")
    curl = shlex.split(request.replace("\\\n", " "))
    headers = dict([curl[curl.index("-H") + 1].split(": ")])
    client = TestClient(scoring_server.init(mlflow.pyfunc.load_model(str(served.model))))
    answer = client.post("/invocations", content=curl[curl.index("-d") + 1], headers=headers)
    assert answer.status_code == 200, answer.text
    first, second = answer.json()["predictions"]
    assert size(base64.b64decode(first["image"])) == (32, 16)
    assert second == {"image": None, "error": TOO_LONG, "warning": None, "sound": None}
    Path(curl[curl.index("-o") + 1]).write_bytes(answer.content)
    exec(shlex.split(picture)[1], {})
    assert size((workplace / "EBBS.png").read_bytes()) == (32, 16)


def test_a_video_with_sound_is_answered_with_a_wav_file_over_http(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    pcm = np.arange(200, dtype=np.int16).reshape(2, 50, 2)
    sounds = Sounds(pcm, 24000)
    monkeypatch.setattr(evaluation, "decode_sounds", lambda *_: sounds)
    client = TestClient(scoring_server.init(mlflow.pyfunc.load_model(str(served.model))))
    rows = [{"prompt": name, "seed": seed} for name, seed in (("EBBS", 0), ("A", -1), ("FLOW", 0))]
    answer = client.post("/invocations", json={"dataframe_records": rows})
    first, second, third = answer.json()["predictions"]
    assert second["sound"] is None
    heard = [base64.b64decode(row["sound"]) for row in (first, third)]
    assert heard == encode_wavs(sounds)
    # The picture has the same sound, for ``convert_to_movie``.
    assert [read_sound(base64.b64decode(row["image"])) for row in (first, third)] == heard
