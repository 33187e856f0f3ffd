"""``pyflyte run --remote`` and ``pyflyte package --copy all``: pods run the sources that were
uploaded, or refuse to run.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from flyteidl.admin.task_pb2 import TaskSpec
from flyteidl.core.errors_pb2 import ErrorDocument
from flyteidl.core.literals_pb2 import LiteralMap
from flyteidl.core.tasks_pb2 import TaskTemplate
from flytekit import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from google.protobuf.json_format import MessageToDict

from ebbflow.recipe import Recipe
from ebbflow.storage.sources import SUBMITTED, SourcesError, check_sources, write_digests
from tasks import resources, sources
from tasks.deployment import DeploymentConfig
from tasks.sources import (
    ENGINE_SIDE,
    _iterate_own_packages,
    describe_submitted_commit,
    describe_submitted_sources,
)
from tests.forked import run_forked
from tests.pipeline.conftest import PYFLYTE, ROOT

TASK = "tasks.plan_run.plan_run"
EDIT = ('return "\\n\\n".join([', 'return "\\n\\n".join(["EDITED", ')
COPIED = (".dockerignore", "pyproject.toml", "constraints.txt", "containers", "datasets")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of the user's with an edited file, and a package of their own."""
    folder = tmp_path_factory.mktemp("clone")
    for name in (*COPIED, "ebbflow", "tasks", "workflows"):
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(ROOT / name, folder)
    edited = folder / "tasks" / "plan_run.py"
    text = edited.read_text()
    assert text.count(EDIT[0]) == 1
    edited.write_text(text.replace(*EDIT))
    (folder / "mine").mkdir()
    (folder / "mine" / "reward.py").write_text("LIMIT = 1\n")
    with (folder / ".dockerignore").open("a") as patterns:
        patterns.write("!mine\n")
    return folder


@pytest.fixture(scope="module")
def package(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``pyflyte package`` makes of the clone: templates, and the upload."""
    archive = tmp_path_factory.mktemp("package") / "flyte.tgz"
    command = [
        *[sys.executable, str(PYFLYTE), "--pkgs", "workflows", "package", "--copy", "all"],
        *["--image", "ebbflow:test", "--source", ".", "--output", str(archive)],
    ]
    # No fork: it would have imported Ebbflow from here.
    environment = os.environ | {"PYTHONPATH": str(clone)}
    done = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(archive) as opened:
        opened.extractall(archive.parent, filter="data")
    return archive.parent


@pytest.fixture(scope="module")
def task(package: Path) -> TaskTemplate:
    (file,) = package.glob(f"*{TASK}_1.pb")
    return TaskSpec.FromString(file.read_bytes()).template


def _container(task: TaskTemplate) -> dict[str, Any]:
    (container,) = MessageToDict(task.k8s_pod.pod_spec)["containers"]
    return container


def _run_pod(task: TaskTemplate, package: Path, folder: Path, **environment: str) -> str:
    """Run the task's container as Flyte does, in an image whose sources are those of this clone;
    the text of its output or of its error.
    """
    context = FlyteContextManager.current_context()
    recipe = TypeEngine.to_literal(
        context, Recipe(), Recipe, TypeEngine.to_literal_type(Recipe)
    ).to_flyte_idl()
    inputs = folder / "inputs.pb"
    inputs.write_bytes(LiteralMap(literals={"recipe": recipe}).SerializeToString())
    (upload,) = package.glob("fast*.tar.gz")
    values = {
        "{{ .remote_package_path }}": str(upload),
        # Where ``pyflyte package`` has a pod unpack the upload: here, a folder of the test's own.
        "/root": str(folder / "code"),
        "{{.input}}": str(inputs),
        "{{.outputPrefix}}": str(folder / "outputs"),
        "{{.rawOutputDataPrefix}}": str(folder / "raw"),
        "{{.checkpointOutputPrefix}}": str(folder / "checkpoints"),
        "{{.prevCheckpointPrefix}}": "",
    }
    container = _container(task)
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    machine = {"PATH": f"{PYFLYTE.parent}{os.pathsep}{os.defpath}", "HOME": str(folder)}
    code = folder / "code"
    code.mkdir()
    done = subprocess.run(
        [values.get(argument, argument) for argument in container["args"]],
        cwd=code,
        env=machine | variables | environment,
        capture_output=True,
        text=True,
    )
    error = folder / "outputs" / "error.pb"
    if error.exists():
        return ErrorDocument.FromString(error.read_bytes()).error.message
    outputs = folder / "outputs" / "outputs.pb"
    assert outputs.exists(), done.stdout + done.stderr
    literals = LiteralMap.FromString(outputs.read_bytes()).literals
    return literals["o0"].scalar.primitive.string_value


def test_a_pod_runs_the_uploaded_sources(task: TaskTemplate, package: Path, tmp_path: Path) -> None:
    assert _run_pod(task, package, tmp_path).startswith("EDITED")


def test_a_pod_refuses_the_sources_of_its_image(
    task: TaskTemplate, package: Path, tmp_path: Path
) -> None:
    # As where the deployment's ``env`` has one, which comes before the upload.
    message = _run_pod(task, package, tmp_path, PYTHONPATH=str(ROOT))
    assert message.startswith("SourcesError: this pod runs other code than was submitted: tasks is")
    assert f"in {ROOT / 'tasks'}" in message
    assert "ebbflow is" not in message, "it is the same in both"
    assert "--copy all" in message


def test_uploads_go_into_a_volume_that_any_user_can_write(task: TaskTemplate) -> None:
    pod = MessageToDict(task.k8s_pod.pod_spec)
    container = _container(task)
    (mount,) = (one for one in container["volumeMounts"] if one["name"] == "code")
    assert container["workingDir"] == mount["mountPath"]
    assert {"name": "code", "emptyDir": {}} in pod["volumes"]
    # Flyte appends the upload to the image's own, where a pod has none.
    variables = {one["name"]: one["value"] for one in container["env"]}
    assert variables["PYTHONPATH"] == mount["mountPath"]


def test_own_packages_are_submitted_if_they_are_uploaded(clone: Path, task: TaskTemplate) -> None:
    variables = {one["name"]: one["value"] for one in _container(task)["env"]}
    submitted = json.loads(variables[SUBMITTED])
    assert set(submitted) == {"ebbflow", "tasks", "workflows", "mine", ENGINE_SIDE}
    (clone / "not_uploaded").mkdir(exist_ok=True)
    (clone / "not_uploaded" / "code.py").touch()
    assert [name for name, _ in _iterate_own_packages(clone)] == ["mine"]


def test_what_installing_the_engines_project_leaves_is_no_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image of rollouts installs it as editable, and a clone may have, too."""
    project = tmp_path / Path(ENGINE_SIDE).parts[0] / Path(ENGINE_SIDE).parts[1]
    shutil.copytree(ROOT / "containers" / "vllm_omni", project)
    shutil.rmtree(project / "ebbflow_vllm_omni.egg-info", ignore_errors=True)
    monkeypatch.setattr(sources, "CLONE", tmp_path)
    submitted = describe_submitted_sources()
    (project / "ebbflow_vllm_omni.egg-info").mkdir()
    (project / "ebbflow_vllm_omni.egg-info" / "SOURCES.txt").write_text("pyproject.toml")
    assert describe_submitted_sources() == submitted
    (tmp_path / ENGINE_SIDE / "__init__.py").write_text("EDITED = True")
    assert describe_submitted_sources() != submitted


def test_a_process_refuses_another_package_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "my_rewards"
    package.mkdir()
    (package / "__init__.py").write_text("WEIGHT = 1\n")
    submitted = {SUBMITTED: write_digests({"my_rewards": package})}
    check_sources(submitted)  # not here: a recipe that names it says so
    monkeypatch.syspath_prepend(tmp_path)
    check_sources(submitted)
    (package / "judge.txt").write_text("Rate the picture.")
    with pytest.raises(SourcesError, match=rf"my_rewards is \w+ in {package}, \w+ was submitted"):
        check_sources(submitted)
    check_sources({})


def _refuse(*options: str, recipe: Path, clone: Path = ROOT) -> str:
    run = [str(PYFLYTE), "run", "--remote", *options, "workflows/post_training.py", "post_train"]
    command = [*run, "--recipe", str(recipe)]
    environment = os.environ | {"COLUMNS": "400"}
    if clone == ROOT:
        done = run_forked(command, cwd=ROOT, env=environment, timeout=300)
    else:
        # No fork: it would have imported Ebbflow from here.
        environment["PYTHONPATH"] = str(clone)
        done = subprocess.run(
            [sys.executable, *command], cwd=clone, env=environment, capture_output=True, text=True
        )
    assert done.returncode != 0
    return " ".join((done.stdout + done.stderr).replace("│", " ").split())


def test_a_submission_without_all_sources_is_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("name: mine\n")
    assert "add --copy all" in _refuse(recipe=recipe)


def test_a_submission_with_a_reward_outside_the_clone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "outside.py").write_text("class Contrast: ...\n")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("rewards: [{name: 'outside:Contrast'}]\n")
    message = _refuse("--copy", "all", recipe=recipe)
    assert f"outside, which is in {tmp_path / 'outside.py'} and not uploaded" in message
    assert "move it beside the package ebbflow" in message


def test_a_submission_without_a_file_that_git_ignores_is_refused(
    clone: Path, tmp_path: Path
) -> None:
    """The clone runs with the file, and no pod would."""
    folder = tmp_path / "clone"
    shutil.copytree(clone, folder, symlinks=True)
    subprocess.run(["git", "-C", str(folder), "init", "-q"], check=True)
    (folder / ".gitignore").write_text("secret_*.py\n")
    (folder / "mine" / "secret_judge.py").write_text("LIMIT = 2\n")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("name: mine\n")
    message = _refuse("--copy", "all", recipe=recipe, clone=folder)
    assert "mine/secret_judge.py: 1 sources that this clone runs with are not uploaded" in message
    assert "git check-ignore -v FILE" in message


def test_a_pod_is_told_the_commit_that_was_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its image may have been built from another one."""
    monkeypatch.delenv(SUBMITTED, raising=False)
    monkeypatch.setenv("EBBFLOW_GIT_COMMIT", "of the image")
    monkeypatch.setattr(sources, "CLONE", tmp_path)
    assert describe_submitted_commit() == "of the image", "there is no repository"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "code.py").touch()
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *arguments], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
    assert describe_submitted_commit() == commit.stdout.strip()
    (tmp_path / "code.py").write_text("EDITED = True")
    assert describe_submitted_commit() == f"{commit.stdout.strip()}-dirty"
    monkeypatch.setenv(SUBMITTED, "{}")
    assert describe_submitted_commit() == "of the image", "a dynamic passes on what it was given"


def test_a_version_follows_the_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    """flytekit computes versions from the sources and the pod templates."""
    version = resources.light_resources()["pod_template"].version_hash()
    assert resources.light_resources()["pod_template"].version_hash() == version
    monkeypatch.setattr(resources, "DEPLOYMENT", DeploymentConfig(env={"A": "b"}))
    assert resources.light_resources()["pod_template"].version_hash() != version
