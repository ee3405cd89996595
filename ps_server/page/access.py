"""Decides who may view the page: callers with a token in a header or a cookie, or a certificate, of a role that may."""

from __future__ import annotations

import base64
import binascii
import ssl

from starlette.requests import Request
from starlette.responses import Response

from ps_protocol.errors import PsError
from ps_protocol.security.binding import HostNames
from ps_protocol.security.credentials import bearer
from ps_protocol.security.identity import Caller
from ps_protocol.security.roles import VIEWING
from ps_protocol.security.security import Security

CERTIFICATE = "torch_ps_certificate"
"""Key of a request's scope: the certificate of the peer, PEM, verified in the handshake; absent without one."""

_LONGEST_TOKEN = 2048


class PageAccess:
    """One per page; used on its event loop."""

    def __init__(self, security: Security, host: str) -> None:
        """``host``: where the page listens."""
        self._security = security
        self._names = HostNames(host)

    def check(self, request: Request) -> Caller:
        """The caller. Raises Unauthenticated for an unknown one, PermissionDenied for a role that may not view."""
        authorization = request.headers.get("authorization", "")
        if not authorization and (token := _decoded(request.cookies.get(cookie_of(request), ""))):
            authorization = bearer(token)
        return self._check(authorization, request)

    def check_proof(self, caller: Caller) -> None:
        """Raises Unauthenticated when the proof of ``caller``, whom ``check`` admitted, is no longer valid."""
        self._security.check_proof(caller)

    def check_token(self, token: str, request: Request) -> None:
        """Raises as ``check`` unless ``token`` admits to the page."""
        self._check(bearer(token[:_LONGEST_TOKEN]), request)

    def may_name(self, request: Request) -> bool:
        """Whether the request names this host. A page of another site cannot read this one by a name of its own.

        Where callers prove who they are, every name is good: a proxy may stand in front.
        """
        if self._security.authenticates:
            return True
        return self._names.allow(request.headers.get("host", ""))

    def keep(self, response: Response, token: str, request: Request) -> None:
        """Set a cookie: the browser sends ``token`` to this page alone, until it is closed."""
        value = base64.urlsafe_b64encode(token.encode()).decode()
        response.set_cookie(
            cookie_of(request), value, httponly=True, samesite="strict", secure=self._security.tls, path="/"
        )

    def _check(self, authorization: str, request: Request) -> Caller:
        try:
            caller = self._security.authenticate(
                authorization=authorization, certificate=request.scope.get(CERTIFICATE, b"")
            )
            self._security.authorize(caller, VIEWING, "the page")
        except PsError as error:
            self._security.refused.add(error)
            raise
        return caller


def cookie_of(request: Request) -> str:
    """The name of the cookie: browsers keep one set of cookies for all ports of a host."""
    server = request.scope.get("server") or ("", 0)
    return f"torch_ps_{server[1]}"


def certificate_of(connection: ssl.SSLObject | ssl.SSLSocket | None) -> bytes:
    """The certificate of the peer, PEM; empty without one."""
    shown = connection.getpeercert(binary_form=True) if connection is not None else None
    return ssl.DER_cert_to_PEM_cert(shown).encode() if shown else b""


def _decoded(value: str) -> str:
    try:
        return base64.b64decode(value[: 2 * _LONGEST_TOKEN], altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return ""
