"""Our server of rewards: what it takes, what it refuses, and how it is started."""

from __future__ import annotations

import base64
import hashlib
import http.client
import io
import json
import struct
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image
from reward_cases import Absent, as_prompt
from served_cases import serving

from ebbflow.cli import main
from ebbflow.data.images import encode_pngs
from ebbflow.recipe.registry import configure_reward
from ebbflow.rewards import server, server_limits
from ebbflow.rewards.base import Reward, RewardResult
from ebbflow.rewards.built_in.jpeg import JpegCompressibility
from ebbflow.rewards.built_in.remote import Remote, build_request
from ebbflow.rewards.combine import RewardError

TOKEN = "s3cret"
IMAGE = np.zeros((1, 8, 8, 3), np.uint8)
PROMPT = {"prompt": "a cat"}


@pytest.fixture(scope="module")
def url():
    with serving(JpegCompressibility()) as address:
        yield address


def post(url, body, **headers):
    """Status and what was answered."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    connection.request(
        "POST", "/score", body if isinstance(body, bytes) else json.dumps(body), headers
    )
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response.status, answer.get("detail", answer)


def png(mode="RGB", size=(8, 8)):
    file = io.BytesIO()
    Image.new(mode, size).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def claimed(width, height):
    """A PNG file of a few bytes whose header claims a size."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"IDAT" + zlib.compress(b"")
    chunks = [
        struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
        for chunk in (header, data)
    ]
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(chunks)).decode()


def test_scores_as_the_reward_does(url):
    status, answer = post(url, {"images": [png()], "prompts": [PROMPT]})
    assert status == 200
    assert answer == {
        "scores": JpegCompressibility()(IMAGE, []).values.tolist(),
        "failures": {},
        "metrics": {},
        "ids": [hashlib.sha256(base64.b64decode(png())).hexdigest()[:16]],
    }


def test_no_images_are_no_scores(url):
    assert post(url, {"images": [], "prompts": []}) == (
        200,
        {"scores": [], "failures": {}, "metrics": {}, "ids": []},
    )


WHOLE = png()
NOISE, HALF = (
    base64.b64encode(file).decode()
    for noise in encode_pngs(
        np.random.default_rng(0).integers(0, 256, (1, 40, 60, 3), dtype=np.uint8)
    )
    for file in (noise, noise[: len(noise) // 2])
)
REFUSED = {
    "no JSON": (b"<html>", 422, "Invalid JSON"),
    "no prompts": ({"images": [WHOLE]}, 422, "prompts: Field required"),
    "one prompt too few": (
        {"images": [WHOLE, WHOLE], "prompts": [PROMPT]},
        422,
        "2 images cannot be scored against 1 prompts",
    ),
    "an unknown key": (
        {"images": [WHOLE], "prompts": [{**PROMPT, "seed": 1}]},
        422,
        "prompts.0.seed: Extra inputs",
    ),
    "a number for a prompt": (
        {"images": [WHOLE], "prompts": [{"prompt": 7}]},
        422,
        "prompts.0.prompt",
    ),
    "no base64": ({"images": ["%%%"], "prompts": [PROMPT]}, 422, "images.0 is no PNG"),
    "no image": (
        {"images": [base64.b64encode(b"GIF89a").decode()], "prompts": [PROMPT]},
        422,
        "images.0 is no PNG",
    ),
    "half an image": (
        {"images": [NOISE, HALF], "prompts": [PROMPT] * 2},
        422,
        "images.1 is a PNG file that ends early",
    ),
    "with transparency": (
        {"images": [png("RGBA")], "prompts": [PROMPT]},
        422,
        "of the mode RGBA; send 8-bit RGB",
    ),
    "two sizes": (
        {"images": [WHOLE, png(size=(8, 9))], "prompts": [PROMPT] * 2},
        422,
        "must have one size",
    ),
    "a bomb": (
        {"images": [claimed(30_000, 30_000)], "prompts": [PROMPT]},
        413,
        "images.0 has more than",
    ),
    "a smaller bomb": (
        {"images": [claimed(9_000, 9_000)], "prompts": [PROMPT]},
        413,
        "1 images of 9000x9000 are more than",
    ),
    "many small bombs": (
        {"images": [claimed(1_000, 1_000)] * 80, "prompts": [PROMPT] * 80},
        413,
        "80 images of 1000x1000",
    ),
    "too many images": (
        {"images": [""] * 257, "prompts": [PROMPT] * 257},
        413,
        "257 images are more than 256",
    ),
}


@pytest.mark.parametrize(("body", "status", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_scored_is_refused_with_the_reason(url, body, status, reason):
    given, said = post(url, body)
    assert given == status
    assert reason in said


@pytest.mark.parametrize("headers", [{}, {"Transfer-Encoding": "chunked"}])
def test_a_body_that_is_too_large_is_refused(url, monkeypatch, headers):
    monkeypatch.setattr(server_limits, "MAX_BYTES", 1000)
    body = b" " * 1001
    if headers:
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    assert post(url, body, **headers) == (
        413,
        "the request has more than 1000 bytes; send fewer images at once",
    )


@pytest.mark.parametrize(
    "given",
    [
        None,
        "Bearer wrong",
        f"Basic {TOKEN}",
        TOKEN,
        f"Bearer {TOKEN}x",
        f"bearer{TOKEN}",
        "Bearer é",
    ],
)
def test_requests_without_the_token_are_refused(given):
    with serving(JpegCompressibility(), token=TOKEN) as url:
        headers = {} if given is None else {"Authorization": given.encode("latin-1")}
        status, said = post(url, b"not even looked at", **headers)
        assert status == 401
        assert TOKEN not in said
        assert post(url, {"images": [], "prompts": []}, Authorization=f"Bearer {TOKEN}")[0] == 200


class Crashes(Reward):
    name = "crashes"

    def __call__(self, images, prompts):
        raise ValueError("no such class: bear")


class Infinite(Reward):
    name = "infinite"

    def __call__(self, images, prompts):
        return RewardResult(np.full(len(images), np.inf))


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (Crashes(), "crashes failed: ValueError: no such class: bear"),
        (Infinite(), "infinite failed: RewardError: the reward"),
    ],
)
def test_a_reward_that_crashes_is_an_error_and_the_server_goes_on(broken, reason):
    body = build_request(IMAGE, [as_prompt(0, "A")]).model_dump_json().encode()
    with serving(broken) as url:
        for _ in range(2):
            status, said = post(url, body)
            assert status == 500
            assert reason in said


class Counting(Reward):
    """A reward that sees how many ask it at the same time."""

    name = "counting"

    def __init__(self):
        self.inside, self.most, self.lock = 0, 0, threading.Lock()

    def __call__(self, images, prompts):
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        time.sleep(0.01)
        with self.lock:
            self.inside -= 1
        return RewardResult(images.mean((1, 2, 3)))


def test_one_request_is_scored_at_a_time_and_each_gets_its_own_answer():
    counting = Counting()
    images = np.arange(12, dtype=np.uint8)[:, None, None, None] * np.ones((8, 8, 3), np.uint8)
    with serving(counting) as url, ThreadPoolExecutor(6) as pool:
        remote = Remote(configure_reward("remote", url=url))
        results = list(
            pool.map(
                lambda index: remote(images[index : index + 1], [as_prompt(index, "A")]), range(12)
            )
        )
    assert [result.values[0] for result in results] == list(range(12))
    assert counting.most == 1


@pytest.fixture
def started(monkeypatch):
    """What uvicorn would have been started with."""
    runs = []
    monkeypatch.setattr(server.uvicorn, "run", lambda app, **keys: runs.append(keys))
    return runs


def test_the_network_is_not_served_without_a_token(started):
    config = configure_reward("jpeg_compressibility")
    for host in ("0.0.0.0", "::", "10.0.0.7", ""):
        with pytest.raises(RewardError, match="set a token"):
            server.run_reward_server(config, host, 8000)
    server.run_reward_server(config, "0.0.0.0", 8000, TOKEN)
    server.run_reward_server(config, "127.0.0.1", 8000)
    assert [keys["host"] for keys in started] == ["0.0.0.0", "127.0.0.1"]


def test_a_reward_that_cannot_run_is_not_served(started, monkeypatch):
    monkeypatch.setattr(server, "load_reward", lambda config: named(Absent(), "absent"))
    with pytest.raises(RewardError, match="'absent' cannot run here: not on this machine"):
        server.run_reward_server(configure_reward("jpeg_compressibility"), "127.0.0.1", 8000)
    assert not started


def named(made, name):
    made.name = name
    return made


@pytest.mark.parametrize("given", ["ocr", '{"name": "ocr", "layout": "page", "label": "poster"}'])
def test_the_command_serves_a_reward_by_name_or_by_json(started, monkeypatch, given):
    served = []
    monkeypatch.setattr(server, "build_app", lambda reward, token: served.append((reward, token)))
    monkeypatch.setenv("REWARD_TOKEN", TOKEN)
    command = [
        "serve-reward",
        given,
        "--host",
        "0.0.0.0",
        "--port",
        "9000",
        "--token-variable",
        "REWARD_TOKEN",
    ]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    ((made, token),) = served
    assert (made.config.layout, made.name) == (
        ("page", "poster") if "page" in given else ("line", "ocr")
    )
    assert (token, started) == (
        TOKEN,
        [{"host": "0.0.0.0", "port": 9000} | server_limits.build_server_options()],
    )


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["jpg_compressibility"], "did you mean 'jpeg_compressibility'?"),
        (['{"name": "ocr", "layot": "page"}'], "did you mean 'layout'?"),
        (['{"name": '], "expected the node content"),
        (["nowhere.mine:Reward"], "No module named 'nowhere'"),
        (["jpeg_compressibility", "--host", "0.0.0.0"], "set a token"),
        (["jpeg_compressibility", "--token-variable", "NOT_SET"], "NOT_SET is not set"),
    ],
)
def test_the_command_says_what_is_wrong(started, arguments, reason):
    result = CliRunner().invoke(main, ["serve-reward", *arguments])
    assert result.exit_code == 1
    assert reason in result.output
    assert not started


def test_every_size_that_a_client_sends_is_taken(url):
    images = np.random.default_rng(0).integers(0, 256, (2, 40, 60, 3), dtype=np.uint8)
    body = {
        "images": [base64.b64encode(file).decode() for file in encode_pngs(images)],
        "prompts": [PROMPT] * 2,
    }
    assert post(url, body)[1]["scores"] == JpegCompressibility()(images, []).values.tolist()
