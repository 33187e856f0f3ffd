"""Preemption: errors after which Flyte retries a task, and a training group that saves on SIGTERM."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

from flytekit import PythonFunctionTask
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.extend import TaskPlugins
from flytekitplugins.kfpytorch import Elastic
from flytekitplugins.kfpytorch.task import PytorchElasticFunctionTask


@contextmanager
def retry_on(*errors: type[Exception]) -> Iterator[None]:
    """Turn these errors into Flyte's recoverable one, the only error after which it retries a task."""
    try:
        yield
    except errors as error:
        raise FlyteRecoverableException(str(error)) from error


@dataclass
class GracefulElastic(Elastic):
    """torch's elastic launcher, with time to save after a SIGTERM.

    By default the launcher kills its processes after 30 seconds, and the task succeeds without outputs.
    """


class GracefulElasticTask(PytorchElasticFunctionTask):
    """Passes SIGTERM on to the processes, which agree on a step, save and raise together. All of them are on one node."""

    terminated = False

    def __init__(self, task_config: GracefulElastic, task_function: Callable[..., Any], **kwargs: Any) -> None:
        # Not the plugin's own, which imports torch to read ``nnodes``: registering and light pods do without torch.
        PythonFunctionTask.__init__(
            self, task_config, task_function, task_type=self._ELASTIC_TASK_TYPE_STANDALONE, task_type_version=1, **kwargs
        )
        self.min_nodes = self.max_nodes = 1
        self.rdzv_backend = "c10d"

    def execute(self, **kwargs: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return super().execute(**kwargs)  # only the main thread receives signals
        before = signal.signal(signal.SIGTERM, self._pass_on)
        try:
            with _launcher_ignoring_sigterm():
                return super().execute(**kwargs)
        except FlyteRecoverableException:
            raise
        except Exception as error:
            if self.terminated:  # while they were loading, before they could save
                raise FlyteRecoverableException(f"{self.name} was terminated before its first step") from error
            raise
        finally:
            signal.signal(signal.SIGTERM, before)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.terminated = True
        processes = multiprocessing.active_children()
        for process in processes:
            process.terminate()
        if not processes:
            raise FlyteRecoverableException(f"{self.name} was terminated before it had processes")


@contextmanager
def _launcher_ignoring_sigterm() -> Iterator[None]:
    """Flyte builds the launcher's configuration and has no option for the signals that the launcher handles."""
    from torch.distributed.launcher import api

    config = api.LaunchConfig
    api.LaunchConfig = partial(config, signals_to_handle="SIGINT,SIGHUP,SIGQUIT")  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        api.LaunchConfig = config  # type: ignore[misc]


TaskPlugins.register_pythontask_plugin(GracefulElastic, GracefulElasticTask)
