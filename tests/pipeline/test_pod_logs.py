"""What flytekit's logger says in pods: everything but two lines that no reader can act on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import aiohttp
import pytest
from flytekit.core.type_engine import display_pickle_warning
from flytekit.utils.asyn import loop_manager

import tasks  # noqa: F401  sets the filter


@pytest.fixture
def said() -> Iterator[list[str]]:
    """Messages of the logger ``flytekit``."""
    messages: list[str] = []
    handler = logging.Handler()
    logger = logging.getLogger("flytekit")
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


def test_a_session_that_flytekit_leaves_open_is_no_error(said: list[str]) -> None:
    async def leave_open() -> None:
        aiohttp.ClientSession()

    async def fail() -> None:
        asyncio.get_running_loop().call_exception_handler(
            {"message": "Task exception was never retrieved"}
        )

    loop_manager.run_sync(leave_open)
    loop_manager.run_sync(fail)
    (message,) = said
    assert "never retrieved" in message


def test_options_of_ones_own_code_are_no_pickle(said: list[str]) -> None:
    for kind in ("typing.Any", "<class 'numpy.ndarray'>"):
        display_pickle_warning.__wrapped__(kind)
    (message,) = said
    assert "numpy.ndarray" in message
