"""Counts the bytes between a worker and each shard, as they are on the wire."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from chaos.proxy import Proxy
from ps_worker import Cluster


@dataclass
class Carried:
    """Bytes of all proxies; each number is written by one thread at a time per connection."""

    up: list[int] = field(default_factory=list)
    down: list[int] = field(default_factory=list)

    def take(self) -> tuple[int, int]:
        """Bytes to the shards and from them since the last call."""
        found = sum(self.up), sum(self.down)
        self.up.clear()
        self.down.clear()
        return found


class CountingProxy(Proxy):
    def __init__(self, target: str, carried: Carried) -> None:
        self._carried = carried
        super().__init__(target)

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        super()._pump(_Counted(source, self._carried, up=sink.getpeername() == self._target), sink)


class _Counted:
    """A socket whose received bytes are counted."""

    def __init__(self, source: socket.socket, carried: Carried, *, up: bool) -> None:
        self._source = source
        self._counts = carried.up if up else carried.down

    def recv(self, size: int) -> bytes:
        data = self._source.recv(size)
        self._counts.append(len(data))
        return data

    def __getattr__(self, name: str):
        return getattr(self._source, name)


@contextmanager
def counted(cluster: Cluster) -> Iterator[Carried]:
    """The bytes between ``cluster``, which uses gRPC alone, and the shards."""
    carried, session = Carried(), cluster._session
    real, proxies = session.shard_address, {}

    def through_proxy(shard: int) -> str:
        address = real(shard)
        if address not in proxies:
            proxies[address] = CountingProxy(address, carried)
        return proxies[address].address

    session.shard_address = through_proxy
    try:
        yield carried
    finally:
        for proxy in proxies.values():
            proxy.close()
