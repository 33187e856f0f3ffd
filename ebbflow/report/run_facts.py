"""When, where and with which code a run was made, and how long its nodes took on the clock."""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ebbflow.data.records import TrackedRun
from ebbflow.recipe.secrets import redact_secrets

VERSIONS = ("ebbflow", "torch", "diffusers", "transformers", "peft", "mlflow", "flytekit")
COMMIT = "mlflow.source.git.commit"
USER = "mlflow.user"
"""MLflow's own tags of a run."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunFacts:
    """When, where and with which code a run was made. Times are in seconds since 1970.

    Example::

        RunFacts(
            written_at=1.7643e9,
            machine="Intel(R) Xeon(R), 2 cores, Linux 6.1",
            versions={"Python": "3.11.7", "torch": "2.13.0"},
            nodes={"1.1 online": (1.76429e9, 1.764295e9)},
        )

    Attributes:
        machine: the one that wrote this down.
        nodes: start and end of every node that has ended, by name. Nodes whose results were cached
            did not run.
    """

    written_at: float
    machine: str
    versions: Mapping[str, str]
    commit: str | None = None
    user: str | None = None
    nodes: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def measure_wall_seconds(self, names: Iterable[str]) -> float:
        """Measure how long at least one of these nodes ran: nodes that ran side by side count
        once.
        """
        # In the order of their starts, each node adds what lies after the end so far.
        total = end = 0.0
        for start, stop in sorted(self.nodes[name] for name in names if name in self.nodes):
            total += max(0.0, stop - max(start, end))
            end = max(end, stop)
        return total


def collect_run_facts(tracked: TrackedRun) -> RunFacts:
    """Collect the facts of a run. While MLflow does not answer, what it knows is left out: a report
    must not fail for it.
    """
    tags: Mapping[str, str] = {}
    nodes: dict[str, tuple[float, float]] = {}
    try:
        tags, nodes = _read_tags_and_nodes(tracked)
    except Exception as error:  # of any store or transport
        logger.warning(
            "the report has no wall times and no commit: MLflow did not answer: %s",
            redact_secrets(str(error)),
        )
    return RunFacts(
        time.time(), describe_machine(), read_versions(), tags.get(COMMIT), tags.get(USER), nodes
    )


def _read_tags_and_nodes(
    tracked: TrackedRun,
) -> tuple[Mapping[str, str], dict[str, tuple[float, float]]]:
    """Read the tags of the run, and start and end of its nodes."""
    # MLflow takes seconds to import, and a page needs none of it.
    from ebbflow.tracking.store import NODE, PARENT, connect_to_store

    client = connect_to_store(tracked.tracking_uri)
    tags: Mapping[str, str] = client.get_run(tracked.run_id).data.tags
    condition = f"tags.`{PARENT}` = '{tracked.run_id}'"
    token = None
    nodes = {}
    while True:
        page = client.search_runs(
            [tracked.experiment_id], condition, max_results=1000, page_token=token
        )
        for run in page:
            name = run.data.tags.get(NODE)
            if name and run.info.end_time:
                # MLflow counts milliseconds.
                nodes[name] = (run.info.start_time / 1000, run.info.end_time / 1000)
        token = page.token
        if not token:
            return tags, nodes


def describe_machine() -> str:
    """Describe processor, cores and system."""
    # platform.processor() is empty on most Linux systems.
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    processor = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )
    return f"{processor}, {os.cpu_count()} cores, {platform.system()} {platform.release()}"


def read_versions() -> dict[str, str]:
    """Read the versions of Python and of the packages that results depend on."""
    versions = {"Python": platform.python_version()}
    for name in VERSIONS:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue  # not on this machine
    return versions
