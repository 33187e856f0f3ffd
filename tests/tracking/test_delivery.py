"""The metrics of a run on their way to the store: in batches, once, and later where it is away."""

from __future__ import annotations

import json
import logging
import time
import uuid
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import BAD_REQUEST
from PIL import Image

from ebbflow.data.records import TrackedRun
from ebbflow.recipe import Recipe
from ebbflow.tracking.child_run import open_node_run
from ebbflow.tracking.outage import deliver_saved_records
from ebbflow.tracking.parent_run import start_run
from ebbflow.tracking.store import connect_to_store, resolve_tracking_uri


def steps(client: MlflowClient, run_id: str, key: str) -> list[int]:
    return sorted(metric.step for metric in client.get_metric_history(run_id, key))


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
