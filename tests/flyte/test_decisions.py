"""A person's no, given through Flyte's signals as the console gives it, and no answer at all."""

from __future__ import annotations

import os
from typing import Any

import pytest
from flyte_cases import (
    MAX_SECONDS,
    WORKFLOW,
    Flyte,
    MakeRecipe,
    Record,
    Register,
    Webhook,
    find_parent_run,
)
from flyte_recipes import ONLINE, build_promotable_changes, with_approval
from mlflow import MlflowClient

from ebbflow.alerts import WEBHOOK
from tasks.executions import ENDPOINT
from tasks.request_approval import GATE

ADDRESS = "EBBFLOW_FLYTE_ADDRESS"
APPROVAL_HOURS = 0.02


def test_a_no_is_a_decision(
    flyte: Flyte, version: str, make_recipe: MakeRecipe, record_property: Record
) -> None:
    """A person declines through the signal API: the run ends well, without a new champion."""
    recipe = make_recipe("declined", **with_approval(build_promotable_changes(ONLINE)))
    execution = flyte.start(WORKFLOW, version, recipe, "declined")
    execution.wait_until(lambda: execution.is_asked(GATE), "the gate", MAX_SECONDS)
    execution.answer(GATE, False)
    execution.wait_for_end(MAX_SECONDS)
    store = MlflowClient(flyte.mlflow, flyte.mlflow)
    model = store.get_registered_model(f"{flyte.run}-declined")
    assert "champion" not in model.aliases
    tags = store.get_model_version(model.name, "1").tags
    assert tags["ebbflow.declined_in"] == execution.name
    assert find_parent_run(flyte, execution).info.status == "FINISHED"
    record_property("seen", "SUCCEEDED, tag ebbflow.declined_in, MLflow FINISHED")


def test_no_answer_in_time_is_a_no(
    flyte: Flyte,
    register: Register,
    deployment: dict[str, Any],
    make_recipe: MakeRecipe,
    record_property: Record,
) -> None:
    """Nobody answers a question in time: a webhook is told of the question and of that, and the run
    ends well as not approved."""
    address = os.environ.get(ADDRESS)
    if not address:
        pytest.skip("ADDRESS names no address of this machine that pods reach")
    if ENDPOINT not in deployment["env"]:
        pytest.skip(f"the deployment's env does not tell pods where Flyte is ({ENDPOINT})")
    webhook = Webhook(address)
    version = register(env=deployment["env"] | {WEBHOOK: webhook.uri})
    changes = build_promotable_changes(ONLINE)
    changes["promotion"] = changes["promotion"] | {"approval": APPROVAL_HOURS}
    execution = flyte.start(WORKFLOW, version, make_recipe("unanswered", **changes), "unanswered")
    execution.wait_for_end(MAX_SECONDS)
    store = MlflowClient(flyte.mlflow, flyte.mlflow)
    model = store.get_registered_model(f"{flyte.run}-unanswered")
    assert "champion" not in model.aliases
    tags = store.get_model_version(model.name, "1").tags
    assert "nobody answered" in tags["ebbflow.declined"]
    assert find_parent_run(flyte, execution).info.status == "FINISHED"
    asked, unanswered = webhook.lines
    assert f"approve it within {APPROVAL_HOURS:g} hours" in asked
    assert execution.name in asked
    assert unanswered.endswith(f"nobody answered in {APPROVAL_HOURS:g} hours; the champion stays")
    record_property("seen", unanswered[-60:])
