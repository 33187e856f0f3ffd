"""The client of remote rewards, against servers that behave well and badly."""

from __future__ import annotations

import base64
import json
import socket
import warnings

import numpy as np
import pytest
from remote_cases import GOOD, HEAD, IMAGES, PROMPTS, TWO, TWO_PROMPTS
from served_cases import answering, hangs, hangs_up, says, serving, trickles

from ebbflow.data.prompts import Prompt
from ebbflow.recipe.registry import configure_reward
from ebbflow.rewards import http
from ebbflow.rewards.base import Reward, RewardResult
from ebbflow.rewards.built_in.jpeg import JpegCompressibility
from ebbflow.rewards.built_in.remote import build_request
from ebbflow.rewards.combine import RewardError, load_reward, load_scorer, require_scored_share
from ebbflow.rewards.protocol import identify_image


class Stub(Reward):
    """A reward with everything that one can have; it fails on the prompts without a target."""

    name = "stub"

    def __init__(self):
        self.prompts = []

    def __call__(self, images, prompts):
        self.prompts += prompts
        values = np.where(
            [prompt.target is None for prompt in prompts], np.nan, images.mean((1, 2, 3)) / 3
        )
        failures = dict.fromkeys(np.flatnonzero(np.isnan(values)).tolist(), "no target")
        return RewardResult(
            values, {"darkness": 1 - values, "height": np.full(len(images), 16.0)}, failures
        )


def test_our_server_gives_what_the_local_reward_gives(client):
    local = JpegCompressibility()
    with serving(local) as url:
        remote = client(url, batch=3)
        assert remote.explain_unavailable() is None
        result = remote(IMAGES, PROMPTS)
    assert np.array_equal(result.values, local(IMAGES, PROMPTS).values)
    assert not result.failures


def test_prompts_failures_and_metrics_travel(client):
    prompts = [
        Prompt(
            5,
            'a sign "Käse"',
            "blurry",
            "Käse",
            "",
            "",
            '{"count": 2, "include": [{"class": "bear"}], "ä": null}',
        ),
        Prompt(6, "nothing to read", "", None, "", "", "{}"),
    ]
    local = Stub()
    expected = local(TWO, prompts)
    local.prompts.clear()
    with serving(local) as url:
        result = client(url, metrics=["darkness"])(TWO, prompts)
    given = [(p.prompt, p.negative_prompt, p.target, p.metadata) for p in local.prompts]
    assert given == [(p.prompt, p.negative_prompt, p.target, p.metadata) for p in prompts]
    assert np.array_equal(result.values, expected.values, equal_nan=True)
    assert result.metrics.keys() == {"remote_darkness"}
    assert np.array_equal(
        result.metrics["remote_darkness"], expected.metrics["darkness"], equal_nan=True
    )
    assert result.failures == {1: "no target"}


HUGE = '{"scores": [0.25, 0.5' + " " * http.MAX_BYTES + "]}"
ANSWERS = {
    "too few scores": (says({"scores": [1.0]}), "1 scores for 2 images"),
    "not a number": (says('{"scores": [0.5, NaN]}'), "scores.1"),
    "infinite": (says('{"scores": [1e999, 0.5]}'), "scores.0"),
    "too large a number": (says('{"scores": [1e308, 0.5]}'), "scores.0"),
    "too large a metric": (says({**GOOD, "metrics": {"a": [-1e31, 0]}}), "metrics.a.0"),
    "a number in quotes": (says({"scores": ["0.5", 0.5]}), "scores.0"),
    "true": (says({"scores": [True, 0.5]}), "scores.0"),
    "an unknown key": (says({**GOOD, "score": 1}), "score: Extra inputs are not permitted"),
    "a metric of another length": (
        says({**GOOD, "metrics": {"a": [1.0]}}),
        "2 scores and 1 values of the metric 'a'",
    ),
    "a failure beside a score": (says({**GOOD, "failures": {"1": "odd"}}), "failure of image 1"),
    "a failure of no image": (says({**GOOD, "failures": {"-1": "odd"}}), "failure of image -1"),
    "another kind of JSON": (says([0.25, 0.5]), "no ScoreAnswer"),
    "HTML": (says("<html>\x1b[2J\n<h1>Welcome</h1>"), '"<html>\\x1b[2J\\n<h1>Welcome</h1>"'),
    "nothing": (says(""), 'answered ""'),
    "no text": (says("\x00\x01"), r'"\x00\x01"'),
    "huge": (says(HUGE), f"more than {http.MAX_BYTES} bytes"),
    "many values": (says("[" + "{}," * 2**20 + "{}]"), "more than 131072 commas and brackets"),
    "nested too deeply": (says("[" * 100_000), "no ScoreAnswer"),
    "bad request": (
        says({"detail": "images.0 is broken"}, 422),
        'answered 422: {"detail": "images.0 is broken"}',
    ),
    "unauthorised": (says("who are you?", 401), "who are you?; name a token with token_variable"),
    "not found": (says("nothing here", 404), "answered 404: nothing here"),
    "no content": (says("", 204), "answered 204"),
    "a redirect": (
        says("", 302, Location="http://elsewhere/score"),
        "points to http://elsewhere/score; redirects are not followed",
    ),
}


@pytest.mark.parametrize(("behaviour", "reason"), ANSWERS.values(), ids=ANSWERS)
def test_a_bad_answer_is_a_failure_of_every_image_and_not_asked_for_again(
    client, waits, behaviour, reason
):
    with answering(behaviour) as server:
        result = client(server.url)(TWO, TWO_PROMPTS)
    assert np.isnan(result.values).all()
    assert set(result.failures) == {0, 1}
    assert all(
        reason in text and text.isprintable() and len(text) < 600
        for text in result.failures.values()
    )
    assert (len(server.asked), waits) == (1, [])


@pytest.mark.parametrize(
    "accident", [says("oops", 500), says("slow down", 429), says("loading", 503), hangs_up]
)
def test_what_passes_is_asked_again(client, waits, accident):
    with answering(accident, accident, says(GOOD)) as server:
        result = client(server.url)(TWO, TWO_PROMPTS)
    assert np.array_equal(result.values, GOOD["scores"])
    assert not result.failures
    assert len({asked.body for asked in server.asked}) == 1
    assert (len(server.asked), len(waits)) == (3, 2)
    assert 0.5 <= waits[0] <= 1 <= waits[1] <= 2


def test_scores_of_other_images_or_in_another_order_are_failures(client):
    request = build_request(TWO, TWO_PROMPTS)
    ids = [identify_image(base64.b64decode(image)) for image in request.images]
    with warnings.catch_warnings(), answering(says(GOOD | {"ids": ids})) as server:
        warnings.simplefilter("error")
        assert not client(server.url)(TWO, TWO_PROMPTS).failures
    for wrong in (ids[::-1], ids[:1], ["0" * 16, ids[1]]):
        with answering(says(GOOD | {"ids": wrong})) as server:
            result = client(server.url)(TWO, TWO_PROMPTS)
        assert np.isnan(result.values).all()
        assert "answered about other images, or in another order" in result.failures[0]
    with (
        answering(says(GOOD)) as server,
        pytest.warns(UserWarning, match="without the ids of the images"),
    ):
        assert not client(server.url)(TWO, TWO_PROMPTS).failures


def test_an_answer_that_ends_early_is_asked_for_again_even_where_it_reads_well(client):
    early = says({"scores": [0.75, 1]}, **{"Content-Length": "400", "Connection": "close"})
    with answering(early, says(GOOD)) as server:
        result = client(server.url)(TWO, TWO_PROMPTS)
    assert np.array_equal(result.values, GOOD["scores"])
    assert len(server.asked) == 2


@pytest.mark.parametrize("size", [b"-1", b"-5", b"-ffffffffffffffffffff"])
def test_a_chunk_of_negative_size_is_a_failure_and_not_read_without_a_limit(client, size):
    """http.client would read one of -1 to the end of the connection, and crash at others."""
    sent = []

    def behave(handler):
        handler.wfile.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + size + b"\r\n")
        for _ in range(64):
            handler.wfile.write(b" " * 2**20)
            sent.append(2**20)

    with answering(behave) as server:
        result = client(server.url, attempts=1)(TWO, TWO_PROMPTS)
    assert "chunk of a negative size" in result.failures[0]
    assert sum(sent) < 2 * http.MAX_BYTES + 16 * 2**20  # what sockets buffer included


def test_remote_reward_fails_after_its_attempts(client, waits):
    with answering(says("still loading", 503)) as server:
        result = client(server.url, attempts=4)(TWO, TWO_PROMPTS)
    assert "answered 503: still loading" in result.failures[0]
    assert (len(server.asked), len(waits)) == (4, 3)


def test_waits_between_attempts_stop_growing():
    waits = http._list_waits(10)
    assert all(0.5 <= wait / min(60, 2**past) <= 1 for past, wait in enumerate(waits))
    assert len(set(waits)) == 9


def test_one_lost_request_costs_its_images_alone(client):
    first = {"scores": [1, 2, 3], "metrics": {"m": [4, 5, 6]}}
    last = {"scores": [7], "metrics": {"m": [8]}}
    with answering(says(first), says("no", 400), says(last)) as server:
        result = client(server.url, batch=3, metrics=["m"])(IMAGES, PROMPTS)
    nan = np.nan
    assert np.array_equal(result.values, [1, 2, 3, nan, nan, nan, 7], equal_nan=True)
    assert np.array_equal(result.metrics["remote_m"], [4, 5, 6, nan, nan, nan, 8], equal_nan=True)
    assert set(result.failures) == {3, 4, 5}


def test_null_is_a_failure_with_the_servers_reason_or_none(client):
    with answering(
        says({"scores": [None, None], "failures": {"1": "detector\ncrashed"}})
    ) as server:
        result = client(server.url)(TWO, TWO_PROMPTS)
    assert result.failures == {0: "the server gave no reason", 1: r"detector\ncrashed"}


def test_a_metric_that_the_server_lacks_is_named(client):
    with answering(says({**GOOD, "metrics": {"count": [1, 2]}})) as server:
        result = client(server.url, metrics=["colour"])(TWO, TWO_PROMPTS)
    assert "without the metrics ['colour']; it has count" in result.failures[0]
    assert np.isnan(result.metrics["remote_colour"]).all()


SLOW = {
    "hangs": hangs,
    "trickles a status": trickles(b"H"),
    "trickles headers": trickles(HEAD + b"X-Slow: "),
    "trickles a body": trickles(HEAD + b"Content-Length: 1000\r\n\r\n"),
    "trickles a body without a length": trickles(HEAD + b"\r\n"),
    "trickles a chunk": trickles(HEAD + b"Transfer-Encoding: chunked\r\n\r\nffff\r\n"),
}


@pytest.mark.parametrize("behaviour", SLOW.values(), ids=SLOW)
def test_a_slow_server_is_cut_off(client, waits, behaviour):
    with answering(behaviour) as server:
        result = client(server.url, timeout=0.2, attempts=2)(TWO, TWO_PROMPTS)
    assert "no whole answer in timeout = 0.2 s" in result.failures[0]
    assert (len(server.asked), len(waits)) == (2, 1)


def test_refused_connection_is_explained(client, waits):
    with socket.create_server(("127.0.0.1", 0)) as unused:
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    remote = client(url)
    assert "ConnectionRefusedError" in remote.explain_unavailable()
    assert len(waits) == 2


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (says({"reward": "geneval", "ready": False}), "geneval is not ready"),
        (says({"reward": "geneval"}), "no Health"),
        (says({"reward": "geneval", "ready": "yes"}), "no Health"),
        (says({"reward": "geneval", "ready": True, "version": 1}), "version: Extra inputs"),
        (says("<html>"), "<html>"),
    ],
)
def test_unhealthy_server_is_explained(client, behaviour, reason):
    with answering(behaviour) as server:
        assert reason in client(server.url).explain_unavailable()
    assert server.asked[0].path == "/health"


def test_a_path_in_the_url_is_kept(client):
    with answering(says(GOOD)) as server:
        client(server.url + "/geneval/")(TWO, TWO_PROMPTS)
    assert server.asked[0].path == "/geneval/score"


def test_no_images_are_no_request(client):
    with answering(says(GOOD)) as server:
        result = client(server.url, metrics=["m"])(IMAGES[:0], [])
    assert (result.values.shape, result.metrics["remote_m"].shape, server.asked) == ((0,), (0,), [])


def test_failures_are_masked_and_counted_in_a_run():
    with answering(
        says({"reward": "geneval", "ready": True}), says({"scores": [None, 0.5]})
    ) as server:
        scorer = load_scorer([configure_reward("remote", url=server.url, label="geneval")], [])
        table = scorer(TWO, TWO_PROMPTS)
    assert np.array_equal(table.metrics["geneval"], [np.nan, 0.5], equal_nan=True)
    assert table.failures == ["geneval: the server gave no reason", None]
    with pytest.raises(RewardError, match="50.0%"):
        require_scored_share(table, 0.1)


def test_metrics_are_called_after_the_label():
    with answering(says({**GOOD, "metrics": {"count": [1, 2]}})) as server:
        remote = load_reward(
            configure_reward("remote", url=server.url, label="geneval", metrics=["count"])
        )
        assert remote(TWO, TWO_PROMPTS).metrics.keys() == {"geneval_count"}


def test_the_request_is_what_the_page_says(client):
    with answering(says({"scores": [1.0]})) as server:
        client(server.url)(
            IMAGES[:1], [Prompt(0, "a cat", "dog", "CAT", "s", "train", json.dumps({"k": [1]}))]
        )
    (asked,) = server.asked
    assert asked.json.keys() == {"images", "prompts"}
    assert asked.json["prompts"] == [
        {"prompt": "a cat", "negative_prompt": "dog", "target": "CAT", "metadata": {"k": [1]}}
    ]
    assert asked.headers["Content-Type"] == "application/json"
