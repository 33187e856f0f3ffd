"""The curves of a run on its parent: every stage and evaluation by the training steps of the run,
and nothing twice.
"""

from __future__ import annotations

import json
import threading
import uuid
from pathlib import Path

import pyarrow as pa
import pytest
from mlflow import MlflowClient
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

from ebbflow.data.records import Evaluation, TrackedRun
from ebbflow.data.schema import ADVANTAGES
from ebbflow.recipe import Recipe
from ebbflow.stage import MetricsRecorder
from ebbflow.storage.tables import write_table
from ebbflow.tracking.child_run import open_node_run
from ebbflow.tracking.curves import (
    build_evaluation_curves,
    build_stage_curves,
    read_rollout_curves,
)
from ebbflow.tracking.outage import deliver_saved_records
from ebbflow.tracking.parent_run import start_run
from ebbflow.tracking.store import connect_to_store


@pytest.fixture
def tracked(recipe: Recipe) -> TrackedRun:
    return start_run(recipe, f"execution-{uuid.uuid4().hex[:8]}")


@pytest.fixture
def client(tracked: TrackedRun) -> MlflowClient:
    return connect_to_store(tracked.tracking_uri)


def curve(client: MlflowClient, run_id: str, key: str) -> list[tuple[int, float]]:
    return sorted((metric.step, metric.value) for metric in client.get_metric_history(run_id, key))


def train(
    tracked: TrackedRun, stage: str, first_step: int, steps: range, died_after: int = 0
) -> None:
    """A stage whose reward is its global step / 100; an attempt after one that died repeats all
    steps, as a checkpoint does.
    """
    with open_node_run(tracked, stage, first_step) as run_logger:
        recorder = MetricsRecorder(run_logger)
        recorder.resume_metrics(
            [
                {"step": step, "reward/mean": (first_step + step) / 100, "loss": 1.0}
                for step in range(died_after)
            ]
        )
        for step in steps:
            speeds = {"seconds/step": 1.0, "images_per_second": 9.0}
            recorder.log_metrics(
                {"reward/mean": (first_step + step) / 100, "loss": 1.0} | speeds, step
            )


def evaluate(tracked: TrackedRun, label: str, reward: float, global_step: int) -> None:
    means = {"held_out": {"reward": reward}, "validation": {"reward": reward + 0.1}}
    evaluation = Evaluation(
        label=label, policy_version=3, coverage=1, velocity_drift=0, seconds={}, **means
    )
    with open_node_run(tracked, f"{label} evaluation") as run_logger:
        run_logger.log_curves(build_evaluation_curves(evaluation), global_step)


def test_the_parent_has_one_reward_curve_over_all_stages(
    tracked: TrackedRun, client: MlflowClient
) -> None:
    evaluate(tracked, "before", 0.1, 0)
    train(tracked, "1.1 online", 0, range(3))
    evaluate(tracked, "1.1 online", 0.3, 3)
    train(tracked, "2.1 online", 3, range(2))
    assert curve(client, tracked.run_id, "reward/train") == [
        (step, step / 100) for step in range(5)
    ]
    assert curve(client, tracked.run_id, "reward/held_out") == [(0, 0.1), (3, 0.3)]
    assert curve(client, tracked.run_id, "reward/validation") == [(0, 0.2), (3, 0.4)]
    assert [step for step, _ in curve(client, tracked.run_id, "stage 1.1 online/loss")] == [0, 1, 2]
    assert [step for step, _ in curve(client, tracked.run_id, "stage 2.1 online/loss")] == [3, 4]
    assert not [
        key
        for key in client.get_run(tracked.run_id).data.metrics
        if "seconds" in key or "per_second" in key
    ]


def test_a_stage_that_is_resumed_doubles_no_point_of_the_parent(
    tracked: TrackedRun, client: MlflowClient
) -> None:
    train(tracked, "1.1 online", 0, range(4))  # two steps more than its checkpoint
    train(tracked, "1.1 online", 0, range(2, 6), died_after=2)
    assert [step for step, _ in curve(client, tracked.run_id, "reward/train")] == list(range(6))
    assert [step for step, _ in curve(client, tracked.run_id, "stage 1.1 online/loss")] == list(
        range(6)
    )


def test_what_came_late_fills_its_place_before_later_stages(
    tracked: TrackedRun, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object, **__: object) -> None:
        raise ConnectionError("connection refused")

    with monkeypatch.context() as outage:
        for method in ("search_runs", "log_batch", "get_run"):
            outage.setattr(MlflowClient, method, away)
        train(tracked, "1.1 online", 0, range(3))
    train(tracked, "2.1 online", 3, range(2))
    assert [step for step, _ in curve(client, tracked.run_id, "reward/train")] == [3, 4]
    deliver_saved_records(tracked)
    assert [step for step, _ in curve(client, tracked.run_id, "reward/train")] == list(range(5))
    deliver_saved_records(tracked)
    assert [step for step, _ in curve(client, tracked.run_id, "reward/train")] == list(range(5))


def test_the_rollouts_of_an_offline_stage_are_a_point_of_the_reward_curve(tmp_path: Path) -> None:
    for name, about in {
        "scored": {"metrics": {"reward/mean": 0.4, "reward/std": 0.1}},
        "pairs": {},
    }.items():
        write_table(tmp_path / name, ADVANTAGES, [], about)
    assert read_rollout_curves(tmp_path / "scored") == {"reward/train": 0.4}
    assert read_rollout_curves(tmp_path / "pairs") == {}


def test_the_parent_has_the_dataset_once(tracked: TrackedRun, client: MlflowClient) -> None:
    table = pa.table({"prompt_id": [1, 2], "prompt": ["AB", "CD"]})
    for _ in range(2):
        with open_node_run(tracked, "prompts") as run_logger:
            run_logger.log_dataset(
                "prompts", table, context="training", source="ebbflow:datasets/signs/prompts.txt"
            )
    parent, child = (
        client.get_run(run_id).inputs.dataset_inputs
        for run_id in (tracked.run_id, run_logger.run_id)
    )
    assert (
        [one.dataset.name for one in parent] == [one.dataset.name for one in child] == ["prompts"]
    )
    assert parent[0].dataset.digest == child[0].dataset.digest
    assert json.loads(parent[0].dataset.source) == {"uri": "datasets/signs/prompts.txt"}
    assert [(tag.key, tag.value) for tag in parent[0].tags] == [("mlflow.data.context", "training")]


def test_a_node_shows_the_load_of_its_machine(
    tracked: TrackedRun, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.01")
    monkeypatch.delenv("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", raising=False)
    published = threading.Event()
    publish = SystemMetricsMonitor.publish_metrics

    def observed(self: SystemMetricsMonitor, metrics: dict[str, float]) -> None:
        publish(self, metrics)
        published.set()

    monkeypatch.setattr(SystemMetricsMonitor, "publish_metrics", observed)
    steps: list[list[int]] = []
    for _ in range(2):
        published.clear()
        with open_node_run(tracked, "train") as run_logger:
            assert published.wait(timeout=60)
        steps.append(
            [
                step
                for step, _ in curve(client, run_logger.run_id, "system/cpu_utilization_percentage")
            ]
        )
    assert "system/system_memory_usage_percentage" in client.get_run(run_logger.run_id).data.metrics
    assert len(steps[1]) > len(steps[0]) > 0
    assert steps[1] == list(range(len(steps[1]))), "a retry goes on, and doubles no step"


def test_the_load_is_not_measured_where_the_user_says_so(
    tracked: TrackedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", "false")
    started: list[object] = []
    monkeypatch.setattr(SystemMetricsMonitor, "start", started.append)
    with open_node_run(tracked, "quiet"):
        pass
    assert started == []


def test_a_monitor_that_cannot_start_stops_nothing(
    tracked: TrackedRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise OSError("no /proc here")

    monkeypatch.setattr(
        "mlflow.system_metrics.system_metrics_monitor.SystemMetricsMonitor.__init__", broken
    )
    with open_node_run(tracked, "train"):
        pass
    assert "cannot measure the load of this machine: no /proc here" in caplog.text


def test_the_first_section_of_the_page_has_reward_held_out_score_and_alarms() -> None:
    evaluation = Evaluation(
        label="before",
        policy_version=0,
        held_out={"reward": 0.5, "ocr": 0.4},
        validation={"reward": 0.6, "ocr": 0.3},
        coverage=1,
        velocity_drift=0,
        seconds={},
    )
    metrics = {
        "reward/mean": 0.2,
        "loss": 1.0,
        "alarm/velocity_drift": 1.0,
        "alarm/statistics": 1.0,
    }
    curves = build_stage_curves("1.1 online", metrics) | build_evaluation_curves(evaluation)
    # MLflow's sections are the prefixes, sorted, and their charts, too.
    assert sorted(curves)[:6] == [
        "reward/alarms",
        "reward/held_out",
        "reward/train",
        "reward/validation",
        "scores/held_out/ocr",
        "scores/validation/ocr",
    ]
    assert curves["reward/alarms"] == 2
    assert all(name.startswith("stage 1.1 online/") for name in sorted(curves)[6:])
