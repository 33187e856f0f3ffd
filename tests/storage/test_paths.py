"""Names from elsewhere cannot lead out of the folder that they belong to."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import mlflow.artifacts
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from mlflow.exceptions import MlflowException

from ebbflow.data.images import ImageError, encode_pngs, load_condition_image
from ebbflow.data.pairs import PairError, read_pairs
from ebbflow.data.records import TrackedRun
from ebbflow.models import ModelError
from ebbflow.models.prepare import download_base_folder
from ebbflow.recipe.base import RecipeError
from ebbflow.recipe.pretrained import PretrainedSourceConfig
from ebbflow.recipe.recipe import Recipe
from ebbflow.stage import StageContext
from ebbflow.storage.artifacts import ArtifactError, commit_folder, verify_folder, write_new_folder
from ebbflow.storage.disk import PathError, create_private_folder, safe_join
from ebbflow.tracking import pending
from ebbflow.tracking.child_run import RunLogger

OUTSIDE = [
    "../x",
    "a/../../x",
    "/etc/passwd",
    "..",
    "a/..",
    "..\\x",
    "a\\..\\x",
    "C:\\x",
    "C:x",
    "\\\\host\\x",
    "",
    "a\0b",
    "//x",
]
in_place = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_leads_out_is_refused(tmp_path, name):
    with pytest.raises(PathError, match=r"is no file name below .*; remove"):
        safe_join(tmp_path, name)


def test_the_private_folder_is_made_once_for_this_user_alone(tmp_path):
    folder = create_private_folder(tmp_path)
    assert (folder.parent, folder.stat().st_mode & 0o777) == (tmp_path, 0o700)
    assert create_private_folder(tmp_path) == folder


def _by_another_user(folder):
    """As if another user had made it: whose it is, this test may not change."""
    folder.mkdir(mode=0o700)
    real = Path.lstat

    def lstat(path):
        status = real(path)
        values = [*status][:4] + [os.getuid() + 1] + [*status][5:]
        return os.stat_result(values) if path == folder else status

    return lstat


TAKEN = {
    "open to others": lambda folder: folder.mkdir() or folder.chmod(0o755),
    "a link": lambda folder: folder.symlink_to(folder.parent),
    "a file": lambda folder: folder.touch(mode=0o600),
    "another user's": _by_another_user,
}


@pytest.mark.parametrize("take", TAKEN.values(), ids=TAKEN)
def test_a_private_folder_that_somebody_else_made_is_refused(tmp_path, monkeypatch, take):
    folder = tmp_path / f"ebbflow-{os.getuid()}"
    lstat = take(folder)
    if lstat:
        monkeypatch.setattr(Path, "lstat", lstat)
    with pytest.raises(
        PathError,
        match=rf"{folder} is not a folder of user {os.getuid()} alone .*; remove it, or set TMPDIR",
    ):
        create_private_folder(tmp_path)


def test_a_link_that_leads_out_is_refused(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "up").symlink_to(tmp_path)
    (folder / "own").symlink_to(folder / "file")
    with pytest.raises(PathError, match="leads out of .*; put the file itself there"):
        safe_join(folder, "up/secret")
    assert safe_join(folder, "own") == folder / "own"
    assert safe_join(folder, "deep/er/file") == folder / "deep/er/file"


@in_place
@given(
    st.lists(
        st.sampled_from(["..", ".", "a", "b.json", "", "\\", "~", "%2e%2e", "…"]), max_size=6
    ).map("/".join)
)
@example("a/./b")
def test_whatever_is_let_through_is_inside(tmp_path, name):
    try:
        path = safe_join(tmp_path, name)
    except PathError:
        return
    assert path.resolve().is_relative_to(tmp_path.resolve())


def test_names_in_a_manifest_are_compared_and_never_followed(tmp_path):
    (tmp_path / "secret").write_text("secret")
    with write_new_folder(tmp_path / "artifact") as partial:
        (partial / "a").write_text("a")
    manifest = json.loads((tmp_path / "artifact" / "manifest.json").read_text())
    manifest["files"]["../secret"] = manifest["files"]["a"]
    (tmp_path / "artifact" / "manifest.json").write_text(json.dumps(manifest))
    digest = hashlib.sha256((tmp_path / "artifact" / "manifest.json").read_bytes()).hexdigest()
    (tmp_path / "artifact" / "COMMIT").write_text(digest)
    with pytest.raises(ArtifactError, match=r"does not match its manifest .*\.\./secret"):
        verify_folder(tmp_path / "artifact")


def test_a_repository_whose_index_names_a_part_elsewhere(tiny_recipe, tmp_path, monkeypatch):
    snapshot = tmp_path / "cache" / "snapshot"
    shutil.copytree(Path(tiny_recipe("sd3").model.path), snapshot)
    (tmp_path / "cache" / "secrets").mkdir()
    (tmp_path / "cache" / "secrets" / "key.json").write_text("{}")
    index = json.loads((snapshot / "model_index.json").read_text())
    monkeypatch.setattr("ebbflow.models.prepare.locate_pretrained", lambda *_: snapshot)
    for part in ("../secrets", "/etc", "..", "**", "a/b", "secrets\\x"):
        (snapshot / "model_index.json").write_text(
            json.dumps(index | {part: ["diffusers", "AutoencoderKL"]})
        )
        with pytest.raises(
            ModelError, match=r"model_index\.json names the part .* which is no identifier"
        ):
            download_base_folder("owner/name", "0" * 40, tmp_path / "out" / "base")
    assert not list(tmp_path.rglob("out/**/key.json"))


@pytest.mark.parametrize(
    "path",
    [
        "../x/y",
        "a/b/c",
        "/a/b",
        "a/..",
        "a//b",
        "a\\b",
        "owner/na me",
        "owner/name\n",
        "-a/b",
        "./a",
    ],
)
def test_what_is_no_repository(path):
    with pytest.raises(RecipeError, match="is no owner/name|has a control character"):
        Recipe.model_validate({"model": {"family": "sd3", "path": path, "revision": "0" * 40}})
    assert PretrainedSourceConfig(path="owner/na.me-1", revision="0" * 40).is_on_hub


def test_images_of_prompts_and_pairs(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (tmp_path / "secret.png").write_bytes(encode_pngs(np.zeros((1, 8, 8, 3), np.uint8))[0])
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "up").symlink_to(tmp_path)
    for name in ("../secret.png", str(tmp_path / "secret.png"), "link.png", "up/secret.png"):
        with pytest.raises(ImageError, match="lies outside"):
            load_condition_image(name, folder)
        (folder / "pairs.jsonl").write_text(
            json.dumps({"prompt": "a", "chosen": name, "rejected": name}) + "\n"
        )
        with pytest.raises(PairError, match="lies outside"):
            list(read_pairs(folder / "pairs.jsonl"))


@pytest.mark.parametrize("path", ["../report.html", "/etc/x", "dumps/../../x", "a\\..\\b", ".."])
def test_files_of_a_run(path, tmp_path):
    tracked = TrackedRun(
        run_id="r",
        experiment_id="1",
        tracking_uri="",
        folder=str(tmp_path),
        recipe_digest="d",
        started_at=0.0,
    )
    with pytest.raises(PathError, match="is no file name below artifacts"):
        RunLogger(tracked, "n").log_file(path, b"")


@given(st.text(max_size=40))
@example("../../x")
@example("1.1 online rollout 0")
def test_the_names_of_nodes_stay_in_their_folder(node):
    path = Path(pending._build_uri("/run", node))
    assert path.parent == Path("/run") / pending.FOLDER
    assert path.name.endswith(".jsonl")


def test_folders_of_stages_have_plain_names(make_recipe):
    assert {StageContext(make_recipe(), 0, stage).stage_label for stage in range(2)} == {
        "1.1 online",
        "1.2 offline",
    }


class Liar(BaseHTTPRequestHandler):
    """An MLflow server that lists artifacts which lie elsewhere."""

    names = ("../../stolen", "/tmp/stolen", "..%2f..%2fstolen", "a/../../../stolen")

    def do_GET(self) -> None:
        files = [{"path": name, "is_dir": False, "file_size": 3} for name in self.names]
        content = b"bad" if "/stolen" in self.path else json.dumps({"files": files}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


def test_a_server_of_artifacts_that_lists_what_lies_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Liar)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    into = tmp_path / "deep" / "er" / "champion"
    into.mkdir(parents=True)
    uri = f"http://127.0.0.1:{server.server_port}/api/2.0/mlflow-artifacts/artifacts/model"
    try:
        with pytest.raises(MlflowException, match="(?i)invalid|path"):
            mlflow.artifacts.download_artifacts(uri, dst_path=str(into))
    finally:
        server.shutdown()
        server.server_close()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_committed_folder_is_made_of_files_below_it(tmp_path):
    """A link to a folder elsewhere could not be verified, and none of its files is ever
    committed."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret").write_text("secret")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a").write_text("a")
    (folder / "link").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    with pytest.raises(ArtifactError, match="holds 'link', which is neither a file nor a folder"):
        commit_folder(folder)
    assert not (folder / "COMMIT").exists()
