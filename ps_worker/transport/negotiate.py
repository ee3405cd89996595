"""Chooses the transport of a stream: the best one that works between worker and shard."""

from __future__ import annotations

import logging
import os
import socket
import ssl

import grpc

from ps_protocol.cluster.answers import OpenedStream, SideChannel
from ps_protocol.cluster.requests import OpenRequest
from ps_protocol.errors import PermissionDenied, PsError, Unauthenticated
from ps_protocol.logs import EventLogger
from ps_protocol.security.security import CredentialsReplaced
from ps_protocol.security.settings import BulkSecurity
from ps_protocol.wire.carrier import Carrier, PlainCarrier
from ps_protocol.wire.tls_carrier import TlsCarrier
from ps_protocol.wire.unix_peer import check_peer
from ps_worker import times
from ps_worker.transport.base import ClientTransport, Link
from ps_worker.transport.grpc_stream import GrpcClientTransport, keep_freed_memory
from ps_worker.transport.socket_stream import SocketClientTransport

logger = EventLogger("ps_worker")


def open_stream(channel: grpc.Channel, link: Link, request: OpenRequest) -> tuple[OpenedStream, ClientTransport]:
    """Open a stream over the first transport of ``request`` that works, or over gRPC when none does. Raises PsError."""
    shown = link.security.show()
    anchor = GrpcClientTransport(channel, link)
    try:
        opened = anchor.open(request)
        for offered in opened.side_channels:
            try:
                return opened, _attached(anchor, link, offered)
            except (OSError, ValueError, PsError) as error:
                if isinstance(error, PsError):
                    error = link.security.explain(error, shown)
                if isinstance(error, CredentialsReplaced):
                    raise error
                _explain(link, offered, error)
        keep_freed_memory()
        return opened, anchor
    except BaseException:
        anchor.close()
        raise


def _attached(anchor: GrpcClientTransport, link: Link, offered: SideChannel) -> SocketClientTransport:
    """Raises OSError, ValueError, PsError when this side channel does not work; the anchor stays open."""
    transport = SocketClientTransport(_connect(link, offered), anchor, link)
    try:
        transport.attach(offered, times.SIDE_CHANNEL_SECONDS)
        return transport
    except BaseException:
        transport.abandon()
        raise


def _explain(link: Link, offered: SideChannel, error: Exception) -> None:
    """Log why a transport is not used: a refusal is for the user to correct; a socket that is not there is common."""
    transport = offered.transport
    level = logging.WARNING if isinstance(error, Unauthenticated | PermissionDenied) else logging.INFO
    reason = str(error)
    if isinstance(error, FileNotFoundError):
        reason = f"{offered.name} does not exist here: shard and worker have separate file systems"
    logger.log(
        level,
        "transport",
        "%s: transport %s cannot be used: %s",
        link.peer,
        transport.value if transport else "?",
        reason,
    )


def _connect(link: Link, offered: SideChannel) -> Carrier:
    """Raises OSError, ValueError; PermissionDenied, Unauthenticated when the socket is not of who it should be."""
    if offered.name:
        return _connect_unix(offered.name, link.security.settings.shm_uid)
    host = link.peer.address.rpartition(":")[0].strip("[]")
    context = _context(link, offered)
    sock = socket.create_connection((host, offered.port), times.SIDE_CHANNEL_SECONDS)
    try:
        if context is None:
            return PlainCarrier(sock)
        carrier = TlsCarrier(sock, context, str(link.peer), host=host)
        carrier.wait_for_handshake(times.SIDE_CHANNEL_SECONDS)
        return carrier
    except BaseException:
        sock.close()
        raise


def _connect_unix(path: str, shm_uid: int | None) -> PlainCarrier:
    if not path.startswith("/"):
        raise ValueError(f"{path!r} is not an absolute path")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(times.SIDE_CHANNEL_SECONDS)
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


def _context(link: Link, offered: SideChannel) -> ssl.SSLContext | None:
    """None: in clear, which is what both sides want. Raises Unauthenticated where they differ."""
    security = link.security
    if offered.tls:
        context = security.client_context()
        if context is None:
            raise Unauthenticated(
                f"{link.peer} wants TLS, and this worker knows no authority", remedy="give --tls-ca (PS_TLS_CA)"
            )
        return context
    if security.tls and security.settings.bulk is BulkSecurity.TLS:
        raise Unauthenticated(
            f"{link.peer} would take and send parameters in clear",
            expected="a bulk transport under TLS",
            actual="--bulk-security token-only at the shard",
            remedy="leave that out, or set PS_BULK_SECURITY=token-only here, where nobody else can read the network",
        )
    return None
