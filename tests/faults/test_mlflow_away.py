"""MLflow goes away while a stage runs: the stage goes on, everything is delivered later and once,
and the report says so.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from mlflow import MlflowClient
from PIL import Image

from ebbflow.data.records import TrackedRun
from ebbflow.recipe import Recipe
from ebbflow.stage import MetricsRecorder
from ebbflow.tracking import pending
from ebbflow.tracking.child_run import RunLogger, open_node_run
from ebbflow.tracking.outage import deliver_saved_records
from ebbflow.tracking.parent_run import log_results, start_run
from ebbflow.tracking.store import connect_to_store
from ebbflow.tracking.ui import SERVER_SETTINGS

FAST = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "60",
    "MLFLOW_TRACKING_URI": "",
}


class Server:
    """``mlflow server`` on a port of its own; what it stores outlives it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [
            sys.executable,
            "-m",
            "mlflow",
            "server",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--workers",
            "1",
        ]
        command += [
            "--backend-store-uri",
            f"sqlite:///{self.folder}/server.db",
            "--artifacts-destination",
            str(self.folder / "a"),
        ]
        with (self.folder / "server.log").open("ab") as log:
            environment = os.environ | SERVER_SETTINGS | {"MLFLOW_TRACKING_URI": ""}
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        for _ in range(1500):
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=0.2)
            except OSError:
                assert self.process.poll() is None, (self.folder / "server.log").read_text()
                time.sleep(0.2)
            else:
                return
        raise AssertionError((self.folder / "server.log").read_text())

    def kill(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """Its store is a SQLite file, which costs less than a server."""
    return Recipe(output=str(tmp_path_factory.mktemp("output")))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, recipe: Recipe) -> Iterator[Server]:
    start_run(
        recipe, None
    )  # makes the database that the server starts from: its own start is slow enough
    server = Server(tmp_path_factory.mktemp("mlflow"))
    shutil.copyfile(Path(recipe.output) / "mlflow.db", server.folder / "server.db")
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in FAST.items():
        monkeypatch.setenv(name, value)


def steps(client: MlflowClient, run_id: str, key: str) -> list[int]:
    return [
        metric.step
        for metric in sorted(client.get_metric_history(run_id, key), key=lambda metric: metric.step)
    ]


def child(tracked: TrackedRun, node: str) -> str:
    condition = f"tags.`mlflow.parentRunId` = '{tracked.run_id}' and tags.`ebbflow.node` = '{node}'"
    [run] = connect_to_store(tracked.tracking_uri).search_runs([tracked.experiment_id], condition)
    return run.info.run_id


def log_some(node, steps: range) -> None:
    for step in steps:
        node.log_metrics({"reward/mean": step / 100, "loss": 1.0}, step)


def log_everything(run_logger: RunLogger) -> None:
    """Eleven records, of every kind."""
    log_some(run_logger, range(3))
    run_logger.log_table("samples", pa.table({"prompt": ["A"], "reward": [0.5]}))
    run_logger.log_dataset("prompts", pa.table({"prompt": ["A"]}), "training", "made up")
    run_logger.log_file("timeline.json", b"{}")
    run_logger.log_image("held_out", Image.new("RGB", (8, 8), "red"), step=1)


@pytest.mark.exhaustive
def test_a_server_that_is_killed_during_a_stage_and_comes_back(
    server: Server, tmp_path: Path
) -> None:
    tracked = start_run(
        Recipe.model_validate({"output": str(tmp_path), "tracking": {"uri": server.uri}}),
        "execution",
    )
    client = connect_to_store(server.uri)

    with open_node_run(tracked, "1.1 online") as online:
        log_some(online, range(300))
        server.kill()
        log_some(online, range(300, 900))
        online.log_image("validation", Image.new("RGB", (8, 8)), step=5)
        online.log_params({"optimizer_steps": 900})
        # It ends before the server is back.
        with open_node_run(tracked, "1.1 online rollout") as rollout:
            log_everything(rollout)
        messages = deliver_saved_records(tracked)
        assert any(
            "1.1 online rollout: MLflow is away; 11 records wait in" in sentence
            for sentence in messages
        ), messages
        assert any("cannot ask MLflow" in sentence for sentence in messages)
        server.start()
        log_some(online, range(900, 910))

    assert (
        steps(client, online.run_id, "reward/mean")
        == steps(client, online.run_id, "loss")
        == list(range(910))
    )
    assert client.get_run(online.run_id).info.status == "FINISHED"
    assert client.get_run(online.run_id).data.params == {"optimizer_steps": "900"}

    messages = deliver_saved_records(tracked)
    assert [sentence.partition(" for ")[0] for sentence in messages] == [
        "1.1 online: MLflow was away",
        "1.1 online rollout: MLflow was away",
    ]
    assert messages[1].endswith("11 records were delivered late")
    run_id = child(tracked, "1.1 online rollout")
    assert steps(client, run_id, "loss") == [0, 1, 2]
    assert client.get_run(run_id).info.status == "FINISHED"
    assert {"samples.json", "timeline.json", "images"} <= {
        entry.path for entry in client.list_artifacts(run_id)
    }
    assert json.loads(
        Path(client.download_artifacts(run_id, "samples.json", str(tmp_path))).read_text()
    )["data"] == [["A", 0.5]]
    assert len(client.get_run(run_id).inputs.dataset_inputs) == 1
    assert not list((Path(tracked.folder) / pending.FOLDER).iterdir())
    assert deliver_saved_records(tracked) == messages, (
        "nothing is delivered twice, and it stays known"
    )
    log_results(tracked, [])
    assert client.get_run(tracked.run_id).info.status == "FINISHED"


@pytest.fixture
def execution(request: pytest.FixtureRequest) -> str:
    return request.node.name


@pytest.fixture
def tracked(recipe: Recipe, execution: str) -> TrackedRun:
    return start_run(recipe, execution)


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch):
    """``with away():`` every call to MLflow fails."""

    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("connection refused")

    def begin():
        context = monkeypatch.context()
        patched = context.__enter__()
        for method in (
            "log_batch",
            "search_runs",
            "create_run",
            "set_terminated",
            "update_run",
            "log_image",
            "get_run",
        ):
            patched.setattr(MlflowClient, method, refuse)
        return context

    class Away:
        def __enter__(self) -> None:
            self.context = begin()

        def __exit__(self, *error: object) -> None:
            self.context.__exit__(*error)

    return Away


def test_the_next_attempt_delivers_what_the_last_one_kept(tracked: TrackedRun, away) -> None:
    def attempt() -> None:
        with open_node_run(tracked, "train") as run_logger:
            log_some(run_logger, range(5))
            assert run_logger.flush()
            with away():
                log_some(run_logger, range(5, 10))
                run_logger.log_params({"lr": 0.1})
                run_logger.close("FAILED")
            run_logger.close = lambda status: None  # the process ended while the store was away
            raise RuntimeError("preempted")

    with pytest.raises(RuntimeError, match="preempted"):
        attempt()
    with open_node_run(tracked, "train") as run_logger:
        log_some(run_logger, range(7, 12))  # its checkpoint was behind
    client = connect_to_store(tracked.tracking_uri)
    assert steps(client, run_logger.run_id, "loss") == list(range(12))
    assert client.get_run(run_logger.run_id).data.params == {"lr": "0.1"}
    assert client.get_run(run_logger.run_id).info.status == "FINISHED"
    assert client.get_run(tracked.run_id).info.status == "RUNNING"


def test_what_a_killed_process_had_not_sent_comes_with_its_checkpoint(tracked: TrackedRun) -> None:
    """Metrics travel in batches: after kill -9 those of the steps before the checkpoint may never
    have been sent.
    """
    first = MetricsRecorder(RunLogger(tracked, "train"))
    first.metrics_logger.flush()
    log_some(first, range(4))
    first.metrics_logger.flush()
    log_some(first, range(4, 8))  # gathered, and gone with the process
    with open_node_run(tracked, "train") as run_logger:
        second = MetricsRecorder(run_logger)
        second.resume_metrics(first.metrics_rows[:6])
        log_some(second, range(6, 10))
    assert steps(connect_to_store(tracked.tracking_uri), run_logger.run_id, "loss") == list(
        range(10)
    )
    assert [row["step"] for row in second.metrics_rows] == list(range(10))


def test_two_attempts_without_a_store_keep_everything_once(tracked: TrackedRun, away) -> None:
    with away():
        for attempt in (range(6), range(4, 9)):
            with open_node_run(tracked, "train") as run_logger:
                log_some(run_logger, attempt)
    [sentence] = deliver_saved_records(tracked)
    assert "18 records were delivered late" in sentence
    assert steps(connect_to_store(tracked.tracking_uri), child(tracked, "train"), "loss") == list(
        range(9)
    )


def test_a_restart_of_the_run_delivers_what_waits(
    recipe: Recipe, execution: str, tracked: TrackedRun, away
) -> None:
    with away(), open_node_run(tracked, "train") as run_logger:
        log_some(run_logger, range(3))
    assert start_run(recipe, execution) == tracked
    client = connect_to_store(tracked.tracking_uri)
    assert steps(client, child(tracked, "train"), "loss") == [0, 1, 2]
    assert client.get_run(tracked.run_id).info.status == "RUNNING"


def test_what_waits_is_kept_behind_a_uri_too(tracked: TrackedRun, away, tmp_path: Path) -> None:
    behind = tracked.model_copy(update={"folder": f"file://{tmp_path}/elsewhere/run"})
    with away(), open_node_run(behind, "1.1 online") as run_logger:
        log_some(run_logger, range(3))
        run_logger.log_file("bytes.bin", bytes(range(256)))
    saved = pending.load_pending(behind.folder, "1.1 online")
    assert saved is not None
    assert [metric.step for metric in saved.metrics if metric.key == "loss"] == [0, 1, 2]
    assert saved.records[0].arguments["content"] == bytes(range(256))
    deliver_saved_records(behind)
    assert pending.load_all_pending(behind.folder) == []


def test_without_a_place_to_keep_them_they_are_lost_and_the_stage_is_not(
    tracked: TrackedRun, away, tmp_path, caplog
) -> None:
    (tmp_path / "file").write_text("no folder")
    nowhere = tracked.model_copy(update={"folder": str(tmp_path / "file" / "run")})
    with away(), open_node_run(nowhere, "train") as run_logger:
        log_some(run_logger, range(3))
    assert "6 metrics and 0 other records are lost" in caplog.text
