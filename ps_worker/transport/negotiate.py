"""Chooses the transport of a stream: the best one that works between worker and shard."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence

import grpc

from ps_protocol.cluster.answers import OpenedStream
from ps_protocol.cluster.transport import Transport
from ps_protocol.errors import PsError
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire.carrier import PlainCarrier
from ps_protocol.wire.convert_step import OpenRequest, opened_from_pb
from ps_protocol.wire.convert_transport import transport_from_pb, transport_to_pb
from ps_worker.transport.base import ClientTransport, Link
from ps_worker.transport.grpc_stream import GrpcClientTransport
from ps_worker.transport.socket_stream import SocketClientTransport

logger = logging.getLogger("ps_worker")

CONNECT_SECONDS = 3.0
"""How long to wait for a side channel, once for each stream that is opened."""


def open_stream(
    channel: grpc.Channel, link: Link, request: OpenRequest, transports: Sequence[Transport]
) -> tuple[OpenedStream, ClientTransport]:
    """Open a stream over the first of ``transports`` that works, or over gRPC when none does. Raises PsError."""
    anchor = GrpcClientTransport(channel, link)
    try:
        request.transports.extend(map(transport_to_pb, transports))
        opened = anchor.open(request)
        for offered in opened.side_channels:
            try:
                return opened_from_pb(opened), _attached(anchor, link, offered)
            except (OSError, ValueError, PsError) as error:
                logger.debug("%s: %s cannot be used: %s", link.peer, transport_from_pb(offered.transport), error)
        return opened_from_pb(opened), anchor
    except BaseException:
        anchor.close()
        raise


def _attached(anchor: GrpcClientTransport, link: Link, offered: pb.SideChannel) -> SocketClientTransport:
    """Raises OSError, ValueError, PsError when this side channel does not work; the anchor stays open."""
    transport = SocketClientTransport(PlainCarrier(_connect(link, offered)), anchor, link)
    try:
        transport.attach(offered, CONNECT_SECONDS)
        return transport
    except BaseException:
        transport.abandon()
        raise


def _connect(link: Link, offered: pb.SideChannel) -> socket.socket:
    if offered.name:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect("\0" + offered.name)
        except BaseException:
            sock.close()
            raise
        return sock
    host = link.peer.address.rpartition(":")[0].strip("[]")
    return socket.create_connection((host, offered.port), CONNECT_SECONDS)
