"""A downloaded base model is a committed folder of the pipeline's own files, whatever else the
repository holds.
"""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path

import pytest

from ebbflow.models import ModelError, prepare
from ebbflow.recipe.pretrained import PretrainedSourceConfig
from ebbflow.storage.artifacts import COMMIT as MARK
from ebbflow.storage.artifacts import MANIFEST, ArtifactError, verify_folder

pytestmark = pytest.mark.any_cpu

COMMIT = "1" * 40


@pytest.fixture
def hub(monkeypatch, tmp_path, base_folder):
    """A cache as the hub's client keeps it: a snapshot of links; returns what was asked for."""
    asked: list[tuple[PretrainedSourceConfig, list[str]]] = []
    snapshot = tmp_path / "snapshots" / COMMIT
    for file in base_folder.rglob("*.*"):
        path = snapshot / file.relative_to(base_folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(file)

    def pretrained_folder(pretrained, patterns):
        asked.append((pretrained, patterns))
        return snapshot

    monkeypatch.setattr(prepare, "locate_pretrained", pretrained_folder)
    return snapshot, asked


def test_the_folder_holds_the_pipeline_and_no_links(hub, tmp_path):
    """Only its parts are asked for and kept, whatever else the repository and the cache hold."""
    snapshot, asked = hub
    wanted = {path.relative_to(snapshot) for path in snapshot.rglob("*") if path.is_file()} - {
        Path("glyph.json"),
        Path(MANIFEST),
    }
    for other in (
        "single_file.safetensors",
        "text_encoders/t5xxl.safetensors",
        "transformer/pytorch_model.bin",
    ):
        (snapshot / other).parent.mkdir(exist_ok=True)
        (snapshot / other).write_bytes(b"large")
    prepare.download_base_folder("owner/name", COMMIT, tmp_path / "base")
    assert verify_folder(tmp_path / "base")
    files = [
        path
        for path in (tmp_path / "base").rglob("*")
        if path.is_file() and path.name not in (MANIFEST, MARK)
    ]
    assert {path.relative_to(tmp_path / "base") for path in files} == wanted
    assert not any(path.is_symlink() for path in files)
    (first, index), (second, patterns) = asked
    assert index == ["model_index.json", "modular_model_index.json"]
    assert first == second == PretrainedSourceConfig(path="owner/name", revision=COMMIT)
    pipeline_files = [
        "model_index.json",
        "transformer/config.json",
        "transformer/x-00001-of-2.safetensors",
        "tokenizer/merges.txt",
    ]
    assert all(any(fnmatch(name, pattern) for pattern in patterns) for name in pipeline_files)
    for other in (
        "single_file.safetensors",
        "text_encoders/t5xxl.safetensors",
        "transformer/pytorch_model.bin",
    ):
        assert not any(fnmatch(other, pattern) for pattern in patterns)


def test_what_the_cache_holds_does_not_change_with_the_folder(hub, tmp_path):
    """The files may share their place on the disk: replacing the folder must leave the cache as it
    was.
    """
    snapshot, _ = hub
    cached_index = (snapshot / "model_index.json").read_text()
    prepare.download_base_folder("owner/name", COMMIT, tmp_path / "base")
    prepare.download_base_folder("owner/name", COMMIT, tmp_path / "base")
    shutil.rmtree(tmp_path / "base")
    assert (snapshot / "model_index.json").read_text() == cached_index


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setattr(prepare, "HF_HUB_CACHE", str(tmp_path / "cache"))


PUBLISHED = PretrainedSourceConfig(path="owner/name", revision=COMMIT)


def test_a_cached_base_is_made_once(hub, cache, tmp_path):
    _, asked = hub
    first = prepare.cache_base_folder(PUBLISHED)
    needed = len(asked)
    assert first.is_relative_to(tmp_path / "cache")
    assert prepare.cache_base_folder(PUBLISHED) == first
    assert len(asked) == needed
    assert verify_folder(first)


def test_a_damaged_cached_base_is_found_and_never_committed_again(hub, cache):
    """It shares its files with the hub's cache, which would give the same damage again."""
    folder = prepare.cache_base_folder(PUBLISHED)
    weights = next(folder.rglob("*.safetensors"))
    content = weights.read_bytes()
    weights.unlink()  # the file is also that of the hub's cache, and of other tests
    weights.write_bytes(content[:-1] + b"x")
    digest = (folder / MARK).read_text()
    with pytest.raises(
        ArtifactError, match=rf"{weights.name}.*; remove {folder} and .*models--owner--name"
    ):
        prepare.cache_base_folder(PUBLISHED)
    assert (folder / MARK).read_text() == digest


def test_two_at_once_make_a_cached_base_once(hub, cache, monkeypatch):
    """The second comes while the first downloads: it waits, and neither writes into what the other
    one made.
    """
    _, asked = hub
    fetched = prepare.locate_pretrained
    locked = prepare.wait_for_lock
    both = threading.Barrier(2, timeout=60)
    others: list[Future[Path]] = []

    def pretrained_folder(pretrained, patterns):
        if not others:
            others.append(pool.submit(prepare.cache_base_folder, PUBLISHED))
            both.wait()
        return fetched(pretrained, patterns)

    def wait_for_lock(file):
        if threading.current_thread() is not threading.main_thread():
            both.wait()
        return locked(file)

    monkeypatch.setattr(prepare, "locate_pretrained", pretrained_folder)
    monkeypatch.setattr(prepare, "wait_for_lock", wait_for_lock)
    with ThreadPoolExecutor(1) as pool:
        first = prepare.cache_base_folder(PUBLISHED)
        assert others[0].result(60) == first
    assert len(asked) == 2  # the index, then the parts
    assert verify_folder(first)


def test_a_repository_without_a_pipeline_is_refused(hub, tmp_path):
    snapshot, _ = hub
    (snapshot / "model_index.json").unlink()
    with pytest.raises(
        ModelError,
        match="owner/name at 1{40} has neither model_index.json nor modular_model_index.json; name"
        " a repository for diffusers",
    ):
        prepare.download_base_folder("owner/name", COMMIT, tmp_path / "base")
    assert not (tmp_path / "base").exists()


@pytest.mark.parametrize("wrong", [{"path": "a/b/c"}, {"path": None}, {"path": "../up"}])
def test_a_revision_is_of_a_repository(wrong):
    with pytest.raises(ValueError, match="is no owner/name"):
        PretrainedSourceConfig(revision=COMMIT, **wrong)


def test_a_branch_is_no_revision():
    with pytest.raises(ValueError, match="revision"):
        PretrainedSourceConfig(path="owner/name", revision="main")
