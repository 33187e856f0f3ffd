"""``/metrics`` for Prometheus and ``/health`` for people and probes, of a process that runs tasks.

Nothing listens unless ``EBBFLOW_METRICS_PORT`` names a port. It then listens on all interfaces, as
Prometheus asks the address of a pod, without a password: what it shows are names of metrics and of
what the process does. The first process of a machine has the port, and shows what the ranks that
it starts do and log: each serves that to its own machine (``join_metrics``).
"""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

from ebbflow.extras import require
from ebbflow.storage.disk import create_private_folder, write_text
from ebbflow.watchdog import list_activities

PORT = "EBBFLOW_METRICS_PORT"
MAX_PORT = 65535
JOIN_SECONDS = 2.0
"""Longest wait for the answer of another process; one without is shown as silent."""

logger = logging.getLogger(__name__)

_values: dict[tuple[str, str], float] = {}
"""The newest value of each metric, by node and name."""
# A proxy of the environment would look for the ranks on its own machine.
_opener = build_opener(ProxyHandler({}))


def record_values(node: str, values: Mapping[str, float]) -> None:
    """Remember the newest values that a node has logged, for ``/metrics``."""
    for name, value in values.items():
        _values[node, name] = value


def serve_metrics() -> ThreadingHTTPServer | None:
    """Serve in a thread, on the port of the environment; None without one, or where another process
    of this machine has it.

    Raises:
        ValueError: it is no port.
        MissingExtraError: prometheus_client is not installed.
    """
    text = os.environ.get(PORT)
    if not text:
        return None
    if not text.isdecimal() or int(text) > MAX_PORT:
        raise ValueError(f"{PORT}={text} is no port; set a number of at most {MAX_PORT}")
    require(PORT, "prometheus_client")
    try:
        server = ThreadingHTTPServer(("", int(text)), _Handler)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        # A rank, or a worker of Ray: the process that started it serves.
        logger.debug("port %s of %s is taken", text, PORT)
        return None
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server


def join_metrics() -> ThreadingHTTPServer | None:
    """Let the process of this machine that has the port show what this one does and logs; None
    without a port.
    """
    port = os.environ.get(PORT)
    if not port:
        return None
    server = ThreadingHTTPServer(("127.0.0.1", 0), _RankHandler)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    write_text(_path_of_processes(port) / str(os.getpid()), str(server.server_port))
    return server


def _path_of_processes(port: str) -> Path:
    """Return the folder with a file for each process that joined: its port, by its number."""
    folder = create_private_folder() / f"metrics-{port}"
    folder.mkdir(exist_ok=True)
    return folder


@dataclass
class _Process:
    """What a process of this machine does, and the newest values that it logged.

    Example:
        ``_Process(4711, [{"name": "training step 3", "seconds": 2.5, "stalled": False}],
        [("1.1 online", "loss", 0.25)])``
    """

    number: int
    activities: list[dict[str, Any]] = field(default_factory=list)
    values: list[tuple[str, str, float]] = field(default_factory=list)
    is_silent: bool = False


def _describe_this_process() -> _Process:
    values = [(node, name, value) for (node, name), value in sorted(_values.items())]
    return _Process(os.getpid(), list_activities(), values)


def _ask_processes() -> list[_Process]:
    """Ask this process and all that joined it, those that have ended left out."""
    files = sorted(_path_of_processes(os.environ[PORT]).glob("[0-9]*"))
    # All at once: eight silent ranks would take longer than Prometheus waits.
    with ThreadPoolExecutor(max(1, len(files)), "ask_process") as threads:
        answers = list(threads.map(_ask_process, files))
    return [_describe_this_process(), *(answer for answer in answers if answer is not None)]


def _ask_process(file: Path) -> _Process | None:
    """Ask a process that joined; None for one that has ended, whose file is removed."""
    number = int(file.name)
    try:
        os.kill(number, 0)
        address = f"http://127.0.0.1:{int(file.read_text())}/"
        with _opener.open(address, timeout=JOIN_SECONDS) as answer:
            return _Process(**json.loads(answer.read()))
    # PermissionError: another user's process has its number now.
    except (ProcessLookupError, PermissionError, FileNotFoundError):
        file.unlink(missing_ok=True)
        return None
    # HTTPException: it has ended while it answered.
    except (OSError, ValueError, HTTPException) as error:
        if isinstance(error, URLError) and isinstance(error.reason, ConnectionRefusedError):
            file.unlink(missing_ok=True)  # another process has its number now
            return None
        return _Process(number, is_silent=True)


def describe_health() -> tuple[int, dict[str, Any]]:
    """Describe the processes: (status of HTTP, what ``/health`` shows). Unhealthy is one in which
    something has stalled, and one that does not answer.

    Example:
        ``(503, {"status": "stalled", "activities": [{"name": "training step 3", "seconds": 650.2,
        "stalled": true, "process": 4711}], "silent": []})``
    """
    processes = _ask_processes()
    activities = [
        activity | {"process": process.number}
        for process in processes
        for activity in process.activities
    ]
    silent = [process.number for process in processes if process.is_silent]
    is_stalled = bool(silent) or any(activity["stalled"] for activity in activities)
    status = "stalled" if is_stalled else "ok"
    health = {"status": status, "activities": activities, "silent": silent}
    return 503 if is_stalled else 200, health


class _Collector:
    """What ``/metrics`` shows, collected when it is asked for."""

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        processes = _ask_processes()
        activities = [activity for process in processes for activity in process.activities]
        oldest = max((activity["seconds"] for activity in activities), default=0.0)
        yield GaugeMetricFamily(
            "ebbflow_activity_seconds", "Seconds of the longest work under way.", value=oldest
        )
        yield GaugeMetricFamily(
            "ebbflow_stalled",
            "Work that takes longer than EBBFLOW_STALL_MINUTES, and processes without an answer.",
            value=sum(activity["stalled"] for activity in activities)
            + sum(process.is_silent for process in processes),
        )
        newest = GaugeMetricFamily(
            "ebbflow_metric", "Newest value of a metric of a run.", labels=["node", "name"]
        )
        # Of a node that several processes logged in turn, the last one counts.
        values = {
            (node, name): value for process in processes for node, name, value in process.values
        }
        for (node, name), value in sorted(values.items()):
            newest.add_metric([node, name], value)
        yield newest


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/metrics":
            from prometheus_client import CollectorRegistry
            from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

            registry = CollectorRegistry()
            registry.register(_Collector())
            self._answer(200, CONTENT_TYPE_LATEST, generate_latest(registry))
        elif self.path == "/health":
            status, health = describe_health()
            self._answer(status, "application/json", json.dumps(health).encode())
        else:
            self._answer(404, "text/plain", b"there are /metrics and /health\n")

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: Prometheus asks every few seconds."""


class _RankHandler(_Handler):
    """Answers the process that has the port."""

    def do_GET(self) -> None:
        content = json.dumps(asdict(_describe_this_process())).encode()
        self._answer(200, "application/json", content)
