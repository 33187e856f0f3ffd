"""Preemption: errors after which Flyte retries a task."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flytekit.exceptions.user import FlyteRecoverableException


@contextmanager
def retry_on_errors(*errors: type[Exception]) -> Iterator[None]:
    """Turn these errors into Flyte's recoverable one, the only error after which it retries a
    task.
    """
    try:
        yield
    except errors as error:
        raise FlyteRecoverableException(str(error)) from error
