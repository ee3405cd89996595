"""Between messages about rows on a step stream and the dataclasses that both sides think in."""

from __future__ import annotations

from collections.abc import Iterable

from ps_protocol.cluster import answers, requests
from ps_protocol.model.tables import RowCount
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire.convert.errors import from_detail, to_detail


def row_counts_to_pb(counts: Iterable[RowCount]) -> list[pb.TableRows]:
    """The wire form of ``counts``."""
    return [pb.TableRows(table=table, rows=rows) for table, rows in counts]


def row_counts_from_pb(messages: Iterable[pb.TableRows]) -> list[RowCount]:
    """What ``messages`` count."""
    return [RowCount(each.table, each.rows) for each in messages]


def lookup_to_pb(header: requests.LookupHeader) -> pb.Lookup:
    """The wire form of ``header``."""
    phase, clock = header.position or (0, 0)
    return pb.Lookup(
        number=header.number,
        tables=row_counts_to_pb(header.tables),
        phase=phase,
        clock=clock,
        now=header.position is None,
        payload=bytes(header.payload),
    )


def lookup_from_pb(message: pb.Lookup) -> requests.LookupHeader:
    """What ``message`` asks for."""
    position = None if message.now else (message.phase, message.clock)
    return requests.LookupHeader(message.number, row_counts_from_pb(message.tables), position, message.payload)


def rows_to_pb(answer: answers.RowsAnswer) -> pb.Rows:
    """The wire form of ``answer``."""
    return pb.Rows(
        number=answer.number,
        version=answer.version,
        error=to_detail(answer.error) if answer.error else None,
        payload_bytes=answer.payload_bytes,
        payload=bytes(answer.payload),
        in_room=answer.in_room,
    )


def rows_from_pb(message: pb.Rows) -> answers.RowsAnswer:
    """What ``message`` answers."""
    error = from_detail(message.error) if message.HasField("error") else None
    return answers.RowsAnswer(
        message.number, message.version, error, message.payload_bytes, message.payload, message.in_room
    )
