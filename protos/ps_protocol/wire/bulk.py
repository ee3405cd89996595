"""Connects to the bulk side channel that a shard offers."""

from __future__ import annotations

import socket
import ssl

from ps_protocol.cluster.answers import AttachedChannel, RefusedChannel, SideChannel
from ps_protocol.cluster.requests import AttachRequest, ConfirmRequest
from ps_protocol.errors import InternalError, Unauthenticated
from ps_protocol.security.security import Security
from ps_protocol.security.settings import BulkSecurity
from ps_protocol.wire.carrier import Carrier, PlainCarrier
from ps_protocol.wire.convert.step import reply_from_bytes, request_to_bytes
from ps_protocol.wire.socket_messages import framed
from ps_protocol.wire.tls_carrier import TlsCarrier


def connect_bulk(offered: SideChannel, address: str, peer: str, security: Security, seconds: float) -> Carrier:
    """A connection to the port that ``peer``, the shard at ``address``, has ``offered``, under TLS where both want it.

    Raises OSError, ValueError; Unauthenticated where one wants TLS and the other does not.
    """
    host = address.rpartition(":")[0].strip("[]")
    context = _context(offered, peer, security)
    sock = socket.create_connection((host, offered.port), seconds)
    try:
        if context is None:
            return PlainCarrier(sock)
        carrier = TlsCarrier(sock, context, peer, host=host)
        carrier.wait_for_handshake(seconds)
        return carrier
    except BaseException:
        sock.close()
        raise


def attached_bulk(offered: SideChannel, address: str, peer: str, security: Security, seconds: float) -> Carrier:
    """As ``connect_bulk``, with the token shown and confirmed: what is offered comes there. Raises PsError, too."""
    carrier = connect_bulk(offered, address, peer, security, seconds)
    try:
        carrier.prepare(seconds)
        carrier.send_all([framed(request_to_bytes(AttachRequest(offered.token, 0)))])
        reply = reply_from_bytes(bytes(carrier.receive_message(lambda: False)[0]))
        if isinstance(reply, RefusedChannel):
            raise reply.error
        if not isinstance(reply, AttachedChannel):
            raise InternalError(f"{peer} did not answer Attach", actual=type(reply).__name__)
        carrier.send_all([framed(request_to_bytes(ConfirmRequest()))])
        carrier.prepare()
        return carrier
    except BaseException:
        carrier.shut_down()
        carrier.close()
        raise


def _context(offered: SideChannel, peer: str, security: Security) -> ssl.SSLContext | None:
    """None: in clear, which is what both sides want. Raises Unauthenticated where they differ."""
    if offered.tls:
        context = security.client_context()
        if context is None:
            raise Unauthenticated(
                f"{peer} wants TLS, and this process knows no authority", remedy="give --tls-ca (PS_TLS_CA)"
            )
        return context
    if security.tls and security.settings.bulk is BulkSecurity.TLS:
        raise Unauthenticated(
            f"{peer} would take and send parameters in clear",
            expected="a bulk transport under TLS",
            actual="--bulk-security token-only at the shard",
            remedy="leave that out, or set PS_BULK_SECURITY=token-only here, where nobody else can read the network",
        )
    return None
