"""Machines that are taken away: what a task says so that Flyte starts it again, and a training group that ends by itself."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.extend import TaskPlugins
from flytekitplugins.kfpytorch import Elastic
from flytekitplugins.kfpytorch.task import PytorchElasticFunctionTask


@contextmanager
def started_again_after(*errors: type[Exception]) -> Iterator[None]:
    """Flyte starts a task again after no error but its own recoverable one."""
    try:
        yield
    except errors as error:
        raise FlyteRecoverableException(str(error)) from error


@dataclass
class Group(Elastic):
    """Processes under torch's elastic launcher that hear of a SIGTERM and are left the time to save.

    By itself the launcher gives them 30 seconds, and the task then ends as if it had succeeded without outputs.
    """


class GroupTask(PytorchElasticFunctionTask):
    """Passes a SIGTERM on to the processes; they agree, save and raise, all of them."""

    told = False

    def execute(self, **kwargs: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return super().execute(**kwargs)  # only the main thread hears signals
        before = signal.signal(signal.SIGTERM, self._pass_on)
        try:
            with _launcher_that_leaves_sigterm():
                return super().execute(**kwargs)
        except FlyteRecoverableException:
            raise
        except Exception as error:
            if self.told:  # it came before they could save, while they were loading
                raise FlyteRecoverableException(f"{self.name} was told to end before it had begun") from error
            raise
        finally:
            signal.signal(signal.SIGTERM, before)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.told = True
        processes = multiprocessing.active_children()
        for process in processes:
            process.terminate()
        if not processes:
            raise FlyteRecoverableException(f"{self.name} was told to end while it had no processes")


@contextmanager
def _launcher_that_leaves_sigterm() -> Iterator[None]:
    """Flyte makes the launcher's configuration itself and has no key for the signals that the launcher takes."""
    from torch.distributed.launcher import api

    config = api.LaunchConfig
    api.LaunchConfig = partial(config, signals_to_handle="SIGINT,SIGHUP,SIGQUIT")  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        api.LaunchConfig = config  # type: ignore[misc]


TaskPlugins.register_pythontask_plugin(Group, GroupTask)
