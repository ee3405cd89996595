"""Answers the requests of browsers: the page, its files, its stream of events, and the form that asks for a token."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from urllib.parse import parse_qs

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ps_protocol.errors import PermissionDenied, PsError, Unauthenticated
from ps_protocol.security.identity import Caller
from ps_protocol.security.roles import AccessRole
from ps_server.page.access import PageAccess
from ps_server.page.broadcast import VIEWERS, Broadcast

HERE = Path(__file__).parent
STATIC = HERE / "static"

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Of every response. A browser loads nothing from elsewhere, and runs no script but those of this page."""

HOST_VIEWERS = VIEWERS // 2
"""The most browsers of one host."""

_FORM_BYTES = 4096
_RETRY_MS = 1000


def templates() -> Environment:
    """The templates of the page, which escape the values that are inserted."""
    return Environment(loader=FileSystemLoader(HERE / "templates"), autoescape=True, undefined=StrictUndefined)


class PageHeaders:
    """Puts ``HEADERS`` into every response, and refuses names of other hosts. ASGI."""

    def __init__(self, app: ASGIApp, access: PageAccess) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                named = {name.lower() for name, _ in message["headers"]}
                extra = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *(pair for pair in extra if pair[0] not in named)]
            await send(message)

        if self._access.may_name(Request(scope)):
            await self._app(scope, receive, send_with_headers)
        else:
            refusal = PlainTextResponse("this page is not served under that name\n", 421)
            await refusal(scope, receive, send_with_headers)


class Pages:
    """The handlers of requests."""

    def __init__(self, broadcast: Broadcast, access: PageAccess) -> None:
        self._broadcast = broadcast
        self._access = access
        self._templates = templates()
        #: How many streams each host reads.
        self._hosts: Counter[str] = Counter()

    async def page(self, request: Request) -> Response:
        """The page, or the form that asks for a token. ``?token=`` is exchanged for a cookie."""
        token = request.query_params.get("token")
        try:
            if token is None:
                self._access.check(request)
                return self._html("page.html")
            return self._admitted(token, request)
        except (Unauthenticated, PermissionDenied) as error:
            return self._refused(error, asked=token is not None)

    async def log_in(self, request: Request) -> Response:
        """Take a token from the form."""
        body = bytearray()
        try:
            async for piece in request.stream():
                body += piece
                if len(body) > _FORM_BYTES:
                    return PlainTextResponse("this form is too long\n", 413)
        except ClientDisconnect:
            return PlainTextResponse("this form is not whole\n", 400)  # nobody reads it
        token = secret_in(parse_qs(body.decode(errors="replace")).get("token", [""])[0])
        try:
            return self._admitted(token, request)
        except (Unauthenticated, PermissionDenied) as error:
            return self._refused(error, asked=True)

    async def events(self, request: Request) -> Response:
        """Stream the state of the job, then its changes, as server-sent events."""
        try:
            caller = self._access.check(request)
        except (Unauthenticated, PermissionDenied) as error:
            return PlainTextResponse(f"{error}\n", _status(error))
        if self._broadcast.is_full:
            return PlainTextResponse(f"{VIEWERS} browsers look at this page already\n", 503)
        host = request.client.host if request.client else ""
        if self._hosts[host] >= HOST_VIEWERS:
            return PlainTextResponse(f"{HOST_VIEWERS} browsers of your host look at this page already\n", 503)
        return StreamingResponse(self._stream(caller, host), media_type="text/event-stream")

    async def check(self, request: Request) -> Response:
        """Answer whether this browser may read the events, for a page whose stream was refused."""
        try:
            self._access.check(request)
        except (Unauthenticated, PermissionDenied) as error:
            return PlainTextResponse(f"{error}\n", _status(error))
        return Response(status_code=204)

    async def _stream(self, caller: Caller, host: str) -> AsyncIterator[str]:
        self._hosts[host] += 1
        try:
            yield f"retry: {_RETRY_MS}\n\n"
            async with aclosing(self._broadcast.messages()) as messages:  # type: ignore[type-var]
                async for message in messages:
                    try:
                        self._access.check_proof(caller)
                    except Unauthenticated:
                        return  # its token was removed: the browser asks again, and gets the reason
                    yield f"data: {message}\n\n"
        finally:
            self._hosts -= Counter({host: 1})

    def _admitted(self, token: str, request: Request) -> Response:
        self._access.check_token(token, request)
        response = RedirectResponse("/", 303)
        self._access.keep(response, token, request)
        return response

    def _refused(self, error: PsError, *, asked: bool) -> Response:
        shown = error.message if asked or isinstance(error, PermissionDenied) else ""
        return self._html("token.html", _status(error), error=shown)

    def _html(self, name: str, status: int = 200, **values: str) -> Response:
        return HTMLResponse(self._templates.get_template(name).render(**values), status)


def secret_in(text: str) -> str:
    """The secret in a text that somebody has pasted: the secret itself, or a line role:name:secret of a token file."""
    role, _, rest = text.strip().partition(":")
    _, colon, secret = rest.partition(":")
    return secret if colon and role in {each.value for each in AccessRole} else text.strip()


def _status(error: PsError) -> int:
    return 401 if isinstance(error, Unauthenticated) else 403


def page_app(broadcast: Broadcast, access: PageAccess) -> Starlette:
    """The application that a server runs."""
    pages = Pages(broadcast, access)
    handlers: list[tuple[str, str, Callable[[Request], Awaitable[Response]]]] = [
        ("/", "GET", pages.page),
        ("/token", "POST", pages.log_in),
        ("/events", "GET", pages.events),
        ("/check", "GET", pages.check),
    ]
    routes = [Route(path, handler, methods=[method]) for path, method, handler in handlers]
    return Starlette(
        routes=[*routes, Mount("/static", StaticFiles(directory=STATIC))],
        middleware=[Middleware(PageHeaders, access=access)],
    )
