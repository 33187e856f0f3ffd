"""A downloaded base model is a committed folder of the pipeline's own files, whatever else the repository holds."""

from __future__ import annotations

import shutil
from fnmatch import fnmatch
from pathlib import Path

import pytest

from ebbflow.models import ModelError, prepare
from ebbflow.recipe.pretrained import PretrainedSourceConfig
from ebbflow.storage.artifacts import COMMIT as MARK
from ebbflow.storage.artifacts import MANIFEST, verify

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

    monkeypatch.setattr(prepare, "pretrained_folder", pretrained_folder)
    return snapshot, asked


def test_the_folder_holds_the_pipeline_and_no_links(hub, tmp_path):
    """Only its parts are asked for and kept, whatever else the repository and the cache hold."""
    snapshot, asked = hub
    wanted = {path.relative_to(snapshot) for path in snapshot.rglob("*") if path.is_file()} - {Path("glyph.json"), Path(MANIFEST)}
    for other in ("single_file.safetensors", "text_encoders/t5xxl.safetensors", "transformer/pytorch_model.bin"):
        (snapshot / other).parent.mkdir(exist_ok=True)
        (snapshot / other).write_bytes(b"large")
    prepare.download_base("owner/name", COMMIT, tmp_path / "base")
    assert verify(tmp_path / "base")
    found = [path for path in (tmp_path / "base").rglob("*") if path.is_file() and path.name not in (MANIFEST, MARK)]
    assert {path.relative_to(tmp_path / "base") for path in found} == wanted
    assert not any(path.is_symlink() for path in found)
    (first, index), (second, patterns) = asked
    assert index == ["model_index.json"]
    assert first == second == PretrainedSourceConfig(path="owner/name", revision=COMMIT)
    kept = ["model_index.json", "transformer/config.json", "transformer/x-00001-of-2.safetensors", "tokenizer/merges.txt"]
    assert all(any(fnmatch(name, pattern) for pattern in patterns) for name in kept)
    for other in ("single_file.safetensors", "text_encoders/t5xxl.safetensors", "transformer/pytorch_model.bin"):
        assert not any(fnmatch(other, pattern) for pattern in patterns)


def test_what_the_cache_holds_does_not_change_with_the_folder(hub, tmp_path):
    """The files may share their place on the disk: replacing the folder must leave the cache as it was."""
    snapshot, _ = hub
    before = (snapshot / "model_index.json").read_text()
    prepare.download_base("owner/name", COMMIT, tmp_path / "base")
    prepare.download_base("owner/name", COMMIT, tmp_path / "base")
    shutil.rmtree(tmp_path / "base")
    assert (snapshot / "model_index.json").read_text() == before


def test_a_repository_without_a_pipeline_is_refused(hub, tmp_path):
    snapshot, _ = hub
    (snapshot / "model_index.json").unlink()
    with pytest.raises(ModelError, match="owner/name at 1{40} has no model_index.json; name a repository for diffusers"):
        prepare.download_base("owner/name", COMMIT, tmp_path / "base")
    assert not (tmp_path / "base").exists()


@pytest.mark.parametrize("wrong", [{"path": "a/b/c"}, {"path": None}, {"path": "../up"}])
def test_a_revision_is_of_a_repository(wrong):
    with pytest.raises(ValueError, match="is no owner/name"):
        PretrainedSourceConfig(revision=COMMIT, **wrong)


def test_a_branch_is_no_revision():
    with pytest.raises(ValueError, match="revision"):
        PretrainedSourceConfig(path="owner/name", revision="main")
