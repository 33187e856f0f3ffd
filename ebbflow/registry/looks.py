"""The ledger of looks: what every decision of the gate has spent of a registered model's error
budget.

An entry is a tag of the registered model, ``ebbflow.look.<run id>``, written before the decision: a
look that nobody finished is spent as well. It is the run's own, so a task that is retried finds its
look and takes no second one, and two runs that look at the same time overwrite nothing of each
other.

Example:
    The tags of a model after two runs; the second is still deciding::

        ebbflow.look.0a1b2c3d  {"error": .001, "number": 1, "spent": .001, "taken": 1764000000.0}
        ebbflow.look.4e5f6071  {"error": .001, "number": 0, "taken": 1764600000.0}

No lock is needed. Each of several concurrent looks counts all other entries after it has written
its own: of two looks at least one counts the other, and an entry without a number counts at the
full share. Looks that counted each other have the same number.
"""

from __future__ import annotations

import json
import time
from typing import Any

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from ebbflow.data.records import Look, TrackedRun
from ebbflow.evaluation.look import compute_look_error
from ebbflow.recipe.promotion import PromotionConfig
from ebbflow.registry.model_version import raise_registry_errors
from ebbflow.registry.promotion import ensure_registered_model
from ebbflow.tracking.store import connect_to_store

PREFIX = "ebbflow.look."
"""How the tags of the registered model begin."""
LOOK = "ebbflow.look"
"""The tag of a run: looks before it."""
YEAR = 365 * 24 * 3600.0
"""Seconds after which a look no longer counts."""


def take_look(tracked: TrackedRun, promotion: PromotionConfig) -> Look:
    """Take a look for a run, or return the one that it has taken. Idempotent.

    Raises:
        RegistryError: the ledger could not be read or written.
    """
    client = connect_to_store(tracked.tracking_uri)
    name = promotion.model_name
    with raise_registry_errors(f"record a look of the gate at {name!r}", tracked.tracking_uri):
        ensure_registered_model(client, name)
        entry = _read_ledger(client, name).get(tracked.run_id)
        if entry is None:
            share = promotion.error_budget / promotion.looks_per_year
            # Without a number: it stands in the way of concurrent looks while this one counts.
            entry = {"error": share, "number": 0, "taken": time.time()}
            _write_entry(client, name, tracked.run_id, entry)
        if not entry["number"]:
            ledger = _read_ledger(client, name)
            since = entry["taken"] - YEAR
            spent = sum(
                other["error"]
                for run_id, other in ledger.items()
                if run_id != tracked.run_id and other["taken"] > since
            )
            error = compute_look_error(promotion, spent)
            # What was spent is kept, too: later looks and those that were killed would change the
            # sum, and a retry must make the decision of its first attempt.
            entry |= {"error": error, "number": len(ledger), "spent": spent + error}
            _write_entry(client, name, tracked.run_id, entry)
    return Look(
        number=entry["number"],
        error=entry["error"],
        spent=entry["spent"],
        budget=promotion.error_budget,
    )


def open_look(tracked: TrackedRun, model_name: str) -> TrackedRun:
    """Return the run with the number of looks that were taken at a registered model before it
    began. Idempotent: the number is kept as a tag of the run, so that a resumed run evaluates with
    the same noise.

    Raises:
        RegistryError: the ledger could not be read, or the tag not be written.
    """
    client = connect_to_store(tracked.tracking_uri)
    with raise_registry_errors(
        f"count the looks of the gate at {model_name!r}", tracked.tracking_uri
    ):
        look = client.get_run(tracked.run_id).data.tags.get(LOOK)
        if look is None:
            look = str(len(_read_ledger(client, model_name)))
            client.set_tag(tracked.run_id, LOOK, look)
    return tracked.model_copy(update={"look": int(look)})


def _write_entry(client: MlflowClient, name: str, run_id: str, entry: dict[str, Any]) -> None:
    client.set_registered_model_tag(name, PREFIX + run_id, json.dumps(entry, sort_keys=True))


def _read_ledger(client: MlflowClient, name: str) -> dict[str, dict[str, Any]]:
    """Read the looks of a model by the run that took them."""
    try:
        tags = client.get_registered_model(name).tags
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return {}
        raise
    return {
        key.removeprefix(PREFIX): json.loads(value)
        for key, value in tags.items()
        if key.startswith(PREFIX)
    }
