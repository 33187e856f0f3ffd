"""Registration at the default limits of Flyte: 2 MB of storage, 4 MB of messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from flyte_cases import DRY_RUN, MAX_SECONDS, Flyte, MakeRecipe, Record
from flyteidl.admin.common_pb2 import NamedEntityIdentifier, ObjectGetRequest, ResourceListRequest
from flyteidl.core.identifier_pb2 import WORKFLOW, Identifier
from kubernetes import client
from kubernetes.client import CoreV1Api

from tests.pipeline.conftest import package

PLANS = ["workflows.launch_plans.manual", "workflows.launch_plans.nightly"]


def _list_versions(flyte: Flyte, plan: str) -> list[str]:
    request = ResourceListRequest(
        id=NamedEntityIdentifier(project=flyte.project, domain=flyte.domain, name=plan), limit=100
    )
    plans = flyte.remote.client.raw.list_launch_plans_paginated(request).launch_plans
    return [plan.id.version for plan in plans]


def test_operators(pods: CoreV1Api, record_property: Record) -> None:
    """The version of Kubernetes, and the operators."""
    record_property(
        "version of Kubernetes", client.VersionApi(pods.api_client).get_code().git_version
    )
    groups = {group.name for group in client.ApisApi(pods.api_client).get_api_versions().groups}
    operators = {"ray.io": "KubeRay", "kubeflow.org": "training operator"}
    there = [name for group, name in operators.items() if group in groups]
    record_property("seen", f"operators: {', '.join(there) or 'none'}")
    assert "flyte.lyft.com" in groups


def test_flytectl_registers_the_package(
    flyte: Flyte, plan_recipe: Path, tmp_path: Path, record_property: Record
) -> None:
    """flytectl registers the package, its launch plans, too."""
    archive = package(tmp_path, flyte.image, recipe=str(plan_recipe))
    version = f"{flyte.run}-flytectl"
    options = ["--archive", *flyte.place, "--version", version]
    flyte.flytectl("register", "files", str(archive), *options)
    assert [version in _list_versions(flyte, plan) for plan in PLANS] == [True, True]
    record_property("seen", f"a package of {archive.stat().st_size / 1024:.0f} KiB")


def test_pyflyte_registers_the_workflows(
    flyte: Flyte, version: str, record_property: Record
) -> None:
    """pyflyte registers the workflows, their launch plans, too."""
    assert [version in _list_versions(flyte, plan) for plan in PLANS] == [True, True]
    record_property("seen", f"{len(PLANS)} launch plans besides those of the workflows")


def test_dry_run(
    flyte: Flyte, version: str, make_recipe: MakeRecipe, record_property: Record
) -> None:
    """`dry_run` describes what the recipe needs."""
    execution = flyte.start(DRY_RUN, version, make_recipe("dry"), "dry-run")
    execution.wait_for_end(MAX_SECONDS)
    outputs = flyte.remote.client.get_execution_data(_identify(flyte, execution.name))
    text = outputs.full_outputs.literals["o0"].scalar.primitive.string_value
    assert "tiny" in text
    record_property("seen", f"a text of {len(text.splitlines())} lines")


def test_the_same_version_with_another_deployment_is_refused(
    flyte: Flyte, version: str, deployment: dict[str, Any], record_property: Record
) -> None:
    """Flyte refuses the same version with another deployment; one that pyflyte computes has the
    deployment in it."""
    other = json.dumps(deployment | {"labels": {"team": "another"}})
    options = ["--image", flyte.image, *flyte.place, "--version", version, "--copy", "none"]
    text = flyte.pyflyte("register", *options, "workflows", status=1, EBBFLOW_DEPLOYMENT=other)
    assert "different structure" in text
    record_property("seen", "refused: different structure")


def test_an_image_with_other_code_is_refused(
    flyte: Flyte,
    clone: Path,
    plan_recipe: Path,
    deployment: dict[str, Any],
    make_recipe: MakeRecipe,
    record_property: Record,
) -> None:
    """An edited clone that is registered without an upload: its first pod refuses the image's
    code, in the first line of the console's error box."""
    version = f"{flyte.run}-not-uploaded"
    options = ["--image", flyte.image, *flyte.place, "--version", version, "--copy", "none"]
    variables = {
        "PYTHONPATH": str(clone),
        "EBBFLOW_DEPLOYMENT": json.dumps(deployment),
        "EBBFLOW_RECIPE": str(plan_recipe),
    }
    flyte.pyflyte("register", *options, "workflows", folder=clone, **variables)
    execution = flyte.start(DRY_RUN, version, make_recipe("refused"), "refused")
    execution.wait_for_end(MAX_SECONDS, "FAILED")
    (attempt,) = execution.attempts_of("plan_run")
    first = attempt.message.strip().splitlines()[0]
    assert "SourcesError: this pod runs other code than was submitted: ebbflow is" in first
    record_property("seen", first[:160])


def test_a_variable_of_flyte_is_refused(
    flyte: Flyte, deployment: dict[str, Any], record_property: Record
) -> None:
    """A variable that Flyte sets by itself is refused in the deployment's `env` at registration."""
    twice = json.dumps(deployment | {"env": {"FLYTE_ATTEMPT_NUMBER": "0"}})
    options = ["--image", flyte.image, *flyte.place, "--version", "never", "--copy", "none"]
    text = flyte.pyflyte("register", *options, "workflows", status=1, EBBFLOW_DEPLOYMENT=twice)
    assert "FLYTE_ATTEMPT_NUMBER" in text
    record_property("seen", _find_line(text, "FLYTE_ATTEMPT_NUMBER"))


def test_the_forms_describe_themselves(flyte: Flyte, version: str, record_property: Record) -> None:
    """Workflows have descriptions in the console."""
    raw = flyte.remote.client.raw
    shown = []
    for name in ("post_train", "post_train_by_name", "dry_run"):
        workflow = Identifier(
            resource_type=WORKFLOW,
            project=flyte.project,
            domain=flyte.domain,
            name=f"workflows.post_training.{name}",
            version=version,
        )
        shown.append(raw.get_workflow(ObjectGetRequest(id=workflow)).short_description)
    assert all(len(text) > 20 for text in shown)
    record_property("seen", shown[0])


@pytest.mark.parametrize("name", PLANS)
def test_launch_plans_describe_their_recipe(
    flyte: Flyte, version: str, name: str, record_property: Record
) -> None:
    """The launch form has help for each input."""
    record_property("case", f"The launch form of `{name}` has help for each input.")
    plan = flyte.remote.fetch_launch_plan(flyte.project, flyte.domain, name, version)
    inputs = plan.flyte_workflow.interface.inputs
    assert all(variable.description for variable in inputs.values())
    record_property(
        "seen", "; ".join(f"{name}: {one.description[:60]}" for name, one in inputs.items())
    )


def _identify(flyte: Flyte, name: str) -> Any:
    from flytekit.models.core.identifier import WorkflowExecutionIdentifier

    return WorkflowExecutionIdentifier(flyte.project, flyte.domain, name)


def _find_line(text: str, word: str) -> str:
    """Find the first line with a word in what a command printed."""
    return next(line for line in text.splitlines() if word in line).strip(" │")[:200]
