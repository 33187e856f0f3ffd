"""What the report says about when, where and how long, as MLflow knows it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ebbflow.recipe import Recipe
from ebbflow.report.run_facts import RunFacts, collect_run_facts
from ebbflow.tracking.child_run import open_node_run
from ebbflow.tracking.parent_run import start_run
from ebbflow.tracking.store import connect_to_store


def test_the_facts_are_those_of_the_run(recipe: Recipe) -> None:
    tracked = start_run(recipe, None)
    other = start_run(recipe, None)
    before = time.time()
    for run, node in (
        (tracked, "before evaluation"),
        (tracked, "1.1 online"),
        (other, "1.2 offline"),
    ):
        with open_node_run(run, node):
            pass
    for name, value in (("mlflow.source.git.commit", "c0ffee"), ("mlflow.user", "ada")):
        connect_to_store(tracked.tracking_uri).set_tag(tracked.run_id, name, value)
    facts = collect_run_facts(tracked)
    assert facts.nodes.keys() == {"before evaluation", "1.1 online"}
    assert all(
        before - 1 <= start <= end <= facts.written_at for start, end in facts.nodes.values()
    )
    assert (facts.commit, facts.user) == ("c0ffee", "ada")
    assert {"Python", "torch", "mlflow"} <= facts.versions.keys()
    assert "cores" in facts.machine


def test_a_store_that_is_away_leaves_the_rest(
    recipe: Recipe, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracked = start_run(recipe, None).model_copy(update={"tracking_uri": f"sqlite:///{tmp_path}"})
    facts = collect_run_facts(tracked)
    assert (facts.nodes, facts.commit) == ({}, None)
    assert facts.versions["torch"]
    assert "MLflow did not answer" in caplog.text


def test_what_ran_side_by_side_counts_once() -> None:
    nodes = {"a": (0.0, 10.0), "b": (2.0, 4.0), "c": (9.0, 12.0), "d": (20.0, 21.0)}
    facts = RunFacts(30.0, "m", {}, nodes=nodes)
    assert facts.measure_wall_seconds(["a", "b", "c", "d", "not run"]) == 13.0
    assert facts.measure_wall_seconds(["b"]) == 2.0
    assert facts.measure_wall_seconds([]) == 0.0
