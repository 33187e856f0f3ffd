"""The client of remote rewards, against servers that behave well and badly."""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
import socket
import ssl
import warnings

import numpy as np
import pytest
from pydantic import ValidationError
from reward_cases import as_prompt
from served_cases import answering, hangs, hangs_up, says, serving, trickles

from ebbflow.data.prompts import Prompt
from ebbflow.recipe.registry import configure_reward
from ebbflow.rewards import http
from ebbflow.rewards.base import Reward, RewardResult
from ebbflow.rewards.built_in.jpeg import JpegCompressibility
from ebbflow.rewards.built_in.remote import Remote, build_request
from ebbflow.rewards.combine import RewardError, load_reward, load_scorer, require_scored_share
from ebbflow.rewards.protocol import identify_image

TOKEN = "s3cret-Token.of~46+characters/that/nobody-sees=="
IMAGES = np.random.default_rng(0).integers(0, 256, (7, 16, 24, 3), dtype=np.uint8)
PROMPTS = [as_prompt(index, "AB") for index in range(7)]
TWO = IMAGES[:2]
TWO_PROMPTS = PROMPTS[:2]
GOOD = {"scores": [0.25, 0.5]}


@pytest.fixture
def waits():
    """The seconds that a reward would have waited."""
    return []


@pytest.fixture
def client(waits):
    """``client(url, timeout=0.2)``: a remote reward that does not wait between its attempts."""

    def make(url, **keys):
        return Remote(
            configure_reward("remote", url=url, **{"timeout": 5, **keys}), sleep=waits.append
        )

    return make


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


def test_a_redirect_is_not_followed_with_the_token(client, monkeypatch):
    monkeypatch.setenv("REWARD_TOKEN", TOKEN)
    with (
        answering(says(GOOD)) as other,
        answering(says("", 307, Location=other.url + "/score")) as server,
    ):
        result = client(server.url, token_variable="REWARD_TOKEN")(TWO, TWO_PROMPTS)
    assert np.isnan(result.values).all()
    assert other.asked == []


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


HEAD = b"HTTP/1.1 200 OK\r\n"
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
    "host",
    ["example.org", "127.0.0.1.example.org", "localhost.example.org", "10.0.0.7", "[fd00::1]"],
)
def test_a_host_that_is_not_listed_is_not_asked(client, monkeypatch, host):
    def connected(*args, **kwargs):
        raise AssertionError("connected")

    monkeypatch.setattr(socket, "create_connection", connected)
    monkeypatch.setenv(http.HOSTS, "rewards.internal, other.example.org")
    remote = client(f"http://{host}:8000")
    assert http.HOSTS in remote.explain_unavailable()
    assert host.strip("[]") in remote(TWO, TWO_PROMPTS).failures[1]


def test_a_listed_host_is_asked(client, monkeypatch):
    monkeypatch.setattr(http, "is_loopback", lambda host: False)
    with answering(says(GOOD)) as server:
        assert client(server.url)(TWO, TWO_PROMPTS).failures
        monkeypatch.setenv(http.HOSTS, "Rewards.internal, 127.0.0.1")
        assert not client(server.url)(TWO, TWO_PROMPTS).failures
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("localhost", True), ("127.0.0.1", True), ("127.8.8.8", True), ("::1", True)]
    + [("0.0.0.0", False), ("::", False), ("example.org", False), ("127.1", False), ("", False)],
)
def test_loopback_hosts_are_recognised(host, loopback):
    assert http.is_loopback(host) == loopback


def test_proxies_and_passwords_of_the_environment_are_not_used(client, monkeypatch, tmp_path):
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password mine\n")
    monkeypatch.setenv("NETRC", str(netrc))
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    with answering(says(GOOD)) as server:
        assert not client(server.url)(TWO, TWO_PROMPTS).failures
    assert "Authorization" not in server.asked[0].headers


def test_the_token_is_read_when_it_is_needed(client, monkeypatch):
    with serving(JpegCompressibility(), token=TOKEN) as url:
        remote = client(url, token_variable="REWARD_TOKEN")
        monkeypatch.delenv("REWARD_TOKEN", raising=False)
        assert "REWARD_TOKEN is not set" in remote.explain_unavailable()
        assert "REWARD_TOKEN is not set" in remote(TWO, TWO_PROMPTS).failures[0]
        monkeypatch.setenv("REWARD_TOKEN", "another")
        assert "check the token in REWARD_TOKEN" in remote.explain_unavailable()
        monkeypatch.setenv("REWARD_TOKEN", TOKEN)
        assert remote.explain_unavailable() is None
        assert not remote(TWO, TWO_PROMPTS).failures
        assert "answered 401" in client(url).explain_unavailable()


@pytest.mark.parametrize(
    "token",
    [TOKEN + "\n", "two words", TOKEN + "\r\nX-Injected: 1", "schlüssel-of-the-house", "=" * 20],
)
def test_a_token_that_no_header_may_carry_is_not_repeated(client, monkeypatch, token):
    monkeypatch.setenv("REWARD_TOKEN", token)
    with answering(says(GOOD)) as server:
        reason = client(server.url, token_variable="REWARD_TOKEN")(TWO, TWO_PROMPTS).failures[0]
    assert reason.startswith("what REWARD_TOKEN holds is no bearer token")
    assert token.strip() not in reason
    assert server.asked == []


LEAKS = {
    "401": says({"detail": f"bad token {TOKEN}"}, 401),
    "400": says("x" * 190 + TOKEN, 400),
    "500": says(TOKEN, 500),
    "redirect": says("", 302, Location=f"http://elsewhere/?token={TOKEN}"),
    "HTML": says(f"<html>{TOKEN}"),
    "key": says({**GOOD, TOKEN: 1}),
    "failure": says({"scores": [None, 1.0], "failures": {"0": TOKEN}}),
    "metric": says({**GOOD, "metrics": {TOKEN: [1, 2]}}),
    "metric of another length": says({**GOOD, "metrics": {TOKEN: [1]}}),
    "status line": lambda handler: handler.wfile.write(f"{TOKEN} 200\r\n\r\n".encode()),
    "not ready": says({"reward": TOKEN, "ready": False}),
    "slow": hangs,
    "gone": hangs_up,
}


@pytest.mark.parametrize("behaviour", LEAKS.values(), ids=LEAKS)
def test_the_token_is_in_no_message(client, monkeypatch, caplog, behaviour):
    monkeypatch.setenv("REWARD_TOKEN", TOKEN)
    with answering(behaviour) as server, caplog.at_level("DEBUG"):
        remote = client(
            server.url, token_variable="REWARD_TOKEN", metrics=["m"], attempts=1, timeout=0.3
        )
        messages = [
            *remote(TWO, TWO_PROMPTS).failures.values(),
            remote.explain_unavailable() or "",
            repr(remote.config),
            caplog.text,
        ]
    assert server.asked[0].headers["Authorization"] == f"Bearer {TOKEN}"
    assert messages[0]
    assert not any(TOKEN[:20] in message for message in messages)


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


@pytest.mark.parametrize(
    "url",
    [
        "http://host:port",
        "http://:8000",
        "http://host/?token=x",
        "http://host/#top",
        "http://me:mine@host",
        "ftp://host",
        "http://hóst",
    ],
)
def test_a_url_that_is_no_base_is_refused(url):
    with pytest.raises(ValidationError):
        configure_reward("remote", url=url)


@pytest.fixture
def certificate(tmp_path):
    """A certificate of 127.0.0.1 that nobody else trusts, and its key."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=False,
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    file = tmp_path / "certificate.pem"
    secret = tmp_path / "key.pem"
    file.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.TraditionalOpenSSL
    secret.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    )
    return file, secret


def test_https_wants_a_certificate_that_is_trusted(client, certificate, monkeypatch):
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(*certificate)
    with answering(says(GOOD), trickles(HEAD + b"\r\n"), tls=tls) as server:
        assert "CERTIFICATE_VERIFY_FAILED" in client(server.url)(TWO, TWO_PROMPTS).failures[0]
        assert server.asked == []
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
        assert not client(server.url)(TWO, TWO_PROMPTS).failures
        slow = client(server.url, timeout=0.3, attempts=1)(TWO, TWO_PROMPTS)
    assert "no whole answer in timeout = 0.3 s" in slow.failures[0]


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
