"""The payloads of one stream: reads its pushes into regions, and encodes and decodes its wire format."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import lru_cache

from ps_protocol.cluster.requests import PushHeader, StageRequest
from ps_protocol.errors import InvalidRequest
from ps_protocol.model.layout import Indexes, Layout, Range, subtract
from ps_protocol.model.spec import Options
from ps_protocol.model.tables import RowOptions
from ps_protocol.wire.codecs import PayloadCodec, Reference, payload_runs
from ps_protocol.wire.formats import Wire
from ps_server.consistency import Position, PushInfo, WorkerKey
from ps_server.shard.byte_budget import FREE_BYTES, ByteBudgets
from ps_server.shard.counters import Counters
from ps_server.shard.execution.executor import INLINE_BYTES
from ps_server.shard.execution.tasks import in_thread
from ps_server.shard.step.model import ShardModel
from ps_server.shard.step.options import merge_options, merge_row_options
from ps_server.shard.step.push import IncomingPush, require_norm, require_weight
from ps_server.shard.step.rows.pushed_rows import PushedRows, announced
from ps_server.shard.step.staging import Staging
from ps_server.shard.transport.base import ServerTransport
from ps_server.state.region import Region

logger = logging.getLogger(__name__)

REPLY_SECONDS = 1.0
"""How long a push waits for the reply before it to be sent."""

_CACHED_PATTERNS = 8


class PushReader:
    """Belongs to one StepStream, used by its reading task."""

    def __init__(
        self,
        transport: ServerTransport,
        model: ShardModel,
        worker: WorkerKey,
        counters: Counters,
        codec: StreamCodec | None,
        replied: asyncio.Event,
        budgets: ByteBudgets,
    ) -> None:
        """``replied`` is set while no reply reads a region. ``budgets`` limit the bytes on their way."""
        self._uploads = budgets.uploads
        self._transport = transport
        self._model = model
        self._worker = worker
        self._counters = counters
        self._traffic = counters.traffic[transport.kind]
        self._codec = codec
        self._replied = replied
        #: What the worker says of its gradients is believed.
        self.trusted = True
        self._slices = model.layout.parameter_slices
        self._options: Sequence[Options] = model.layout.shard_map.spec.group_options
        self._row_options: Sequence[RowOptions] = [table.options for table in model.layout.shard_map.spec.tables]
        #: What has come of the next push; None: nothing.
        self._staging: Staging | None = None

    async def read(self, header: PushHeader) -> IncomingPush:
        """The push of ``header``, received whole. Raises InvalidRequest, ConnectionError."""
        push = self._begin(header)
        rows = [push.rows.buffer] if push.rows and not header.rows_in_room else []
        if header.skipped:
            pass
        elif header.segment:
            push.region, push.lent = self._transport.gradients(header.segment), True
            await self.receive(header.payload, rows)
        else:
            ranges = self._model.layout.ranges_without(push.absent, header.with_buffers)
            if header.staged:
                ranges = subtract(ranges, self._staged().checked(header.staged))
            await self._one_region()
            region = self._staging.take() if self._staging else self._model.pool.take()
            try:
                await self._fill(region, push, header.payload, ranges, rows)
            except BaseException:
                # A push that does not come whole is dropped, and its memory is free again.
                self._model.pool.give(region)
                raise
            push.region = region
        self.discard()
        self._counters.pushes += 1
        return push

    async def stage(self, stage: StageRequest) -> None:
        """Receive a part of the next push. Raises InvalidRequest, ConnectionError."""
        if self._codec:
            raise InvalidRequest("a part of a push came ahead on a stream with a wire format", expected="whole pushes")
        await self._one_region()
        piece = self._staged().place(stage.begin, stage.end)
        await self.receive(stage.payload, [piece])

    def discard(self) -> None:
        """Forget what has come of the next push."""
        if self._staging is not None:
            self._staging.discard()
            self._staging = None

    async def receive(self, inline: bytes | memoryview, pieces: Sequence[memoryview]) -> None:
        """Fill ``pieces`` from a message or what follows it. Raises InvalidRequest, ConnectionError, Unavailable."""
        size = sum(map(len, pieces))
        if inline or not size:
            scatter(inline, pieces)
        elif size <= FREE_BYTES:
            await self._transport.receive_payload(pieces)
        else:
            # Held while bytes come, and not until the push is applied: that may wait for pushes of others.
            async with self._uploads.taken(self._worker, size):
                await self._transport.receive_payload(pieces)
        self._traffic.received += size

    def _staged(self) -> Staging:
        if self._staging is None:
            self._staging = Staging(self._model.layout, self._model.pool)
        return self._staging

    def _begin(self, header: PushHeader) -> IncomingPush:
        """Check one header. Raises InvalidRequest."""
        if header.sequence == 0:
            raise InvalidRequest("a push needs a sequence", expected="1 or more", actual="0")
        absent = frozenset(header.absent)
        if absent and max(absent) >= self._slices:
            raise InvalidRequest(
                "an absent slice does not exist",
                shard=str(self._model.layout.shard),
                expected=f"indexes below {self._slices}",
                actual=str(max(absent)),
            )
        if header.weight:
            require_weight(header.weight, self._worker.rank)
        spec = self._model.layout.shard_map.spec
        if spec.clip_grad_norm and not header.skipped:
            require_norm(header.squared_norm, spec, self._worker.rank)
        if header.options:
            self._options = merge_options(spec, header.options)
        if header.table_options:
            self._row_options = merge_row_options(spec, header.table_options)
        info = PushInfo(
            worker=self._worker,
            sequence=header.sequence,
            position=Position(header.phase, header.clock),
            pulled_version=header.pulled_version,
            skipped=header.skipped,
        )
        return IncomingPush(
            info,
            None,
            absent,
            self._options,
            with_buffers=header.with_buffers,
            finite=header.finite and self.trusted,
            ahead=header.ahead,
            weight=header.weight or 1.0,
            squared_norm=header.squared_norm,
            rows=self._announced(header) if header.tables and not header.skipped else None,
        )

    def _announced(self, header: PushHeader) -> PushedRows:
        """Memory for the rows of a push, or where they are already. Raises InvalidRequest."""
        tables, layout, options = header.tables, self._model.layout, self._row_options
        return announced(tables, layout, options, self._transport.pushed_rows if header.rows_in_room else None)

    async def _one_region(self) -> None:
        """Before memory is taken: wait until the last reply is sent, so that a stream needs one region at a time, and
        while the model itself takes one more than workers need.

        Not for long: a worker may send several pushes before it reads its replies.
        """
        if not self._replied.is_set():
            try:
                async with asyncio.timeout(REPLY_SECONDS):
                    await self._replied.wait()
            except TimeoutError:
                logger.debug("%s pushes before it has read the last reply", self._worker)
        if self._model.copies.under_way:
            await self._model.copies.ended()

    async def _fill(
        self,
        region: Region,
        push: IncomingPush,
        inline: bytes | memoryview,
        ranges: Sequence[Range],
        rows: list[memoryview],
    ) -> None:
        """Write the payload of a push to ``region``."""
        if self._codec is None:
            await self.receive(inline, region.pieces(ranges) + rows)
            return
        encoded = self._codec.buffer(push.absent, buffers=push.with_buffers)
        await self.receive(inline, [encoded, *rows])
        await self._codec.decode(encoded, region, push.absent, buffers=push.with_buffers)


def scatter(payload: bytes | memoryview, pieces: Sequence[memoryview]) -> None:
    """Write an inline payload to its places. Raises InvalidRequest when it is too short or too long."""
    expected = sum(map(len, pieces))
    if len(payload) != expected:
        raise InvalidRequest(
            "an inline payload has the wrong size", expected=f"{expected} bytes", actual=f"{len(payload)} bytes"
        )
    at = 0
    for piece in pieces:
        piece[:] = payload[at : at + len(piece)]
        at += len(piece)


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
