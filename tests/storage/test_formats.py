"""What an older or newer Ebbflow wrote is read, or refused with a line that says why."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlflow.entities.model_registry import ModelVersion
from mlflow.entities.model_registry.model_version_tag import ModelVersionTag

from ebbflow.registry.model_version import RegistryError, require_weights
from ebbflow.run_list import list_runs
from ebbflow.storage.formats import RUN_FORMAT_FILE, VERSION_FORMAT_TAG, explain_unknown_format


@pytest.mark.parametrize(
    ("text", "known", "is_readable"),
    [(None, 1, True), ("1\n", 1, True), ("1", 3, True), ("2", 1, False), ("x", 1, False)],
)
def test_what_an_older_ebbflow_wrote_is_read_and_what_a_newer_one_wrote_is_not(
    text: str | None, known: int, is_readable: bool
) -> None:
    assert (explain_unknown_format(text, known) is None) == is_readable


def test_a_version_of_a_newer_ebbflow_is_refused() -> None:
    version = ModelVersion("m", "3", 0, tags=[ModelVersionTag(VERSION_FORMAT_TAG, "7")])
    with pytest.raises(
        RegistryError, match=r"'m' version 3: format '7' is of a newer Ebbflow, .* up to 1; install"
    ):
        require_weights(version)


def test_the_run_of_a_newer_ebbflow_is_listed_as_such(tmp_path: Path) -> None:
    for name, text in (("a-1", "1\n"), ("a-2", "2\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".lock").touch()
        (tmp_path / name / RUN_FORMAT_FILE).write_text(text)
    states = {run.name: run.state for run in list_runs(tmp_path)}
    assert states == {
        "a-1": "stopped",
        "a-2": "format '2' is of a newer Ebbflow, and this one reads up to 1",
    }
