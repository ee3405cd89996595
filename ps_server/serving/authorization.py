"""Refuses calls of unknown callers and of roles that a method is not for, before a request is parsed."""

from __future__ import annotations

import inspect
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import grpc

from ps_protocol.cluster.view import Role
from ps_protocol.errors import PermissionDenied, Unauthenticated, Unavailable
from ps_protocol.logs import EventLogger
from ps_protocol.security.credentials import AUTHORIZATION, SESSION
from ps_protocol.security.identity import Caller, SessionEnded
from ps_protocol.security.roles import METHODS, Access
from ps_protocol.security.security import EVERYBODY, OFF, Security
from ps_protocol.text import printable
from ps_server.serving.open_streams import OpenStreams
from ps_server.serving.rpc_errors import translated

if TYPE_CHECKING:
    from ps_protocol.security.session import SessionVerifier

logger = EventLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


_MOST_PEERS = 1000

_FULL_HANDSHAKE = b"false"
"""gRPC's value for a connection that did not resume a TLS session."""

_caller: ContextVar[Caller] = ContextVar("caller", default=EVERYBODY)


def current_caller() -> Caller:
    """The caller of the call that is being handled."""
    return _caller.get()


def check_member(role: Role, index: int, incarnation: int, *others: Role) -> None:
    """Raises PermissionDenied unless the session of the present call is that of this member, and Unauthenticated for a
    call without a session. Does nothing where callers are not authenticated. ``others``: roles that it may have, too.
    """
    caller = _caller.get()
    if caller is EVERYBODY:
        return
    session = caller.session
    if session is None:
        raise Unauthenticated(
            f"a call of {role.value} {index} has no session token",
            remedy="send the one of the reply of Join with each call of a member",
        )
    if session.role not in (role, *others) or (session.index, session.incarnation) != (index, incarnation):
        owner = f"{session.role.value} {session.index}" if session.role else "the coordinator"
        raise PermissionDenied(
            "a call names another member than its session does",
            expected=f"{owner}, incarnation {session.incarnation}",
            actual=f"{role.value} {index}, incarnation {incarnation}",
            remedy="a member calls for itself alone",
        )


class PeerLogLimit:
    """Admits one log record per peer and second. Used on one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[str, float] = {}

    def allows(self, peer: str) -> bool:
        """Whether a record about ``peer`` (ipv4:10.0.0.5:1234) is due; its port does not count."""
        host, now = peer.rpartition(":")[0] or peer, self._clock()
        if now - self._last.get(host, float("-inf")) < 1.0:
            return False
        if len(self._last) >= _MOST_PEERS:
            self._last.clear()
        self._last[host] = now
        return True


class Authorization(grpc.aio.ServerInterceptor):
    """The first interceptor of every server; called on its loop at the start of each call.

    What ``METHODS`` does not list is refused. Sessions are refused until ``verifier`` is set.
    """

    def __init__(self, security: Security = OFF) -> None:
        self.security = security
        #: Of the job that this server is part of.
        self.verifier: SessionVerifier | None = None
        #: Calls in progress that stream.
        self.streams = OpenStreams(security.check_proof)
        self._log_limit = PeerLogLimit()

    def trust(self, public_key: bytes) -> None:
        """Accept sessions signed by this key. Does nothing where callers are not authenticated."""
        if self.security.authenticates and public_key:
            from ps_protocol.security.session import SessionVerifier

            self.verifier = SessionVerifier(public_key)

    async def intercept_service(self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """The handler of a call, behind its check."""
        handler: Any = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        roles = METHODS.get(method, Access(frozenset())).roles
        if handler is None or roles is None or not self.security.authenticates:
            return handler

        def check(context: Context) -> Caller:
            caller = self._admitted(context, method, roles)
            _caller.set(caller)
            return caller

        return _guarded(handler, check, self.streams)

    def _admitted(self, context: Context, method: str, roles: frozenset[Any]) -> Caller:
        """The caller. Raises Unauthenticated, PermissionDenied; Unavailable for a session whose token is not here."""
        try:
            caller = self._caller_of(context)
            self.security.authorize(caller, roles, method.rpartition("/")[2])
        except (Unauthenticated, PermissionDenied) as error:
            self.security.refused.add(error)
            peer = context.peer()
            if self._log_limit.allows(peer):
                logger.warning("caller.refused", "refused %s of %s: %s", printable(method), printable(peer), error)
            if isinstance(error, SessionEnded):
                # The coordinator decides whether it is a member still: this file may be older than the one there.
                raise Unavailable(error.message, remedy=error.remedy) from error
            raise
        return caller

    def _caller_of(self, context: Context) -> Caller:
        metadata: Mapping[str, Any] = dict(context.invocation_metadata() or ())
        shown: Mapping[str, Any] = context.auth_context()
        authorization, session = metadata.get(AUTHORIZATION, ""), metadata.get(SESSION, b"")
        return self.security.authenticate(
            authorization=authorization if isinstance(authorization, str) else "",
            certificate=next(iter(shown.get("x509_pem_cert", ())), b""),
            session=session if isinstance(session, bytes) else b"",
            # A resumed TLS session keeps the certificate of the previous handshake.
            verified=_FULL_HANDSHAKE in shown.get("ssl_session_reused", ()),
            verifier=self.verifier,
        )


def _guarded(handler: Any, check: Callable[[Context], Caller], streams: OpenStreams) -> Any:
    """``handler``, called after ``check``; a single request is parsed after it, too. A stream is one of ``streams``."""
    if handler.request_streaming:
        kind = "stream_stream" if handler.response_streaming else "stream_unary"
        return handler._replace(**{kind: _checked(getattr(handler, kind), check, None, streams)})
    kind = "unary_stream" if handler.response_streaming else "unary_unary"
    listed = streams if handler.response_streaming else None
    behavior = _checked(getattr(handler, kind), check, handler.request_deserializer, listed)
    return handler._replace(request_deserializer=None, **{kind: behavior})


def _checked(
    behavior: Any,
    check: Callable[[Context], Caller],
    parse: Callable[[bytes], Any] | None,
    streams: OpenStreams | None,
) -> Any:
    def parsed(request: Any) -> Any:
        return parse(request) if parse else request

    async def once(request: Any, context: Context) -> Any:
        async with translated(context):
            caller = check(context)
            if streams is not None:
                async with streams.opened(caller):
                    return await behavior(parsed(request), context)
        return await behavior(parsed(request), context)

    async def each(request: Any, context: Context) -> AsyncIterator[Any]:
        async with translated(context):
            caller = check(context)
        replies: AsyncGenerator[Any, None] = behavior(parsed(request), context)
        async with aclosing(replies):
            while True:
                # A generator is suspended outside of any block of its own: it is listed while it waits for a reply,
                # and checked with each.
                async with translated(context), streams.opened(caller) if streams else nullcontext():
                    reply = await anext(replies, None)
                    if reply is None:
                        return
                    if streams is not None:
                        streams.check(caller)
                yield reply

    return each if inspect.isasyncgenfunction(behavior) else once
