"""One shard as one model's pipeline sees it: its stream, and what has been told and received on it."""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ps_protocol import PROTOCOL_VERSION, convert
from ps_protocol.codecs import Run, payload_runs
from ps_protocol.convert_tables import row_options_to_json
from ps_protocol.errors import InternalError, PsError, Unavailable, from_detail
from ps_protocol.frames import pieces_of
from ps_protocol.layout import Range, subtract, total_bytes
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire import RAW, wire_to_pb
from ps_worker.calls import ShardCalls, Writer
from ps_worker.carriers import Carrier, Link, open_stream
from ps_worker.encoder import Encoder
from ps_worker.flat import FlatModel
from ps_worker.gradients import Gradients
from ps_worker.interfaces import TrainingSession
from ps_worker.landing import Landing
from ps_worker.replies import Answer, Peer
from ps_worker.state import StateEntry
from ps_worker.summary import Outcome, Push, Style
from ps_worker.tables.asked import Asked
from ps_worker.tables.initial import RowsCall
from ps_worker.tables.lookup import Part, Position
from ps_worker.tables.places import RowPlaces
from ps_worker.tables.update import NO_ROWS

logger = logging.getLogger("ps_worker")


@dataclass(frozen=True, slots=True)
class Standing:
    """What a shard says about this worker when its stream opens."""

    version: int
    #: (phase, clock) of this worker on the shard.
    position: tuple[int, int]
    last_sequence: int
    initialised: bool


@dataclass(frozen=True, slots=True)
class Receipt:
    """One shard's answer to one push. ``error``: it refused, and no parameters came; or the push's step failed."""

    outcome: Outcome
    staleness: int
    clock: int
    transferred_bytes: int
    error: PsError | None
    #: Options that this worker pushed and that were not used.
    differences: Sequence[pb.OptionDifference] = ()


def _outcome(number: int, peer: Peer) -> Outcome:
    """Raises InternalError for a number this version does not know."""
    try:
        return Outcome[pb.Outcome.Name(number).removeprefix("OUTCOME_")]
    except (KeyError, ValueError):
        raise InternalError(f"{peer} answered with an unknown outcome", actual=str(number)) from None


class Lane:
    """Used by one thread at a time. At most one push is under way; nothing here retries.

    Lookups may be under way before it: answers come in the order of the questions, and rows wait in their lookup.
    """

    def __init__(
        self,
        session: TrainingSession,
        places: RowPlaces,
        shard: int,
        flat: FlatModel,
        gradients: Gradients,
        style: Style,
    ) -> None:
        self.shard = shard
        self._session = session
        self._shard_map = places.shard_map
        self._places = places
        self._flat = flat
        self._gradients = gradients
        #: Where the slices lie on the shard.
        self.layout = flat.plan.layouts[shard]
        self._wire = style.wire
        self._encoder = Encoder(self.layout, style.wire) if style.wire != RAW else None
        #: What the payload encoded last is of.
        self._runs: Sequence[Run] | None = None
        self._overlap = style.overlap
        #: Where parameters wait for ``land``; None: they are received into the model's memory.
        self._landing: Landing | None = None
        spec = self._shard_map.spec
        self._declared = tuple(convert.options_to_json(options) for options in spec.group_options)
        self._declared_tables = tuple(row_options_to_json(table.options) for table in spec.tables)
        self._carrier: Carrier | None = None
        self._pushing = False
        #: Of the push under way, and of the last that the shard said it had applied.
        self._sequence = self._acknowledged = 0
        #: The version of torch on the shard that was spoken of.
        self._torch_told = ""
        self._opened_at = 0.0
        #: The shard's incarnation that the stream was opened to.
        self._opened_to = 0
        self._options = self._declared
        self._table_options = self._declared_tables
        self._sent_bytes = 0
        self._asked = Asked()
        #: Sent on this stream ahead of the next push.
        self._staged: list[Range] = []
        #: Version of the parameters held.
        self.version = 0

    @property
    def peer(self) -> Peer:
        """The shard, for messages."""
        return Peer(self.shard, self._session.shard_address(self.shard))

    @property
    def transport(self) -> str:
        """How the stream travels; empty while there is none."""
        return convert.transport_name(self._carrier.transport) if self._carrier else ""

    @property
    def is_open(self) -> bool:
        """Whether the stream is open, as far as this side knows, and to the shard that holds the slices now."""
        return (
            self._carrier is not None
            and self._carrier.alive
            and self._session.shard_incarnation(self.shard) == self._opened_to
        )

    @property
    def is_outdated(self) -> bool:
        """Whether the stream is to a life of the shard that another has followed. From any thread."""
        return self._carrier is not None and self._session.shard_incarnation(self.shard) != self._opened_to

    @property
    def is_dropped(self) -> bool:
        """Whether there is no stream at all, so that nothing can be under way."""
        return self._carrier is None

    @property
    def is_pushing(self) -> bool:
        """Whether a push has been sent whose answer has not come."""
        return self._pushing

    @property
    def age_seconds(self) -> float:
        """How long the stream has been open; 0 when it never was."""
        return time.monotonic() - self._opened_at if self._opened_at else 0.0

    def open(self, phase: int, clock: int | None = None) -> Standing:
        """Open a new stream in the place of the last. Raises PsError.

        ``clock``: how far this worker has come, in ``phase``, on every shard; None: it has just begun.
        """
        self.drop()
        link = Link(self.peer, self.layout, self._session.wait_hint)
        request = pb.Open(
            model=self._shard_map.spec.name,
            epoch=self._shard_map.epoch,
            worker=pb.WorkerId(rank=self._session.rank, incarnation=self._session.incarnation),
            membership_revision=self._session.revision,
            protocol_version=PROTOCOL_VERSION,
            phase=phase,
            clock=clock,
            wire=wire_to_pb(self._wire),
            acknowledged=self._acknowledged,
            torch_version=torch.__version__,
            keeps_slices=True,
        )
        self._opened_to = self._session.shard_incarnation(self.shard)
        channel = self._session.shard_channel(self.shard)
        opened, self._carrier = open_stream(channel, link, request, self._session.transports)
        if self.is_outdated:
            # Whoever looked for outdated streams when the shard was replaced may not have seen this one.
            self.drop()
            raise Unavailable(f"{link.peer} has been replaced by another process", shard=str(self.shard))
        if self._carrier.gradients is not None or not self._gradients.has_place(self.shard):
            self._gradients.place(self.shard, self._carrier.gradients)
        if self._overlap or (self._wire != RAW and self._carrier.gradients is None):
            self._landing = self._landing or Landing(self.layout, self._wire)
        self._tell_torch(opened.torch_version)
        self._opened_at = time.monotonic()
        self._options, self._table_options = self._declared, self._declared_tables
        return Standing(opened.version, (opened.phase, opened.clock), opened.last_sequence, opened.initialised)

    def _tell_torch(self, version: str) -> None:
        if version not in ("", torch.__version__, self._torch_told):
            self._torch_told = version
            logger.warning(
                "%s applies updates with torch %s, and this worker computes gradients with torch %s: results may "
                "differ in the last digits; install the same version on both",
                self.peer,
                version,
                torch.__version__,
            )

    def drop(self, *, for_good: bool = False) -> None:
        """End the stream now; what is under way on it is lost. ``for_good``: this lane opens no other."""
        if self._carrier is not None:
            self._carrier.close()
            if self._pushing and self._carrier.gradients is not None and not for_good:
                # The shard may hold the push and read it later: what the user's backward writes must not reach it.
                self._gradients.place(self.shard)
        self._carrier, self._opened_at, self._pushing, self._staged = None, 0.0, False, []
        self._asked.forget()

    def stage(self, span: Range) -> bool:
        """Send bytes ``span`` of the region ahead of the next push; whether they are on their way."""
        ready = self._gradients.bring(self.shard, span)
        carrier = self._carrier
        if carrier is None or carrier.gradients is not None or self._encoder:
            return False
        carrier.stage(span, self._gradients.memory(self.shard)[span[0] : span[1]], ready)
        self._staged.append(span)
        return True

    def send(self, push: Push) -> None:
        """Send ``push``. The gradients in memory must not change until ``receive`` has returned."""
        update = push.update
        absent = () if update.skipped else self._flat.plan.absent_slices(update.absent)[self.shard]
        ranges = [] if update.skipped else self.layout.ranges(absent, buffers=update.with_buffers)
        # What went ahead on another stream than this one is lost.
        came = [span for span in update.staged[self.shard] if span in self._staged] if update.staged else []
        ranges = subtract(ranges, came)
        header = pb.PushHeader(
            sequence=push.sequence,
            phase=push.phase,
            clock=push.clock,
            pulled_version=self.version,
            absent=absent,
            group_options=() if update.options == self._options else update.options,
            with_buffers=update.with_buffers and not update.skipped,
            skipped=update.skipped,
            finite=update.finite,
            ahead=update.ahead,
            staged=[position for span in came for position in span],
            table_options=() if update.table_options == self._table_options else update.table_options,
        )
        rows = NO_ROWS
        if update.rows is not None and not update.skipped:
            rows = update.rows.of(self._places, self.shard)
            header.tables.extend(rows.tables)
        carrier = self._living()
        self._pushing, self._staged, self._runs = True, [], None
        self._sequence = push.sequence
        pieces = self._gradients.pieces(self.shard, ranges)
        if self._encoder and pieces and carrier.gradients is None:
            self._runs = payload_runs(self.layout, absent, buffers=update.with_buffers)
            pieces = [self._encoder.encode(push.sequence, self._gradients.region(self.shard), self._runs)]
        carrier.push(header, pieces, rows.pieces)
        self._options, self._table_options = update.options, update.table_options
        self._sent_bytes = sum(map(len, (*pieces, *rows.pieces))) + total_bytes(came)

    def look_up(self, part: Part, position: Position, *, now: bool) -> None:
        """Ask for ``part``, for the push of ``position``, or as the rows are now."""
        self._living().look_up(self._asked.ask(part, position, now=now), part.ids)

    def has_asked(self, part: Part) -> bool:
        """Whether ``part`` has been asked for on this stream and is to come."""
        return part in self._asked

    def receive_rows(self) -> bool:
        """Take the answer to the oldest lookup; whether it came, for the shard may wait. No push is under way.

        Raises PsError.
        """
        answer = self._answer(self._living())
        if isinstance(answer, pb.StepResult):
            raise InternalError(f"{self.peer} answered a push that was not made", shard=str(self.shard))
        return answer is not None

    def receive(self) -> Receipt | None:
        """The answer to the push under way, its parameters in flat memory; None: the shard waits. Raises PsError.

        Lookups asked before it are answered first.
        """
        result = self._receive(self._living())
        if result is None:
            return None
        self._pushing = False
        if result.outcome != pb.OUTCOME_REFUSED:
            self.version = result.version
        outcome = _outcome(result.outcome, self.peer)
        if outcome is Outcome.APPLIED:
            self._acknowledged = self._sequence
        return Receipt(
            outcome=outcome,
            staleness=result.staleness,
            clock=result.clock,
            transferred_bytes=self._sent_bytes + result.payload_bytes,
            error=from_detail(result.error) if result.HasField("error") else None,
            differences=result.option_differences,
        )

    def _receive(self, carrier: Carrier) -> pb.StepResult | None:
        while isinstance(result := self._answer(carrier), pb.Rows):
            pass
        if self._landing and result:
            self._landing.settle(result)
        return result

    def _answer(self, carrier: Carrier) -> Answer | None:
        answer = carrier.receive(self._place_answer)
        if isinstance(answer, pb.Rows):
            self._asked.settle(answer, self.peer)
        return answer

    def _place_answer(self, answer: Answer) -> Sequence[memoryview]:
        if isinstance(answer, pb.Rows):
            return self._asked.place(answer, self.peer)
        return self._landing.place(answer) if self._landing else self._place(answer)

    def land(self) -> None:
        """Make received parameters the model's, where ``receive`` has not."""
        if self._landing and self._landing.arrived is not None:
            self._landing.take(self._flat.parameters.tensors(self._ranges_of(self._landing.arrived)))

    def interrupt(self) -> None:
        """From any thread: whoever waits for an answer gets Unavailable."""
        if (carrier := self._carrier) is not None:
            carrier.cancel()

    def arrive(self, phase: int) -> None:
        """Queue the news that this worker enters the barrier that ends ``phase``."""
        self._living().arrive(phase)

    def pull(self) -> None:
        """Receive the newest parameters and buffers into flat memory. Raises PsError."""
        if self._carrier is None:
            self.version = self._calls().pull(self._place, self.layout.region_bytes)
            return
        self._carrier.fetch()
        while (result := self._receive(self._carrier)) is None:
            pass
        self.version = result.version
        self.land()

    def initialised(self) -> bool:
        """Whether the shard holds values of this model. Raises PsError."""
        return self._calls().status().initialised

    def load_region(self) -> None:
        """Upload parameters and buffers from flat memory; the first values of a model win. Raises PsError."""
        pieces = self._flat.parameters.pieces(self._flat.plan.ranges(self.shard))
        self._calls().load_region(self._writer(), pieces)

    def status(self) -> pb.ModelStatus:
        """How the model stands on the shard. Raises PsError."""
        return self._calls().status()

    def holds(self, variables: Iterable[int]) -> bool:
        """Whether the shard has slices of any of ``variables``, by number."""
        return bool(self._slices_of(frozenset(variables)))

    def assign(self, variables: frozenset[int], *, checksums: bool) -> None:
        """Write flat memory's values of ``variables``, by number, over the shard's. Raises PsError.

        ``checksums``: the shard tells others what the values were, whatever it has trained since.
        """
        if slices := self._slices_of(variables):
            pieces = self._flat.parameters.pieces(self._flat.plan.values(self.shard, slices))
            sums = [self._checksum(index) for index in slices] if checksums else []
            self._calls().assign(self._writer(), slices, pieces, sums)

    def set_otherwise(self, variables: frozenset[int]) -> list[int]:
        """Those of ``variables`` that were not set to flat memory's values on the shard. Raises PsError."""
        told = self.status().assigned_checksums
        return [
            self.layout.slices[index].slice.variable
            for index in self._slices_of(variables)
            if told.get(index) != self._checksum(index)
        ]

    def _checksum(self, index: int) -> int:
        (begin, end), *_ = self._flat.plan.values(self.shard, [index]) or [(0, 0)]
        return zlib.crc32(self._flat.parameters.bytes[begin:end])

    def differing(self, variables: frozenset[int]) -> int | None:
        """The first of ``variables`` whose values on the shard are not flat memory's; None: all are. Raises PsError."""
        region = memoryview(bytearray(self.layout.region_bytes))

        def place(result: pb.StepResult) -> list[memoryview]:
            return pieces_of(region, self.layout.ranges(result.absent, buffers=result.with_buffers))

        self._calls().pull(place, self.layout.region_bytes)
        for index in self._slices_of(variables):
            span, (own,) = self.layout.slices[index], self._flat.plan.values(self.shard, [index]) or [(0, 0)]
            if region[span.begin : span.end] != self._flat.parameters.bytes[slice(*own)]:
                return span.slice.variable
        return None

    def _slices_of(self, variables: frozenset[int]) -> list[int]:
        return [i for i, span in enumerate(self.layout.slices) if span.slice.variable in variables]

    def load_rows(self, call: RowsCall) -> None:
        """Upload first values of rows. Raises PsError."""
        self._calls().load_rows(self._writer(), call.header(), call.pieces)

    def load_state(self, entries: list[StateEntry]) -> None:
        """Replace the optimizer state of this shard. Raises PsError."""
        self._calls().load_state(self._writer(), entries)

    def save_state(self) -> list[StateEntry]:
        """The optimizer state of this shard. Raises PsError."""
        return self._calls().save(self.layout.region_bytes)

    def take_back(self) -> None:
        """The push under way will be encoded again, by another layout: what it was to bring becomes its gradients."""
        if self._encoder and self._runs is not None:
            self._encoder.take_back(self._gradients.region(self.shard), self._runs)

    def residuals(self) -> list[StateEntry]:
        """What the wire format has left out of gradients so far."""
        return self._encoder.residuals() if self._encoder else []

    def load_residuals(self, entries: list[StateEntry]) -> None:
        """Take over what another life of this worker had left out."""
        if self._encoder:
            self._encoder.load_residuals(entries)

    def _writer(self) -> Writer:
        return Writer(self._session.rank, self._session.incarnation, self._session.revision)

    def _calls(self) -> ShardCalls:
        channel = self._session.shard_channel(self.shard)
        return ShardCalls(channel, self.peer, self._shard_map.spec.name, self._shard_map.epoch)

    def _place(self, result: pb.StepResult) -> list[memoryview]:
        return self._flat.parameters.pieces(self._ranges_of(result))

    def _ranges_of(self, result: pb.StepResult) -> list[Range]:
        """Where the slices in the payload of ``result`` lie in flat memory."""
        return self._flat.plan.ranges(self.shard, tuple(result.absent), buffers=result.with_buffers)

    def _living(self) -> Carrier:
        if self._carrier is None:
            raise Unavailable(f"the stream to {self.peer} is not open", shard=str(self.shard))
        return self._carrier
