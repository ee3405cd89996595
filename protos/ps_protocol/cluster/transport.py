"""Transports of the payloads of a step stream."""

from __future__ import annotations

import enum


class Transport(enum.Enum):
    """The transport of a stream's payloads; the values are what users write."""

    #: As chunks on the gRPC stream.
    GRPC = "grpc"
    #: In memory that worker and shard share; messages on a Unix socket.
    SHM = "shm"
    #: On a TCP socket beside the gRPC stream, with the messages.
    BULK = "bulk"

    #: By identity, as members compare: that of Enum is written in Python, and steps look members up.
    __hash__ = object.__hash__


IN_CLEAR = " in clear"
"""Behind the name of a transport whose payloads are not encrypted although the process uses TLS."""
