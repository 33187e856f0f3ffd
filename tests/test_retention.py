"""What is kept of earlier runs: thirty nights on a disk, with folders and versions laid out as real
runs leave them, and nothing computed in them.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from mlflow import MlflowClient

from ebbflow import retention
from ebbflow.cli import main
from ebbflow.recipe import Recipe
from ebbflow.registry.lookup import find_named_version
from ebbflow.registry.model_version import RegistryError
from ebbflow.registry.promotion import roll_back_champion
from ebbflow.retention import (
    clean,
    count_bytes,
    delete_all,
    link_equal_folders,
    list_deletions,
)
from ebbflow.run_list import list_runs
from ebbflow.run_summary import write_summary_file
from ebbflow.storage.artifacts import digest_of_folder, verify_folder, write_new_folder
from ebbflow.storage.locks import lock_folder
from ebbflow.tracking.store import connect_to_store, resolve_tracking_uri

MODEL = "nightly"
BASE_BYTES = 200_000
POLICY_BYTES = 50_000
SMALL_BYTES = 4_000
"""Of a night that keeps its report alone."""
SUMMARY = {"before": {"reward": 0.1}, "after": {"reward": 0.2}, "model_version": "1"}


@dataclass
class Nights:
    """Nights of one recipe: each has a base model, a policy, a report and a registered version."""

    recipe: Recipe
    uri: str
    client: MlflowClient
    count: int = 0

    @property
    def output(self) -> Path:
        return Path(self.recipe.output)

    def run(self, promoted: bool = False, finished: bool = True) -> Path:
        """Make what the next night leaves behind."""
        self.count += 1
        run_id = f"{self.count:08x}{'0' * 24}"
        home = self.output / f"mine-{run_id[:8]}"
        _write_folder(home / "nodes" / "base-model" / "base", b"b" * BASE_BYTES)
        policy = home / "nodes" / "1.1-online" / "policy"
        _write_folder(policy, self.count.to_bytes(4) * (POLICY_BYTES // 4))
        (home / ".lock").touch()
        (home / "recipe.yaml").write_text(yaml.safe_dump({"name": "mine", "seed": self.count}))
        os.utime(home / "recipe.yaml", (self.count, self.count))
        (home / "report.html").write_text("a report")
        if finished:
            write_summary_file(home / "summary.json", SUMMARY | {"promoted": promoted})
        stored = self.output / "mlartifacts" / run_id
        shutil.copytree(policy, stored / "data" / "policy")
        shutil.copytree(home / "nodes" / "base-model" / "base", stored / "data" / "base")
        (stored / "evidence").mkdir()
        (stored / "evidence" / "gate.json").write_text(json.dumps({"decision": promoted}))
        tags = {"ebbflow.run_id": run_id}
        version = self.client.create_model_version(MODEL, stored.as_uri(), run_id, tags)
        self.client.set_registered_model_alias(MODEL, "challenger", version.version)
        if promoted:
            self.promote(str(version.version))
        return home

    def promote(self, version: str) -> None:
        aliases = self.client.get_registered_model(MODEL).aliases
        if "champion" in aliases:
            self.client.set_registered_model_alias(MODEL, "previous", aliases["champion"])
        self.client.set_model_version_tag(MODEL, version, "ebbflow.replaces", "")
        self.client.set_registered_model_alias(MODEL, "champion", version)

    def has_weights(self, number: int) -> bool:
        return (self.output / "mlartifacts" / f"{number:08x}{'0' * 24}" / "data").is_dir()


def _write_folder(folder: Path, content: bytes) -> None:
    with write_new_folder(folder) as unfinished:
        (unfinished / "model.safetensors").write_bytes(content)


@pytest.fixture
def nights(tmp_path: Path) -> Nights:
    settings: dict[str, Any] = {
        "name": "mine",
        "output": str(tmp_path / "runs"),
        "promotion": {"model_name": MODEL},
        "retention": {"keep_runs": 3, "keep_rejected_days": 0},
    }
    recipe = Recipe.model_validate(settings)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(settings))
    uri = resolve_tracking_uri(recipe)
    client = connect_to_store(uri)
    client.create_registered_model(MODEL)
    return Nights(recipe, uri, client)


def _measure(nights: Nights) -> int:
    """Count the bytes of runs and versions, without MLflow's database."""
    return count_bytes(nights.output) - count_bytes(nights.output / "mlflow.db")


def test_thirty_nights_stay_below_a_bound(nights: Nights) -> None:
    for number in range(1, 31):
        clean(nights.recipe, nights.uri)
        nights.run(promoted=number in (5, 17))
    clean(nights.recipe, nights.uri)
    # One base model, the policies of 3 runs and of the 2 runs and 3 versions that have an alias,
    # and a report a night. Without a retention: 30 * 2 * (200 + 50) kB = 15 MB.
    bound = BASE_BYTES + 8 * POLICY_BYTES + 30 * SMALL_BYTES
    assert _measure(nights) < bound
    assert [number for number in range(1, 31) if nights.has_weights(number)] == [5, 17, 30]
    whole = [path.parent.name for path in sorted(nights.output.glob("mine-*/nodes"))]
    assert whole == [f"mine-{number:08x}" for number in (5, 17, 28, 29, 30)]
    # Every night is still listed, with its verdict.
    assert [run.state for run in list_runs(nights.output)] == ["finished"] * 30
    for folder in nights.output.rglob("base"):
        verify_folder(folder)


def test_a_version_that_was_ever_champion_keeps_its_weights(nights: Nights) -> None:
    for number in range(1, 5):
        nights.run(promoted=number < 4)
    clean(nights.recipe, nights.uri)
    assert all(nights.has_weights(number) for number in range(1, 5))
    assert roll_back_champion(nights.uri, MODEL, "1").champion


def test_a_rejected_version_says_where_its_weights_went_and_keeps_its_evidence(
    nights: Nights,
) -> None:
    nights.run(promoted=True)
    nights.run()
    nights.run()
    clean(nights.recipe, nights.uri)
    version = find_named_version(nights.uri, f"{MODEL}/2")
    assert version.tags["ebbflow.cleaned"]
    assert (Path(version.source.removeprefix("file://")) / "evidence" / "gate.json").is_file()
    with pytest.raises(RegistryError, match=r"version 2 were deleted by `ebbflow clean`"):
        roll_back_champion(nights.uri, MODEL, "2")


def test_a_run_that_has_not_finished_is_left_alone(nights: Nights) -> None:
    stopped = nights.run(finished=False)
    for _ in range(5):
        nights.run()
    clean(nights.recipe, nights.uri)
    assert (stopped / "nodes").is_dir()


def test_runs_of_other_recipes_in_the_folder_are_left_alone(nights: Nights) -> None:
    for _ in range(5):
        nights.run()
    clean(nights.recipe.model_copy(update={"name": "another"}), nights.uri)
    assert len(list(nights.output.glob("mine-*/nodes"))) == 5


def test_the_run_of_a_champion_of_another_model_keeps_its_files(nights: Nights) -> None:
    promoted = nights.run(promoted=True)
    for _ in range(4):
        nights.run()
    promotion = nights.recipe.promotion.model_copy(update={"model_name": "renamed"})
    clean(nights.recipe.model_copy(update={"promotion": promotion}), nights.uri)
    assert (promoted / "nodes").is_dir()
    assert len(list(nights.output.glob("mine-*/nodes"))) == 4


def test_a_long_name_of_a_recipe_is_compared_as_a_whole(nights: Nights) -> None:
    name = "n" * 100
    for number in range(1, 6):
        shutil.move(nights.run(), nights.output / f"{name}-{number:08x}")
        (nights.output / f"{name}-{number:08x}" / "recipe.yaml").write_text(f"name: {name}")
    clean(nights.recipe.model_copy(update={"name": f"{name}n"}), nights.uri)
    assert len(list(nights.output.glob("n*/nodes"))) == 5
    clean(nights.recipe.model_copy(update={"name": name}), nights.uri)
    assert len(list(nights.output.glob("n*/nodes"))) == 3


def test_a_version_whose_run_is_under_way_keeps_its_weights(nights: Nights) -> None:
    nights.run()
    version = nights.client.get_model_version(MODEL, "1")
    waiting = nights.client.create_run(nights.client.create_experiment("mine")).info.run_id
    nights.client.set_model_version_tag(MODEL, version.version, "ebbflow.run_id", waiting)
    nights.run()
    clean(nights.recipe, nights.uri)
    assert nights.has_weights(1)
    nights.client.set_terminated(waiting)
    clean(nights.recipe, nights.uri)
    assert not nights.has_weights(1)


def test_weights_that_another_version_has_too_are_kept(nights: Nights) -> None:
    for _ in range(3):
        nights.run()
    nights.client.copy_model_version(f"models:/{MODEL}/1", "production")
    again = nights.client.get_model_version(MODEL, "2").source
    # By hand, as in MLflow's UI: the registry's challenger is another one.
    nights.client.create_model_version("production", again)
    clean(nights.recipe, nights.uri)
    assert [nights.has_weights(number) for number in (1, 2, 3)] == [True, True, True]


def test_a_version_that_somebody_else_registered_is_left_alone(nights: Nights) -> None:
    nights.run()
    nights.client.delete_model_version_tag(MODEL, "1", "ebbflow.run_id")
    nights.run()
    clean(nights.recipe, nights.uri)
    assert nights.has_weights(1)


def test_a_champion_by_hand_keeps_its_weights_and_run_once_a_run_was_compared_with_it(
    nights: Nights,
) -> None:
    for _ in range(6):
        nights.run()
    # Somebody moved the alias to version 1, a run met it there, and then to version 2.
    nights.client.set_model_version_tag(MODEL, "3", "ebbflow.compared_with", "1")
    nights.client.set_registered_model_alias(MODEL, "champion", "2")
    clean(nights.recipe, nights.uri)
    assert [number for number in range(1, 7) if nights.has_weights(number)] == [1, 2, 6]
    assert (nights.output / "mine-00000001" / "nodes").is_dir()
    assert not (nights.output / "mine-00000003" / "nodes").is_dir()


def test_what_killed_turns_left_goes_but_the_newest_trainings_and_the_queue(
    nights: Nights,
) -> None:
    settings = nights.recipe.model_dump(exclude_unset=True)
    settings["reward_model"] = {"name": "taste", "labels": ["labels"]}
    recipe = Recipe.model_validate(settings)
    trainings = nights.output / "reward_models" / "taste"
    for number in range(5):
        _write_folder(trainings / f"{number:012x}" / "checkpoint", b"c" * POLICY_BYTES)
        (trainings / f"{number:012x}" / ".lock").touch()
        os.utime(trainings / f"{number:012x}", (number, number))
    other = nights.output / "reward_models" / "another" / f"{0:012x}"
    _write_folder(other / "checkpoint", b"c")
    (other / ".lock").touch()
    queue = nights.output / "queues" / "mine"
    _write_folder(queue / "models" / "digest" / "base", b"b" * BASE_BYTES)
    (queue / ".lock").touch()
    clean(recipe, nights.uri)
    # The queue is not there yet: its generation, which needs the base model, may resume.
    assert (queue / "models").is_dir()
    (queue / "queue.parquet").write_bytes(b"q")
    with lock_folder(queue):
        clean(recipe, nights.uri)
        assert (queue / "models").is_dir()
    clean(recipe, nights.uri)
    assert sorted(path.name for path in queue.iterdir()) == [".lock", "queue.parquet"]
    kept = [path.parent.name for path in sorted(trainings.glob("*/checkpoint"))]
    assert kept == [f"{number:012x}" for number in (2, 3, 4)]
    assert (other / "checkpoint").is_dir()
    clean(nights.recipe, nights.uri)
    assert len(list(trainings.glob("*/checkpoint"))) == 3


def test_files_that_folders_share_cannot_be_written_in_place(nights: Nights) -> None:
    homes = [nights.run() for _ in range(2)]
    link_equal_folders(nights.output)
    files = [home / "nodes" / "base-model" / "base" / "model.safetensors" for home in homes]
    assert files[0].samefile(files[1])
    assert files[1].stat().st_mode & 0o222 == 0
    if os.geteuid() != 0:
        with pytest.raises(PermissionError):
            files[1].write_bytes(b"x")
    # What replaces files still can: of a copy, and of the folder itself.
    files[1].unlink()
    files[1].write_bytes(b"x")
    assert files[0].read_bytes() == b"b" * BASE_BYTES


def test_files_that_cannot_become_read_only_are_not_shared(
    nights: Nights, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    homes = [nights.run() for _ in range(2)]

    def refuse(path: Path, mode: int) -> None:
        raise PermissionError(f"{path} is of another user")

    monkeypatch.setattr(Path, "chmod", refuse)
    assert link_equal_folders(nights.output) == 0
    files = [home / "nodes" / "base-model" / "base" / "model.safetensors" for home in homes]
    assert not files[0].samefile(files[1])
    assert "keeps its own copy" in caplog.text


def test_a_version_that_is_being_promoted_keeps_its_weights(
    nights: Nights, caplog: pytest.LogCaptureFixture
) -> None:
    nights.run()
    nights.run()
    deletions = list_deletions(nights.recipe, nights.recipe.retention, nights.uri)
    nights.client.set_model_version_tag(MODEL, "1", "ebbflow.promoting", "against no champion")
    assert delete_all(deletions) == 0
    assert nights.has_weights(1)
    assert "ebbflow.cleaned" not in nights.client.get_model_version(MODEL, "1").tags
    assert f"{MODEL} version 1 is in use" in caplog.text


def test_folders_of_a_run_that_is_under_way_are_not_touched(nights: Nights) -> None:
    homes = [nights.run() for _ in range(3)]
    files = [home / "nodes" / "base-model" / "base" / "model.safetensors" for home in homes]
    with lock_folder(homes[0]):
        inode = files[0].stat().st_ino
        link_equal_folders(nights.output)
        assert (files[0].stat().st_ino, files[0].stat().st_nlink) == (inode, 1)
    assert files[1].samefile(files[2])
    assert not list(nights.output.rglob(".*.link*"))


@pytest.mark.parametrize("home", ["queues/mine", "reward_models/taste/0123456789ab"])
def test_folders_of_a_turn_that_is_under_way_are_not_touched(nights: Nights, home: str) -> None:
    run = nights.run()
    base = nights.output / home / "base"
    _write_folder(base, b"b" * BASE_BYTES)
    shared = run / "nodes" / "base-model" / "base" / "model.safetensors"
    with lock_folder(base.parent):
        link_equal_folders(nights.output)
        assert (base / "model.safetensors").stat().st_nlink == 1
    link_equal_folders(nights.output)
    assert shared.samefile(base / "model.safetensors")


def test_folders_that_share_their_files_are_not_read_again(
    nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    nights.run()
    nights.run()
    read: list[Path] = []

    def count(folder: Path) -> str:
        read.append(folder)
        return verify_folder(folder)

    monkeypatch.setattr(retention, "verify_folder", count)
    assert link_equal_folders(nights.output) > 0
    assert read
    read.clear()
    assert link_equal_folders(nights.output) == 0
    assert read == []


def test_without_hard_links_every_folder_keeps_its_files(
    nights: Nights, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    nights.run()
    nights.run()
    monkeypatch.setattr(retention.os, "link", refuse)
    assert link_equal_folders(nights.output) == 0
    assert "keeps its own copy of" in caplog.text
    for folder in nights.output.rglob("base"):
        verify_folder(folder)


def test_a_damaged_folder_is_not_linked_to(nights: Nights) -> None:
    first = nights.run() / "nodes" / "base-model" / "base"
    second = nights.run() / "nodes" / "base-model" / "base"
    (first / "model.safetensors").write_bytes(b"x" * BASE_BYTES)
    clean(nights.recipe, nights.uri)
    verify_folder(second)
    assert digest_of_folder(second) == (first / "COMMIT").read_text().strip()


def test_without_retention_everything_stays(nights: Nights) -> None:
    for _ in range(5):
        nights.run()
    before = _measure(nights)
    clean(Recipe.model_validate({"output": nights.recipe.output}), nights.uri)
    assert _measure(nights) == before


def test_the_command_only_lists_until_it_is_told_to_delete(nights: Nights) -> None:
    for _ in range(5):
        nights.run()
    before = _measure(nights)
    file = nights.output.parent / "recipe.yaml"
    listed = CliRunner().invoke(main, ["clean", str(file)])
    assert listed.exit_code == 0, listed.output
    assert "run mine-00000002: all but its report, summary and recipe" in listed.output
    assert "weights of nightly version 4, which was not promoted" in listed.output
    assert listed.output.splitlines()[-1].endswith("MB  would be deleted; pass --yes to delete")
    assert _measure(nights) == before
    deleted = CliRunner().invoke(main, ["clean", str(file), "--runs", "1", "--yes"])
    assert deleted.output.splitlines()[-1].endswith("MB  freed")
    assert len(list(nights.output.glob("mine-*/nodes"))) == 1
    assert _measure(nights) < before / 5


def test_a_recipe_without_retention_is_an_error_of_the_command(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump({"output": str(tmp_path / "runs")}))
    done = CliRunner().invoke(main, ["clean", str(file)])
    assert done.exit_code == 1
    assert "set retention.keep_runs or retention.keep_rejected_days, or pass --runs" in done.output
