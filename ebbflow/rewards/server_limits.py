"""Limit what a client can take from the server of rewards: connections, time and memory.

uvicorn's own limits do not replace this. It limits neither the time of a request's header nor that
of its body, and its ``limit_concurrency`` rejects everybody once somebody holds that many
connections: with them alone, 13 of the tests of half-sent and slow requests fail. Here the
connection that has waited longest for its request makes room for a new one: a client that means it
sends a request within milliseconds.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import HTTPException, Request
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.h11_impl import H11Protocol

from ebbflow.rewards.protocol import MAX_JSON_VALUES, count_values

MAX_CONNECTIONS = 256
"""Open at once, or a quarter of the files that this process may open."""
HEADER_SECONDS = 10.0
"""For a request's whole header, from the connection or the last answer on; what is left of a
refused body is discarded in it.
"""
BODY_SECONDS = 60.0
"""Waiting for one body, in all."""
MAX_BYTES = 256 * 2**20
"""Of a body."""
MAX_HELD = 4 * MAX_BYTES
"""Of the bodies in memory, those that wait to be scored included."""

logger = logging.getLogger(__name__)


def build_server_options() -> dict[str, Any]:
    """Return uvicorn's options that limit connections. WebSockets would leave the protocol below,
    and no reward needs them.
    """
    return {"http": LimitedProtocol, "ws": "none", "backlog": compute_max_connections()}


def compute_max_connections() -> int:
    """Return how many connections may be open at once."""
    # At the limit of files a process can accept nothing, nor open what a reward or a log needs.
    return min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)


class LimitedProtocol(H11Protocol):
    """One connection: closed when its request takes too long, or when a new connection needs its
    place.
    """

    waiting_since = 0.0
    _alarm: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_request_alarm()
        if len(self.connections) > compute_max_connections():
            self._close_idlest_connection()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_request_alarm()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        # h11 has parsed what arrived: the header is whole once there is a cycle. From here on the
        # time of the body counts, which ``BodyReader`` measures.
        super().handle_events()
        if self.has_request:
            self._stop_request_alarm()

    def on_response_complete(self) -> None:
        # For the next request on the connection, and for what is left of a body that was refused.
        self._start_request_alarm()
        super().on_response_complete()

    @property
    def has_request(self) -> bool:
        """Whether a request with a whole header is waiting for its answer."""
        return self.cycle is not None and not self.cycle.response_complete

    def _start_request_alarm(self) -> None:
        self.waiting_since = self.loop.time()
        self._stop_request_alarm()
        # abort, not close: close would wait until a client that reads nothing has read everything.
        self._alarm = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def _stop_request_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()

    def _close_idlest_connection(self) -> None:
        """Close the connection that has waited longest for a header, else for a body; this one
        where all are being answered.
        """
        others = [
            other
            for other in self.connections
            if isinstance(other, LimitedProtocol) and other is not self
        ]
        unfinished = [other for other in others if not other.has_request or other.cycle.more_body]
        closed = min(
            unfinished, key=lambda other: (other.has_request, other.waiting_since), default=self
        )
        logger.warning(
            "%d connections are open; closing that of %s, which has sent no whole request",
            len(others),
            closed.client,
        )
        # It is lost in the next turn of the loop, and must not be counted until then: several new
        # connections may come in one turn.
        self.connections.discard(closed)
        closed.transport.abort()


class BodyReader:
    """Reads bodies into bounded memory. Beyond ``MAX_HELD`` only the oldest goes on, so that bodies
    never wait for each other.
    """

    def __init__(self) -> None:
        self._held = 0
        self._oldest_first: list[object] = []
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def read_body(self, request: Request) -> AsyncIterator[bytearray]:
        """Read the body of a request, which counts as held until the context ends.

        Raises:
            HTTPException: it has too many bytes or JSON values, takes too long, or the client is
                gone.
        """
        # A body of chunks announces no length, so it is counted below as well.
        if int(request.headers.get("content-length", 0)) > MAX_BYTES:
            raise _build_size_error()
        ticket = object()
        body = bytearray()
        size = 0
        values = 0
        self._oldest_first.append(ticket)
        try:
            async for chunk in _iterate_timely_chunks(request):
                # While this waits, nothing more of the body is read, and TCP slows the client down.
                await self._reserve_memory(ticket, len(chunk))
                size += len(chunk)
                values += count_values(chunk)
                # Checked with every chunk, so that a bomb is never held as a whole.
                _check_body_size(size, values)
                body += chunk
            yield body
        finally:
            await self._release_memory(ticket, size)

    async def _reserve_memory(self, ticket: object, size: int) -> None:
        async with self._changed:
            # The oldest may go beyond the limit by one body: else many half bodies could fill the
            # memory, each waiting for another to end.
            await self._changed.wait_for(
                lambda: self._held + size <= MAX_HELD or self._oldest_first[0] is ticket
            )
            self._held += size

    async def _release_memory(self, ticket: object, size: int) -> None:
        async with self._changed:
            self._oldest_first.remove(ticket)
            self._held -= size
            self._changed.notify_all()


async def _iterate_timely_chunks(request: Request) -> AsyncIterator[bytes]:
    """Yield the chunks of a body, until waiting for them took ``BODY_SECONDS``."""
    # Only the waiting for the client counts, not that for memory between two chunks, which is ours.
    chunks = aiter(request.stream())
    left = BODY_SECONDS
    loop = asyncio.get_running_loop()
    while True:
        start = loop.time()
        try:
            async with asyncio.timeout(left):
                chunk = await anext(chunks, None)
        except TimeoutError:
            raise HTTPException(
                408,
                f"the request did not arrive within {BODY_SECONDS:g} s; send fewer images at once",
            ) from None
        except ClientDisconnect:
            raise HTTPException(400, "the request ended early") from None
        if chunk is None:
            return
        left -= loop.time() - start
        yield chunk


def _check_body_size(size: int, values: int) -> None:
    if size > MAX_BYTES:
        raise _build_size_error()
    if values > MAX_JSON_VALUES:
        raise HTTPException(
            413,
            f"the request has more than {MAX_JSON_VALUES} commas and brackets; send fewer images at"
            " once",
        )


def _build_size_error() -> HTTPException:
    return HTTPException(
        413, f"the request has more than {MAX_BYTES} bytes; send fewer images at once"
    )
