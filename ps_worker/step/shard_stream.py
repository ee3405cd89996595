"""One shard's step stream for one model: what this worker sends on it and receives from it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import torch

from ps_protocol.cluster.answers import Answer, Outcome, RowsAnswer, StepAnswer
from ps_protocol.cluster.requests import LookupHeader, OpenRequest, PushHeader
from ps_protocol.cluster.transport import IN_CLEAR
from ps_protocol.errors import InternalError, PsError, Unavailable
from ps_protocol.logs import EventLogger
from ps_protocol.model.layout import Range, subtract
from ps_protocol.model.spec import Options
from ps_protocol.model.tables import RowOptions
from ps_protocol.wire.formats import RAW
from ps_protocol.wire.shared_memory import KeptMappings, SharedMemory
from ps_worker.memory.double_buffer import BackRegion
from ps_worker.memory.flat import FlatModel
from ps_worker.memory.payloads import Encoder, ReceiveBuffer, copy_end_to_end
from ps_worker.model.optimizer_state import StateEntry
from ps_worker.model.unused_options import UnusedOptions
from ps_worker.session.session import Session
from ps_worker.step.gradients import Gradients
from ps_worker.step.push_trace import PushTrace
from ps_worker.step.shard_values import ShardValues
from ps_worker.step.summary import StepPush, StepSettings, StepSummary, StreamPosition
from ps_worker.tables.lookup import Position, ShardLookup
from ps_worker.tables.row_payloads import NO_ROWS, RowRouter
from ps_worker.transport.base import ClientTransport, Link, Peer
from ps_worker.transport.negotiate import open_stream

logger = EventLogger("ps_worker")


class ShardStream:
    """Used by one thread at a time. At most one push is under way; nothing here retries.

    Lookups may be under way before it: answers come in the order of the questions, and rows wait in their lookup.
    """

    def __init__(
        self,
        session: Session,
        router: RowRouter,
        shard: int,
        flat: FlatModel,
        gradients: Gradients,
        style: StepSettings,
        options_lost: UnusedOptions,
        memory: KeptMappings,
    ) -> None:
        self.shard = shard
        #: Of the streams before this one, which the shard may give to it again.
        self._memory = memory
        #: The model's values on the shard, by calls of their own.
        self.values = ShardValues(session, router.shard_map, shard, flat)
        self._session = session
        self._router = router
        self._flat = flat
        self._gradients = gradients
        self._options_lost = options_lost
        #: Positions of the slices on the shard.
        self.layout = flat.plan.layouts[shard]
        self._style = style
        self._encoder = Encoder(self.layout, style.wire) if style.wire != RAW else None
        #: Holds parameters until ``land``; None: they are received into the model's memory.
        self._receive_buffer: ReceiveBuffer | BackRegion | None = None
        self._transport: ClientTransport | None = None
        self.is_dropped = True  # there is no stream at all, so that nothing can be under way
        self.is_pushing = False  # a push has been sent whose answer has not come
        #: Of the push under way, and of the last that the shard has reported as applied.
        self._sequence = self._acknowledged = 0
        #: The last push that the shard has answered, and not refused.
        self.answered = 0
        #: The version of torch on the shard that was warned of last.
        self._warned_version = ""
        self._opened_at, self._opened_to = 0.0, 0  # when, and to which incarnation of the shard
        #: How many streams have been opened.
        self.openings = 0
        #: Sent last on this stream.
        self._options: tuple[Options, ...] = ()
        self._table_options: tuple[RowOptions, ...] = ()
        self._sent_bytes = 0
        self._pending_lookups = PendingLookups()
        self._staged: list[Range] = []  # sent on this stream ahead of the next push
        self.version = 0  # of the parameters held
        #: The last answer with a payload, and where that is; the last answer to a push.
        self._placed: tuple[StepAnswer, Sequence[memoryview]] | None = None
        self._answered: StepAnswer | None = None
        #: Encodes what is pushed for several workers of this host, and keeps what that leaves out.
        self._host_encoder: Encoder | None = None
        #: Parameters that another worker of this host has received, until ``land``.
        self._taken_over: ReceiveBuffer | None = None
        #: Of the push under way, if it is traced.
        self._trace: PushTrace | None = None

    @property
    def peer(self) -> Peer:
        """The shard, for messages."""
        return Peer(self.shard, self._session.shard_address(self.shard))

    @property
    def transport(self) -> str:
        """The name of the stream's transport, and what it lacks; empty while there is no stream."""
        if self._transport is None:
            return ""
        return self._transport.transport.value + (IN_CLEAR if self._transport.in_clear else "")

    @property
    def is_open(self) -> bool:
        """Whether there is a stream, it has not ended as far as this side knows, and it goes to the present process."""
        return self.is_alive and not self.is_outdated

    @property
    def is_alive(self) -> bool:
        """Whether there is a stream that has not ended as far as this side knows."""
        return self._transport is not None and self._transport.alive

    @property
    def is_outdated(self) -> bool:
        """Whether the stream goes to a process of the shard that another has replaced. From any thread."""
        return self._transport is not None and self._session.shard_incarnation(self.shard) != self._opened_to

    @property
    def age_seconds(self) -> float:
        """How long the stream has been open; 0 when it never was."""
        return time.monotonic() - self._opened_at if self._opened_at else 0.0

    def open(self, phase: int, clock: int | None = None) -> StreamPosition:
        """Open a new stream in place of the last one. Raises PsError.

        ``clock``: this worker's clock on every shard, in ``phase``; None: it has just begun.
        """
        self.drop()
        session, wanted = self._session, self._gradients.segments
        link = Link(self.peer, self.layout, session.wait_hint, session.security, self._memory, wanted)
        shard_map = self._router.shard_map
        request = OpenRequest(
            shard_map.spec.name,
            shard_map.epoch,
            (session.rank, session.incarnation),
            session.revision,
            phase,
            clock,
            self._style.wire,
            self._acknowledged,
            torch.__version__,
            keeps_slices=True,
            transports=session.transports,
            answered=self.answered,
        )
        self._opened_to = session.shard_incarnation(self.shard)
        opened, self._transport = open_stream(session.shard_channel(self.shard), link, request)
        self.is_dropped = False
        if self.is_outdated:
            # ``interrupt_outdated`` may have run before this stream was there.
            self.drop()
            raise Unavailable(f"{link.peer} has been replaced by another process", shard=str(self.shard))
        lent = () if self._gradients.on_host else self._transport.gradients
        if lent or not self._gradients.pushed.has_place(self.shard):
            self._gradients.place(self.shard, *lent)
        if self._receive_buffer is None and (self._style.overlap or (self._style.wire != RAW and not lent)):
            double, wire = self._flat.double, self._style.wire
            self._receive_buffer = BackRegion(double, self.shard) if double else ReceiveBuffer(self.layout, wire)
        self._compare_torch(opened.torch_version)
        self._opened_at = time.monotonic()
        self.openings += 1
        self._options = ({},) * len(shard_map.spec.group_options)
        self._table_options = ({},) * len(shard_map.spec.tables)
        return StreamPosition(opened.version, (opened.phase, opened.clock), opened.last_sequence, opened.initialised)

    def _compare_torch(self, version: str) -> None:
        """Warn of a shard that runs another version of torch than this worker; empty: it does not report one."""
        if version not in ("", str(torch.__version__), self._warned_version):
            self._warned_version = version
            logger.warning(
                "versions",
                "%s applies updates with torch %s, and this worker computes gradients with torch %s: results may "
                "differ in the last digits; install the same version on both",
                self.peer,
                version,
                torch.__version__,
            )

    def drop(self, *, for_good: bool = False) -> None:
        """End the stream now; what is under way on it is lost. ``for_good``: slices have moved, no other is opened."""
        if self._transport is not None:
            if for_good:
                self._transport.keep_memory()
            self._transport.close()
            if self.is_pushing and self._transport.gradients and not for_good and not self._gradients.on_host:
                # The shard may hold the push and read it later: what the user's backward writes must not reach it.
                self._gradients.place(self.shard)
        self._transport, self._opened_at, self.is_pushing, self._staged = None, 0.0, False, []
        self.is_dropped = True
        self._pending_lookups.forget()

    # -- pushes

    def stage(self, span: Range) -> bool:
        """Send bytes ``span`` of the region ahead of the next push; whether that was possible."""
        ready = self._gradients.pushed.bring(self.shard, span)
        transport = self._transport
        if transport is None or transport.gradients or self._encoder:
            return False
        transport.stage(span, self._gradients.pushed.memory(self.shard)[span[0] : span[1]], ready)
        self._staged.append(span)
        return True

    def send(self, push: StepPush) -> None:
        """Send ``push``. The gradients in memory must not change until ``receive`` has returned."""
        if (transport := self._transport) is None:
            raise self._not_open()
        trace = self._trace = PushTrace(push.trace, self.shard) if push.trace is not None else None
        contents = self._flat.plan.contents(self.shard, push.absent, push.with_buffers)
        absent, ranges, runs = ((), (), ()) if push.skipped else contents
        # What was sent ahead on another stream than this one is lost.
        staged = [span for span in push.staged[self.shard] if span in self._staged] if push.staged else []
        ranges = subtract(ranges, staged) if staged else ranges
        rows = push.rows.of(self._router, self.shard) if push.rows is not None and not push.skipped else NO_ROWS
        # Fields are assigned: as arguments by name they take a multiple of the time.
        header = PushHeader(push.sequence, push.phase, push.clock, self.version)
        header.absent = absent
        if push.options != self._options:
            header.options = push.options
        if push.table_options != self._table_options:
            header.table_options = push.table_options
        header.with_buffers = push.with_buffers and not push.skipped
        header.skipped = push.skipped
        header.finite = push.finite
        header.ahead = push.ahead
        if staged:
            header.staged = [position for span in staged for position in span]
        header.tables = rows.tables
        if push.trace is not None:
            header.traceparent = push.trace.traceparent
        header.weight = push.weight
        header.squared_norm = push.squared_norm
        header.segment = self._gradients.segment
        self.is_pushing, self._staged, self._sequence = True, [], push.sequence
        if (combined := push.combined) is not None:
            header.contributions = combined.contributions(self.shard)
        source = combined or self._gradients.pushed
        if self._encoder and ranges and not transport.gradients:
            encoder = self._encoder if combined is None else self._encoder_of_host()
            pieces = [encoder.encode(push.sequence, source.region(self.shard), runs)]
            if trace is not None:
                trace.encoded()
        else:
            pieces = source.pieces(self.shard, ranges)
            if transport.gradients and self._gradients.on_host:
                _fill(transport.gradients[self._gradients.segment - 1], source.region(self.shard), ranges)
        try:
            transport.push(header, pieces, rows.pieces)
        except PsError:  # an option that no message holds: nothing has been sent
            self.is_pushing = False
            raise
        self._options, self._table_options = push.options, push.table_options
        self._sent_bytes = sum(map(len, pieces))
        if rows.pieces:
            self._sent_bytes += sum(map(len, rows.pieces))
        if staged:
            self._sent_bytes += sum(end - begin for begin, end in staged)
        if trace is not None:
            trace.sent(self._sent_bytes)

    def receive(self) -> StepSummary | None:
        """The answer to the push under way, its parameters in flat memory; None: the shard waits. Raises PsError.

        Lookups asked before it are answered first.
        """
        if (transport := self._transport) is None:
            raise self._not_open()
        while isinstance(result := self._answer(transport), RowsAnswer):
            pass
        if result is None:
            return None
        self.is_pushing, self._answered = False, result
        outcome = result.outcome
        if outcome < Outcome.REFUSED:
            self.version, self.answered = result.version, self._sequence
        if outcome is Outcome.APPLIED:
            self._acknowledged = self._sequence
        if result.differences:
            self._options_lost.tell(result.differences)
        return StepSummary(
            (self.version,),
            (outcome,),
            result.staleness,
            result.clock,
            self._sent_bytes + result.payload_bytes,
            result.waited_seconds,
            (result.error,) if result.error else (),
        )

    def _answer(self, transport: ClientTransport) -> Answer | None:
        trace = self._trace if self.is_pushing else None
        if trace is not None:
            trace.waits()
        answer = transport.receive(self._place)
        if trace is not None:
            trace.received(answer)
        if isinstance(answer, RowsAnswer):
            self._pending_lookups.complete(answer, self.peer)
        elif self._receive_buffer and answer:
            self._receive_buffer.complete(answer)
        return answer

    def _place(self, answer: Answer) -> Sequence[memoryview]:
        """The memory for the payload of ``answer``."""
        if self._trace is not None:
            self._trace.arrives()
        if isinstance(answer, RowsAnswer):
            return self._pending_lookups.place(answer, self.peer)
        if self._receive_buffer:
            pieces = self._receive_buffer.place(answer)
        else:
            pieces = self._flat.pieces(self._flat.plan.ranges(self.shard, answer.absent, answer.with_buffers))
        self._placed = answer, pieces
        return pieces

    def _place_pulled(self, answer: StepAnswer) -> Sequence[memoryview]:
        return self._flat.pieces(self._flat.plan.ranges(self.shard, answer.absent, answer.with_buffers))

    def land(self) -> None:
        """Make received parameters the model's, where neither ``receive`` nor ``publish_parameters`` does."""
        for buffer in (self._receive_buffer, self._taken_over):
            if isinstance(buffer, ReceiveBuffer) and (result := buffer.arrived) is not None:
                ranges = self._flat.plan.ranges(self.shard, result.absent, result.with_buffers)
                buffer.take(self._flat.host_tensors(ranges))

    # -- pushes made with those of other workers of this host

    @property
    def epoch(self) -> int:
        """Of the shard map that its layout is from."""
        return self._router.shard_map.epoch

    def _encoder_of_host(self) -> Encoder:
        self._host_encoder = self._host_encoder or Encoder(self.layout, self._style.wire)
        return self._host_encoder

    def copy_received(self, into: torch.Tensor) -> StepAnswer | None:
        """Copy what came with the last answer to ``into``, which is laid out as the region; None: nothing came."""
        answer = self._answered
        if answer is None or self._placed is None or self._placed[0] is not answer or not answer.payload_bytes:
            return None
        ranges = self.layout.ranges(answer.absent, buffers=answer.with_buffers)
        if isinstance(self._receive_buffer, ReceiveBuffer):
            sources = self._receive_buffer.values(ranges)
        else:
            sources = [torch.frombuffer(piece, dtype=torch.uint8) for piece in self._placed[1] if len(piece)]
        copy_end_to_end([into[begin:end] for begin, end in ranges], sources)
        return answer

    def take_over(self, answer: StepAnswer, region: torch.Tensor) -> None:
        """Take over what came to another worker of this host with ``answer``, and is in ``region`` now.

        It is received as an answer on this stream would be, but for the wire format, which it has no more.
        """
        buffer = self._receive_buffer
        if isinstance(buffer, ReceiveBuffer):
            # That buffer has what the shard takes this stream to have.
            buffer = self._taken_over = self._taken_over or ReceiveBuffer(self.layout, RAW)
        if buffer is not None:
            pieces = buffer.place(answer)
        else:
            pieces = self._flat.pieces(self._flat.plan.ranges(self.shard, answer.absent, answer.with_buffers))
        targets = [torch.frombuffer(piece, dtype=torch.uint8) for piece in pieces if len(piece)]
        ranges = self.layout.ranges(answer.absent, buffers=answer.with_buffers)
        copy_end_to_end(targets, [region[begin:end] for begin, end in ranges])
        if buffer is not None:
            buffer.complete(answer)

    def followed(self, sequence: int, outcome: Outcome, version: int) -> None:
        """Another worker of this host has made push ``sequence`` for this one, and ``version`` was taken over."""
        self.version, self.answered = version, sequence
        if outcome is Outcome.APPLIED:
            self._acknowledged = sequence

    def take_back(self) -> None:
        """The push under way will be encoded again for another layout: what it was to bring becomes its gradients."""
        if self._encoder:
            self._encoder.take_back(self._sequence, self._gradients.pushed.region(self.shard))

    def residuals(self) -> list[StateEntry]:
        """What the wire format has left out of gradients so far."""
        return self._encoder.residuals() if self._encoder else []

    def load_residuals(self, entries: list[StateEntry]) -> None:
        """Take over what an earlier process of this worker had left out."""
        if self._encoder:
            self._encoder.load_residuals(entries)

    # -- rows, barriers, pulls

    def look_up(self, part: ShardLookup, position: Position, *, now: bool) -> None:
        """Ask for ``part``, for the push of ``position``, or for the rows as they are now."""
        self._opened().look_up(self._pending_lookups.ask(part, position, now=now), part.ids)

    def has_asked(self, part: ShardLookup) -> bool:
        """Whether ``part`` has been asked for on this stream and is to come."""
        return part in self._pending_lookups

    def receive_rows(self) -> bool:
        """Receive the answer to the oldest lookup; False: the shard waits. No push is under way. Raises PsError."""
        answer = self._answer(self._opened())
        if isinstance(answer, StepAnswer):
            raise InternalError(f"{self.peer} answered a push that was not made", shard=str(self.shard))
        return answer is not None

    def arrive(self, phase: int) -> None:
        """Tell the shard that this worker enters the barrier that ends ``phase``."""
        self._opened().arrive(phase)

    def pull(self) -> None:
        """Receive the newest parameters and buffers into flat memory. Raises PsError."""
        if self._transport is None:
            self._flat.forget_arrived(self.shard)
            self.version = self.values.pull(self._place_pulled)
            return
        self._transport.fetch()
        while (result := self._answer(self._transport)) is None or isinstance(result, RowsAnswer):
            pass
        self.version = result.version
        self.land()

    def interrupt(self) -> None:
        """From any thread: a call that waits for an answer raises Unavailable."""
        if (transport := self._transport) is not None:
            transport.cancel()

    def _opened(self) -> ClientTransport:
        if self._transport is None:
            raise self._not_open()
        return self._transport

    def _not_open(self) -> Unavailable:
        return Unavailable(f"the stream to {self.peer} is not open", shard=str(self.shard))


def _fill(segment: SharedMemory, region: torch.Tensor, ranges: Sequence[Range]) -> None:
    """Copy ``ranges`` of ``region`` to the same places of ``segment``."""
    target = torch.frombuffer(segment.bytes, dtype=torch.uint8)
    for begin, end in ranges:
        target[begin:end].copy_(region[begin:end])


class PendingLookups:
    """Used by one shard's stream. A shard answers in the order of the requests."""

    def __init__(self) -> None:
        self._parts: deque[tuple[int, ShardLookup]] = deque()
        self._number = 0

    def __contains__(self, part: ShardLookup) -> bool:
        return any(asked is part for _, asked in self._parts)

    def ask(self, part: ShardLookup, position: Position, *, now: bool) -> LookupHeader:
        """The request for ``part``, which counts as sent from now on."""
        self._number += 1
        self._parts.append((self._number, part))
        return LookupHeader(self._number, part.tables, None if now else position)

    def place(self, rows: RowsAnswer, peer: Peer) -> Sequence[memoryview]:
        """The memory for the payload of ``rows``. Raises InternalError when these rows are not due."""
        return self._due(rows, peer).pieces

    def complete(self, rows: RowsAnswer, peer: Peer) -> None:
        """The payload of ``rows`` has been received. Raises as ``place``."""
        part = self._due(rows, peer)
        self._parts.popleft()
        part.error = rows.error
        part.arrived = True

    def forget(self) -> None:
        """Forget all lookups: the stream has ended."""
        self._parts.clear()

    def _due(self, rows: RowsAnswer, peer: Peer) -> ShardLookup:
        if not self._parts or self._parts[0][0] != rows.number:
            raise InternalError(
                f"{peer} sent rows that are not due",
                shard=str(peer.shard),
                expected=f"those of lookup {self._parts[0][0]}" if self._parts else "none",
                actual=f"those of lookup {rows.number}",
            )
        return self._parts[0][1]
