"""Servers of rewards on 127.0.0.1 that behave as the tests ask, and our own."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import uvicorn

from ebbflow.rewards.base import Reward
from ebbflow.rewards.server import build_app
from ebbflow.rewards.server_limits import build_server_options

Behaviour = Callable[[BaseHTTPRequestHandler], None]
TRICKLE = 0.02
"""Seconds between the bytes of a server that trickles, far below every time-out here."""


@dataclass
class Asked:
    """One request that a server got."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Server:
    """Where a server is, and what it was asked."""

    url: str
    asked: list[Asked] = field(default_factory=list)


@contextlib.contextmanager
def answering(*behaviours: Behaviour, tls: ssl.SSLContext | None = None) -> Iterator[Server]:
    """A server that takes the behaviours one after the other, the last for all further requests."""
    left = list(behaviours)
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        released = threading.Event()

        def handle_one_request(self) -> None:
            with contextlib.suppress(OSError):
                super().handle_one_request()

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            with lock:
                server.asked.append(Asked(self.path, dict(self.headers), body))
                behave = left.pop(0) if len(left) > 1 else left[0]
            self.asked = server.asked[-1]
            with contextlib.suppress(OSError):
                behave(self)

        do_GET = do_POST = answer

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        if tls:
            http.socket = tls.wrap_socket(http.socket, server_side=True)
            http.handle_error = lambda *args: None
        server = Server(f"http{'s' * bool(tls)}://127.0.0.1:{http.server_address[1]}")
        threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield server
        finally:
            Handler.released.set()
            http.shutdown()


def says(content: Any, status: int = 200, **headers: str) -> Behaviour:
    """Answer with text as it is, or with JSON of anything else."""
    body = content.encode() if isinstance(content, str) else json.dumps(content).encode()

    def behave(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)

    return behave


def hangs(handler: Any) -> None:
    handler.released.wait(10)


def hangs_up(handler: Any) -> None:
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


def trickles(first: bytes) -> Behaviour:
    """Send the bytes at once and then an x every now and then, without an end."""

    def behave(handler: Any) -> None:
        handler.wfile.write(first)
        while not handler.released.is_set():
            handler.wfile.write(b"x")
            time.sleep(TRICKLE)

    return behave


@contextlib.contextmanager
def serving(reward: Reward, token: str | None = None) -> Iterator[str]:
    """Our own server with a reward: its URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(build_app(reward, token), log_config=None, **build_server_options())
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
