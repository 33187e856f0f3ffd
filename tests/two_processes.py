"""A function run by processes that train together, this one and forked ones (tests/forked.py)."""

from __future__ import annotations

import faulthandler
import os
import socket
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from ebbflow.training import distributed
from tests.forked import CONTEXT, DUMP_SIGNAL


def as_two_ranks(work: Callable[..., object], *arguments: Any, **environment: str) -> None:
    """``work(*arguments)`` as rank 0 here and as rank 1 in another process, each with the
    environment of an elastic launcher.

    ``work`` is a function of a module, which joins with ``process_group()``; ``environment`` is for
    both processes.
    """
    as_ranks(2, work, *arguments, **environment)


def as_ranks(world: int, work: Callable[..., object], *arguments: Any, **environment: str) -> None:
    """As ``as_two_ranks``, for so many processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    # A fork server that starts imports first, for longer than ranks wait where others compute. It
    # starts outside of the ranks' environment, which all programs of later tests would have.
    first = CONTEXT.Process(target=int)
    first.start()
    first.join()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (group | environment).items():
            patch.setenv(name, value)
        patch.setattr(distributed, "TIMEOUT", timedelta(minutes=3))
        with tempfile.NamedTemporaryFile("r", suffix=".stacks") as stacks:
            given = (work, arguments, dict(os.environ), stacks.name)
            other = torch.multiprocessing.start_processes(
                _run_further_rank, given, nprocs=world - 1, join=False, start_method="forkserver"
            )
            try:
                work(*arguments)
            except Exception as error:
                # Raises what the other one raised, if it did: then this one only lost its partner.
                if not other.join(timeout=60):
                    for process in other.processes:
                        if process.is_alive():
                            os.kill(process.pid, DUMP_SIGNAL)
                            time.sleep(0.5)  # one after another: all of them write into one file
                    error.add_note(f"the other processes still run:\n{stacks.read()}")
                raise
            while not other.join():
                pass


def _run_further_rank(
    index: int,
    work: Callable[..., object],
    arguments: tuple[Any, ...],
    environment: dict[str, str],
    stacks: str,
) -> None:
    faulthandler.register(DUMP_SIGNAL, file=open(stacks, "a"), all_threads=True)  # noqa: SIM115
    torch.set_num_threads(1)
    # Nothing that the server had when it started: a store of ranks, where these have none.
    os.environ.clear()
    os.environ.update(environment)
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(index + 1)
    work(*arguments)
