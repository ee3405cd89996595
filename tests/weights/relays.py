"""Relays on the loop of a job, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ps_protocol.weights.pieces import Received
from ps_server.relay.held import RelayedVersion
from ps_server.relay.process import RelayConfig, serve
from tests.support.loops import LoopThread
from tests.support.shards import wait_until


@dataclass
class Relay:
    """A relay that runs; what it received and said."""

    address: str
    stop: asyncio.Event
    served: Any
    received: list[tuple[str, int, Received]] = field(default_factory=list)
    #: Each event, and its text.
    told: list[tuple[str, str]] = field(default_factory=list)
    loop: LoopThread | None = None

    def end(self) -> None:
        """Stop it, and wait for that; safe to repeat."""
        self.loop.loop.call_soon_threadsafe(self.stop.set)
        self.served.result(60)

    @property
    def said(self) -> list[str]:
        return [text for _, text in self.told]

    @property
    def versions(self) -> list[int]:
        return [number for _, number, _ in self.received]

    def received_of(self, name: str, number: int) -> list[Received]:
        """What version ``number`` of ``name`` took, each time that it came."""
        return [received for *version, received in self.received if version == [name, number]]


@contextmanager
def relaying(
    loop: LoopThread, coordinator: str, *names: str, told: list[tuple[str, str]] | None = None, **changes: Any
) -> Iterator[Relay]:
    """A relay on ``loop``; it has ended, without an error, at the end of the block."""
    with TemporaryDirectory() as folder:
        ready = Path(folder) / "ready"
        config = RelayConfig(
            **{"coordinator": coordinator, "names": names, "ready_file": ready, "patience_seconds": 0.5, **changes}
        )
        relay = Relay("", asyncio.Event(), None, told=[] if told is None else told, loop=loop)

        def on_version(name: str, version: RelayedVersion, received: Received) -> None:
            relay.received.append((name, version.number, received))

        relay.served = asyncio.run_coroutine_threadsafe(
            serve(config, relay.stop, on_version, lambda event, text: relay.told.append((event, text))), loop.loop
        )
        try:
            wait_until(lambda: ready.exists() or relay.served.done())
            if ready.exists():
                relay.address = ready.read_text().strip()
            yield relay
        finally:
            relay.end()
