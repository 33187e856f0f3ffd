"""The champion that the gate compared a version with, found again."""

from __future__ import annotations

from pathlib import Path

from ebbflow.recipe.policy import CHAMPION
from ebbflow.registry.download import download_registered_data
from ebbflow.registry.lookup import find_named_version
from ebbflow.registry.model_version import BASE_DIGEST
from ebbflow.registry.promotion import COMPARED_WITH, NO_CHAMPION
from ebbflow.registry.serving import find_base_folder
from ebbflow.storage.artifacts import verify_folder
from ebbflow.training.policy_metadata import write_base_policy
from ebbflow.verification.version import CheckFailedError, NotStoredError, RegisteredVersion

POLICY = "champion-policy"
BASE = "champion-base"


def find_compared_policy(registered: RegisteredVersion, tracking_uri: str, scratch: Path) -> str:
    """Put links to the champion's policy and base model into ``scratch``, as ``POLICY`` and
    ``BASE``; return which champion it is.

    Raises:
        NotStoredError: the run began with a policy that is not stored.
        CheckFailedError: the champion was trained from another base model than is there.
    """
    compared = registered.require_tag(COMPARED_WITH)
    own_base = find_base_folder(registered.data)
    if compared != NO_CHAMPION:
        named = f"{registered.version.name}/{compared}"
        version = find_named_version(tracking_uri, named)
        data = download_registered_data(tracking_uri, version, scratch / "champion")
        base = data / "base" if (data / "base").is_dir() else own_base
        if verify_folder(base) != version.tags.get(BASE_DIGEST):
            raise CheckFailedError(f"the base model of {named} was not stored, and is another")
        (scratch / POLICY).symlink_to(data / "policy", target_is_directory=True)
        (scratch / BASE).symlink_to(base.resolve(), target_is_directory=True)
        return f"version {compared}"
    recipe = registered.recipe
    # Without a champion, a run that asks for it begins with the base model.
    if recipe.policy.start not in (None, CHAMPION):
        raise NotStoredError("the run began with a policy of its own, which no version holds")
    write_base_policy(
        scratch / POLICY,
        verify_folder(own_base),
        recipe.digest,
        recipe.policy,
        recipe.model,
        recipe.evaluation,
    )
    (scratch / BASE).symlink_to(own_base.resolve(), target_is_directory=True)
    return "the base model, which the run began with"
