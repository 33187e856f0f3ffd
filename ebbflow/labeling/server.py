"""The page on which people compare pictures, over HTTP.

Other pages of the same browser cannot use it: the address has a random token, a request must name
this server as its host (a page whose name was rebound to this address does not), and one that
changes something must come from this very page.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import uvicorn
from fastapi import APIRouter, FastAPI, HTTPException, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ebbflow.labeling.results import write_results
from ebbflow.labeling.session import OutOfTurnError, Session, Side, normalize_rater_name
from ebbflow.labeling.sources import LabelError
from ebbflow.plots.pages import create_page_environment
from ebbflow.rewards.http import is_loopback
from ebbflow.rewards.server_limits import build_server_options
from ebbflow.storage.disk import DiskFullError

MAX_BYTES = 4096
"""Largest body of a request; an answer has a hundred bytes."""
BROWSER = "browser"
"""Cookie that tells the browsers of raters apart."""
BROWSER_SECONDS = 365 * 24 * 3600
KEEP_IMAGES = "private, max-age=86400, immutable"
"""The address of a picture has the token in it, and always leads to the same picture."""

Rater = Annotated[str, AfterValidator(normalize_rater_name)]

logger = logging.getLogger(__name__)


class AnswerMessage(BaseModel):
    """What the page sends after a key."""

    model_config = ConfigDict(extra="forbid", strict=True)

    rater: Rater
    pair: str = Field(max_length=80)
    answer: Literal["left", "right", "tie"]


class UndoMessage(BaseModel):
    """What the page sends after the undo key."""

    model_config = ConfigDict(extra="forbid", strict=True)

    rater: Rater


def run_label_server(
    session: Session, host: str, port: int, announce: Callable[[str], object]
) -> None:
    """Serve the page until the process is stopped, and then write the results.

    Args:
        port: 0 takes a free one.
        announce: is called with the address for raters.

    Raises:
        LabelError: the address is not free, or not one of this machine.
    """
    token = secrets.token_urlsafe(24)
    with _open_listener(host, port) as listener:
        config = uvicorn.Config(
            build_app(session, host, token),
            log_config=None,
            access_log=False,
            **build_server_options(),
        )
        announce(f"http://{_host_in_address(host)}:{listener.getsockname()[1]}/{token}/")
        # uvicorn raises KeyboardInterrupt again after it has shut down and the results are written.
        with suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])


def _open_listener(host: str, port: int) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        reason = error.strerror or str(error)
        raise LabelError(
            f"host = {host!r}, port = {port}: cannot listen there ({reason}); choose another --port"
            " or --host"
        ) from None


def _host_in_address(host: str) -> str:
    """Return the host in the address for raters: the name of this machine if the server listens on
    all of its addresses.
    """
    if _is_ip_address(host) and ip_address(host).is_unspecified:
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host


def build_app(session: Session, host: str, token: str) -> FastAPI:
    """Build the page as an ASGI application below ``/<token>/``. It writes the results when it
    shuts down.

    Args:
        host: the host that the server listens on. Requests must name it, or localhost.
    """

    @asynccontextmanager
    async def run_lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        _write_results_or_log(session)

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=run_lifespan)
    # The browser runs scripts and styles with this nonce only: text that reaches the page, such as
    # a prompt, cannot run.
    nonce = secrets.token_urlsafe(16)
    router = APIRouter(prefix=f"/{token}")
    _add_page_route(router, nonce)
    _add_answer_routes(router, session)

    @app.middleware("http")
    async def guard_request(
        request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        refusal = _explain_refusal(request, host, token)
        # A name does not say who asks, so a browser is known by a secret that it alone has. The
        # file of answers has its digest.
        cookie = request.cookies.get(BROWSER) or secrets.token_urlsafe(24)
        request.state.browser = hashlib.sha256(cookie.encode()).hexdigest()[:16]
        if refusal:
            status, reason = refusal
            response: Response = PlainTextResponse(reason, status)
        else:
            response = await call_next(request)
            if BROWSER not in request.cookies:
                response.set_cookie(
                    BROWSER,
                    cookie,
                    max_age=BROWSER_SECONDS,
                    path=f"/{token}/",
                    httponly=True,
                    # Not strict: a link in a web mail would arrive without it, and get another.
                    samesite="lax",
                )
        for name, value in _build_security_headers(nonce).items():
            response.headers.setdefault(name, value)
        return response

    app.include_router(router)
    return app


def _add_page_route(router: APIRouter, nonce: str) -> None:
    page = (
        create_page_environment(Path(__file__).parent).get_template("page.html").render(nonce=nonce)
    )

    @router.get("/", response_class=HTMLResponse)
    async def show_page() -> str:
        return page


def _add_answer_routes(router: APIRouter, session: Session) -> None:
    """Add what the page asks for and sends."""
    # All handlers are async functions without a wait: one event loop runs them one after the other,
    # so that two answers never change the session at the same time.

    @router.get("/state")
    async def read_state(rater: Rater) -> dict[str, Any]:
        return _build_state(session, rater)

    @router.get("/picture/{pair}/{side}")
    async def send_picture(pair: str, side: Side, rater: Rater) -> Response:
        try:
            png = session.picture_on_side(rater, pair, side)
        except KeyError:
            raise HTTPException(404, "there is no such pair") from None
        return Response(png, media_type="image/png", headers={"Cache-Control": KEEP_IMAGES})

    @router.post("/answer")
    async def take_answer(message: AnswerMessage, request: Request) -> dict[str, Any]:
        with _convert_errors_to_http():
            session.record_answer(
                message.rater, message.pair, message.answer, request.state.browser
            )
        return _continue_after(session, message.rater)

    @router.post("/undo")
    async def undo_answer(message: UndoMessage, request: Request) -> dict[str, Any]:
        with _convert_errors_to_http():
            session.undo_last_answer(message.rater, request.state.browser)
        return _continue_after(session, message.rater)


@contextmanager
def _convert_errors_to_http() -> Iterator[None]:
    """Raise the session's errors as HTTP statuses, so that the page can say what happened."""
    try:
        yield
    except OutOfTurnError as error:
        raise HTTPException(409, str(error)) from None
    except DiskFullError as error:
        logger.error("%s", error)
        raise HTTPException(507, "The answer was not saved: the disk is full.") from None


def _build_state(session: Session, rater: str) -> dict[str, Any]:
    """Return what the page shows. Nothing in it depends on which picture is whose."""
    # No result of the test either: a rater who saw it could steer it with undo.
    upcoming = session.list_upcoming_pairs(rater)
    answered = session.answers.answers_of_rater(rater)
    alpha = session.measure_agreement()
    return {
        "rater": rater,
        "total": len(session.pairs),
        "answered": len(answered),
        "left": len(upcoming),
        "pair": {"key": upcoming[0].key, "prompt": upcoming[0].prompt} if upcoming else None,
        "next": upcoming[1].key if len(upcoming) > 1 else None,
        "finished": None if upcoming else "decided" if session.is_decided() else "all",
        "raters": len({answer.rater for answer in session.answers.standing}),
        "agreement": None if alpha is None else round(alpha, 3),
    }


def _continue_after(session: Session, rater: str) -> dict[str, Any]:
    state = _build_state(session, rater)
    if state["finished"]:
        _write_results_or_log(session)
    return state


def _write_results_or_log(session: Session) -> None:
    try:
        write_results(session)
    except DiskFullError as error:
        # The answers are safe, and the same command writes the results again when it ends.
        logger.error("%s", error)


# Who may ask.


def _explain_refusal(request: Request, host: str, token: str) -> tuple[int, str] | None:
    """Return (status, reason) for a request that comes neither from this page nor from somebody
    with its address.
    """
    # DNS rebinding: a page may have its own name resolve to this machine. Its requests then have
    # that name as their Host.
    requested_host = request.headers.get("Host", "")
    if not _is_own_host(requested_host, host):
        return 403, "This server goes by another name. Open the address that the terminal shows."
    requested_token = request.url.path.split("/")[1]
    # In constant time, so that response times do not reveal the token letter by letter.
    if not hmac.compare_digest(requested_token.encode(), token.encode()):
        return 404, "Open the address that the terminal shows."
    # A link on another page may open this page, and nothing else of it. Old browsers send no
    # Sec-Fetch-Site; the token and the checks below still protect them.
    is_page = request.method == "GET" and request.url.path == f"/{token}/"
    if not is_page and request.headers.get("Sec-Fetch-Site", "same-origin") not in (
        "same-origin",
        "none",
    ):
        return 403, "Another page asked for this."
    if request.method not in ("GET", "HEAD"):
        if _parse_netloc(request.headers.get("Origin", "")) != requested_host.lower():
            return 403, "Another page sent this."
        if not _is_short_body(request.headers.get("Content-Length", "")):
            return 413, f"A request has at most {MAX_BYTES} bytes and says how many."
    return None


def _is_own_host(requested_host: str, host: str) -> bool:
    """Return whether a Host header names this server in a way that no other page can: by an IP
    address, or by a name of this machine.
    """
    try:
        name = urlsplit(f"//{requested_host}").hostname or ""
    except ValueError:
        return False
    if is_loopback(name):
        return True
    # A server that listens on this machine alone is never reached by another name.
    if is_loopback(host):
        return False
    return _is_ip_address(name) or name in (host.lower(), socket.gethostname().lower())


def _is_ip_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _parse_netloc(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _is_short_body(length: str) -> bool:
    # ``isdigit`` alone also takes digits of other scripts.
    return length.isascii() and length.isdigit() and len(length) < 10 and int(length) <= MAX_BYTES


def _build_security_headers(nonce: str) -> dict[str, str]:
    """Return headers with which the browser loads nothing from elsewhere, runs no script but the
    page's own, and tells nobody the address.
    """
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src 'self'"
        " data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {
        "Content-Security-Policy": policy,
        "Cache-Control": "no-store",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "same-origin",
        "X-Content-Type-Options": "nosniff",
    }
