"""The group of processes of an offline or a colocated stage, or of a task that generates on all
GPUs of its pod: torch's elastic launcher on each node, which saves on SIGTERM and starts at once.

Without CUDA, ranks are forked from a server that has imported what they need, so that they start at
once (``tasks.fork_server``). With CUDA, which does not survive a fork, ranks are spawned.

On one node nothing listens on a network. torch's own rendezvous (c10d) opens a port on every
interface, asks nobody for a password, and unpickles what it reads there. One node needs none: ranks
meet in a file of this user, and talk over the loopback interface. Several nodes, the pods of a
PyTorchJob, do meet by c10d (docs/nodes.md); outside such a job all ranks are on one node.

flytekit's own ``Elastic`` was tried on the same task: two ranks that import torch and Ebbflow, on
two busy CPU cores. Its ranks start after 64 seconds and these after 23. At a SIGTERM it kills ranks
that take 33 seconds to save, after 30, and raises ``IgnoreOutputs``: Flyte takes the task for a
success without outputs. Here the ranks save, and Flyte retries the task. It also listens on two
ports of every interface. So ``GracefulElastic`` derives from it, and changes how ranks start, where
they meet and what a SIGTERM does.
"""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

from flytekit import PythonFunctionTask
from flytekit.exceptions.user import FlyteRecoverableException, FlyteUserRuntimeException
from flytekit.extend import IgnoreOutputs, TaskPlugins
from flytekitplugins.kfpytorch import Elastic
from flytekitplugins.kfpytorch import task as plugin
from flytekitplugins.kfpytorch.task import PytorchElasticFunctionTask

from ebbflow.compute import count_gpus
from ebbflow.metrics_server import join_metrics
from ebbflow.recipe import Recipe
from ebbflow.resume import take_sigterm
from tasks.fork_server import preload_fork_server

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

logger = logging.getLogger(__name__)
# What the plugin runs in every rank; ``_configure_launcher`` replaces it for the time of a launch.
SPAWN_HELPER = plugin.spawn_helper
RENDEZVOUS = "one-node"
"""The name of ``_build_one_node_rendezvous`` among torch's rendezvous."""
IN_JOB = "PET_NNODES"
"""Environment variable of the pods of a PyTorchJob, which the training operator sets."""
JOIN_SECONDS = 900
"""How long nodes wait for each other at the start: one may have to be started, and to pull the
image.
"""
SILENT_SECONDS = 300
"""A launcher that was silent for so long is out of the rendezvous: torch's 15 seconds are too few
on a busy machine.
"""
# torch's default interval; the rendezvous counts silent intervals, not seconds.
HEARTBEAT_SECONDS = 5
CONFIGS = dict.fromkeys(("timeout", "join_timeout", "read_timeout"), JOIN_SECONDS)


@dataclass
class GracefulElastic(Elastic):
    """torch's elastic launcher, with time to save after a SIGTERM.

    By default the launcher kills its processes after 30 seconds, and the task succeeds without
    outputs.
    """

    rdzv_configs: dict[str, Any] = field(
        default_factory=lambda: (
            CONFIGS | {"keep_alive_max_attempt": SILENT_SECONDS // HEARTBEAT_SECONDS}
        )
    )


class GracefulElasticTask(PytorchElasticFunctionTask):
    """Passes SIGTERM on to the processes, which agree on a step, save and raise together.

    When a process is killed or a node of several is gone, the task is retried. The task function
    takes the recipe as ``recipe``.
    """

    terminated = False

    def __init__(
        self, task_config: GracefulElastic, task_function: Callable[..., Any], **kwargs: Any
    ) -> None:
        # Not the plugin's own, which imports torch to read ``nnodes``: registering and light pods
        # do without torch.
        several = task_config.nnodes > 1
        task_type = self._ELASTIC_TASK_TYPE if several else self._ELASTIC_TASK_TYPE_STANDALONE
        PythonFunctionTask.__init__(
            self, task_config, task_function, task_type=task_type, task_type_version=1, **kwargs
        )
        self.min_nodes = self.max_nodes = task_config.nnodes
        self.rdzv_backend = "c10d" if several else RENDEZVOUS

    def execute(self, **kwargs: Any) -> Any:
        # It came too late for the stage before, and the ranks to be forked would never see it.
        if take_sigterm():
            raise FlyteRecoverableException(f"{self.name} was terminated before it had processes")
        # Only the main thread may set a handler, and it receives the signals.
        if threading.current_thread() is not threading.main_thread():
            return self._launch_processes(**kwargs)
        previous_handler = signal.signal(signal.SIGTERM, self._forward_signal)
        try:
            return self._launch_processes(**kwargs)
        except (FlyteRecoverableException, IgnoreOutputs):
            # The plugin raises the first where a rank did, and the second on every node but the
            # first.
            raise
        except Exception:
            # Ranks that were still loading had no handler and died of the SIGTERM. Flyte retries
            # nothing but recoverable errors.
            if self.terminated:
                raise FlyteRecoverableException(
                    f"{self.name} was terminated before its first step"
                ) from None
            raise
        finally:
            signal.signal(signal.SIGTERM, previous_handler)

    def _launch_processes(self, **kwargs: Any) -> Any:
        """Run the ranks: those of this node, or outside of a PyTorchJob all of them here.

        Raises:
            FlyteRecoverableException: another node is gone or did not come, or a process of this
                one was killed.
        """
        in_job = self.task_config.nnodes > 1 and IN_JOB in os.environ
        launch = self._launch_processes_of_node if in_job else self._launch_all_processes
        try:
            return launch(**kwargs)
        except IgnoreOutputs:
            raise
        except Exception as error:
            if self.terminated:
                raise  # ``execute`` says that it was
            reason = _explain_lost_process(error, several_nodes=in_job)
            if reason:
                # Not ``from error``: Flyte's exceptions print their cause, at every level of the
                # workflow once more. The launcher has logged it.
                raise FlyteRecoverableException(f"{self._short_name}: {reason}") from None
            raise  # an error of the stage, which another attempt would meet again

    def _launch_all_processes(self, **kwargs: Any) -> Any:
        processes = self._count_processes(**kwargs)
        settings = {
            "min_nodes": 1,
            "max_nodes": 1,
            "nproc_per_node": processes,
            "rdzv_backend": RENDEZVOUS,
        }
        logger.info("starting %d processes for %s", processes, self._short_name)
        with _provide_file_store(), _configure_launcher(kwargs["recipe"], settings):
            return super().execute(**kwargs)

    def _launch_processes_of_node(self, **kwargs: Any) -> Any:
        """Run the processes of this node, which meet those of the others."""
        processes = self.task_config.nproc_per_node
        nodes = self.task_config.nnodes
        logger.info(
            "starting %d processes for %s, on one of %d nodes", processes, self._short_name, nodes
        )
        with (
            _record_launch_time(),
            _skip_method_name_search(),
            _configure_launcher(kwargs["recipe"], {}),
        ):
            try:
                return super().execute(**kwargs)
            except IgnoreOutputs:
                logger.info(
                    "%s is done on this node; the first node returns its outputs", self._short_name
                )
                raise

    def _count_processes(self, **inputs: Any) -> int:
        """Count the ranks outside of a PyTorchJob."""
        # A local run of a deployment with several nodes has as many ranks as on a cluster.
        return self.task_config.nproc_per_node * self.task_config.nnodes

    @property
    def _short_name(self) -> str:
        """The task's name without its module."""
        return str(self.name).rpartition(".")[2]

    def _forward_signal(self, number: int, frame: FrameType | None) -> None:
        """Pass a SIGTERM on to the ranks, and let the launcher wait until they have saved."""
        self.terminated = True
        processes = multiprocessing.active_children()
        for process in processes:
            process.terminate()
        # Nothing to wait for: the launch is interrupted here, in the main thread.
        if not processes:
            raise FlyteRecoverableException(f"{self.name} was terminated before it had processes")


@dataclass
class EveryGpu(GracefulElastic):
    """A process for each GPU that the task's pod sees, which generate together
    (``ebbflow.training.rounds``); on a machine with one or none, the task's own process.
    """


class EveryGpuTask(GracefulElasticTask):
    """Counts the GPUs where it runs, so that no setting has to say their number twice."""

    def execute(self, **kwargs: Any) -> Any:
        if self._count_processes(**kwargs) == 1:
            return PythonFunctionTask.execute(self, **kwargs)
        return super().execute(**kwargs)

    def _count_processes(self, **inputs: Any) -> int:
        stage = inputs.get("stage")
        # Another engine has a process of its own, on the GPU that it finds first.
        if stage is not None and inputs["recipe"].stages[stage].engine != "diffusers":
            return 1
        return max(1, count_gpus())


def _explain_lost_process(error: Exception, several_nodes: bool) -> str | None:
    """Explain an error that another attempt may not meet: a connection to another node that broke,
    or a process that was killed; None for any other.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    from ebbflow.training.distributed import is_connection_error

    if isinstance(error, RendezvousError) or is_connection_error(error):
        return f"another node is gone, or did not come ({type(error).__name__}: {error})"
    cause = error.value if isinstance(error, FlyteUserRuntimeException) else error
    if not isinstance(cause, ChildFailedError):
        return None
    failure = cause.get_first_failure()[1]
    if failure.exitcode >= 0:
        return None
    # By a signal: SIGKILL where memory is used up, SIGABRT by NCCL when a connection breaks.
    ended_by = signal.Signals(-failure.exitcode)
    reasons = [f"process {failure.local_rank} of this node ended by {ended_by.name}"]
    if ended_by == signal.SIGKILL:
        reasons.append("its memory may be used up")
    if several_nodes:
        reasons.append("another node may be gone")
    return "; ".join(reasons)


@contextmanager
def _configure_launcher(recipe: Recipe, further: dict[str, Any]) -> Iterator[None]:
    """Give the launcher settings that Flyte's plugin has no options for: the signals that it
    handles, a start by forking, and ranks that end with it.

    Args:
        further: more of the launcher's settings.
    """
    from torch.distributed.launcher import api

    # Not SIGTERM, which is ``GracefulElasticTask``'s, and not SIGINT, which is Flyte's (start_run).
    settings = {"signals_to_handle": "SIGHUP,SIGQUIT", **further}
    launch_config = api.LaunchConfig
    # A spawned rank inherits the environment, in which torch then sets what is this rank's own.
    environment: dict[str, str] = {}
    if preload_fork_server(recipe):
        settings["start_method"] = "forkserver"
        environment = dict(os.environ)
    # Spawned ranks as well: the launcher's death and Ctrl-C reach them like forked ones.
    rank = partial(_run_rank, os.getcwd(), environment)
    # The launcher logs the names, which a partial does not have.
    rank.__name__ = rank.__qualname__ = SPAWN_HELPER.__name__  # type: ignore[attr-defined]
    plugin.spawn_helper = rank

    # The plugin imports LaunchConfig inside ``execute``, so that it gets this one.
    def build_launch_config(**plugin_settings: Any) -> Any:
        return launch_config(**plugin_settings | settings)

    api.LaunchConfig = build_launch_config  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        api.LaunchConfig = launch_config  # type: ignore[misc]
        plugin.spawn_helper = SPAWN_HELPER


@contextmanager
def _provide_file_store() -> Iterator[None]:
    """Provide a file through which ranks find each other, and configure torch for one node
    (``_build_one_node_rendezvous``).
    """
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    from ebbflow.training.distributed import STORE

    rendezvous_handler_registry.register(RENDEZVOUS, _build_one_node_rendezvous)
    with tempfile.TemporaryDirectory(prefix="ebbflow-ranks-") as folder, _record_launch_time():
        os.environ[STORE] = os.path.join(folder, "store")
        try:
            yield
        finally:
            del os.environ[STORE]


@contextmanager
def _record_launch_time() -> Iterator[None]:
    """Tell ranks when they were launched, so that the stage can log how long they took to start."""
    from ebbflow.training.distributed import LAUNCHED

    os.environ[LAUNCHED] = str(time.time())
    try:
        yield
    finally:
        del os.environ[LAUNCHED]


@contextmanager
def _skip_method_name_search() -> Iterator[None]:
    """Keep c10d's rendezvous from searching the name of the calling method in all modules of the
    process, which it does several times for each operation.
    """
    # For a log message. With the thousands of modules here it takes seconds on a busy machine.
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    slow = dynamic_rendezvous.get_method_name
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name
    try:
        yield
    finally:
        dynamic_rendezvous.get_method_name = slow


def _build_one_node_rendezvous(parameters: RendezvousParameters) -> RendezvousHandler:
    """Build the rendezvous of a launcher that is alone: it meets nobody, and what it stores stays
    in its memory.
    """
    from torch.distributed import HashStore  # type: ignore[attr-defined]
    from torch.distributed.elastic.rendezvous import (
        RendezvousHandler,
        RendezvousInfo,
        RendezvousStoreInfo,
    )

    class OneNode(RendezvousHandler):
        def get_backend(self) -> str:
            return RENDEZVOUS

        def next_rendezvous(self) -> RendezvousInfo:
            # Ranks meet in the file of ``_provide_file_store`` and never ask for this address.
            no_port = RendezvousStoreInfo("127.0.0.1", 0)
            return RendezvousInfo(HashStore(), rank=0, world_size=1, bootstrap_store_info=no_port)

        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None:
            pass

        def num_nodes_waiting(self) -> int:
            return 0

        def get_run_id(self) -> str:
            return parameters.run_id

        def shutdown(self) -> bool:
            return True

    return OneNode()


def _run_rank(directory: str, environment: dict[str, str], *arguments: Any) -> Any:
    """Do a rank's work, in the folder and environment of its launcher. A forked rank would have
    those that the server had when it started.
    """
    # The fork server ignores SIGTERM, and so would its forks.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # The launcher passes Ctrl-C on as a SIGTERM, for which ranks save.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.chdir(directory)
    os.environ.update(environment)
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    # The launcher has the port, and logs nothing of the training itself.
    join_metrics()
    return SPAWN_HELPER(*arguments)


def _end_with_launcher() -> None:
    """End this process when its launcher is gone.

    Nothing else would: the parent of a forked rank is the server, and a spawned one is left to
    init. A rank that waits in a collective would keep its GPU until the time-out.
    """
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    multiprocessing.connection.wait([launcher.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


TaskPlugins.register_pythontask_plugin(GracefulElastic, GracefulElasticTask)
TaskPlugins.register_pythontask_plugin(EveryGpu, EveryGpuTask)
