"""Which servers the client of remote rewards asks, and who learns its token."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl

import numpy as np
import pytest
from pydantic import ValidationError
from remote_cases import GOOD, HEAD, TOKEN, TWO, TWO_PROMPTS
from served_cases import answering, hangs, hangs_up, says, serving, trickles

from ebbflow.recipe.registry import configure_reward
from ebbflow.rewards import http
from ebbflow.rewards.built_in.jpeg import JpegCompressibility


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
