"""Ray's workers, forked from a process that has imported what takes seconds, in place of new
interpreters.

``forked_workers`` starts this file as the process that forks (``serve``), and Ray starts it as the
program of each worker: it hands its arguments, environment and streams to that process and ends
with its fork. Ray itself is imported by each fork: what its extension reads and starts as it is
imported does not survive one.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ADDRESS = "EBBFLOW_TEST_FORKED_WORKERS"
MAX_MESSAGE = 2**20
PRELOADED = [
    "ebbflow.online.training_worker",
    "ebbflow.online.sample_workers",
    "ebbflow.models.families.glyph",
]


@contextmanager
def forked_workers(address: Path) -> Iterator[None]:
    """While it is open, a Ray that this process starts has forked workers; ``address``: of a
    socket.
    """
    import pytest
    from ray._private.parameter import RayParams

    original = RayParams.__init__

    def with_this_program(self: RayParams, *arguments: object, **named: object) -> None:
        original(self, *arguments, **named)
        self.setup_worker_path = __file__

    with pytest.MonkeyPatch.context() as patch, socket.socket(socket.AF_UNIX) as listener:
        patch.setenv(ADDRESS, str(address))
        patch.setattr(RayParams, "__init__", with_this_program)
        listener.bind(str(address))
        listener.listen(100)
        descriptor = listener.fileno()
        server = subprocess.Popen(
            [sys.executable, __file__, "serve", str(descriptor)], pass_fds=[descriptor]
        )
        yield
        server.kill()
        server.wait()


def _serve(listener: socket.socket) -> None:
    for module in PRELOADED:
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the workers
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _become_worker(connection)
        connection.close()


def _become_worker(connection: socket.socket) -> None:
    """Do what Ray's own setup_worker.py does, without ``exec``, but for runtime environments, which
    no test has.

    The connection stays open as long as the worker lives.
    """
    message, streams, *_ = socket.recv_fds(connection, MAX_MESSAGE, 2)
    asked = json.loads(message)
    for descriptor, stream in zip((1, 2), streams, strict=True):
        os.dup2(stream, descriptor)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    ours = ("--serialized-runtime-env-context", "--language")
    sys.argv = [argument for argument in asked["arguments"] if not argument.startswith(ours)]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _ask_for_worker() -> None:
    with socket.socket(socket.AF_UNIX) as to_server:
        to_server.connect(os.environ[ADDRESS])
        asked = {"arguments": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd()}
        socket.send_fds(to_server, [json.dumps(asked).encode()], [1, 2])
        to_server.recv(1)  # nothing comes; the worker has ended


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        _serve(socket.socket(fileno=int(sys.argv[2])))
    else:
        _ask_for_worker()
