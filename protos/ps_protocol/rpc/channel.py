"""Opens every gRPC channel and server, with the settings for keep-alive and message size that both sides agree on."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import grpc

from ps_protocol import times
from ps_protocol.errors import InvalidRequest
from ps_protocol.rpc.secure_channel import CallCredentials, SecureAsyncChannel, SecureChannel
from ps_protocol.security.credentials import SessionCredential, ShownCredentials
from ps_protocol.security.security import OFF, Security

HANDSHAKE_SECONDS = 10.0
"""How long a new connection to a server may take to speak HTTP/2."""

IDLE_SECONDS = 60.0
"""How long a connection to a server stays open without a call; the next call opens another."""

MAX_STREAMS = 1024
"""Calls at a time on one connection to a server."""

SHARD_KEY = "ps-shard-bin"
"""Metadata of the coordinator's calls that change a shard: a ShardKey."""

# Tensors are sent in chunks of 1 MB; only metadata of very many variables comes near this.
MAX_MESSAGE_BYTES = 256 << 20

_COMMON = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", int(times.KEEPALIVE_SECONDS * 1000)),
    ("grpc.keepalive_timeout_ms", int(times.KEEPALIVE_TIMEOUT_SECONDS * 1000)),
    ("grpc.http2.max_pings_without_data", 0),
)

CLIENT_OPTIONS: tuple[tuple[str, int], ...] = (
    *_COMMON,
    # A shard that died is asked again within a second, not after gRPC's two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A server may come back at another address of its name, as pods do; gRPC's default is 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
    ("grpc.enable_http_proxy", 0),
)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_COMMON,
    ("grpc.http2.min_ping_interval_without_data_ms", int(times.KEEPALIVE_SECONDS * 500)),
    ("grpc.keepalive_permit_without_calls", 1),
    # Idle connections give their descriptors back.
    ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_SECONDS * 1000)),
    ("grpc.max_connection_idle_ms", int(IDLE_SECONDS * 1000)),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    # A port in use is an error, not a second listener.
    ("grpc.so_reuseport", 0),
)


_open: weakref.WeakSet[grpc.Channel] = weakref.WeakSet()
"""The blocking channels of this process that are open; in a forked one those of its parent, too."""

_parent = 0
"""The process from which this one was forked while it had open channels; 0: it was not."""


def _forked() -> None:
    global _parent
    _parent = os.getppid() if _open else _parent


os.register_at_fork(after_in_child=_forked)


def _counted(channel: grpc.Channel) -> grpc.Channel:
    """``channel``, which is open until its ``close``."""
    reference, close = weakref.ref(channel), type(channel).close

    def closed() -> None:
        if (found := reference()) is not None:
            _open.discard(found)
            close(found)

    channel.close = closed  # type: ignore[method-assign]
    _open.add(channel)
    return channel


def open_channel(
    address: str, security: Security = OFF, session: SessionCredential | None = None, *, to_shard: bool = False
) -> grpc.Channel:
    """A blocking channel to ``address`` (host:port), until its ``close``. It connects by itself, now or later.

    Its calls carry what ``security`` and ``session`` hold at the time; ``to_shard``: as in ``Security.metadata``.

    Raises InvalidRequest in a process that was forked while its parent had open channels: the threads and locks of gRPC
    are as they were at that moment, and no call would end.
    """
    if _parent:
        raise InvalidRequest(
            "a process that was forked while its parent was connected cannot connect to a job itself",
            expected="a process that was started, not forked",
            actual=f"process {os.getpid()}, forked from process {_parent}",
            remedy="start it with the method spawn or forkserver (multiprocessing_context of a DataLoader)",
        )
    if security.sends_nothing:
        return _counted(grpc.insecure_channel(address, CLIENT_OPTIONS))

    def open_one(shown: ShownCredentials) -> grpc.Channel:
        if shown.files is None:
            return grpc.insecure_channel(address, CLIENT_OPTIONS)
        return grpc.secure_channel(address, shown.files.value.channel_credentials(), CLIENT_OPTIONS)

    return _counted(SecureChannel(open_one, CallCredentials(security, session, to_shard)))


OpenChannel = Callable[[str], grpc.aio.Channel]
"""Opens a channel to an address, with the credentials of the process that made this."""


def open_async_channel(
    address: str, security: Security = OFF, session: SessionCredential | None = None, *, to_shard: bool = True
) -> grpc.aio.Channel:
    """As ``open_channel``, for use on the running event loop; most of these are from server to shard."""
    if security.sends_nothing:
        return grpc.aio.insecure_channel(address, CLIENT_OPTIONS)

    def open_one(shown: ShownCredentials) -> grpc.aio.Channel:
        if shown.files is None:
            return grpc.aio.insecure_channel(address, CLIENT_OPTIONS)
        return grpc.aio.secure_channel(address, shown.files.value.channel_credentials(), CLIENT_OPTIONS)

    return SecureAsyncChannel(open_one, CallCredentials(security, session, to_shard))


def new_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    max_request_bytes: int = MAX_MESSAGE_BYTES,
    limits: Mapping[str, int] = MappingProxyType({}),
) -> grpc.aio.Server:
    """A server for the running event loop; it refuses messages of more than ``max_request_bytes`` unread.

    ``limits``: options in the place of those of the same name in SERVER_OPTIONS.
    """
    options = {**dict(SERVER_OPTIONS), "grpc.max_receive_message_length": max_request_bytes, **limits}
    return grpc.aio.server(interceptors=interceptors, options=tuple(options.items()))


def listen(server: grpc.aio.Server, address: str, security: Security = OFF) -> int:
    """Have ``server`` listen on ``address`` once it starts; returns its port. Raises RuntimeError when it cannot."""
    credentials = security.server_credentials()
    if credentials is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, credentials)
