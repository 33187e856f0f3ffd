"""The gate policy of a registered model: pinned by its first promotion, changed by a command of its
own, and every change recorded.

It is a tag of the registered model, and so is each change, numbered from one: who, when, why, from
and to. Without it the recipe of a night could ask for less than the champion had to pass.
"""

from __future__ import annotations

import getpass
import json
import platform
from datetime import UTC, datetime
from typing import Any

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from ebbflow.recipe import Recipe
from ebbflow.recipe.gate_policy import GatePolicy, build_gate_policy, list_laxer_rules
from ebbflow.registry.model_version import (
    RegistryError,
    check_store_exists,
    raise_registry_errors,
)
from ebbflow.tracking.store import connect_to_store

GATE_POLICY = "ebbflow.gate_policy"
CHANGE = "ebbflow.gate_policy_change."
"""Tags of a registered model: the policy, and its changes by number."""


def find_gate_policy(client: MlflowClient, name: str) -> GatePolicy | None:
    """Find the policy that is pinned to a model; None before its first promotion.

    Raises:
        RegistryError: the tag is no policy.
    """
    text = _read_model_tags(client, name).get(GATE_POLICY)
    if not text:
        return None
    try:
        return GatePolicy.model_validate_json(text)
    except ValueError as error:
        raise RegistryError(
            f"the tag {GATE_POLICY} of {name!r} is no gate policy; pin one with `ebbflow"
            f" gate-policy RECIPE --set --reason ...` ({str(error).splitlines()[0]})"
        ) from None


def read_gate_policy(tracking_uri: str, name: str) -> GatePolicy | None:
    """Return ``find_gate_policy`` of the model in a store.

    Raises:
        RegistryError: the store cannot be read, or the tag is no policy.
    """
    with raise_registry_errors(f"read the gate policy of {name!r}", tracking_uri):
        return find_gate_policy(connect_to_store(tracking_uri), name)


def pin_gate_policy(client: MlflowClient, name: str, policy: GatePolicy, who: str) -> None:
    """Pin the policy that a version has just passed, unless one is pinned; of a pinned one that a
    command has changed, what only a gate can know is completed.

    Raises:
        RegistryError: the pinned one asks for more.
    """
    pinned = find_gate_policy(client, name)
    if pinned is None:
        _write_gate_policy(client, name, None, policy, who, "the first promotion")
        return
    laxer = list_laxer_rules(pinned, policy)
    if laxer:
        raise RegistryError(
            f"the gate policy of {name!r} asks for more than this version has passed:"
            f" {'; '.join(laxer)}; it stays challenger"
        )
    # The digest is that of as many prompts as are pinned: with that of a larger set, recipes with
    # the pinned number would be refused for a file that has not changed.
    keys = ["rewards", "reward_weights"]
    if policy.held_out == pinned.held_out:
        keys.append("held_out_digest")
    known = {key: getattr(policy, key) for key in keys if not getattr(pinned, key)}
    known = {key: value for key, value in known.items() if value}
    if known:
        completed = pinned.model_copy(update=known)
        _write_gate_policy(
            client, name, pinned.model_dump(), completed, who, "completed by what its gate measured"
        )


def require_gate_policy(recipe: Recipe, tracking_uri: str, held_out_digest: str = "") -> None:
    """Check that a recipe asks for no less than the policy that is pinned to its model: the gate
    would refuse its policy at the end.

    Args:
        held_out_digest: of the run's held-out prompts, once they are known.

    Raises:
        RegistryError: it asks for less; says where, and what to do.
    """
    reason = describe_laxer_rules(recipe, tracking_uri, held_out_digest)
    if reason:
        raise RegistryError(reason)


def describe_laxer_rules(
    recipe: Recipe, tracking_uri: str, held_out_digest: str = ""
) -> str | None:
    """Say where a recipe asks for less than the policy that is pinned to its model, and what to do;
    None where it does not.

    Raises:
        RegistryError: the policy cannot be read.
    """
    name = recipe.promotion.model_name
    pinned = read_gate_policy(tracking_uri, name)
    proposed = build_gate_policy(recipe, held_out_digest=held_out_digest)
    laxer = list_laxer_rules(pinned, proposed) if pinned else []
    if not laxer:
        return None
    return (
        f"the gate of {name!r} asks for more than this recipe: {'; '.join(laxer)}. Change the"
        " recipe, set another promotion.model_name, or change the policy for all runs with"
        " `ebbflow gate-policy RECIPE --set --reason ...`"
    )


def change_gate_policy(tracking_uri: str, recipe: Recipe, reason: str) -> GatePolicy:
    """Pin the policy of a recipe to its model, and record who did it and why; return it.

    Raises:
        RegistryError: there is no such model, no reason, or the store cannot be written.
    """
    name = recipe.promotion.model_name
    if not reason.strip():
        raise RegistryError("a change of the gate policy needs a reason; give --reason")
    check_store_exists(tracking_uri)
    policy = build_gate_policy(recipe)
    client = connect_to_store(tracking_uri)
    with raise_registry_errors(
        f"change the gate policy of {name!r}", tracking_uri, "Run the command again"
    ):
        pinned = _read_model_tags(client, name).get(GATE_POLICY)
        previous = json.loads(pinned) if pinned else None
        who = f"{getpass.getuser()}@{platform.node()}"
        _write_gate_policy(client, name, previous, policy, who, reason.strip())
    return policy


def list_policy_changes(tracking_uri: str, name: str) -> list[dict[str, Any]]:
    """List the changes of a model's policy, the first one first: ``who``, ``when``, ``why``,
    ``from`` and ``to``.
    """
    check_store_exists(tracking_uri)
    with raise_registry_errors(f"read the gate policy of {name!r}", tracking_uri):
        tags = _read_model_tags(connect_to_store(tracking_uri), name)
    changes = sorted(key for key in tags if key.startswith(CHANGE))
    return [json.loads(tags[key]) for key in changes]


def _read_model_tags(client: MlflowClient, name: str) -> dict[str, str]:
    try:
        return dict(client.get_registered_model(name).tags)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return {}


def _write_gate_policy(
    client: MlflowClient,
    name: str,
    previous: Any,
    policy: GatePolicy,
    who: str,
    why: str,
) -> None:
    number = 1 + sum(key.startswith(CHANGE) for key in _read_model_tags(client, name))
    change = {
        "who": who,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "why": why,
        "from": previous,
        "to": policy.model_dump(),
    }
    # The record first: a change that is not recorded must not happen.
    client.set_registered_model_tag(
        name, f"{CHANGE}{number:04}", json.dumps(change, sort_keys=True)
    )
    client.set_registered_model_tag(name, GATE_POLICY, policy.model_dump_json())
