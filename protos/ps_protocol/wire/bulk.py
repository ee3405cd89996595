"""Connects to the side channels that a shard offers: bulk, a TCP port, and the Unix socket that hands memory over."""

from __future__ import annotations

import os
import socket
import ssl

from ps_protocol.cluster.answers import AttachedChannel, RefusedChannel, SideChannel
from ps_protocol.cluster.requests import AttachRequest, ConfirmRequest
from ps_protocol.errors import InternalError, PermissionDenied, Unauthenticated
from ps_protocol.security.security import Security
from ps_protocol.security.settings import BulkSecurity
from ps_protocol.wire.carrier import Carrier, PlainCarrier
from ps_protocol.wire.convert.step import reply_from_bytes, request_to_bytes
from ps_protocol.wire.shared_memory import map_private
from ps_protocol.wire.socket_messages import framed
from ps_protocol.wire.tls_carrier import TlsCarrier
from ps_protocol.wire.unix_peer import check_peer


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
        _attach(carrier, offered, peer, seconds)
        carrier.send_all([framed(request_to_bytes(ConfirmRequest()))])
        carrier.prepare()
        return carrier
    except BaseException:
        carrier.shut_down()
        carrier.close()
        raise


def mapped_memory(offered: SideChannel, peer: str, security: Security, seconds: float) -> memoryview:
    """The memory that ``peer`` hands over on the Unix socket that it has ``offered``, mapped as ``map_private``.

    Raises OSError, ValueError, PsError.
    """
    carrier = connect_unix(offered.name, security.settings.shm_uid, seconds)
    try:
        size, descriptors = _attach(carrier, offered, peer, seconds)
        if len(descriptors) != 1:
            for descriptor in descriptors:
                os.close(descriptor)
            raise ValueError(f"{peer} handed {len(descriptors)} segments over")
        memory = map_private(descriptors[0], size)
        carrier.send_all([framed(request_to_bytes(ConfirmRequest()))])
        return memory
    finally:
        carrier.shut_down()
        carrier.close()


def _attach(carrier: Carrier, offered: SideChannel, peer: str, seconds: float) -> tuple[int, list[int]]:
    """Show the token. Returns the bytes of memory that come, and descriptors of it. Raises OSError, PsError."""
    carrier.prepare(seconds)
    carrier.send_all([framed(request_to_bytes(AttachRequest(offered.token, 0)))])
    message, descriptors = carrier.receive_message(lambda: False)
    reply = reply_from_bytes(bytes(message))
    if isinstance(reply, AttachedChannel):
        return reply.segment_bytes, descriptors or []
    for descriptor in descriptors or ():
        os.close(descriptor)
    if isinstance(reply, RefusedChannel):
        raise reply.error
    raise InternalError(f"{peer} did not answer Attach", actual=type(reply).__name__)


def connect_unix(path: str, shm_uid: int | None, seconds: float) -> PlainCarrier:
    """A connection to the socket at ``path`` of a process of this user, or of ``shm_uid``.

    Raises OSError, ValueError; PermissionDenied for a process of another user.
    """
    if not path.startswith("/"):
        raise ValueError(f"{path!r} is not an absolute path")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(seconds)
        sock.connect(path)
        check_peer(sock, shm_uid)
    except PermissionError as error:
        sock.close()
        raise PermissionDenied(
            "the shard shares memory with processes of its own user alone",
            actual=f"user {os.geteuid()}: {error}",
            remedy=f"run both as one user, or give the shard --shm-uid {os.geteuid()}",
        ) from error
    except BaseException:
        sock.close()
        raise
    return PlainCarrier(sock)


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
