"""``ebbflow run``: what a person reads when a run ends early, and the environment that it runs
in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from flytekit.exceptions.user import FlyteRecoverableException, FlyteUserRuntimeException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from ebbflow import compute, launch
from ebbflow.recipe import Recipe, RecipeError
from ebbflow.rewards.base import RewardError

ROUNDS = "Error encountered while executing 'workflows.post_training.train_rounds':\n  "
IN_TASK = ROUNDS + "Error encountered while executing 'tasks.train_online.train_online':\n  "


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("TMPDIR", "PATH", "MLFLOW_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    for name in ("EBBFLOW_TRAIN_PROCESSES", "EBBFLOW_DEPLOYMENT"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_an_error_that_explains_itself_is_its_own_message() -> None:
    assert (
        launch.explain_error(RewardError(IN_TASK + "reward 'x' cannot run: install it"))
        == "train_online: reward 'x' cannot run: install it"
    )


def test_an_error_that_a_cluster_would_retry_is_the_message_of_the_task() -> None:
    error = FlyteRecoverableException("train_online: process 1 of this node ended by SIGKILL")
    error.args = (f"{IN_TASK}{error}",)  # as Flyte does at each level
    assert launch.explain_error(error) == "train_online: process 1 of this node ended by SIGKILL"


def test_any_other_error_has_its_type_and_a_traceback_in_a_file(tmp_path: Path) -> None:
    try:
        raise ValueError(IN_TASK + "no such thing")
    except ValueError as error:
        said = launch.explain_error(error).splitlines()
    file = tmp_path / f"ebbflow-{os.getuid()}" / f"traceback-{os.getpid()}.txt"
    assert said == [
        "train_online: ValueError: no such thing",
        f"the traceback is in {file}; --debug shows it",
    ]
    assert file.read_text().startswith("Traceback (most recent call last)")
    assert __file__ in file.read_text()


def test_where_no_file_can_be_written_the_error_is_told_all_the_same(tmp_path: Path) -> None:
    (tmp_path / f"ebbflow-{os.getuid()}").write_text("made by another user first")
    assert (
        launch.explain_error(ValueError("no such thing"))
        == "ValueError: no such thing\n--debug shows the traceback"
    )


def test_of_a_training_group_the_first_failure_is_said(tmp_path: Path) -> None:
    reply = tmp_path / "error.json"
    message = {
        "message": "TrainingError: the loss is NaN",
        "extraInfo": {"timestamp": "7", "py_callstack": "..."},
    }
    reply.write_text(json.dumps({"message": message}))
    failed = ChildFailedError("spawn_helper", {1: ProcessFailure(1, 99, 1, str(reply))})
    error = FlyteUserRuntimeException(failed)
    error.args = (
        (
            f"{ROUNDS}Error encountered while executing 'tasks.train_offline.train_offline':\n "
            f" {error}"
        ),
    )
    assert (
        launch.explain_error(error).splitlines()[0]
        == "train_offline: TrainingError: the loss is NaN"
    )


def test_temporary_files_lie_in_the_output_folder(tmp_path: Path) -> None:
    launch._prepare_environment(Recipe(output=str(tmp_path / "runs")))
    assert os.environ["TMPDIR"] == tempfile.gettempdir() == str(tmp_path / "runs" / "flyte")
    assert Path(tempfile.gettempdir()).is_dir()
    assert os.environ["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)


@pytest.fixture
def three_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a driver and three GPUs."""
    monkeypatch.setattr(compute, "DRIVER_SIGNS", (tmp_path,))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)


def test_a_local_run_trains_with_a_process_for_each_gpu(tmp_path: Path, three_gpus: None) -> None:
    launch._prepare_environment(Recipe(output=str(tmp_path / "runs")))
    assert os.environ["EBBFLOW_TRAIN_PROCESSES"] == "3"


def test_one_sign_of_a_driver_is_enough_to_count_gpus(
    tmp_path: Path, three_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute, "DRIVER_SIGNS", (tmp_path / "none", tmp_path))
    assert compute.count_gpus() == 3


def test_a_local_run_without_a_driver_trains_with_two_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute, "DRIVER_SIGNS", (tmp_path / "none",))
    launch._prepare_environment(Recipe(output=str(tmp_path / "runs")))
    assert os.environ["EBBFLOW_TRAIN_PROCESSES"] == "2"


@pytest.mark.parametrize(
    ("variable", "processes"), [("EBBFLOW_TRAIN_PROCESSES", "5"), ("EBBFLOW_DEPLOYMENT", "")]
)
def test_a_local_run_keeps_the_processes_that_the_environment_or_a_deployment_names(
    tmp_path: Path,
    three_gpus: None,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    processes: str,
) -> None:
    monkeypatch.setenv(variable, "5")
    launch._prepare_environment(Recipe(output=str(tmp_path / "runs")))
    assert os.environ["EBBFLOW_TRAIN_PROCESSES"] == processes


def test_an_output_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        RecipeError, match=r"output = .*file/runs.* cannot be written .*set another folder"
    ):
        launch._prepare_environment(Recipe(output=str(tmp_path / "file" / "runs")))


def test_a_run_that_is_started_in_the_root_folder_leaves_nothing_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir("/")
    name = "ebbflow-test-of-the-root-folder"
    with pytest.raises(RecipeError, match="as the working directory is /"):
        launch._prepare_environment(Recipe(output=name))
    assert not Path("/", name).exists()


INTERRUPTED = """
import os, signal, sys
from pathlib import Path
from ebbflow import launch, resume
sys.argv = ["/somewhere/bin/ebbflow", "run", "my recipe.yaml"]
Path(sys.argv[2]).write_text("name: mine")
def interrupt(recipe):
    if OPENED:
        resume.remember_run_folder("runs/mine-1")
    os.kill(os.getpid(), signal.SIGINT)
launch._prepare_environment = interrupt
launch.launch_recipe(Path(sys.argv[2]), debug=False)
"""


@pytest.mark.parametrize(
    ("opened", "said"),
    [
        (
            False,
            [
                "interrupted before the run was opened",
                "start again with: ebbflow run 'my recipe.yaml'",
            ],
        ),
        (
            True,
            [
                "interrupted",
                "runs/mine-1 keeps what is finished; resume with: ebbflow run 'my recipe.yaml'",
            ],
        ),
    ],
)
def test_ctrl_c_ends_in_two_lines(tmp_path: Path, opened: bool, said: list[str]) -> None:
    program = f"OPENED = {opened}\n{INTERRUPTED}"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 130
    assert done.stderr.strip().splitlines() == said
