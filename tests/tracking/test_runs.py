"""Runs against a real SQLite store: retries resume, metrics never appear twice, and a store that is
away stops nothing.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest
import yaml
from fsspec.implementations.local import LocalFileSystem
from mlflow import MlflowClient
from PIL import Image

from ebbflow.data.records import TrackedRun
from ebbflow.recipe import Recipe
from ebbflow.resume import InterruptedAttempt
from ebbflow.tracking import parent_run, pending
from ebbflow.tracking.child_run import open_node_run
from ebbflow.tracking.delivery import MAX_PARAM_LENGTH, flatten_settings
from ebbflow.tracking.outage import deliver_saved_records
from ebbflow.tracking.parent_run import finish_run, start_run
from ebbflow.tracking.pending import PendingRecords
from ebbflow.tracking.store import (
    TrackingError,
    allow_long_uploads,
    check_store,
    connect_to_store,
    resolve_tracking_uri,
)
from ebbflow.training.stop_conditions import Preempted, handle_sigterm


def test_the_store_is_the_recipes_else_the_environments_else_a_file_in_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe(output=str(tmp_path))
    assert resolve_tracking_uri(recipe) == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://server:5000")
    assert resolve_tracking_uri(recipe) == "http://server:5000"
    named = recipe.model_copy(
        update={"tracking": recipe.tracking.model_copy(update={"uri": "http://other:5000"})}
    )
    assert resolve_tracking_uri(named) == "http://other:5000"


def test_a_remote_output_needs_a_server() -> None:
    with pytest.raises(TrackingError, match=r"s3://bucket/runs is no local folder.*tracking\.uri"):
        resolve_tracking_uri(Recipe(output="s3://bucket/runs"))


def test_the_parent_run_carries_the_recipe(
    recipe: Recipe, tracked: TrackedRun, client: MlflowClient
) -> None:
    run = client.get_run(tracked.run_id)
    assert run.data.params["stages.1.algorithm.name"] == "diffusion_nft"
    assert run.data.params["guardrails.0.name"] == "tesseract"
    assert run.data.tags["ebbflow.recipe_digest"] == recipe.digest == tracked.recipe_digest
    assert "online mix_grpo" in run.data.tags["mlflow.note.content"]
    [logged] = Path(recipe.output, "mlartifacts").rglob(f"{tracked.run_id}/artifacts/recipe.yaml")
    assert Recipe.model_validate(yaml.safe_load(logged.read_text())) == recipe
    assert Path(tracked.folder).parent == Path(recipe.output)


def test_the_parent_run_says_who_ran_what(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "ada")
    run = start_run(recipe, None, source="workflows/post_training.py")
    tags = connect_to_store(run.tracking_uri).get_run(run.run_id).data.tags
    assert (tags["mlflow.user"], tags["mlflow.source.name"], tags["mlflow.source.type"]) == (
        "ada",
        "workflows/post_training.py",
        "LOCAL",
    )
    git = ["git", "-C", str(Path(__file__).parent)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
    if commit.returncode == 0:
        assert tags["mlflow.source.git.commit"] == commit.stdout.strip()
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD"]).returncode != 0
        assert ("ebbflow.uncommitted_changes" in tags) == changed


def test_a_run_in_a_pod_has_the_commit_of_its_image(
    recipe: Recipe, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod has no repository, and its image may have no git."""
    monkeypatch.setattr(parent_run, "get_git_commit", lambda path: None)
    for value, is_dirty in (("c" * 40, False), (f"{'c' * 40}-dirty", True)):
        monkeypatch.setenv("EBBFLOW_GIT_COMMIT", value)
        tracked = start_run(recipe, None)
        tags = client.get_run(tracked.run_id).data.tags
        assert tags["mlflow.source.git.commit"] == "c" * 40
        assert ("ebbflow.uncommitted_changes" in tags) == is_dirty


def test_runs_of_a_recipe_have_names_of_their_own(recipe: Recipe, client: MlflowClient) -> None:
    seeded = recipe.model_copy(update={"seed": 7})
    one, other = (start_run(seeded, None) for _ in range(2))
    names = [client.get_run(run.run_id).info.run_name for run in (one, other)]
    assert names == [f"glyph-seed7-{run.run_id[:8]}" for run in (one, other)]
    assert [Path(run.folder).name[-8:] for run in (one, other)] == [name[-8:] for name in names]


def test_a_name_that_the_user_gave_a_run_stays(
    recipe: Recipe, tracked: TrackedRun, client: MlflowClient
) -> None:
    client.update_run(tracked.run_id, name="the good one")
    start_run(recipe, client.get_run(tracked.run_id).data.tags["flyte.execution_id"])
    assert client.get_run(tracked.run_id).info.run_name == "the good one"


def test_the_experiment_says_that_it_trains_models(
    store: Path, tracked: TrackedRun, client: MlflowClient
) -> None:
    kind = "mlflow.experimentKind"
    assert client.get_experiment(tracked.experiment_id).tags[kind] == "custom_model_development"
    older = client.create_experiment(f"older-{uuid.uuid4().hex[:8]}")
    recipe = Recipe.model_validate(
        {"output": str(store), "tracking": {"experiment": client.get_experiment(older).name}}
    )
    start_run(recipe, None)
    assert client.get_experiment(older).tags[kind] == "custom_model_development"
    client.set_experiment_tag(older, kind, "finetuning")
    start_run(recipe, None)
    assert client.get_experiment(older).tags[kind] == "finetuning", "what the user chose stays"


def test_a_retry_of_the_same_execution_resumes_its_parent_run(
    recipe: Recipe, tracked: TrackedRun, client: MlflowClient
) -> None:
    execution = client.get_run(tracked.run_id).data.tags["flyte.execution_id"]
    finish_run(tracked, "FAILED")
    assert start_run(recipe, execution) == tracked
    assert client.get_run(tracked.run_id).info.status == "RUNNING"
    finish_run(tracked, "FINISHED")
    assert client.get_run(tracked.run_id).info.status == "FINISHED"


def test_without_an_execution_every_start_is_a_new_run(recipe: Recipe) -> None:
    assert start_run(recipe, None).run_id != start_run(recipe, None).run_id


def test_one_execution_cannot_change_its_recipe(
    recipe: Recipe, tracked: TrackedRun, client: MlflowClient
) -> None:
    execution = client.get_run(tracked.run_id).data.tags["flyte.execution_id"]
    with pytest.raises(TrackingError, match="a changed recipe needs a new execution"):
        start_run(recipe.model_copy(update={"seed": 1}), execution)


def test_a_child_is_resumed_and_ends_as_its_body_ends(
    tracked: TrackedRun, client: MlflowClient
) -> None:
    def attempt(fails: bool) -> str:
        with open_node_run(tracked, "train") as run_logger:
            assert run_logger.run_id is not None
            assert client.get_run(run_logger.run_id).info.status == "RUNNING"
            if fails:
                raise RuntimeError("preempted")
        return run_logger.run_id

    with pytest.raises(RuntimeError, match="preempted"):
        attempt(fails=True)
    children = client.search_runs(
        [tracked.experiment_id], f"tags.`mlflow.parentRunId` = '{tracked.run_id}'"
    )
    assert [child.info.status for child in children] == ["FAILED"]
    assert attempt(fails=False) == children[0].info.run_id
    assert client.get_run(children[0].info.run_id).info.status == "FINISHED"


def test_an_interrupted_child_is_killed_until_another_attempt_goes_on(
    tracked: TrackedRun, client: MlflowClient
) -> None:
    """An abort in Flyte's console ends a stage in this way, and no attempt follows."""

    def read_statuses() -> set[str]:
        runs = client.search_runs([tracked.experiment_id])
        return {run.info.status for run in runs if run.info.run_id in (child_id, tracked.run_id)}

    with (
        pytest.raises(Preempted, match="SIGTERM"),
        open_node_run(tracked, "train", first_step=0) as run_logger,
    ):
        raise Preempted("train was preempted (SIGTERM)")
    child_id = run_logger.run_id
    assert read_statuses() == {"KILLED"}
    with open_node_run(tracked, "train", first_step=0) as run_logger:
        assert run_logger.run_id == child_id
        assert read_statuses() == {"RUNNING"}


def test_a_sigterm_that_the_last_stage_could_not_obey_ends_the_run_at_its_next_node(
    tracked: TrackedRun, client: MlflowClient
) -> None:
    with open_node_run(tracked, "1.1 online"), handle_sigterm():
        os.kill(os.getpid(), signal.SIGTERM)
    with (
        pytest.raises(InterruptedAttempt, match="SIGTERM came before evaluation began; "),
        open_node_run(tracked, "evaluation"),
    ):
        raise AssertionError("the node has begun")
    # Obeyed: the next attempt in this process goes on.
    with open_node_run(tracked, "evaluation"):
        pass


def test_a_node_has_tags_of_its_process_and_a_retry_replaces_them(
    tracked: TrackedRun, client: MlflowClient
) -> None:
    for device in ("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"):
        with open_node_run(tracked, "train") as run_logger:
            run_logger.log_tags({"ebbflow.device": device, "ebbflow.cuda": "13.0"})
    assert run_logger.run_id is not None
    tags = client.get_run(run_logger.run_id).data.tags
    assert (tags["ebbflow.device"], tags["ebbflow.cuda"]) == ("NVIDIA H100 80GB HBM3", "13.0")


def test_runs_of_other_people_below_the_parent_are_passed_over(
    tracked: TrackedRun, client: MlflowClient
) -> None:
    parent = {"mlflow.parentRunId": tracked.run_id}
    for tags in ({}, {"ebbflow.node": "twice"}, {"ebbflow.node": "twice"}):
        client.create_run(tracked.experiment_id, tags=parent | tags)
    assert deliver_saved_records(tracked) == []


def test_pictures_tables_datasets_and_files_survive_a_retry_once(
    tracked: TrackedRun, client: MlflowClient, tmp_path: Path
) -> None:
    table = pa.table(
        {"prompt_id": [1, 2], "prompt": ["AB", "CD"], "image": pa.array([b"x", b"y"], pa.binary())}
    )
    (tmp_path / "note.txt").write_text("hello")
    for _ in range(2):
        with open_node_run(tracked, "evaluate") as run_logger:
            for key in ("grid", "grid/noise"):
                run_logger.log_image(key, Image.new("RGB", (8, 8)), step=3)
            run_logger.log_table("rewards/held_out", table)
            run_logger.log_dataset(
                "held-out prompts", table, context="evaluation", source=str(tmp_path)
            )
            run_logger.log_artifact(tmp_path / "note.txt", "notes")
            run_logger.log_file("dumps/step-00000/bytes.bin", b"\x00\xff")
            run_logger.log_file("timeline.json", b"{}")
    images = [
        entry.path
        for entry in client.list_artifacts(run_logger.run_id, "images")
        if entry.path.endswith(".png")
    ]
    assert len(images) == 2
    logged = json.loads(
        Path(client.download_artifacts(run_logger.run_id, "rewards/held_out.json")).read_text()
    )
    assert logged["columns"] == ["prompt_id", "prompt"]
    assert logged["data"] == [[1, "AB"], [2, "CD"]]
    inputs = client.get_run(run_logger.run_id).inputs.dataset_inputs
    assert [(entry.dataset.name, entry.tags[0].value) for entry in inputs] == [
        ("held-out prompts", "evaluation")
    ]
    assert (
        Path(client.download_artifacts(run_logger.run_id, "notes/note.txt")).read_text() == "hello"
    )
    assert (
        Path(
            client.download_artifacts(run_logger.run_id, "dumps/step-00000/bytes.bin")
        ).read_bytes()
        == b"\x00\xff"
    )
    assert Path(client.download_artifacts(run_logger.run_id, "timeline.json")).read_bytes() == b"{}"


def test_a_file_that_is_not_there_is_the_callers_error(tracked: TrackedRun, tmp_path: Path) -> None:
    with (
        pytest.raises(FileNotFoundError, match="no file at"),
        open_node_run(tracked, "files") as run_logger,
    ):
        run_logger.log_artifact(tmp_path / "missing.txt")


def test_a_server_that_is_down_is_named_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    with pytest.raises(
        TrackingError, match=rf"127\.0\.0\.1:{port} does not answer.*(?s:.*)MLFLOW_TRACKING_URI"
    ):
        start_run(Recipe(output=str(tmp_path)), None)


def test_a_database_without_its_driver_is_told_which_package_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)  # as if it were not installed
    with pytest.raises(
        TrackingError,
        match=r"needs the database driver psycopg, .* `pip install 'ebbflow\[postgresql\]'`",
    ):
        check_store("postgresql://mlflow@127.0.0.1:1/mlflow")


def test_waiting_for_a_server_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in ("MAX_RETRIES", "BACKOFF_FACTOR", "TIMEOUT"):
        monkeypatch.delenv(f"MLFLOW_HTTP_REQUEST_{name}", raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "33")
    connect_to_store("http://127.0.0.1:9")
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "2"
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "33", "what the user has set stays"
    assert os.environ["MLFLOW_ALLOW_PICKLE_DESERIALIZATION"] == "false"


@pytest.mark.parametrize(("usual", "during"), [("10", "3600"), ("7200", "7200")])
def test_an_upload_has_an_hour(monkeypatch: pytest.MonkeyPatch, usual: str, during: str) -> None:
    import os

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", usual)
    with suppress(ConnectionError), allow_long_uploads():
        seen = os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"]
        raise ConnectionError
    assert (seen, os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"]) == (during, usual)


def test_a_sqlite_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(
        TrackingError,
        match=r"cannot write the MLflow store .*mlflow\.db.*'output' to a writable folder",
    ):
        start_run(Recipe(output=str(tmp_path / "file")), None)


def test_a_file_that_is_no_sqlite_store_is_named(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("this is a text file, and a rather long one at that" * 50)
    with pytest.raises(TrackingError, match="not a database"):
        check_store(f"sqlite:///{tmp_path}/mlflow.db")


def test_a_deleted_experiment_is_named(store: Path) -> None:
    recipe = Recipe.model_validate({"output": str(store), "tracking": {"experiment": "gone"}})
    tracked = start_run(recipe, None)
    connect_to_store(tracked.tracking_uri).delete_experiment(tracked.experiment_id)
    with pytest.raises(TrackingError, match="'gone' was deleted"):
        start_run(recipe, None)


def test_params_are_flat_and_short_enough(tracked: TrackedRun, client: MlflowClient) -> None:
    assert flatten_settings({"a": {"b": [1, {"c": None}]}, "d": []}) == {
        "a.b.0": "1",
        "a.b.1.c": "None",
        "d": "[]",
    }
    with open_node_run(tracked, "long") as run_logger:
        run_logger.log_params({"text": "x" * 10_000})
    value = client.get_run(run_logger.run_id).data.params["text"]
    assert len(value) == MAX_PARAM_LENGTH
    assert value.endswith("(10000 characters)")


def test_an_attempt_that_was_killed_while_it_saved_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalFileSystem, "mv", killed)
    with pytest.raises(KeyboardInterrupt):
        pending.save_pending(str(tmp_path), PendingRecords("1.1 online"))
    assert list(tmp_path.rglob("*.unfinished"))
    assert pending.load_pending(str(tmp_path), "1.1 online") is None
    assert not list(tmp_path.rglob("*.unfinished"))
