"""Runs against a real SQLite store: retries resume, metrics never appear twice, and a store that is
away stops nothing.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from fsspec.implementations.local import LocalFileSystem
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import BAD_REQUEST
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


@pytest.fixture
def tracked(recipe: Recipe) -> TrackedRun:
    return start_run(recipe, f"execution-{uuid.uuid4().hex[:8]}")


@pytest.fixture
def client(tracked: TrackedRun) -> MlflowClient:
    return connect_to_store(tracked.tracking_uri)


def steps(client: MlflowClient, run_id: str, key: str) -> list[int]:
    return sorted(metric.step for metric in client.get_metric_history(run_id, key))


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


def test_steps_that_a_resumed_run_already_holds_are_not_logged_twice(
    tracked: TrackedRun, client: MlflowClient
) -> None:
    with open_node_run(tracked, "train") as run_logger:
        for step in range(1, 6):
            run_logger.log_metrics({"reward/mean": step / 10}, step)
    with open_node_run(tracked, "train") as run_logger:
        for step in range(4, 9):  # its checkpoint was two steps behind
            run_logger.log_metrics({"reward/mean": step / 10, "kl": 0.0}, step)
    assert steps(client, run_logger.run_id, "reward/mean") == list(range(1, 9))
    assert steps(client, run_logger.run_id, "kl") == list(range(4, 9)), (
        "a metric that is new after the resume is not held back"
    )


def test_a_node_has_tags_of_its_process_and_a_retry_replaces_them(
    tracked: TrackedRun, client: MlflowClient
) -> None:
    for device in ("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"):
        with open_node_run(tracked, "train") as run_logger:
            run_logger.log_tags({"ebbflow.device": device, "ebbflow.cuda": "13.0"})
    assert run_logger.run_id is not None
    tags = client.get_run(run_logger.run_id).data.tags
    assert (tags["ebbflow.device"], tags["ebbflow.cuda"]) == ("NVIDIA H100 80GB HBM3", "13.0")


def test_non_finite_values_are_counted_and_not_sent(
    tracked: TrackedRun, client: MlflowClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), open_node_run(tracked, "train") as run_logger:
        for step, value in enumerate([1.0, float("nan"), float("inf"), 2.0]):
            run_logger.log_metrics({"kl": value}, step)
    assert steps(client, run_logger.run_id, "kl") == [0, 3]
    assert json.loads(
        client.get_run(run_logger.run_id).data.tags["ebbflow.non_finite_metrics"]
    ) == {"kl": 2}
    assert sum("kl is nan" in message for message in caplog.messages) == 1


def test_metrics_travel_in_batches(tracked: TrackedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    send = MlflowClient.log_batch

    def counted(self: MlflowClient, run_id: str, metrics: list = (), **rest: object) -> object:  # type: ignore[assignment, type-arg]
        sizes.append(len(metrics))
        return send(self, run_id, metrics=metrics, **rest)

    monkeypatch.setattr(MlflowClient, "log_batch", counted)
    with open_node_run(tracked, "train") as run_logger:
        for step in range(300):
            run_logger.log_metrics({"a": 1.0, "b": 2.0}, step)
    assert sum(sizes) == 600
    assert len(sizes) <= 4


def test_a_store_that_goes_away_stops_nothing_and_gets_everything_later(
    tracked: TrackedRun,
    client: MlflowClient,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def away(*_: object, **__: object) -> None:
        raise ConnectionError("connection refused")

    with caplog.at_level(logging.WARNING), open_node_run(tracked, "train") as run_logger:
        with monkeypatch.context() as outage:
            for method in ("log_batch", "log_image", "search_runs", "get_metric_history"):
                outage.setattr(MlflowClient, method, away)
            for step in range(600):
                run_logger.log_metrics({"reward/mean": 0.5}, step)
            run_logger.log_image("samples", Image.new("RGB", (8, 8)), step=5)
            assert not run_logger.flush()
            assert steps_before_recovery(client, run_logger.run_id) == 0
        assert run_logger.flush()
        assert steps(client, run_logger.run_id, "reward/mean") == list(range(600))
        assert any(
            entry.path.startswith("images/samples+step+5")
            for entry in client.list_artifacts(run_logger.run_id, "images")
        )
    assert sum("is away" in message for message in caplog.messages) == 1
    assert client.get_run(run_logger.run_id).info.status == "FINISHED"


def steps_before_recovery(client: MlflowClient, run_id: str) -> int:
    return len(client.get_run(run_id).data.metrics)


def test_a_child_that_could_not_be_opened_is_opened_later(
    tracked: TrackedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as outage:
        outage.setattr(
            MlflowClient,
            "create_run",
            lambda *_, **__: (_ for _ in ()).throw(ConnectionError("refused")),
        )
        manager = open_node_run(tracked, "late")
        node = manager.__enter__()
        node.log_metrics({"loss": 1.0}, 1)
    assert node.run_id is None
    manager.__exit__(None, None, None)
    assert steps(connect_to_store(tracked.tracking_uri), node.run_id, "loss") == [1]


def test_what_is_too_much_to_keep_is_reported_as_lost(
    tracked: TrackedRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ebbflow.tracking.pending.MAX_METRICS", 3)
    monkeypatch.setattr(
        MlflowClient,
        "search_runs",
        lambda *_, **__: (_ for _ in ()).throw(ConnectionError("refused")),
    )
    with caplog.at_level(logging.WARNING), open_node_run(tracked, "lost") as run_logger:
        for step in range(5):
            run_logger.log_metrics({"loss": 1.0}, step)
    assert run_logger.pending.lost == 2
    assert "3 metrics and 0 other records wait in" in caplog.text
    assert "2 metrics are lost" in caplog.text


def test_what_mlflow_refuses_does_not_block_the_rest(
    tracked: TrackedRun, client: MlflowClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), open_node_run(tracked, "train") as run_logger:
        run_logger.log_params({"lr": 0.1})
        run_logger.log_params({"lr": 0.2})  # parameters are immutable
        run_logger.log_metrics({"loss": 1.0}, 1)
    assert "refuses params" in caplog.text
    assert client.get_run(run_logger.run_id).data.params == {"lr": "0.1"}
    assert steps(client, run_logger.run_id, "loss") == [1]
    assert deliver_saved_records(tracked) == [
        "train: MLflow refused params (1); the run lacks them"
    ]


def test_a_metric_that_mlflow_refuses_takes_no_other_with_it(
    tracked: TrackedRun, client: MlflowClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), open_node_run(tracked, "train") as run_logger:
        for step in range(3):
            run_logger.log_metrics({"loss": 1.0, "score/P(yes)": 0.5}, step)
            run_logger.flush()
    assert steps(client, run_logger.run_id, "loss") == [0, 1, 2]
    assert sum("refuses metric score/P(yes)" in message for message in caplog.messages) == 1
    assert deliver_saved_records(tracked) == [
        "train: MLflow refused metric score/P(yes) (3); the run lacks them"
    ]


def test_what_was_refused_adds_up_and_fits_into_a_tag(
    tracked: TrackedRun, client: MlflowClient
) -> None:
    for _ in range(2):
        with open_node_run(tracked, "train") as run_logger:
            run_logger.log_metrics({f"P({index}) {'x' * 300}": 0.5 for index in range(60)}, 0)
    refused = json.loads(client.get_run(run_logger.run_id).data.tags["ebbflow.refused"])
    assert sum(refused.values()) == 120
    assert refused.pop("others") == 120 - 40 * 2
    assert set(refused.values()) == {2}
    assert len(deliver_saved_records(tracked)) == 1


def test_runs_of_other_people_below_the_parent_are_passed_over(
    tracked: TrackedRun, client: MlflowClient
) -> None:
    parent = {"mlflow.parentRunId": tracked.run_id}
    for tags in ({}, {"ebbflow.node": "twice"}, {"ebbflow.node": "twice"}):
        client.create_run(tracked.experiment_id, tags=parent | tags)
    assert deliver_saved_records(tracked) == []


def test_a_server_without_its_database_is_away(
    tracked: TrackedRun, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers 400, as to what it will never take."""

    def closed(*_: object, **__: object) -> None:
        raise MlflowException("connection already closed", error_code=BAD_REQUEST)

    with open_node_run(tracked, "train") as run_logger, monkeypatch.context() as outage:
        for method in ("log_batch", "set_tag"):
            outage.setattr(MlflowClient, method, closed)
        run_logger.log_metrics({"loss": 1.0}, 0)
        assert not run_logger.flush()
    assert steps(client, run_logger.run_id, "loss") == [0]
    assert not run_logger.sender.refused


@pytest.mark.parametrize("node", [None, "train"], ids=["parent", "child"])
def test_a_run_whose_creation_was_not_answered_is_not_made_twice(
    recipe: Recipe, node: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow's client asks again: the first run is there, and nobody knows its number."""
    create = MlflowClient.create_run
    execution = f"execution-{uuid.uuid4().hex[:8]}"

    def twice(self: MlflowClient, *arguments: Any, **named: Any) -> Any:
        create(self, *arguments, **named)
        time.sleep(0.01)  # runs are distinguished by the millisecond
        return create(self, *arguments, **named)

    def attempt() -> tuple[str, str | None]:
        tracked = start_run(recipe, execution)
        with open_node_run(tracked, node or "other") as recorder:
            recorder.log_metrics({"loss": 1.0}, 0)
        return tracked.run_id, recorder.run_id

    if node is None:
        monkeypatch.setattr(MlflowClient, "create_run", twice)
        first = attempt()
    else:
        tracked = start_run(recipe, execution)
        monkeypatch.setattr(MlflowClient, "create_run", twice)
        first = attempt()
        assert first[0] == tracked.run_id
    monkeypatch.undo()
    assert attempt() == first
    client = connect_to_store(resolve_tracking_uri(recipe))
    assert steps(client, first[1] or "", "loss") == [0]
    children = client.search_runs(
        [start_run(recipe, execution).experiment_id], f"tags.`mlflow.parentRunId` = '{first[0]}'"
    )
    assert [child.info.run_id for child in children] == [first[1]]


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
