"""Limits of what all clients of a server, and one of them, may use. Imports neither gRPC nor torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import click

from ps_protocol.errors import InvalidRequest, Unavailable
from ps_server.settings import setting

CALLS, PEER_CALLS, METADATA, FIRST_MESSAGE = "calls", "peer_calls", "metadata", "first_message"
FEEDS, PEER_FEEDS, ANSWERS, UPLOADS = "feeds", "peer_feeds", "answers", "uploads"
SIDE_HANDSHAKES, TOKEN_TIME = "side_handshakes", "token_time"
MODELS, VARIABLES, SLICES, TABLES, BUCKETS = "models", "variables", "slices", "tables", "buckets"
MODEL_BYTES, NAMES = "model_bytes", "names"

LIMITS = (
    *(CALLS, PEER_CALLS, METADATA, FIRST_MESSAGE),
    *(FEEDS, PEER_FEEDS, ANSWERS, UPLOADS),
    *(SIDE_HANDSHAKES, TOKEN_TIME),
    *(MODELS, VARIABLES, SLICES, TABLES, BUCKETS, MODEL_BYTES, NAMES),
)
"""Names of the limits, by which they are counted when they refuse or close something.

Connections are limited by gRPC, which counts none that it refuses.
"""


MAX_NAME_BYTES = 256
"""Default limit of names of models, tables, datasets and optimizers; limit of hosts, addresses and tokens."""

METADATA_FACTOR = 4
"""gRPC itself refuses headers this many times above their limit, unread and uncounted."""


_MEMORY: Mapping[str, Any] = {
    "type": click.IntRange(0),
    "show_default": "a quarter of the memory of the machine",
    "metavar": "MB",
}


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits of one server process. A peer is a host: all processes of one address together."""

    max_connections: int = setting(10_000, "Open gRPC connections; one more is closed.")
    max_streams: int = setting(1024, "Calls at a time on one connection; clients wait with one more.")
    max_calls: int = setting(16_384, "Calls in progress, streams included.")
    max_peer_calls: int = setting(8_192, "Calls in progress of one host.")
    max_metadata_bytes: int = setting(16 << 10, "Bytes of the headers of one call.", click.IntRange(4096))
    handshake_seconds: float = setting(20.0, "Time for a new connection to complete its handshake.")

    @property
    def server_options(self) -> Mapping[str, int]:
        """The limits that gRPC itself enforces, as options of a server."""
        return {
            "grpc.max_allowed_incoming_connections": self.max_connections,
            "grpc.max_concurrent_streams": self.max_streams,
            # CallLimits refuses less, names the limit and counts; gRPC refuses the rest unread.
            "grpc.max_metadata_size": METADATA_FACTOR * self.max_metadata_bytes,
            "grpc.absolute_max_metadata_size": METADATA_FACTOR * self.max_metadata_bytes,
            "grpc.server_handshake_timeout_ms": max(1, int(self.handshake_seconds * 1000)),
        }


@dataclass(frozen=True, slots=True)
class ShardLimits(ServerLimits):
    """Limits of one shard."""

    first_message_seconds: float = setting(10.0, "Time for a call to send its first message.")
    max_feeds: int = setting(256, "Streams that follow the changes of tables.")
    max_peer_feeds: int = setting(128, "Streams of one host that follow the changes of tables.")
    max_side_handshakes: int = setting(
        64,
        "Connections to the bulk and shm transports that have not shown their token; one more closes the oldest.",
    )
    token_seconds: float = setting(10.0, "Time for such a connection to complete its handshake and show its token.")
    answer_mb: int = setting(
        0, "Memory for answers to requests for rows or parameters; one client gets at most half of it.", **_MEMORY
    )
    upload_mb: int = setting(
        0, "Bytes of gradients, rows and values that clients are sending; one client has at most half of it.", **_MEMORY
    )


@dataclass(frozen=True, slots=True)
class JobLimits:
    """Limits of all models of one job together."""

    #: Without optimizer state.
    max_model_bytes: int = setting(
        64 << 30,
        "Limit of the bytes of values in all models together; a model above it is refused.",
        show_default="64 GB",
    )
    max_models: int = setting(256, "Models of the job.")
    max_variables: int = setting(1 << 18, "Variables of all models together.")
    max_slices: int = setting(1 << 18, "Slices of all models together.")
    max_tables: int = setting(1024, "Tables of all models together.")
    #: ``max_tables`` with the default of 256 each.
    max_buckets: int = setting(1 << 18, "Buckets of all tables together.")
    max_name_bytes: int = setting(
        MAX_NAME_BYTES,
        "Bytes of the name of a model, table, dataset or optimizer. Names of variables may have 16 times as many.",
    )

    @property
    def max_variable_name_bytes(self) -> int:
        """Higher than ``max_name_bytes``, because modules nest and wrappers add their own names."""
        return 16 * self.max_name_bytes


class OverLimit(InvalidRequest):
    """A request above ``limit``, one of LIMITS; clients receive an InvalidRequest."""

    limit: str = ""

    @classmethod
    def of(cls, limit: str, message: str, **fields: str) -> OverLimit:
        """An error that names ``limit``."""
        error = cls(message, **fields)
        error.limit = limit
        return error


class LimitCounts:
    """Counts what each limit refuses or closes, and knows how much of it is used. Used on the server's event loop."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._tracked: dict[str, tuple[int, Callable[[], int]]] = {}

    def track(self, limit: str, most: int, used: Callable[[], int]) -> None:
        """Report what ``used`` returns as the part of ``limit``, ``most`` in all, that is in use."""
        self._tracked[limit] = most, used

    @property
    def usage(self) -> Mapping[str, tuple[int, int]]:
        """The size of each tracked limit, and how much of it is in use."""
        return {limit: (most, used()) for limit, (most, used) in self._tracked.items()}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the OverLimit that leaves the block."""
        try:
            yield
        except OverLimit as error:
            self.add(error.limit)
            raise

    def add(self, limit: str) -> None:
        """Count one refusal by ``limit``, one of LIMITS."""
        self._counts[limit] += 1

    @property
    def counts(self) -> Mapping[str, int]:
        """The refusals of all limits, also of those without any."""
        return MappingProxyType({limit: self._counts[limit] for limit in LIMITS})


class SharedLimit:
    """Limits how many of one thing are in use: in all, and by each peer."""

    def __init__(self, most: int, most_of_one: int, names: tuple[str, str], counts: LimitCounts) -> None:
        """``names``: those of both limits in ``counts``."""
        self._most = most
        self._most_of_one = most_of_one
        self._names = names
        self._counts = counts
        self._used: Counter[str] = Counter()
        self._total = 0
        counts.track(names[0], most, lambda: self._total)

    @property
    def used(self) -> int:
        """The number in use by all peers."""
        return self._total

    def take(self, peer: str, what: str, flags: tuple[str, str]) -> None:
        """Take one for ``peer``, until ``give_back``. Raises Unavailable, naming ``what`` and the option to raise."""
        for number, (used, most) in enumerate(((self._total, self._most), (self._used[peer], self._most_of_one))):
            if used >= most:
                self._counts.add(self._names[number])
                raise Unavailable(
                    f"this server has too many {what}" + (" of one host" if number else ""),
                    expected=f"at most {most}",
                    actual=f"{used} in progress",
                    remedy=f"try again later, or start the server with a higher {flags[number]}",
                )
        self._total += 1
        self._used[peer] += 1

    def give_back(self, peer: str) -> None:
        """Return one that ``peer`` has taken."""
        self._total -= 1
        self._used[peer] -= 1
        if not self._used[peer]:
            del self._used[peer]


def host_of(peer: str) -> str:
    """The host in gRPC's name of a peer, such as ipv4:10.0.0.1:4711; the name itself where it has no port."""
    return peer.rpartition(":")[0] or peer
