"""The wire format of one stream: gradients decoded into a region, parameters encoded out of one."""

from __future__ import annotations

from collections.abc import Iterable

from ps_protocol.codecs import PayloadCodec, Reference, payload_runs
from ps_protocol.layout import Layout
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire import Wire
from ps_server.optimizers import Region
from ps_server.shard.threads import in_thread


class Coding:
    """Belongs to one stream, used by its reader and its writer, one of each at a time; the work is done in threads.

    Formats that keep errors send parameters as differences to what the worker has; the first payload is raw.
    """

    def __init__(self, wire: Wire, layout: Layout) -> None:
        self._layout = layout
        self._incoming = PayloadCodec(wire)
        self._reference = Reference(PayloadCodec(wire), layout)
        self._received = memoryview(bytearray())
        self._sent = memoryview(bytearray())

    @property
    def keeps_error(self) -> bool:
        """Whether what a payload leaves out of a slice comes with later ones."""
        return self._reference.payload.keeps_error

    @property
    def needs_raw(self) -> bool:
        """Whether the next payload holds all bytes of the region, as they are."""
        return self._reference.needs_raw

    def buffer(self, absent: Iterable[int], *, buffers: bool) -> memoryview:
        """Where the payload of a push without the slices ``absent`` goes; valid until the next call."""
        size = self._incoming.encoded_bytes(payload_runs(self._layout, absent, buffers=buffers))
        if size > len(self._received):
            self._received = memoryview(bytearray(size))
        return self._received[:size]

    async def decode(self, data: memoryview, region: Region, absent: Iterable[int], *, buffers: bool) -> None:
        """Write what ``data`` stands for to ``region``. Raises InvalidRequest; nothing has been written then."""
        runs = payload_runs(self._layout, absent, buffers=buffers)
        await in_thread(lambda: self._incoming.decode(data, runs, region.data))

    async def encode(self, result: pb.StepResult, region: Region) -> memoryview | None:
        """The payload of ``result``, valid until the next call; None when it is to be the bytes of the region."""
        if self._reference.needs_raw:
            await in_thread(lambda: self._reference.reset(region.data))
            return None
        runs = payload_runs(self._layout, result.absent, buffers=result.with_buffers)
        size = self._reference.payload.encoded_bytes(runs)
        if size > len(self._sent):
            self._sent = memoryview(bytearray(size))
        data = self._sent[:size]
        await in_thread(lambda: self._reference.encode(region.data, runs, data))
        result.encoded = True
        return data
