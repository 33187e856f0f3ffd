"""After an outage of MLflow: what nodes had to keep is delivered, and the report is told."""

from __future__ import annotations

import json

from ebbflow.data.records import TrackedRun
from ebbflow.recipe.secrets import cleaned
from ebbflow.tracking import waiting
from ebbflow.tracking.child_run import Node
from ebbflow.tracking.store import AWAY, NODE, PARENT, REFUSED, connect
from ebbflow.tracking.waiting import Waiting


def settle(tracked: TrackedRun) -> list[str]:
    """Deliver what nodes that have ended had to keep. Sentences for the report: to which nodes MLflow was away, what it refused.

    One caller at a time, or metrics could be delivered twice: the tasks before the first node of a run and after its last.
    """
    try:
        for name in waiting.nodes(tracked.folder):
            kept = waiting.read(tracked.folder, name)
            Node.taken_up(tracked, name).close("FAILED" if kept and kept.status == "FAILED" else "FINISHED")
        still = [kept for name in waiting.nodes(tracked.folder) if (kept := waiting.read(tracked.folder, name))]
    except Exception as error:  # as for a node
        return [f"what waits for MLflow in {tracked.folder} cannot be read: {error}"]
    return [*_told(tracked), *(_not_delivered(tracked, kept) for kept in still)]


def _told(tracked: TrackedRun) -> list[str]:
    """What the nodes left in their tags: outages first, then refusals."""
    try:
        client = connect(tracked.tracking_uri)
        children = client.search_runs([tracked.experiment_id], f"tags.`{PARENT}` = '{tracked.run_id}'")
        told = sorted((child.data.tags for child in children if NODE in child.data.tags), key=lambda tags: tags[NODE])
        late = [_late(tags[NODE], **json.loads(tags[AWAY])) for tags in told if AWAY in tags]
        return [*late, *(_refused(tags[NODE], json.loads(tags[REFUSED])) for tags in told if REFUSED in tags)]
    except Exception as error:  # as for a node
        return [f"MLflow cannot be asked which records came late or were refused: {cleaned(str(error))}"]


def _late(node: str, seconds: float, late: int, lost: int) -> str:
    rest = f"; {lost} metrics were too many to keep and are lost" if lost else ""
    return f"{node}: MLflow was away for {seconds:g} s; {late} records were delivered late{rest}"


def _refused(node: str, counts: dict[str, int]) -> str:
    listed = ", ".join(f"{what} ({count})" for what, count in counts.items())
    return f"{node}: MLflow refused {listed}; that is not in the run"


def _not_delivered(tracked: TrackedRun, kept: Waiting) -> str:
    count = len(kept.metrics) + len(kept.records)
    return f"{kept.node}: MLflow is away; {count} records wait in {tracked.folder}/{waiting.FOLDER} for the next start of the run"
