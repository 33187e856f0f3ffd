"""After an outage of MLflow: deliver what nodes had to save, and explain in the report what came
late or not at all.
"""

from __future__ import annotations

import json

from ebbflow.data.records import TrackedRun
from ebbflow.recipe.secrets import redact
from ebbflow.tracking.child_run import RunLogger
from ebbflow.tracking.pending import FOLDER, PendingRecords, load_all
from ebbflow.tracking.store import AWAY, NODE, PARENT, REFUSED, connect


def deliver_saved(tracked: TrackedRun) -> list[str]:
    """Deliver what nodes that have ended could not. Returns a sentence per outage, refusal and file
    still undelivered.

    One caller at a time, or metrics would be delivered twice: the tasks before the first node of a
    run and after its last.
    """
    try:
        for saved in load_all(tracked.folder):
            RunLogger(tracked, saved.node).close(saved.status)
        undelivered = load_all(tracked.folder)
    except Exception as error:  # as for a node: records must not stop the work
        return [f"cannot read the records that wait for MLflow in {tracked.folder}: {error}"]
    return [
        *_outages_and_refusals(tracked),
        *(_undelivered(tracked, saved) for saved in undelivered),
    ]


def _outages_and_refusals(tracked: TrackedRun) -> list[str]:
    """From the tags of the run's nodes: outages first."""
    try:
        client = connect(tracked.tracking_uri)
        children = client.search_runs(
            [tracked.experiment_id], f"tags.`{PARENT}` = '{tracked.run_id}'"
        )
        nodes = sorted(
            (child.data.tags for child in children if NODE in child.data.tags),
            key=lambda tags: tags[NODE],
        )
        outages = [_outage(tags[NODE], **json.loads(tags[AWAY])) for tags in nodes if AWAY in tags]
        return outages + [
            _refusal(tags[NODE], json.loads(tags[REFUSED])) for tags in nodes if REFUSED in tags
        ]
    except Exception as error:  # as above
        return [f"cannot ask MLflow which records were late or refused: {redact(str(error))}"]


def _outage(node: str, seconds: float, late: int, lost: int) -> str:
    rest = f"; {lost} metrics were too many to keep and are lost" if lost else ""
    return f"{node}: MLflow was away for {seconds:g} s; {late} records were delivered late{rest}"


def _refusal(node: str, counts: dict[str, int]) -> str:
    listed = ", ".join(f"{what} ({count})" for what, count in counts.items())
    return f"{node}: MLflow refused {listed}; the run lacks them"


def _undelivered(tracked: TrackedRun, saved: PendingRecords) -> str:
    count = saved.num_metrics + len(saved.records)
    return (
        f"{saved.node}: MLflow is away; {count} records wait in {tracked.folder}/{FOLDER} for the"
        " next start of the run"
    )
