"""What a client can take from our server of rewards, on purpose or by accident: memory, time and
connections are bounded.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import io
import json
import socket
import struct
import subprocess
import sys
import threading
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from fastapi import HTTPException
from PIL import Image
from served_cases import serving

from ebbflow.data.images import encode_pngs
from ebbflow.rewards import server, server_limits
from ebbflow.rewards.base import Reward, RewardResult
from ebbflow.rewards.built_in.jpeg import JpegCompressibility
from ebbflow.rewards.protocol import MAX_JSON_VALUES, count_values

TOKEN = "s3cret"
MIB = 2**20
PROMPT = {"prompt": "a cat"}
NOISE = encode_pngs(np.random.default_rng(0).integers(0, 256, (1, 8, 8, 3), dtype=np.uint8))[0]


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def with_chunks(*chunks: bytes, picture: bytes = NOISE) -> str:
    """A PNG file in base64, with further chunks after its header."""
    return base64.b64encode(picture[:33] + b"".join(chunks) + picture[33:]).decode()


def ask(url: str, body: bytes | dict | None = None, **headers: str) -> tuple[int, object]:
    """Status and what was answered, to a POST of the body or without one to a GET of the health."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    method, path = ("GET", "/health") if body is None else ("POST", "/score")
    connection.request(method, path, json.dumps(body) if isinstance(body, dict) else body, headers)
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response.status, answer


def opened(url: str, sent: bytes) -> socket.socket:
    """A connection on which so much was sent."""
    parts = urlsplit(url)
    connection = socket.create_connection((parts.hostname or "", parts.port or 0), timeout=60)
    connection.sendall(sent)
    return connection


@contextlib.contextmanager
def peak() -> Iterator[list[float]]:
    """The most memory that Python held at once, in MiB, once the context ended."""
    found: list[float] = []
    tracemalloc.start()
    try:
        yield found
    finally:
        found.append(tracemalloc.get_traced_memory()[1] / MIB)
        tracemalloc.stop()


TEXTS = {
    "zTXt": lambda number, text: chunk(b"zTXt", b"k%d\0\0" % number + zlib.compress(text)),
    "iTXt": lambda number, text: chunk(b"iTXt", b"k%d\0\1\0\0\0" % number + zlib.compress(text)),
}


@pytest.mark.parametrize("form", TEXTS.values(), ids=TEXTS)
def test_compressed_text_in_images_is_not_unpacked(form):
    bomb = with_chunks(*(form(number, bytes(MIB - 1)) for number in range(63)))
    assert len(bomb) < 0.1 * MIB
    with peak() as most:
        pixels = server._decode_images([bomb] * 3)
    assert np.array_equal(pixels, server._decode_images([base64.b64encode(NOISE).decode()] * 3))
    assert most[0] < 8  # and not the 189 MiB of the text


def test_a_colour_profile_and_other_chunks_change_no_pixel():
    buffer = io.BytesIO()
    picture = Image.fromarray(
        np.random.default_rng(1).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    )
    picture.save(
        buffer,
        "PNG",
        icc_profile=b"x" * 1000,
        dpi=(300, 300),
        transparency=(1, 2, 3),
        exif=b"Exif\0\0x",
    )
    assert np.array_equal(
        server._decode_images([base64.b64encode(buffer.getvalue()).decode()])[0],
        np.asarray(picture),
    )


def test_an_animation_is_scored_by_its_first_frame():
    frames = np.random.default_rng(0).integers(0, 256, (1, 3, 8, 8, 3), dtype=np.uint8)
    pixels = server._decode_images([base64.b64encode(encode_pngs(frames)[0]).decode()])
    assert np.array_equal(pixels, frames[:, 0])


@pytest.mark.parametrize("name", [b"IDAT", b"tEXt", b"zzzz"])
def test_the_chunks_of_all_images_are_counted(monkeypatch, name):
    monkeypatch.setattr(server, "MAX_CHUNKS", 3 * 20)
    server._decode_images([with_chunks(*[chunk(b"tEXt", b"")] * 17)] * 3)
    with pytest.raises(HTTPException) as refused:
        server._decode_images([with_chunks(*[chunk(name, b"")] * 18)] * 3)
    assert (refused.value.status_code, "more than 60 PNG chunks" in refused.value.detail) == (
        413,
        True,
    )


def metadata(values: bytes) -> bytes:
    return b'{"images": [], "prompts": [{"prompt": "a", "metadata": {"a": [' + values + b"]}}]}"


BOMBS = {
    "mappings": metadata(b"{}," * MIB + b"{}"),
    "lists": metadata(b"[]," * MIB + b"[]"),
    "numbers": metadata(b"1," * MIB + b"1"),
    "unknown keys": b'{"images": []' + b"".join(b',"%d":1' % key for key in range(MIB // 4)) + b"}",
    "images that are numbers": b'{"prompts": [], "images": [' + b"1," * MIB + b"1]}",
    "prompts that are none": b'{"images": [], "prompts": [' + b"{}," * MIB + b"{}]}",
}


@pytest.mark.parametrize("body", BOMBS.values(), ids=BOMBS)
@pytest.mark.parametrize("chunked", [False, True])
def test_json_of_many_values_is_refused_before_it_is_parsed(monkeypatch, body, chunked):
    monkeypatch.setattr(server, "_parse_request", lambda body: pytest.fail("parsed"))
    with serving(JpegCompressibility()) as url:
        headers = {"Transfer-Encoding": "chunked"} if chunked else {}
        status, answer = ask(
            url, b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body, **headers
        )
    assert (status, answer) == (
        413,
        {
            "detail": (
                "the request has more than 131072 commas and brackets; send fewer images at once"
            )
        },
    )


AT_THE_LIMIT = {
    "mappings": metadata(b"{}," * (2**16 - 5) + b"{}"),
    "unknown keys": (
        b'{"images": []' + b"".join(b',"%d":1' % key for key in range(2**17 - 2)) + b"}"
    ),
    "images that are numbers": b'{"prompts": [], "images": [' + b"1," * (2**17 - 4) + b"1]}",
    "prompts that are none": b'{"images": [], "prompts": [' + b"{}," * (2**16 - 3) + b"{}]}",
}


@pytest.mark.parametrize("body", AT_THE_LIMIT.values(), ids=AT_THE_LIMIT)
def test_json_that_is_parsed_takes_bounded_memory(body):
    assert count_values(body) <= MAX_JSON_VALUES
    with peak() as most, pytest.raises(HTTPException) as refused:
        server._parse_request(bytearray(body))
    assert refused.value.status_code == 422
    assert most[0] < 128


def test_as_many_images_as_a_request_may_have_are_far_from_the_limit_of_values():
    metadata = {
        "tag": "counting",
        "include": [{"class": "bear", "count": 2, "color": [1, 2, 3]}] * 20,
    }
    prompt = {
        "prompt": "a cat, a dog, " * 40,
        "negative_prompt": "x, " * 20,
        "target": None,
        "metadata": metadata,
    }
    image = base64.b64encode(NOISE).decode()
    with serving(JpegCompressibility()) as url:
        status, answer = ask(
            url, {"images": [image] * server.MAX_IMAGES, "prompts": [prompt] * server.MAX_IMAGES}
        )
    assert (status, len(answer["scores"])) == (200, server.MAX_IMAGES)


def test_the_server_answers_others_while_it_parses_a_request(monkeypatch):
    others_answered = threading.Event()
    parse = server._parse_request

    def slowly(body):
        assert others_answered.wait(60)
        return parse(body)

    monkeypatch.setattr(server, "_parse_request", slowly)
    answers = []
    with serving(JpegCompressibility()) as url:
        asking = threading.Thread(
            target=lambda: answers.append(ask(url, {"images": [], "prompts": []}))
        )
        asking.start()
        assert ask(url)[0] == 200
        others_answered.set()
        asking.join(60)
    assert answers[0][0] == 200


HEAD = b"POST /score HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + TOKEN.encode() + b"\r\n"
WRONG = HEAD.replace(TOKEN.encode(), b"wrong")
HALF = {
    "nothing": b"",
    "half a header": b"POST /score HTTP/1.1\r\nHost: x\r\nX-A: ",
    "half a body": HEAD + b"Content-Length: 100\r\n\r\n{",
    "half a body of the largest size": HEAD + b"Content-Length: 268435456\r\n\r\n{",
    "half a chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\nff\r\n{",
    "half a body without the token": WRONG + b"Content-Length: 100\r\n\r\n{",
    "nothing after an answer": b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
}


@pytest.mark.parametrize("sent", HALF.values(), ids=HALF)
def test_requests_that_never_end_leave_room_for_others(monkeypatch, sent):
    monkeypatch.setattr(server_limits, "MAX_CONNECTIONS", 16)
    with serving(JpegCompressibility(), TOKEN) as url, contextlib.ExitStack() as still_open:
        for _ in range(40):
            still_open.enter_context(contextlib.closing(opened(url, sent)))
        for _ in range(5):
            assert (
                ask(url, {"images": [], "prompts": []}, Authorization=f"Bearer {TOKEN}")[0] == 200
            )


def test_three_hundred_half_requests_to_a_process_of_few_files():
    port = socket.create_server(("127.0.0.1", 0))
    number = port.getsockname()[1]
    code = (
        "import resource, socket, uvicorn\n"
        "from ebbflow.recipe.registry import configure_reward\n"
        "from ebbflow.rewards import server\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\n"
        "config = configure_reward('jpeg_compressibility')\n"
        f"server.run_reward_server(config, '127.0.0.1', {number}, '{TOKEN}')\n"
    )
    port.close()
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:  # uvicorn says when it listens
            if "running on" in line:
                break
        threading.Thread(target=process.stderr.read, daemon=True).start()
        url = f"http://127.0.0.1:{number}"
        with contextlib.ExitStack() as still_open:
            for _ in range(300):
                still_open.enter_context(contextlib.closing(opened(url, HALF["half a header"])))
            assert ask(url, Authorization=f"Bearer {TOKEN}") == (
                200,
                {"reward": "jpeg_compressibility", "ready": True},
            )
    finally:
        process.kill()
        process.wait()


def test_the_oldest_half_request_makes_room_and_one_that_is_answered_does_not(monkeypatch):
    monkeypatch.setattr(server_limits, "MAX_CONNECTIONS", 2)
    asked = threading.Event()
    release = threading.Event()

    class Waits(Reward):
        name = "waits"

        def __call__(self, images, prompts):
            asked.set()
            assert release.wait(60)
            return RewardResult(np.zeros(len(images)))

    body = json.dumps({"images": [base64.b64encode(NOISE).decode()], "prompts": [PROMPT]}).encode()
    with serving(Waits(), TOKEN) as url:
        scored = opened(url, HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert asked.wait(60)
        oldest, newest = (opened(url, HALF["half a header"]) for _ in range(2))
        assert closed(oldest)
        newest.close()
        release.set()
        assert scored.recv(1000).startswith(b"HTTP/1.1 200")


def closed(connection: socket.socket) -> bool:
    """Whether the server ends the connection; fails after a minute without an end."""
    with contextlib.suppress(ConnectionError):  # a reset is an end, too
        while connection.recv(65536):
            continue
    return True


@pytest.mark.parametrize(
    "name", ["nothing", "half a header", "half a body without the token", "nothing after an answer"]
)
def test_a_request_whose_header_takes_too_long_is_cut_off(monkeypatch, name):
    monkeypatch.setattr(server_limits, "HEADER_SECONDS", 0.05)
    with serving(JpegCompressibility(), TOKEN) as url:
        assert closed(opened(url, HALF[name]))


def ends_while_bytes_trickle_in(connection: socket.socket) -> bool:
    connection.settimeout(0.01)  # between two bytes
    for _ in range(2000):
        try:
            connection.sendall(b"x")
            if not connection.recv(65536):
                return True
        except TimeoutError:
            continue  # the server has not ended it yet
        except ConnectionError:
            return True
    return False


TRICKLES = {
    "header": HALF["half a header"],
    "refused body": WRONG + b"Content-Length: 100000\r\n\r\n",
}


@pytest.mark.parametrize("first", TRICKLES.values(), ids=TRICKLES)
def test_bytes_that_trickle_in_give_no_more_time(monkeypatch, first):
    monkeypatch.setattr(server_limits, "HEADER_SECONDS", 0.05)
    with serving(JpegCompressibility(), TOKEN) as url:
        assert ends_while_bytes_trickle_in(opened(url, first))


def test_a_body_that_trickles_in_is_refused(monkeypatch):
    monkeypatch.setattr(server_limits, "HEADER_SECONDS", 0.05)
    monkeypatch.setattr(server_limits, "BODY_SECONDS", 0.05)
    with serving(JpegCompressibility(), TOKEN) as url:
        assert ends_while_bytes_trickle_in(opened(url, HEAD + b"Content-Length: 100000\r\n\r\n"))


@pytest.mark.parametrize("name", ["half a body", "half a body of the largest size", "half a chunk"])
def test_a_body_that_takes_too_long_is_refused(monkeypatch, name):
    monkeypatch.setattr(server_limits, "BODY_SECONDS", 0.05)
    with serving(JpegCompressibility(), TOKEN) as url:
        assert opened(url, HALF[name]).recv(1000).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    ("head", "status"), [(WRONG, b"401"), (HEAD, b"413")], ids=["wrong token", "too large"]
)
def test_token_and_size_are_checked_before_the_body_arrives(head, status):
    with serving(JpegCompressibility(), TOKEN) as url:
        assert (
            opened(url, head + b"Content-Length: 268435457\r\n\r\n")
            .recv(1000)
            .startswith(b"HTTP/1.1 " + status)
        )


def test_bodies_beyond_the_memory_for_them_wait_until_older_ones_are_scored(monkeypatch):
    monkeypatch.setattr(server_limits, "MAX_HELD", 1000)
    held = []
    release = server_limits.BodyReader._release_memory

    async def noted(self, ticket, size):
        held.append(self._held)
        await release(self, ticket, size)

    monkeypatch.setattr(server_limits.BodyReader, "_release_memory", noted)
    body = json.dumps({"images": [], "prompts": []}).encode().ljust(900)
    with serving(JpegCompressibility(), TOKEN) as url:
        halves = [opened(url, HEAD + b"Content-Length: 900\r\n\r\n" + body[:600]) for _ in range(5)]
        for connection in reversed(halves):
            connection.sendall(body[600:])
        for connection in halves:
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    assert len(held) == 5
    assert max(held) <= 1000 + 900
    assert held[-1] == 900
