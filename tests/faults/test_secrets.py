"""Planted secrets: none is found again in anything that a run writes or prints."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import sqlite3
import threading
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ebbflow.recipe import Recipe
from ebbflow.recipe.base import RecipeError
from ebbflow.recipe.recipe_file import load_recipe
from ebbflow.recipe.secrets import redact_secrets
from ebbflow.tracking.store import TrackingError, resolve_tracking_uri
from tests.pipeline.conftest import run_pipeline

PLANTED = {
    name: f"PLANTED{index}{name.replace('_', '')}0123456789"
    for index, name in enumerate(
        [
            "REWARD_TOKEN",
            "MLFLOW_TRACKING_PASSWORD",
            "MLFLOW_TRACKING_TOKEN",
            "HF_TOKEN",
            "AWS_SECRET_ACCESS_KEY",
            "AWS_SESSION_TOKEN",
            "FLYTE_AWS_SECRET_ACCESS_KEY",
            "WANDB_API_KEY",
            "PGPASSWORD",
        ]
    )
}


class Scorer(BaseHTTPRequestHandler):
    """A reward that wants its token, fails for every third image and tells everybody the token when
    it does.
    """

    asked = 0

    def do_GET(self) -> None:
        self._answer(
            200, {"reward": f"brightness for {self.headers['Authorization']}", "ready": True}
        )

    def do_POST(self) -> None:
        token = PLANTED["REWARD_TOKEN"]
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).asked += 1
        if self.headers["Authorization"] != f"Bearer {token}":
            self._answer(401, {"error": "no token"})
        elif self.asked % 9 == 0:
            self._answer(
                500, {"error": f"wrong header Authorization: {self.headers['Authorization']}"}
            )
        else:
            count = len(request["images"])
            scores = [
                None if index % 3 == 0 else 0.1 + 0.9 * index / count for index in range(count)
            ]
            failures = dict.fromkeys(range(0, count, 3), f"the token {token} is out of quota")
            self._answer(200, {"scores": scores, "failures": failures, "metrics": {}})

    def _answer(self, status: int, body: object) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Scorer)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def texts(path: Path) -> Iterator[bytes]:
    """What a file says: its bytes, and what they decode to."""
    content = path.read_bytes()
    yield content
    if path.suffix == ".parquet" or content[:4] == b"PAR1":
        table = pq.read_table(path)
        yield repr(
            [
                column.to_pylist()
                for name, column in zip(table.column_names, table.columns, strict=True)
                if name != "image"
            ]
        ).encode()
        yield repr(table.schema.metadata).encode()
    if content[:15] == b"SQLite format 3":
        with contextlib.closing(sqlite3.connect(path)) as database:
            yield "\n".join(database.iterdump()).encode()
    for found in re.finditer(
        rb"(?:zTXt|iTXt)", content[:4096] if content[:4] == b"\x89PNG" else b""
    ):
        with contextlib.suppress(zlib.error):
            yield zlib.decompress(content[found.end() :])


def spellings(secret: str) -> set[bytes]:
    """A secret as it is, backwards quoting aside: as base64 at every alignment, and in the header
    of a basic login.
    """
    encoded = {base64.b64encode(b"x" * shift + secret.encode())[4:-4] for shift in range(3)}
    return {secret.encode(), *encoded}


def found_in(content: bytes) -> list[str]:
    return [
        name
        for name, secret in PLANTED.items()
        if any(spelling in content for spelling in spellings(secret))
    ]


def test_the_search_would_find_them(tmp_path):
    secret = PLANTED["HF_TOKEN"]
    assert found_in(f"x {secret} y".encode()) == ["HF_TOKEN"]
    assert found_in(base64.b64encode(f"user:{secret}".encode())) == ["HF_TOKEN"]
    path = tmp_path / "mlflow.db"
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("create table t (x)")
        database.execute("insert into t values (?)", (secret,))
        database.commit()
    assert any(found_in(text) for text in texts(path))


@pytest.mark.exhaustive
def test_whole_run_writes_no_secret_anywhere(url, tmp_path, monkeypatch):
    for name, secret in PLANTED.items():
        monkeypatch.setenv(name, secret)
    reward = {
        "name": "remote",
        "url": url,
        "token_variable": "REWARD_TOKEN",
        "attempts": 1,
        "batch": 3,
        "timeout": 30,
    }
    changes = {
        "rewards": [reward],
        "guardrails": [],
        "max_failed_share": 0.9,
        "model": {"training": {"steps": 2, "batch": 4}},
        "prompts": {"count": 48, "validation": 2, "held_out": 30},
    }
    done = run_pipeline(tmp_path, changes)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert Scorer.asked > 9
    assert found_in(done.stdout.encode() + done.stderr.encode()) == []
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    leaks = {
        str(path): found for path in files for text in texts(path) if (found := found_in(text))
    }
    assert leaks == {}
    scores = [
        path
        for path in files
        if path.suffix == ".parquet" and "failure" in pq.read_schema(path).names
    ]
    failures = {
        text for path in scores for text in pq.read_table(path)["failure"].to_pylist() if text
    }
    assert any("the token *** is out of quota" in text for text in failures), (
        "the test is to see what failed"
    )


WITH_A_SECRET = {
    "tracking": {"tracking": {"uri": "http://user:SECRET@host:5000"}},
    "database": {"tracking": {"uri": "postgresql://user:SECRET@host/mlflow"}},
    "token as user": {"tracking": {"uri": "https://SECRET@host"}},
    "signed prompts": {
        "prompts": {
            "source": "https://bucket.s3.amazonaws.com/p.txt?X-Amz-Signature=SECRET&X-Amz-Date=1"
        }
    },
    "output": {"output": "s3://key:SECRET@bucket/runs"},
    "reward": {"rewards": [{"name": "remote", "url": "http://user:SECRET@127.0.0.1:80"}]},
    "query of a reward": {
        "rewards": [{"name": "remote", "url": "http://127.0.0.1:80?token=SECRET"}]
    },
    "wrong elsewhere": {"seed": "x", "tracking": {"uri": "http://user:SECRET@host:5000"}},
    "in options": {"rewards": [{"name": "a.b:C", "options": {"at": ["http://u:SECRET@host"]}}]},
    "slash": {"tracking": {"uri": "http://user:SEC@RET@host:5000"}},
    "a slash that nobody encoded": {"tracking": {"uri": "postgresql://user:SEC/RET@host/mlflow"}},
    "an address as user": {"tracking": {"uri": "https://me@corp.com:SECRET@host/x"}},
    "numbers and more": {"tracking": {"uri": "postgresql://user:2024,SECRET@host/mlflow"}},
    "query of a database": {"tracking": {"uri": "postgresql://host/mlflow?user=u&pwd=SECRET"}},
    "an option": {"rewards": [{"name": "a.b:C", "options": {"client": {"api_key": "SECRET"}}}]},
}


@pytest.mark.parametrize("recipe", WITH_A_SECRET.values(), ids=WITH_A_SECRET)
def test_a_recipe_with_a_secret_is_refused_without_repeating_it(recipe, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    for read in (
        lambda: Recipe.model_validate(recipe),
        lambda: load_recipe(path),
        lambda: Recipe.model_validate_json(path.read_text()),
    ):
        with pytest.raises(RecipeError, match=r"keep it in the environment") as raised:
            read()
        shown = str(raised.value) + repr(raised.value.__cause__)
        assert "SEC" not in shown
        assert "RET" not in shown


def test_a_token_in_the_place_of_its_variables_name():
    reward = {"name": "remote", "url": "http://127.0.0.1:80", "token_variable": "hf_SECRET"}
    with pytest.raises(RecipeError, match="token_variable: String should match") as raised:
        Recipe.model_validate({"rewards": [reward]})
    assert "SECRET" not in str(raised.value)


def test_options_that_only_sound_like_secrets():
    keys = [
        "tokenizer",
        "max_tokens",
        "keys",
        "token_variable",
        "eos_token",
        "trigger_token",
        "secret_name",
        "token_path",
    ]
    Recipe.model_validate({"rewards": [{"name": "a.b:C", "options": dict.fromkeys(keys, "x")}]})


@pytest.mark.parametrize(
    "key",
    ["token", "hf_token", "accessToken", "clientSecret", "api-key", "password", "service_token"],
)
def test_options_that_are_secrets(key):
    with pytest.raises(RecipeError, match=rf"options\.{key} is a secret, by its name") as raised:
        Recipe.model_validate({"rewards": [{"name": "a.b:C", "options": {key: "SECRET"}}]})
    assert "SECRET" not in str(raised.value)


@pytest.mark.parametrize(
    "key", ["token", "api_key", "password", "hf_token", "clientSecret", "tokens"]
)
def test_a_key_that_is_none_and_holds_a_secret(key):
    with pytest.raises(RecipeError, match=f"{key}: unknown key") as raised:
        Recipe.model_validate(
            {"rewards": [{"name": "remote", "url": "http://127.0.0.1:80", key: "SECRET"}]}
        )
    assert "SECRET" not in str(raised.value)


def test_what_has_no_secret_stays_as_it_is():
    for text in (
        "postgresql://mlflow@host/db",
        "s3://bucket/a@b/c",
        "http://127.0.0.1:8000/v1",
        "sqlite:////tmp/a:b@c.db",
        'Is this "ABCD"? key=1',
        "https://host/p.txt?versionId=3",
        "http://host:8000/path@v1",
        "postgresql://mlflow@host:5432/db?application_name=a@b",
        "postgresql://h1:5432,h2:5432/db?application_name=a@b",
        "postgresql://mlflow@db/mlflow?sslmode=verify-full&sslkey=/c/x.key&sslcert=/c/x.crt",
        "http://[::1]:5000/a@b",
        "git+ssh://git@github.com:o/r.git@v1",
        "mail@host: a://b",
    ):
        assert redact_secrets(text) == text
    assert (
        redact_secrets("GET http://me:word@host:1/x?a=1&api_key=k failed")
        == "GET http://***@host:1/x?a=1&api_key=*** failed"
    )


@pytest.mark.parametrize(
    "uri",
    ["http://user:SECRET@127.0.0.1:1", "https://SECRET@host", "postgresql://u:SEC/RET@db/mlflow"],
)
def test_the_environments_tracking_uri_with_a_password_is_refused(tmp_path, monkeypatch, uri):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(TrackingError, match="MLFLOW_TRACKING_PASSWORD") as raised:
        resolve_tracking_uri(Recipe(output=str(tmp_path)))
    assert "SEC" not in str(raised.value)
