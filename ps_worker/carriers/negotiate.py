"""Decides how a stream travels: the best transport that worker and shard both have, found by trying."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence

import grpc

from ps_protocol.errors import PsError
from ps_protocol.v1 import common_pb2
from ps_protocol.v1 import shard_pb2 as pb
from ps_worker.carriers.carrier import Carrier, Link
from ps_worker.carriers.grpc_stream import GrpcCarrier
from ps_worker.carriers.socket_stream import SocketCarrier

logger = logging.getLogger("ps_worker")

CONNECT_SECONDS = 3.0
"""A port that swallows what is sent to it costs this, once for each stream that is opened."""


def open_stream(
    channel: grpc.Channel, link: Link, request: pb.Open, transports: Sequence[common_pb2.Transport]
) -> tuple[pb.Opened, Carrier]:
    """Open a stream that travels by the first of ``transports`` that works; by gRPC when none does. Raises PsError."""
    anchor = GrpcCarrier(channel, link)
    try:
        request.transports.extend(transports)
        opened = anchor.open(request)
        for offered in opened.side_channels:
            try:
                return opened, _attached(anchor, link, offered)
            except (OSError, ValueError, PsError) as error:
                name = common_pb2.Transport.Name(offered.transport)
                logger.debug("%s: %s cannot be used: %s", link.peer, name, error)
        return opened, anchor
    except BaseException:
        anchor.close()
        raise


def _attached(anchor: GrpcCarrier, link: Link, offered: pb.SideChannel) -> SocketCarrier:
    """Raises OSError, ValueError, PsError when this side channel cannot be had; the anchor goes on."""
    carrier = SocketCarrier(_connect(link, offered), anchor, link)
    try:
        carrier.attach(offered, CONNECT_SECONDS)
        return carrier
    except BaseException:
        carrier.abandon()
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
