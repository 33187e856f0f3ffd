"""Ask a server of rewards one question: check the host and the token, limit the time, and explain
what is not an answer.

The standard library's client is used for what it lacks: it follows no redirect, takes no proxy and
no password from the environment and unpacks nothing, so a token goes to the host that the recipe
names and to no other.

httpx2 was tried in its place, and keeps the promises that tests hold only with code around it. Its
time-outs start again with every byte, so a deadline over the whole answer needs its asynchronous
client in an event loop and a thread of their own (3.2 ms of a CPU for each request instead of 0.8).
At DEBUG it logs the status line and the headers of answers, in which a server can echo the token,
so its loggers need a filter in every process; and why a connection failed is found at the end of a
chain of causes. What remains is 40 lines fewer than here, and two direct dependencies more.
tenacity would replace the loop over attempts, which is seven lines.
"""

from __future__ import annotations

import io
import ipaddress
import os
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, ValidationError, field_validator

from ebbflow.recipe.rewards import RewardConfig
from ebbflow.recipe.secrets import redact_secrets
from ebbflow.rewards.protocol import MAX_JSON_VALUES, count_values, describe_first_problem

HOSTS = "EBBFLOW_REWARD_HOSTS"
MAX_BYTES = 4 * 2**20
"""Of an answer; a few numbers for each image take thousands."""
SHOWN = 200
"""Characters of an answer that a message repeats."""
FIRST_WAIT = 1.0
MAX_WAIT = 60.0
"""Seconds between requests: doubled each time, and then a random share from half to all of it."""
TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")
"""What a bearer token may be (RFC 6750)."""

Answer = TypeVar("Answer", bound=BaseModel)


class ServedRewardConfig(RewardConfig):
    """A reward behind HTTP. The host must be this machine or one of ``EBBFLOW_REWARD_HOSTS``
    (commas between them).
    """

    url: str = Field(pattern=r"^https?://[!-?A-~]+$")
    """Address of the server."""
    token_variable: str | None = Field(None, pattern=r"^[A-Z][A-Z0-9_]*$")
    """Name of the environment variable that holds the bearer token. The token itself must not be in
    a recipe.
    """
    timeout: float = Field(60.0, gt=0, le=3600)
    """Seconds for one request."""
    attempts: int = Field(3, ge=1, le=10)
    """Number of requests before their images count as failed. Waits between them grow, with jitter.
    """

    @field_validator("url")
    @classmethod
    def _check_base_url(cls, url: str) -> str:
        parts = urlsplit(url)
        if not parts.hostname or parts.query or parts.fragment:
            raise ValueError(
                "take http://host:port, with a path where the server has one, and nothing after it"
            )
        parts.port  # noqa: B018  raises ValueError for a port that is none
        return url.rstrip("/")


class NoAnswer(Exception):
    """There is no usable answer. The message says why and never holds the token."""


class _TransientError(NoAnswer):
    """It may be better in a moment."""


def ask_server(
    config: ServedRewardConfig,
    url: str,
    form: type[Answer],
    body: bytes | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Answer:
    """Return the answer to a POST of JSON, or to a GET where there is no body.

    What may pass (no connection, no answer in time, status 429 or 5xx) is asked again,
    ``config.attempts`` times in all.

    Raises:
        NoAnswer: nothing may be asked, nothing was answered, or what was answered is not of that
            form.
    """
    token = _require_allowed_host(config)
    # The last attempt stands after the loop: its error, transient or not, is the caller's.
    for wait in _list_waits(config.attempts):
        with suppress(_TransientError):
            return _parse_answer(config, url, form, _exchange_once(config, url, body, token))
        sleep(wait)
    return _parse_answer(config, url, form, _exchange_once(config, url, body, token))


def quote_answer(text: bytes | str, config: ServedRewardConfig) -> str:
    """Return what a server said, as it may stand in a message: on one line, without secrets, cut to
    200 characters.
    """
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    # Before anything is cut: half a token would no longer be recognised.
    token = os.environ.get(config.token_variable or "")
    if token:
        text = text.replace(token, "***")
    # Secrets are searched in ten times what is shown, not in megabytes. ``repr`` makes line breaks
    # and control characters visible, and the text longer, so that it is cut once more.
    return repr(redact_secrets(text[: 10 * SHOWN])[:SHOWN])[1:-1][:SHOWN]


def is_loopback(host: str) -> bool:
    """Return whether the host is this machine by its name or address.

    Names are not resolved: whoever answers for DNS could make any name a loopback address.
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_token(variable: str | None) -> str | None:
    """Return the bearer token in an environment variable; None where no variable is named.

    Raises:
        NoAnswer: it is not set, or holds what no header could carry.
    """
    if variable is None:
        return None
    token = os.environ.get(variable, "")
    if not token:
        raise NoAnswer(
            f"the environment variable {variable} is not set; it must hold the bearer token"
        )
    if not TOKEN.fullmatch(token):
        raise NoAnswer(
            f"what {variable} holds is no bearer token; it may have letters, digits and -._~+/ with"
            " = at its end"
        )
    return token


def _require_allowed_host(config: ServedRewardConfig) -> str | None:
    """Return the token to send, once the host may be asked at all."""
    # Recipes come from other people, and the images and the token go to the host that they name:
    # the list is in the environment, which only the owner of the machine sets.
    host = urlsplit(config.url).hostname or ""
    listed = {name.strip().lower() for name in os.environ.get(HOSTS, "").split(",")}
    if not is_loopback(host) and host not in listed:
        raise NoAnswer(
            f"url = {config.url}: the host {host!r} may not be asked; add it to {HOSTS} where"
            " rewards are computed"
        )
    return read_token(config.token_variable)


def _list_waits(attempts: int) -> list[float]:
    """Return the seconds to wait between the attempts."""
    # The random share keeps workers that failed together from asking together again.
    return [
        min(MAX_WAIT, FIRST_WAIT * 2**past) * random.uniform(0.5, 1) for past in range(attempts - 1)
    ]


def _exchange_once(
    config: ServedRewardConfig, url: str, body: bytes | None, token: str | None
) -> bytes:
    """Make one request; return what came with a status of 200."""
    # One deadline for connection, request and answer, whatever share of it the connection took.
    end = time.monotonic() + config.timeout
    try:
        with (
            closing(_open_connection(url, config.timeout)) as connection,
            _enforce_deadline(connection.sock, end - time.monotonic()),
        ):
            connection.request(
                "GET" if body is None else "POST", urlsplit(url).path, body, _build_headers(token)
            )
            response = connection.getresponse()
            content = _read_body(response)
    except TimeoutError:
        raise _TransientError(
            f"{url} gave no whole answer in timeout = {config.timeout:g} s"
        ) from None
    except (OSError, HTTPException) as error:
        raise _TransientError(
            f"{url}: {type(error).__name__}: {quote_answer(str(error), config)}"
        ) from None
    if response.status != 200:
        raise _explain_status(config, url, response, content)
    if len(content) > MAX_BYTES:
        raise NoAnswer(f"{url} answered with more than {MAX_BYTES} bytes")
    return content


def _open_connection(url: str, timeout: float) -> HTTPConnection:
    parts = urlsplit(url)
    connection_class = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = connection_class(parts.hostname or "", parts.port, timeout=timeout)
    connection.response_class = _Response
    # Now and not with the request, so that there is a socket for ``_enforce_deadline`` to cut.
    connection.connect()
    return connection


class _Reader(io.BufferedReader):
    """What http.client reads an answer from. It asks for a negative number of bytes where a server
    announces such a chunk.
    """

    def read(self, size: int | None = -1, /) -> bytes:
        # A negative size would mean "to the end", which has no limit.
        if size is None or size < 0:
            raise HTTPException("a chunk of a negative size")
        return super().read(size)


class _Response(HTTPResponse):
    def __init__(self, *args: Any, **keys: Any) -> None:
        super().__init__(*args, **keys)
        self.fp = _Reader(self.fp.detach())


def _build_headers(token: str | None) -> dict[str, str]:
    headers = {"Content-Type": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    return headers


@contextmanager
def _enforce_deadline(connected: socket.socket, seconds: float) -> Iterator[None]:
    """Cut the connection when the time is over: the socket's own time-out starts again with every
    byte that trickles in.

    Raises:
        TimeoutError: the time was over, whatever the cut then looked like.
    """
    over = threading.Event()

    def cut_connection() -> None:
        # Set first: the thread that reads looks at it as soon as the cut wakes it.
        over.set()
        with suppress(OSError):
            connected.shutdown(socket.SHUT_RDWR)

    alarm = threading.Timer(max(0.0, seconds), cut_connection)
    alarm.daemon = True
    alarm.start()
    try:
        yield
    except (OSError, HTTPException):
        # The cut looks like a lost connection or half an answer; only the event tells them apart.
        if not over.is_set():
            raise
    finally:
        alarm.cancel()
    # A body without a length ends where the connection does, so a cut one looks whole.
    if over.is_set():
        raise TimeoutError


def _read_body(response: HTTPResponse) -> bytes:
    """Read the body, and one byte more than is taken where there is more."""
    content = response.read(MAX_BYTES + 1)
    # ``length`` is what was announced and did not come, about which http.client is silent.
    if response.length and len(content) <= MAX_BYTES:
        raise IncompleteRead(content, response.length)
    return content


def _explain_status(
    config: ServedRewardConfig, url: str, response: HTTPResponse, content: bytes
) -> NoAnswer:
    """Return the error that a status other than 200 means."""
    answered = f"{url} answered {response.status}"
    if 300 <= response.status < 400:
        target = quote_answer(response.headers.get("Location", "nowhere"), config)
        return NoAnswer(
            f"{answered} and points to {target}; redirects are not followed, name the final address"
        )
    answered += f": {quote_answer(content, config)}"
    # Too many requests, a proxy without its server, a server that loads its model: these pass. A
    # request that was wrong (4xx) is as wrong the next time.
    if response.status == 429 or response.status >= 500:
        return _TransientError(answered)
    if response.status in (401, 403):
        wanted = (
            f"check the token in {config.token_variable}"
            if config.token_variable
            else "name a token with token_variable"
        )
        return NoAnswer(f"{answered}; {wanted}")
    return NoAnswer(answered)


def _parse_answer(
    config: ServedRewardConfig, url: str, form: type[Answer], content: bytes
) -> Answer:
    # Counted before it is parsed: 4 MiB of "{}," become 800 MiB of objects.
    if count_values(content) > MAX_JSON_VALUES:
        raise NoAnswer(f"{url} answered with more than {MAX_JSON_VALUES} commas and brackets")
    try:
        return form.model_validate_json(content)
    except ValidationError as error:
        reason = quote_answer(describe_first_problem(error), config)
        raise NoAnswer(
            f'{url} answered "{quote_answer(content, config)}", which is no {form.__name__}'
            f" ({reason})"
        ) from None
