"""After an outage of MLflow: deliver what nodes had to save, and explain in the report what came
late or not at all.
"""

from __future__ import annotations

import json

from ebbflow.data.records import TrackedRun
from ebbflow.recipe.secrets import redact_secrets
from ebbflow.tracking.child_run import RunLogger
from ebbflow.tracking.pending import FOLDER, load_all_pending
from ebbflow.tracking.store import AWAY, NODE, PARENT, REFUSED, connect_to_store


def deliver_saved_records(tracked: TrackedRun) -> list[str]:
    """Deliver what nodes that have ended could not. Returns a sentence per outage, refusal and file
    still undelivered.

    One caller at a time, or metrics would be delivered twice: the tasks before the first node of a
    run and after its last.

    Example:
        ::

            ["1.1 online: MLflow was away for 812.4 s; 600 records were delivered late",
             "1.1 online: MLflow refused metric score/P(yes) (20); the run lacks them"]
    """
    try:
        for saved in load_all_pending(tracked.folder):
            # a logger of the node loads the file itself, and removes it once it is delivered
            RunLogger(tracked, saved.node).close(saved.status)
        undelivered = load_all_pending(tracked.folder)
    except Exception as error:  # as for a node: records must not stop the work
        return [f"cannot read the records that wait for MLflow in {tracked.folder}: {error}"]
    sentences = _read_outages_and_refusals(tracked)
    for saved in undelivered:
        count = saved.num_metrics + len(saved.records)
        sentences.append(
            f"{saved.node}: MLflow is away; {count} records wait in {tracked.folder}/{FOLDER} for"
            " the next start of the run"
        )
    return sentences


def _read_outages_and_refusals(tracked: TrackedRun) -> list[str]:
    """Describe the outages and then the refusals that the run's nodes have as tags."""
    try:
        client = connect_to_store(tracked.tracking_uri)
        children = client.search_runs(
            [tracked.experiment_id], f"tags.`{PARENT}` = '{tracked.run_id}'"
        )
        # a user's own child runs have no such tag
        nodes = sorted(
            (child.data.tags for child in children if NODE in child.data.tags),
            key=lambda tags: tags[NODE],
        )
        outages = [
            _describe_outage(tags[NODE], **json.loads(tags[AWAY])) for tags in nodes if AWAY in tags
        ]
        refusals = []
        for tags in nodes:
            if REFUSED in tags:
                counts = json.loads(tags[REFUSED])
                listed = ", ".join(f"{what} ({count})" for what, count in counts.items())
                refusals.append(f"{tags[NODE]}: MLflow refused {listed}; the run lacks them")
        return outages + refusals
    except Exception as error:  # as above
        return [
            f"cannot ask MLflow which records were late or refused: {redact_secrets(str(error))}"
        ]


def _describe_outage(node: str, seconds: float, late: int, lost: int) -> str:
    rest = f"; {lost} metrics were too many to keep and are lost" if lost else ""
    return f"{node}: MLflow was away for {seconds:g} s; {late} records were delivered late{rest}"
