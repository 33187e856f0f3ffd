"""Lines that are pushed to a webhook."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from ebbflow.alerts import WEBHOOK, send_alert


class Webhook:
    """A webhook on this machine, and the bodies that it took."""

    def __init__(self) -> None:
        self.bodies: list[Any] = []
        bodies = self.bodies

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(404 if self.path == "/gone/token" else 200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    webhook = Webhook()
    threading.Thread(target=webhook.server.serve_forever, args=(0.01,), daemon=True).start()
    yield webhook
    webhook.server.shutdown()
    webhook.server.server_close()


def test_a_line_arrives_as_text(webhook: Webhook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WEBHOOK, webhook.address)
    assert send_alert("stage 1.1 stands still")
    assert webhook.bodies == [{"text": "stage 1.1 stands still"}]


def test_without_an_address_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WEBHOOK, raising=False)
    assert not send_alert("unheard")


def test_a_webhook_that_fails_is_a_warning_without_its_address(
    webhook: Webhook, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for address in (
        f"{webhook.address}/gone/token",
        "file:///etc/token",
        "http://127.0.0.1:9/token",
        f"{webhook.address}/a token",
    ):
        monkeypatch.setenv(WEBHOOK, address)
        assert not send_alert("stage 1.1 stands still")
    assert caplog.text.count("did not take a line") == 4
    assert caplog.text.count("stage 1.1 stands still") == 4
    assert "token" not in caplog.text
