"""``/metrics`` and ``/health`` of a process."""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from functools import partialmethod
from http.server import ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from ebbflow import metrics_server, watchdog
from ebbflow.metrics_server import PORT, join_metrics, record_values, serve_metrics
from ebbflow.watchdog import Watchdog, watch
from tests.forked import CONTEXT


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server of this process, which does nothing and has logged nothing."""
    # The end of a server waits for its next look at whether it should end.
    serve_forever = partialmethod(ThreadingHTTPServer.serve_forever, 0.01)
    monkeypatch.setattr(ThreadingHTTPServer, "serve_forever", serve_forever)
    monkeypatch.setattr(watchdog, "_watchdog", Watchdog(stall_seconds=3600))
    monkeypatch.setattr(metrics_server, "_values", {})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv(PORT, str(port))
    server = serve_metrics()
    assert isinstance(server, ThreadingHTTPServer)
    yield f"http://127.0.0.1:{port}"
    server.shutdown()
    server.server_close()


def _read(address: str) -> str:
    with urlopen(address, timeout=60) as answer:
        return str(answer.read().decode())


def test_prometheus_gets_the_newest_values_and_what_takes_long(address: str) -> None:
    record_values("1.1 online", {"reward": 0.25, "loss": 1.0})
    record_values("1.1 online", {"reward": 0.5})
    lines = _read(f"{address}/metrics").splitlines()
    assert 'ebbflow_metric{name="reward",node="1.1 online"} 0.5' in lines
    assert 'ebbflow_metric{name="loss",node="1.1 online"} 1.0' in lines
    assert "ebbflow_activity_seconds 0.0" in lines
    assert "ebbflow_stalled 0.0" in lines


def test_a_process_in_which_something_stalls_is_not_healthy(address: str) -> None:
    with watch("training step 3"):
        healthy = json.loads(_read(f"{address}/health"))
        assert healthy["status"] == "ok"
        assert [activity["name"] for activity in healthy["activities"]] == ["training step 3"]
        (activity,) = watchdog._watchdog.activities.values()
        activity.has_stalled = True
        with pytest.raises(HTTPError) as raised:
            _read(f"{address}/health")
        assert raised.value.code == 503
        assert json.loads(raised.value.read())["status"] == "stalled"
        assert "ebbflow_stalled 1.0" in _read(f"{address}/metrics").splitlines()
    assert json.loads(_read(f"{address}/health")) == {
        "status": "ok",
        "activities": [],
        "silent": [],
    }


def _work_as_rank(port: str, folder: str, connection: Connection) -> None:
    """Do and log something in a process that joins the one with the port."""
    os.environ[PORT] = port
    tempfile.tempdir = folder
    join_metrics()
    record_values("1.2 offline training", {"loss": 0.125})
    with watch("training step 7"):
        connection.send("joined")
        connection.recv()


def test_the_values_and_the_work_of_a_rank_are_shown_until_it_ends(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server, "JOIN_SECONDS", 20.0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    here, there = CONTEXT.Pipe()
    rank = CONTEXT.Process(
        target=_work_as_rank, args=(os.environ[PORT], str(tmp_path), there), daemon=True
    )
    rank.start()
    assert rank.pid is not None
    try:
        assert here.recv() == "joined"
        line = 'ebbflow_metric{name="loss",node="1.2 offline training"} 0.125'
        assert line in _read(f"{address}/metrics").splitlines()
        (activity,) = json.loads(_read(f"{address}/health"))["activities"]
        assert (activity["name"], activity["process"]) == ("training step 7", rank.pid)
        # A rank that is stopped does not answer.
        monkeypatch.setattr(metrics_server, "JOIN_SECONDS", 0.5)
        os.kill(rank.pid, signal.SIGSTOP)
        assert "ebbflow_stalled 1.0" in _read(f"{address}/metrics").splitlines()
        with pytest.raises(HTTPError) as raised:
            _read(f"{address}/health")
        assert json.loads(raised.value.read())["silent"] == [rank.pid]
    finally:
        rank.kill()
        rank.join()
    assert line not in _read(f"{address}/metrics").splitlines()
    assert json.loads(_read(f"{address}/health"))["status"] == "ok"


def test_ranks_are_asked_without_the_proxy_of_the_environment(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with socket.socket() as refusing:
        refusing.bind(("127.0.0.1", 0))  # and never listens
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{refusing.getsockname()[1]}")
        monkeypatch.setattr(metrics_server, "JOIN_SECONDS", 20.0)
        server = join_metrics()
        assert server is not None
        try:
            processes = metrics_server._ask_processes()
        finally:
            server.shutdown()
            server.server_close()
    assert [(process.number, process.is_silent) for process in processes] == [
        (os.getpid(), False)
    ] * 2


def test_the_number_of_a_rank_that_another_user_has_now_is_forgotten(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(number: int, signal_number: int) -> None:
        raise PermissionError(number)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    file = metrics_server._path_of_processes(os.environ[PORT]) / "4711"
    file.write_text("1")
    monkeypatch.setattr(os, "kill", refuse)
    assert json.loads(_read(f"{address}/health"))["silent"] == []
    assert not file.exists()


def test_other_paths_are_not_there(address: str) -> None:
    with pytest.raises(HTTPError, match="404"):
        _read(f"{address}/")


def test_a_second_process_leaves_the_port_to_the_first(address: str) -> None:
    assert serve_metrics() is None


def test_nothing_listens_without_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PORT, raising=False)
    assert serve_metrics() is None


@pytest.mark.parametrize("port", ["70000", "-1", "http"])
def test_what_is_no_port_is_refused(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PORT, port)
    with pytest.raises(ValueError, match=f"{PORT}={port} is no port"):
        serve_metrics()
