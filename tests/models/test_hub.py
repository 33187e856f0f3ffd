"""Weights from a folder or from a Hugging Face repository; a small server on 127.0.0.1 stands in
for the hub.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ebbflow.models.hub import HubError, locate_pretrained
from ebbflow.recipe.pretrained import PretrainedSourceConfig

pytestmark = pytest.mark.any_cpu

COMMIT = "1" * 40
OTHER = "2" * 40
TOKEN = "hf_of_this_test"
FILES = {
    "config.json": b'{"a": 1}',
    "weights/model.safetensors": b"12345678",
    "notes.md": b"not asked for",
}
FETCH = """
import json, sys, types
# The real package imports torch.
package = sys.modules["ebbflow.models"] = types.ModuleType("ebbflow.models")
package.__path__ = ["ebbflow/models"]
from ebbflow.models.hub import HubError, locate_pretrained
from ebbflow.recipe.pretrained import PretrainedSourceConfig
for path, commit in json.loads(sys.argv[1]):
    try:
        source = PretrainedSourceConfig(path=path, revision=commit)
        print("folder", locate_pretrained(source, ["*.json", "*.safetensors"]))
    except HubError as error:
        print("HubError", error)
"""


class Hub(BaseHTTPRequestHandler):
    """``team/model`` to whoever has the token, at one commit; ``team/gated`` to nobody; nothing
    else is there.
    """

    def do_GET(self) -> None:
        self.server.asked.append((self.command, self.path, self.headers.get("Authorization")))
        path = self.path.partition("?")[0]
        tree = f"/api/models/team/model/tree/{COMMIT}"
        files = f"/team/model/resolve/{COMMIT}/"
        if path.startswith(("/api/models/team/gated", "/team/gated")):
            self._answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif not path.startswith(("/api/models/team/model", "/team/model")):
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer(401, b"{}", {})
        elif path == tree:
            entries = [
                {"type": "file", "path": name, "size": len(body), "oid": _etag(body)}
                for name, body in FILES.items()
            ]
            self._answer(200, json.dumps(entries).encode(), {"Content-Type": "application/json"})
        elif path.startswith(files) and path.removeprefix(files) in FILES:
            body = FILES[path.removeprefix(files)]
            self._answer(200, body, {"ETag": f'"{_etag(body)}"', "X-Repo-Commit": COMMIT})
        else:
            self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})

    do_HEAD = do_GET

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments) -> None:
        pass


def _etag(body: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()


@pytest.fixture(scope="module")
def hub():
    """The server; ``hub.asked`` lists method, path and Authorization of every request."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked = []
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def fetch(hub, cache: Path, *wanted: tuple[str, str], **environment: str) -> list[tuple[str, str]]:
    """``("folder", its path)`` or ``("HubError", its message)`` of each wanted path and commit,
    from a process of its own.

    (huggingface_hub reads its environment once, when it is imported.)
    """
    ours = {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HOME": str(cache),
        "HF_HUB_OFFLINE": "0",
        "TRANSFORMERS_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "NO_PROXY": "127.0.0.1",
        **environment,
    }
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))
    }
    process = subprocess.run(
        [sys.executable, "-c", FETCH, json.dumps(wanted)],
        env={**inherited, **ours},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    return [
        (kind, rest)
        for kind, _, rest in (line.partition(" ") for line in process.stdout.splitlines())
    ]


def test_the_pinned_commit_is_fetched_with_the_token_and_then_kept(hub, tmp_path):
    hub.asked.clear()
    wanted = (
        ("team/model", COMMIT),
        ("team/model", OTHER),
        ("team/absent", COMMIT),
        ("team/gated", COMMIT),
    )
    (kind, folder), *refused = fetch(hub, tmp_path, *wanted, HF_TOKEN=TOKEN)

    assert kind == "folder", folder
    fetched_files = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in Path(folder).rglob("*")
        if path.is_file()
    }
    assert fetched_files == {name: body for name, body in FILES.items() if name != "notes.md"}
    served = [path for _, path, _ in hub.asked if "team/model" in path and OTHER not in path]
    assert served
    assert all(COMMIT in path for path in served)
    assert {token for _, path, token in hub.asked if "team/" in path} == {f"Bearer {TOKEN}"}

    for (repository, commit), (kind, message) in zip(wanted[1:], refused, strict=True):
        assert kind == "HubError"
        assert repository in message
        assert commit in message
        assert "HF_TOKEN" in message
        assert "licence" in message
        assert TOKEN not in message

    asked = len(hub.asked)
    again, absent = fetch(
        hub, tmp_path, ("team/model", COMMIT), ("team/absent", COMMIT), HF_HUB_OFFLINE="1"
    )
    assert again == ("folder", folder)
    assert absent[0] == "HubError"
    assert f"team/absent at commit {COMMIT}" in absent[1]
    assert "HF_HUB_OFFLINE" in absent[1]
    assert len(hub.asked) == asked


def test_without_its_token_a_repository_is_refused(hub, tmp_path):
    ((kind, message),) = fetch(hub, tmp_path, ("team/model", COMMIT), HF_TOKEN="hf_wrong")
    assert kind == "HubError"
    assert f"team/model at commit {COMMIT}" in message
    assert "hf_wrong" not in message
    assert not list(tmp_path.rglob("model.safetensors"))


def test_a_folder_or_a_file_is_taken_as_it_is(tmp_path):
    file = tmp_path / "head.pth"
    file.write_bytes(b"")
    assert locate_pretrained(PretrainedSourceConfig(path=str(tmp_path))) == tmp_path
    assert locate_pretrained(PretrainedSourceConfig(path=str(file)), ["*.json"]) == file


@pytest.mark.parametrize("path", [None, "/no/such/folder", "s3://bucket/clip", "team/model"])
def test_a_path_that_leads_nowhere_is_named(path):
    with pytest.raises(
        HubError, match=f"path = {path!r} is not on this machine; .* give its commit as 'revision'"
    ):
        locate_pretrained(PretrainedSourceConfig(path=path))
