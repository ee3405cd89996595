"""Chooses the transport of a stream: the best one that works between worker and shard."""

from __future__ import annotations

import logging

import grpc

from ps_protocol.cluster.answers import OpenedStream, SideChannel
from ps_protocol.cluster.requests import OpenRequest
from ps_protocol.errors import PermissionDenied, PsError, Unauthenticated
from ps_protocol.logs import EventLogger
from ps_protocol.security.security import CredentialsReplaced
from ps_protocol.wire.bulk import connect_bulk, connect_unix
from ps_protocol.wire.carrier import Carrier
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
        return connect_unix(offered.name, link.security.settings.shm_uid, times.SIDE_CHANNEL_SECONDS)
    return connect_bulk(offered, link.peer.address, str(link.peer), link.security, times.SIDE_CHANNEL_SECONDS)
