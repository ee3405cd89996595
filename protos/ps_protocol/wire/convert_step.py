"""Between the messages of a step stream and what a worker reads of them; headers are made here and only sent on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ps_protocol import PROTOCOL_VERSION
from ps_protocol.cluster.answers import OpenedStream, RowsAnswer, StepAnswer
from ps_protocol.model.layout import Range
from ps_protocol.model.spec import Options
from ps_protocol.model.tables import RowCount
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire.convert_errors import from_detail
from ps_protocol.wire.convert_options import differences_from_pb, options_to_pb
from ps_protocol.wire.formats import Wire, wire_to_pb

OpenRequest = pb.Open
PushHeader = pb.PushHeader
LookupHeader = pb.Lookup

_OUTCOMES = {number: name.removeprefix("OUTCOME_") for name, number in pb.Outcome.items()}


def opened_from_pb(message: pb.Opened) -> OpenedStream:
    """What ``message`` says, side channels aside."""
    return OpenedStream(
        message.version,
        message.phase,
        message.clock,
        message.last_sequence,
        message.initialised,
        message.torch_version,
    )


def step_answer_from_pb(message: pb.StepResult) -> StepAnswer:
    """What ``message`` says, its payload aside. Raises InvalidRequest for options without values."""
    number = message.outcome
    return StepAnswer(
        message.sequence,
        _OUTCOMES.get(number) or str(number),
        message.version,
        message.staleness,
        message.clock,
        tuple(message.absent),
        message.with_buffers,
        message.payload_bytes,
        message.encoded,
        message.segment,
        from_detail(message.error) if message.HasField("error") else None,
        differences_from_pb(message.option_differences) if message.option_differences else (),
        message.waited_for,
        message.waited_micros / 1e6,
    )


def rows_answer_from_pb(message: pb.Rows) -> RowsAnswer:
    """What ``message`` says, its payload aside."""
    error = from_detail(message.error) if message.HasField("error") else None
    return RowsAnswer(message.number, message.payload_bytes, message.in_room, error)


def open_request(
    model: str,
    epoch: int,
    worker: tuple[int, int],
    *,
    membership_revision: int,
    phase: int,
    clock: int | None,
    wire: Wire,
    acknowledged: int,
    torch_version: str,
) -> OpenRequest:
    """The first message of a stream of ``worker``, by rank and incarnation, which keeps what comes on it."""
    rank, incarnation = worker
    return pb.Open(
        model=model,
        epoch=epoch,
        worker=pb.WorkerId(rank=rank, incarnation=incarnation),
        membership_revision=membership_revision,
        protocol_version=PROTOCOL_VERSION,
        phase=phase,
        clock=clock,
        wire=wire_to_pb(wire),
        acknowledged=acknowledged,
        torch_version=torch_version,
        keeps_slices=True,
    )


def push_header(
    *,
    sequence: int,
    phase: int,
    clock: int,
    pulled_version: int,
    absent: Sequence[int],
    options: Sequence[Options],
    table_options: Sequence[Options],
    with_buffers: bool,
    skipped: bool,
    finite: bool,
    ahead: int,
    staged: Sequence[Range],
    tables: Sequence[RowCount],
    traceparent: str = "",
) -> PushHeader:
    """``options``, ``table_options``: per group and table, those that are not as declared; none: as last sent."""
    return pb.PushHeader(
        sequence=sequence,
        phase=phase,
        clock=clock,
        pulled_version=pulled_version,
        absent=absent,
        groups=[options_to_pb(each) for each in options] if options else (),
        table_arguments=[options_to_pb(each) for each in table_options] if table_options else (),
        with_buffers=with_buffers,
        skipped=skipped,
        finite=finite,
        ahead=ahead,
        staged=[position for span in staged for position in span] if staged else (),
        tables=row_counts_to_pb(tables) if tables else (),
        traceparent=traceparent,
    )


def lookup_header(number: int, tables: Iterable[RowCount], position: tuple[int, int] | None) -> LookupHeader:
    """``position``: phase and clock of the push that the rows are for; None: as they are now."""
    phase, clock = position or (0, 0)
    counts = row_counts_to_pb(tables)
    return pb.Lookup(number=number, tables=counts, phase=phase, clock=clock, now=position is None)


def row_counts_to_pb(counts: Iterable[RowCount]) -> list[pb.TableRows]:
    """The wire form of ``counts``."""
    return [pb.TableRows(table=table, rows=rows) for table, rows in counts]


def row_counts_from_pb(messages: Iterable[pb.TableRows]) -> list[RowCount]:
    """What ``messages`` count."""
    return [RowCount(each.table, each.rows) for each in messages]
