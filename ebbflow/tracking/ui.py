"""MLflow's UI, opened where runs of a recipe are."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import webbrowser
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import urlopen

from ebbflow.tracking.store import TrackingError, connect_to_store, find_sqlite_file

MODE = "workflowType=machine_learning"
"""Part of an address of the UI. Without it MLflow shows the mode used last, at first that of
traces, which hides the registry.
"""
START_SECONDS = 300
"""Its imports take seconds, and a minute on a busy laptop."""
SERVER_SETTINGS = {
    # Further processes, each an interpreter that imports MLflow; runs and versions need none.
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Variables for an MLflow server that only stores and shows runs and versions."""


def list_pages(server: str, experiment_id: str) -> dict[str, str]:
    """The address of each page that a user looks for, by its name.

    Args:
        server: where the UI is.
    """
    runs = f"{server}/#/experiments/{experiment_id}/runs?{MODE}"
    return {
        "runs": runs,
        "reward curves of all runs": f"{runs}&compareRunsMode=CHART",
        "registry": f"{server}/#/models?{MODE}",
    }


def serve_ui(
    uri: str, experiment: str, port: int, browser: bool, say: Callable[[str], None]
) -> int:
    """Serve the UI on 127.0.0.1 until it is stopped, with Ctrl-C. A server has its own UI, which is
    only opened.

    Args:
        browser: whether to open the page of the runs in a browser, where there is one.
        say: shows a line to the user.

    Returns:
        the exit status of the server.

    Raises:
        TrackingError: the store has no such experiment, or the server does not start.
    """
    if uri.startswith(("http://", "https://")):
        # With MLflow's client, as the server may want a password or a token.
        stored_experiment = connect_to_store(uri).get_experiment_by_name(experiment)
        if stored_experiment is None:
            raise _build_no_experiment_error(uri, experiment)
        pages = list_pages(uri.rstrip("/"), stored_experiment.experiment_id)
        _show_addresses(pages, browser, say)
        return 0
    database = find_sqlite_file(uri)
    # MLflow would make an empty one, wherever the command was started
    if database and not database.is_file():
        raise TrackingError(
            f"no MLflow store at {uri}; run this where the pipeline ran, or name a recipe with"
            " --recipe"
        )
    server = f"http://127.0.0.1:{port}"
    process = _start_server(uri, port)
    # SIGTERM ends as Ctrl-C does, or the server would outlive this process
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _wait_for_server(process, server)
        # Asked of the server: it has imported MLflow, which costs this process two CPU seconds.
        experiment_id = _ask_experiment_id(server, experiment)
        if experiment_id is None:
            raise _build_no_experiment_error(uri, experiment)
        _show_addresses(list_pages(server, experiment_id), browser, say)
        say("Ctrl-C ends it.")
        return process.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def _start_server(uri: str, port: int) -> subprocess.Popen[bytes]:
    """Start MLflow's UI as a process group of its own.

    Raises:
        TrackingError: the port is taken.
    """
    options = {
        "--backend-store-uri": uri,
        "--port": str(port),
        "--workers": "1",
        "--uvicorn-opts": "--log-level=warning",
    }
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "ui",
        *(word for option in options.items() for word in option),
    ]
    _check_port_free(port)
    # a session of its own: the server has children, and the whole group is killed at the end
    return subprocess.Popen(command, env=os.environ | SERVER_SETTINGS, start_new_session=True)


def _check_port_free(port: int) -> None:
    """Before MLflow has imported itself: what answers at the port in the meantime would be taken
    for it.
    """
    with socket.socket() as taken:
        # as MLflow's own socket: connections that have just ended (TIME_WAIT) do not count
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", port))
        except OSError as error:
            raise TrackingError(
                f"port {port} of 127.0.0.1 is taken ({error.strerror}); set another --port"
            ) from None


def _wait_for_server(process: subprocess.Popen[bytes], server: str) -> None:
    """Until the server answers."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            raise TrackingError(f"MLflow's UI ended with status {process.returncode}, see above")
        try:
            urlopen(f"{server}/health", timeout=5).close()
            return
        except (URLError, TimeoutError, ConnectionError):
            time.sleep(0.2)
    raise TrackingError(f"MLflow's UI does not answer at {server} after {START_SECONDS} s")


def _ask_experiment_id(server: str, experiment: str) -> str | None:
    """Ask a server for the id of an experiment by its REST API; None if there is none.

    Raises:
        TrackingError: the server answers with another error.
    """
    address = f"{server}/api/2.0/mlflow/experiments/get-by-name?experiment_name={quote(experiment)}"
    try:
        with urlopen(address, timeout=60) as answer:
            return str(json.load(answer)["experiment"]["experiment_id"])
    except HTTPError as error:
        if error.code == HTTPStatus.NOT_FOUND:
            return None
        raise TrackingError(f"MLflow's UI at {server} fails: {error}, see above") from error
    except (URLError, ConnectionError) as error:
        raise TrackingError(f"MLflow's UI at {server} has ended: {error}, see above") from error


def _build_no_experiment_error(uri: str, experiment: str) -> TrackingError:
    return TrackingError(
        f"{uri} has no experiment {experiment!r} yet; run a recipe first, or name one with --recipe"
    )


def _show_addresses(addresses: dict[str, str], browser: bool, say: Callable[[str], None]) -> None:
    width = max(map(len, addresses))
    for name, address in addresses.items():
        say(f"{name:<{width}}  {address}")
    # without a display Python may open a text browser, in this terminal
    has_display = sys.platform in ("darwin", "win32") or any(
        map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY"))
    )
    if browser and has_display:
        webbrowser.open(addresses["runs"])
