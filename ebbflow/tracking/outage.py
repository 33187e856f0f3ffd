"""After an outage of MLflow: deliver what nodes had to save, and explain in the report what came
late or not at all.
"""

from __future__ import annotations

import json

from ebbflow.data.records import TrackedRun
from ebbflow.recipe.secrets import redact_secrets
from ebbflow.tracking.child_run import RunLogger
from ebbflow.tracking.pending import FOLDER, PendingRecords, load_all_pending
from ebbflow.tracking.store import AWAY, NODE, PARENT, REFUSED, connect_to_store


def deliver_saved_records(tracked: TrackedRun) -> list[str]:
    """Deliver what nodes that have ended could not. Returns a sentence per outage, refusal and file
    still undelivered.

    One caller at a time, or metrics would be delivered twice: the tasks before the first node of a
    run and after its last.
    """
    try:
        for saved in load_all_pending(tracked.folder):
            RunLogger(tracked, saved.node).close(saved.status)
        undelivered = load_all_pending(tracked.folder)
    except Exception as error:  # as for a node: records must not stop the work
        return [f"cannot read the records that wait for MLflow in {tracked.folder}: {error}"]
    return [
        *_read_outages_and_refusals(tracked),
        *(_describe_undelivered(tracked, saved) for saved in undelivered),
    ]


def _read_outages_and_refusals(tracked: TrackedRun) -> list[str]:
    """From the tags of the run's nodes: outages first."""
    try:
        client = connect_to_store(tracked.tracking_uri)
        children = client.search_runs(
            [tracked.experiment_id], f"tags.`{PARENT}` = '{tracked.run_id}'"
        )
        nodes = sorted(
            (child.data.tags for child in children if NODE in child.data.tags),
            key=lambda tags: tags[NODE],
        )
        outages = [
            _describe_outage(tags[NODE], **json.loads(tags[AWAY])) for tags in nodes if AWAY in tags
        ]
        return outages + [
            _describe_refusal(tags[NODE], json.loads(tags[REFUSED]))
            for tags in nodes
            if REFUSED in tags
        ]
    except Exception as error:  # as above
        return [
            f"cannot ask MLflow which records were late or refused: {redact_secrets(str(error))}"
        ]


def _describe_outage(node: str, seconds: float, late: int, lost: int) -> str:
    rest = f"; {lost} metrics were too many to keep and are lost" if lost else ""
    return f"{node}: MLflow was away for {seconds:g} s; {late} records were delivered late{rest}"


def _describe_refusal(node: str, counts: dict[str, int]) -> str:
    listed = ", ".join(f"{what} ({count})" for what, count in counts.items())
    return f"{node}: MLflow refused {listed}; the run lacks them"


def _describe_undelivered(tracked: TrackedRun, saved: PendingRecords) -> str:
    count = saved.num_metrics + len(saved.records)
    return (
        f"{saved.node}: MLflow is away; {count} records wait in {tracked.folder}/{FOLDER} for the"
        " next start of the run"
    )
