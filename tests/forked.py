"""Programs that start at once: forks of a process that has imported what takes seconds, in place of
new interpreters.

A program gets the arguments, environment, working directory and output files that a process of its
own would have, and imports ``tasks`` and ``workflows`` itself, because these read the environment
as they are imported. Ebbflow's own start-up is tested on real interpreters (tests/test_house.py,
the first pod of tests/pipeline/test_pods.py, the command line).
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from multiprocessing import forkserver
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
PRELOADED = [
    "ebbflow.online.train_folder",
    "ebbflow.offline.training",
    "ebbflow.models.families.glyph",
    "ebbflow.models.glyph_training.train",
    "ebbflow.registry.promotion",
    "ebbflow.tracking.nodes",
    "ebbflow.report.run_report",
    "ebbflow.rewards.ppocr",
    "ebbflow.preflight",
    "mlflow.store.tracking.sqlalchemy_store",
    "mlflow.store.model_registry.sqlalchemy_store",
    "flytekit.clis.sdk_in_container.pyflyte",
    "flytekit.bin.entrypoint",
    "flytekitplugins.kfpytorch",
    "flytekitplugins.ray",
    "kubernetes.client",
    "s3fs",
    "onnxruntime",
    "rapidocr",
    # What clients of an MLflow server import at their first request.
    "mlflow.tracking.request_header.registry",
    "IPython",
]
DUMP_SIGNAL = signal.SIGUSR2
"""Makes a program write the stacks of its threads into a file."""
CONTEXT = multiprocessing.get_context("forkserver")
"""Of all processes that tests fork: a process has one fork server, with one list of what it
imports.
"""
CONTEXT.set_forkserver_preload(PRELOADED)
SERVER_ATTRIBUTES = ("_forkserver_pid", "_forkserver_address", "_forkserver_alive_fd")
"""What ``multiprocessing`` knows of the server that runs; None without one."""


@contextmanager
def separate_fork_server() -> Iterator[None]:
    """Give a task that prepares or starts a process group here a fork server that ends with it.

    The task forks this process as the server (tasks/fork_server.py). Programs of later tests would
    be forks of pytest, with its standard streams, with ``workflows`` imported already, and with
    locks that another thread of pytest held. They are forks of the server of before, which keeps
    what it took seconds to import.
    """
    server = forkserver._forkserver  # type: ignore[attr-defined]
    program_server = {name: getattr(server, name) for name in SERVER_ATTRIBUTES}
    vars(server).update(dict.fromkeys(SERVER_ATTRIBUTES))
    try:
        yield
    finally:
        stop_fork_server()
        vars(server).update(program_server)
        # A task whose forks could not train has left its own list.
        CONTEXT.set_forkserver_preload(PRELOADED)


def stop_fork_server() -> None:
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


def is_fork_server_a_fork_of_this_process() -> bool:
    """Tell whether programs would be forks of pytest; a server of ``multiprocessing``'s own is a
    new interpreter with a command line of its own.
    """
    server: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return server is not None and _has_command_of_this_process(server)


@cache  # every test asks, and most find the server of the test before
def _has_command_of_this_process(process: int) -> bool:
    try:
        return psutil.Process(process).cmdline() == psutil.Process().cmdline()
    except psutil.NoSuchProcess:  # it has ended, also where nobody has waited for it
        return False


class ForkedProgram:
    """A program under way; as much of ``subprocess.Popen`` as the tests need.

    Args:
        command: a Python script and its arguments; an interpreter before it is left out.
        output: files of its two streams; one file takes both.
        new_session: make it the leader of a process group of its own.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str],
        output: Sequence[Path],
        new_session: bool = False,
    ) -> None:
        arguments = [str(part) for part in command if str(part) != sys.executable]
        streams = [str(output[0]), str(output[-1])]
        self.stacks = Path(f"{streams[-1]}.stacks")
        self.process = CONTEXT.Process(
            target=_run,
            args=(arguments, str(cwd), dict(env), streams, str(self.stacks), new_session),
        )
        self.process.start()
        assert self.process.pid is not None
        self.pid: int = self.process.pid

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit status.

        Raises:
            subprocess.TimeoutExpired: the program still runs. Its note has the stacks of all
                threads of the program and of its child processes.
        """
        self.process.join(timeout)
        if self.process.exitcode is None:
            error = subprocess.TimeoutExpired(str(self.process), timeout or 0)
            error.add_note(self.dump_stacks())
            raise error
        return self.process.exitcode

    def dump_stacks(self) -> str:
        """Return the stacks of all threads of the program and of the processes that it forked.

        A process that it started as a new interpreter does not know the signal, and ends by it.
        """
        program = psutil.Process(self.pid)
        for process in (program, *program.children(recursive=True)):
            process.send_signal(DUMP_SIGNAL)
            time.sleep(0.5)  # one after another: all of them write into one file
        return self.stacks.read_text()

    def poll(self) -> int | None:
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()


def run_forked(
    command: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    timeout: float,
    watch: Callable[[int], None] | None = None,
) -> subprocess.CompletedProcess[str]:
    """As ``subprocess.run`` with captured text.

    Args:
        watch: called again and again with the id of the program's session, while it runs.
    """
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder, name) for name in ("out", "err")]
        program = ForkedProgram(
            command, cwd=cwd, env=env, output=streams, new_session=watch is not None
        )
        try:
            while watch and program.poll() is None:
                watch(program.pid)
                program.process.join(0.02)
            ended = program.wait(timeout)
        finally:
            program.kill()
        out, err = (stream.read_text() for stream in streams)
    return subprocess.CompletedProcess(command, ended, out, err)


def _run(
    command: list[str],
    cwd: str,
    env: dict[str, str],
    output: list[str],
    stacks: str,
    new_session: bool,
) -> None:
    """Become the program."""
    if new_session:
        os.setsid()
    # Processes that the program forks keep both the handler and the file.
    faulthandler.register(DUMP_SIGNAL, file=open(stacks, "w"), all_threads=True)  # noqa: SIM115
    for descriptor, path in zip((1, 2), output, strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), descriptor)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    script = shutil.which(command[0]) or command[0]
    own = [
        os.path.dirname(os.path.abspath(script)),
        *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)),
    ]
    of_pytest = (str(ROOT), str(ROOT / "tests"))
    sys.path[:] = own + [
        path for path in sys.path if path != of_pytest[0] and not path.startswith(of_pytest[1])
    ]
    sys.argv = [script, *command[1:]]
    tempfile.tempdir = None
    from flytekit import FlyteContextManager
    from flytekit.core.local_cache import LocalTaskCache

    FlyteContextManager.initialize()  # its temporary folder is that of the environment
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        keep_libraries_of_torch()
        # A process of multiprocessing leaves without closing what an interpreter closes.
        atexit._run_exitfuncs()
        if LocalTaskCache._initialized:
            LocalTaskCache._cache.close()


def keep_libraries_of_torch() -> None:
    """Leave operators registered at the end of a fork, which has no use for memory that is tidy.

    To take back hundreds of them copies the pages that they share with the fork server, and is most
    of what a short program costs at its end.
    """
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        if finalizer.peek()[1].__name__ == "_del_library":
            finalizer.atexit = False
