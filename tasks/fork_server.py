"""The process that the ranks of a group are forked from, where there is no CUDA: it has imported
what they need, so that they start at once.

The server is ``multiprocessing``'s, and itself a fork of the launcher, made before the launcher
computes anything: a process that has started threads or opened a database must not be forked. Where
the launcher's forks can no longer train, the server is a new interpreter, seconds later.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing import forkserver, resource_tracker, util

from ebbflow.recipe import Recipe

SHORT_FOLDER = "/tmp"
PRELOADED = (
    "tasks.train_offline",
    "tasks.train_online_colocated",
    "tasks.evaluate_policy",
    "tasks.generate_rollouts",
    "ebbflow.offline.training",
    "ebbflow.online.train_folder",
    "ebbflow.tracking.nodes",
)
"""What a rank imports before its first step; the fork server imports it once for all of them."""
TRIAL_SECONDS = 60
"""A trial backward pass in a fork takes milliseconds; one that has not ended by then hangs."""


def preload_fork_server(recipe: Recipe) -> bool:
    """Import what ranks need, and fork the server that they are forked from, unless it runs
    already.

    Returns:
        whether there is such a server: there is none where ranks use CUDA, nor outside Linux.
    """
    import torch

    if torch.cuda.is_available() or sys.platform != "linux":
        return False
    from ebbflow.models.families import load_adapter

    for module in PRELOADED:
        importlib.import_module(module)
    adapter = load_adapter(recipe.model.family)
    _create_socket_folder()
    # ``forkserver`` starts the resource tracker by the same function as the server: it has to run
    # before that function is replaced.
    resource_tracker.ensure_running()
    start_interpreter = util.spawnv_passfds
    if _can_forks_train():
        util.spawnv_passfds = _fork_server  # type: ignore[assignment]
    else:
        # A notebook that has trained something itself, say: the server takes seconds longer.
        forkserver.set_forkserver_preload([*PRELOADED, adapter.__module__])
        util.spawnv_passfds = partial(_start_server, start_interpreter)
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = start_interpreter
    return True


def _can_forks_train() -> bool:
    """Return whether a fork of this process can run a backward pass, by trying it: where this
    process has run one, its threads of autograd may be missing in a fork, which torch refuses.
    """
    import torch

    process = os.fork()
    if process == 0:
        status = 1
        try:
            # A lock that another thread held at the fork is never released in it. The signal's own
            # action ends the fork then: a handler of Python would wait for the same lock.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(TRIAL_SECONDS)
            torch.ones((), requires_grad=True).backward()
            status = 0
        finally:
            # Neither a traceback nor the exit handlers of this process.
            os._exit(status)
    return os.waitpid(process, 0)[1] == 0


def _create_socket_folder() -> None:
    """Create the folder of multiprocessing's sockets at a short path: that of a local socket has
    107 bytes at most, and the temporary folder of a local run lies in its output.
    """
    usual = tempfile.gettempdir()
    if os.access(SHORT_FOLDER, os.W_OK | os.X_OK):
        tempfile.tempdir = SHORT_FOLDER
    try:
        # Makes a folder that only this user can open, and remembers it.
        util.get_temp_dir()
    finally:
        tempfile.tempdir = usual


def _start_server(
    start_interpreter: Callable[..., int],
    executable: str,
    arguments: list[str],
    descriptors: list[int],
) -> int:
    """Start ``multiprocessing``'s fork server as a new interpreter, and return its id."""
    # The server ends after the ranks, which save first. Of a server that has ended,
    # ``multiprocessing`` would report that its ranks have failed.
    *options, program = arguments
    ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    return start_interpreter(executable, [*options, ignore + program], descriptors)


def _fork_server(executable: str, arguments: list[str], descriptors: list[int]) -> int:
    """Fork this process as ``multiprocessing``'s fork server, which is a new interpreter otherwise,
    and return its id.
    """
    # What is still in a buffer would be written by both.
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process:
        return process
    # What the launcher has dropped and not yet collected is never collected here: the destructor of
    # a process group waits for its threads, which no fork has.
    gc.freeze()
    listener, alive = descriptors
    try:
        # ``ensure_running`` holds this lock while it forks. A fork of the server would wait for it
        # for ever as soon as it starts a server of its own.
        forkserver._forkserver._lock = threading.RLock()  # type: ignore[attr-defined]
        # The server ends after the ranks, which save first.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # The server ends when nobody holds the other end of this pipe. The fork holds one itself,
        # which a new interpreter would not, and would wait for itself.
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # the listing's own descriptor is gone
                if int(name) != alive and os.path.sameopenfile(int(name), alive):
                    os.close(int(name))
        forkserver.main(listener, alive, [])
    finally:
        # Not sys.exit: exit handlers and finalisers are those of the launcher.
        os._exit(0)
