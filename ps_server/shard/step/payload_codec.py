"""The wire format of one stream: gradients decoded into a region, parameters encoded out of one."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from ps_protocol.model.layout import Indexes, Layout
from ps_protocol.wire.codecs import PayloadCodec, Reference, payload_runs
from ps_protocol.wire.formats import Wire
from ps_server.shard.executor import INLINE_BYTES
from ps_server.shard.tasks import in_thread
from ps_server.state.region import Region

_CACHED_PATTERNS = 8


class StreamCodec:
    """Belongs to one stream, used by its reader and its writer, one of each at a time.

    Large payloads are worked on in threads, small ones at once. Formats that keep errors send parameters as differences
    to what the worker has; the first payload is raw.
    """

    def __init__(self, wire: Wire, layout: Layout) -> None:
        self._is_small = layout.region_bytes < INLINE_BYTES
        self._incoming = PayloadCodec(wire)
        self._reference = Reference(PayloadCodec(wire), layout)
        self._received = memoryview(bytearray())
        self._sent = memoryview(bytearray())
        #: By absent slices, and whether with buffers.
        self._runs = lru_cache(_CACHED_PATTERNS)(lambda absent, buffers: payload_runs(layout, absent, buffers=buffers))

    @property
    def keeps_error(self) -> bool:
        """Whether what a payload leaves out of a slice comes with later ones."""
        return self._reference.payload.keeps_error

    @property
    def needs_raw(self) -> bool:
        """Whether the next payload holds all bytes of the region, as they are."""
        return self._reference.needs_raw

    def buffer(self, absent: Indexes, *, buffers: bool) -> memoryview:
        """Where the payload of a push without the slices ``absent`` goes; valid until the next call."""
        size = self._incoming.encoded_bytes(self._runs(absent, buffers))
        if size > len(self._received):
            self._received = memoryview(bytearray(size))
        return self._received[:size]

    async def decode(self, data: memoryview, region: Region, absent: Indexes, *, buffers: bool) -> None:
        """Write what ``data`` stands for to ``region``. Raises InvalidRequest; nothing has been written then."""
        runs = self._runs(absent, buffers)
        await self._do(lambda: self._incoming.decode(data, runs, region.data))

    async def encode(self, absent: Indexes, region: Region, *, buffers: bool) -> memoryview | None:
        """The parameters without the slices ``absent``, valid until the next call; None: send the region's bytes."""
        if self._reference.needs_raw:
            await self._do(lambda: self._reference.reset(region.data))
            return None
        runs = self._runs(absent, buffers)
        size = self._reference.payload.encoded_bytes(runs)
        if size > len(self._sent):
            self._sent = memoryview(bytearray(size))
        data = self._sent[:size]
        await self._do(lambda: self._reference.encode(region.data, runs, data))
        return data

    async def _do(self, work: Callable[[], None]) -> None:
        if self._is_small:
            work()
        else:
            await in_thread(work)
