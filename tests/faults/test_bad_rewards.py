"""Whatever a reward server answers, its images get the scores that it gave or none, with a reason;
and the client comes back.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import strategies as st
from plain_cases import anything, assert_readable, cases, damage

from ebbflow.data.prompts import Prompt
from ebbflow.recipe.registry import configure_reward
from ebbflow.rewards import http
from ebbflow.rewards.built_in.remote import Remote
from ebbflow.rewards.built_in.vision_judge import VisionJudge
from ebbflow.rewards.combine import RewardError, Scorer, require_scored_share

IMAGES = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3), dtype=np.uint8)
PROMPTS = [Prompt(index, "a b", "", "AB", "test", "train", "{}") for index in range(3)]
GOOD = b'{"scores": [0.25, 0.5, 1]}'


@contextlib.contextmanager
def sending(pieces: list[bytes], pause: float = 0.0, keep_open: bool = False) -> Iterator[str]:
    """A server that reads a request and sends the pieces, whatever they are: its URL."""
    over = threading.Event()

    def talk(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(5)
            request = connection.recv(65536)
            while b"\r\n\r\n" not in request:
                request += connection.recv(65536)
            for piece in pieces:
                connection.sendall(piece)
                if pause and over.wait(pause):
                    return
            if keep_open:
                over.wait(5)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(
                65536
            ):  # else what was sent would be thrown away with the connection
                pass

    def serve() -> None:
        with contextlib.suppress(OSError):
            while not over.is_set():
                threading.Thread(target=talk, args=(listener.accept()[0],), daemon=True).start()

    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        over.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def answer(
    body: bytes, status: bytes = b"200 OK", headers: bytes = b"", length: bytes | None = None
) -> bytes:
    length = str(len(body)).encode() if length is None else length
    return (
        b"HTTP/1.1 "
        + status
        + b"\r\nContent-Length: "
        + length
        + b"\r\n"
        + headers
        + b"\r\n"
        + body
    )


def remote(url: str, timeout: float = 2.0, attempts: int = 1) -> Remote:
    return Remote(
        configure_reward("remote", url=url, timeout=timeout, attempts=attempts),
        sleep=lambda seconds: None,
    )


def asked(pieces: list[bytes], **keys) -> np.ndarray:
    """The scores, once every image has a number or a reason."""
    with sending(pieces, keys.pop("pause", 0.0), keys.pop("keep_open", False)) as url:
        client = remote(url, **keys)
        table = Scorer(((client, 1.0),))(IMAGES, PROMPTS)
    for value, reason in zip(table.reward, table.failures, strict=True):
        assert np.isnan(value) == (reason is not None)
        if reason is not None:
            assert_readable(reason, "remote: ")
    return table.reward


def given(body: bytes) -> list[float]:
    """The scores that an answer holds for three images, by the rules of docs/rewards.md alone; NaN
    where it has none.
    """
    nothing = [math.nan] * 3
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        return nothing
    if not isinstance(said, dict) or not said.keys() <= {"scores", "failures", "metrics"}:
        return nothing
    scores = said.get("scores")
    if not isinstance(scores, list) or len(scores) != 3:
        return nothing
    if not all(
        score is None or (type(score) in (int, float) and math.isfinite(score)) for score in scores
    ):
        return nothing
    return [math.nan if score is None else float(score) for score in scores]


def never_a_wrong_score(found: np.ndarray, body: bytes) -> None:
    """What was taken is what was said; to take nothing is always right."""
    assert np.isnan(found).all() or np.array_equal(found, given(body), equal_nan=True)


@cases(150, go_wrong=damage())
def test_damaged_answer_of_a_reward_server_gives_no_wrong_score(go_wrong):
    sent = go_wrong(answer(GOOD))
    found = asked([sent], timeout=0.3)
    # Of a damaged head nothing is known but that the body which was sent last is all that it can
    # have said.
    starts = [
        start for start in range(len(sent)) if sent[start : start + 1] == b"{"
    ]  # damage may have put one into the head
    bodies = [sent[start:end] for start in starts for end in range(start + 1, len(sent) + 1)]
    assert np.isnan(found).all() or any(
        np.array_equal(found, given(body), equal_nan=True) for body in bodies
    )


@cases(
    60,
    noise=st.binary(max_size=300),
    head=st.sampled_from([b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\n\r\n"]),
)
def test_random_bytes_from_a_reward_server_give_no_score(noise, head):
    assert np.isnan(asked([head + noise], timeout=0.3)).all()


numbers = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    st.none(),
    st.sampled_from([0, 1, -1, 10**18]),
)
scores = st.one_of(
    st.lists(numbers, min_size=3, max_size=3),
    st.lists(numbers, max_size=5),
    st.lists(
        st.one_of(
            numbers, anything, st.sampled_from([True, "0.5", math.nan, math.inf, 10**400, [0.5]])
        ),
        max_size=4,
    ),
)


@cases(
    150,
    scores=scores,
    more=st.one_of(
        st.just({}), st.dictionaries(st.sampled_from(["failures", "metrics", "x"]), anything)
    ),
)
def test_arbitrary_scores_from_a_reward_server_give_no_wrong_score(scores, more):
    body = json.dumps({"scores": scores, **more}).encode()
    never_a_wrong_score(asked([answer(body)]), body)


@cases(40, said=anything)
def test_arbitrary_json_from_a_reward_server_gives_no_wrong_score(said):
    body = json.dumps(said).encode()
    never_a_wrong_score(asked([answer(body)]), body)


@cases(
    40,
    status=st.integers(0, 999),
    body=st.sampled_from([b"", GOOD, b"<html>\x1b[2J<h1>Gateway</h1>"]),
)
def test_every_status_but_200_gives_no_score(status, body):
    found = asked([answer(body, f"{status:03d} x".encode())], timeout=0.3)
    never_a_wrong_score(found, body if status == 200 else b"")


ODD = {
    "HTML": [answer(b"<!doctype html><title>Login</title>" * 50)],
    "longer than it is": [answer(GOOD, length=b"4000")],
    "shorter than it is": [answer(GOOD, length=b"10")],
    "a length that is none": [answer(b"{}", length=b"x")],
    "a negative length": [answer(b"{}", length=b"-1")],
    "a length of many digits": [answer(b"{}", length=b"9" * 5000)],
    "closed in the middle": [answer(GOOD)[:-5]],
    "closed in the head": [answer(GOOD)[:20]],
    "nothing": [b""],
    "another protocol": [b"SSH-2.0-OpenSSH_9.6\r\n"],
    "too many headers": [answer(GOOD, headers=b"".join(b"X%d: y\r\n" % n for n in range(300)))],
    "a long header": [answer(GOOD, headers=b"X: " + b"y" * 100_000 + b"\r\n")],
    "a chunk that is none": [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n" + GOOD],
    "a chunk of a negative size": [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n" + GOOD
    ],
    "a chunk that is cut off": [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n" + GOOD
    ],
    "a gzip bomb": [
        answer(gzip.compress(b" " * 2**24 + GOOD), headers=b"Content-Encoding: gzip\r\n")
    ],
    "gzip of a good answer": [answer(gzip.compress(GOOD), headers=b"Content-Encoding: gzip\r\n")],
    "more than is read": [answer(b" " * (http.MAX_BYTES + 1) + GOOD)],
    "UTF-16": [answer(GOOD.decode().encode("utf-16"))],
    "deep": [answer(b'{"scores": ' + b"[" * 200_000)],
    "a redirect to itself": [answer(b"", b"307 x", b"Location: /score\r\n")],
    "a redirect to a file": [answer(b"", b"302 x", b"Location: file:///etc/passwd\r\n")],
    "NaN": [answer(b'{"scores": [NaN, 0.5, 1]}')],
    "Infinity": [answer(b'{"scores": [-Infinity, 0.5, 1]}')],
    "too large for a float": [answer(b'{"scores": [1e400, 0.5, 1]}')],
    "too few": [answer(b'{"scores": [0.5]}')],
    "too many": [answer(b'{"scores": [0.5, 0.5, 0.5, 0.5]}')],
    "twice": [answer(b'{"scores": [0.5, 0.5]}, {"scores": [0.5, 0.5, 0.5]}')],
}


@pytest.mark.parametrize("pieces", ODD.values(), ids=ODD)
def test_an_odd_answer_is_masked_and_counted_and_stops_the_stage_where_it_is_one_of_many(pieces):
    with sending(pieces) as url:
        table = Scorer(((remote(url, timeout=1), 1.0),))(IMAGES, PROMPTS)
    assert np.isnan(table.reward).all()
    assert table.failed_share == 1
    for reason in table.failures:
        assert_readable(str(reason), "remote: ")
    with pytest.raises(RewardError) as error:
        require_scored_share(table, 0.05)
    assert_readable(str(error.value), "3 of 3 images", "max_failed_share")


SLOW = {
    "a head that trickles": ([bytes([byte]) for byte in answer(GOOD)] * 100, 0.01),
    "a body that trickles": ([answer(GOOD, length=b"4000"), *[b"x"] * 4000], 0.01),
    "chunks without an end": (
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", *[b"1\r\nx\r\n"] * 4000],
        0.01,
    ),
    "to be continued for ever": ([b"HTTP/1.1 100 Continue\r\n\r\n"] * 4000, 0.01),
    "silence after the head": ([answer(b"", length=b"26")], 5.0),
}


@pytest.mark.parametrize(("pieces", "pause"), SLOW.values(), ids=SLOW)
def test_a_server_that_never_ends_is_cut_off(pieces, pause):
    start = time.monotonic()
    assert np.isnan(asked(pieces, pause=pause, timeout=0.3)).all()
    assert (
        time.monotonic() - start < 20
    )  # and not the forty seconds or more that it would go on for


completions = st.one_of(
    anything,
    st.fixed_dictionaries({"choices": st.lists(anything, max_size=2)}),
    st.fixed_dictionaries(
        {
            "choices": st.lists(
                st.fixed_dictionaries(
                    {"message": st.fixed_dictionaries({"content": anything})},
                    optional={
                        "finish_reason": st.one_of(st.just("stop"), anything),
                        "logprobs": st.one_of(
                            anything,
                            st.fixed_dictionaries(
                                {
                                    "content": st.lists(
                                        st.fixed_dictionaries(
                                            {
                                                "top_logprobs": st.lists(
                                                    st.fixed_dictionaries(
                                                        {
                                                            "token": st.sampled_from(
                                                                ["yes", " No", "maybe"]
                                                            ),
                                                            "logprob": st.one_of(
                                                                st.floats(-1e308, 1), anything
                                                            ),
                                                        }
                                                    ),
                                                    max_size=3,
                                                )
                                            }
                                        ),
                                        max_size=2,
                                    )
                                }
                            ),
                        ),
                    },
                ),
                max_size=2,
            )
        }
    ),
)


@cases(80, said=completions, kind=st.sampled_from(["probability", "yes_no", "number"]))
def test_a_judge_that_says_anything(said, kind):
    with sending([answer(json.dumps(said).encode())]) as url:
        config = configure_reward(
            "vision_judge", url=url, model="m", answer=kind, timeout=2, attempts=1, concurrency=1
        )
        table = Scorer(((VisionJudge(config, sleep=lambda seconds: None), 1.0),))(
            IMAGES[:1], PROMPTS[:1]
        )
    assert np.isnan(table.reward[0]) == (table.failures[0] is not None)
    if table.failures[0] is None:
        assert 0 <= table.reward[0] <= 1
    else:
        assert_readable(table.failures[0], "vision_judge: ")


@cases(30, said=anything, form=st.sampled_from(["remote", "vision_judge"]))
def test_a_server_that_says_anything_of_itself(said, form):
    with sending([answer(json.dumps(said).encode())]) as url:
        config = configure_reward(
            form,
            url=url,
            timeout=2,
            attempts=1,
            **({"model": "m"} if form == "vision_judge" else {}),
        )
        client = (VisionJudge if form == "vision_judge" else Remote)(
            config, sleep=lambda seconds: None
        )
        assert_readable(str(client.explain_unavailable()), url)
