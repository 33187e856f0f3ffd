"""A policy that the command line names by a URI."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ebbflow.registry.model_folders import open_model_folders
from ebbflow.training.policy_metadata import PolicyError, read_policy_metadata


def test_a_policy_folder_is_named_by_its_uri(policy: Path, tmp_path: Path) -> None:
    with open_model_folders("sqlite:///none.db", policy.as_uri(), tmp_path) as folders:
        assert folders.policy != policy
        assert folders.base == tmp_path
        assert folders.name == policy.as_uri()
        assert read_policy_metadata(folders.policy) == read_policy_metadata(policy)


@pytest.mark.parametrize("address", ["{folder}", "no-such-store://{folder}"])
def test_an_address_without_a_policy_is_said(policy: Path, tmp_path: Path, address: str) -> None:
    shutil.rmtree(policy)
    uri = address.format(folder=policy.as_uri())
    with (
        pytest.raises(PolicyError, match="cannot be downloaded"),
        open_model_folders("sqlite:///none.db", uri, tmp_path),
    ):
        pass
