"""Between log entries about rows of tables and what is written of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from ps_protocol.model.payload_headers import BucketHeader
from ps_protocol.model.spec import ModelSpec
from ps_protocol.model.tables import Ids
from ps_protocol.v1 import log_pb2
from ps_protocol.wire.convert.options import changed_options, options_to_pb, row_options_from_pb
from ps_protocol.wire.convert.shard import BUCKET_HEADER
from ps_server.log.entries import BucketsPut, RowsDropped, RowsEntry, RowsLoaded
from ps_server.optimizers.state_bytes import taken
from ps_server.state.replica import Replica, Skipped
from ps_server.tables.bucket_contents import BucketContents
from ps_server.tables.step import RowStep

Written = tuple[log_pb2.LogRecord, list[memoryview]]


def encode_rows(entry: RowsEntry) -> Written:
    """The message of ``entry``, and the bytes that follow it as views of its memory."""
    match entry:
        case RowsLoaded():
            load = log_pb2.LoadRowsRecord(
                model=entry.model,
                table=entry.table,
                rows=entry.ids.size,
                with_state=entry.with_state,
                only_new=entry.only_new,
            )
            return log_pb2.LogRecord(load_rows=load), [bytes_of(entry.ids), bytes_of(entry.rows)]
        case RowsDropped():
            drop = log_pb2.DropRowsRecord(
                model=entry.model, table=entry.table, rows=entry.ids.size, waiting=entry.waiting.size
            )
            return log_pb2.LogRecord(drop_rows=drop), [bytes_of(entry.ids), bytes_of(entry.waiting)]
        case BucketsPut():
            messages = BUCKET_HEADER.all_to_pb(describe_buckets(entry.contents))
            pieces = [piece for _, contents in entry.contents for piece in contents.pieces()]
            return log_pb2.LogRecord(buckets=log_pb2.BucketsRecord(model=entry.model, buckets=messages)), pieces


def decode_rows(record: log_pb2.LogRecord, payload: memoryview, spec: ModelSpec) -> RowsEntry:
    """Raises InvalidRequest when the bytes are not as many as announced."""
    match record.WhichOneof("body"):
        case "load_rows":
            return _decode_load(record.load_rows, payload, spec)
        case "drop_rows":
            return _decode_drop(record.drop_rows, payload)
        case _:
            return BucketsPut(
                record.buckets.model, read_buckets(BUCKET_HEADER.all_from_pb(record.buckets.buckets), payload, spec)
            )


def _decode_load(record: log_pb2.LoadRowsRecord, payload: memoryview, spec: ModelSpec) -> RowsLoaded:
    table = spec.tables[record.table]
    width = table.width if record.with_state else table.dim
    ids = ids_in(payload, 0, record.rows)
    rows = floats_in(payload, 8 * record.rows, record.rows, width)
    taken(payload, 8 * record.rows + rows.nbytes, 0, whole=True)
    return RowsLoaded(record.model, record.table, ids, rows, record.with_state, record.only_new)


def _decode_drop(record: log_pb2.DropRowsRecord, payload: memoryview) -> RowsDropped:
    ids = ids_in(payload, 0, record.rows)
    waiting = ids_in(payload, 8 * record.rows, record.waiting)
    taken(payload, 8 * (record.rows + record.waiting), 0, whole=True)
    return RowsDropped(record.model, record.table, ids, waiting)


def describe_buckets(buckets: Iterable[tuple[int, BucketContents]]) -> list[BucketHeader]:
    """What announces the payloads of ``buckets``."""
    return [contents.header(table) for table, contents in buckets]


def read_buckets(
    headers: Iterable[BucketHeader], payload: memoryview, spec: ModelSpec
) -> list[tuple[int, BucketContents]]:
    """What ``payload`` holds, copied. Raises InvalidRequest when it is not what ``headers`` announce."""
    found, at = [], 0
    for header in headers:
        piece = taken(payload, at, header.payload_bytes)
        found.append((header.table, BucketContents.read(spec.tables[header.table], header, piece)))
        at += header.payload_bytes
    taken(payload, at, 0, whole=True)
    return found


def encode_steps(steps: Sequence[RowStep], spec: ModelSpec) -> tuple[list[log_pb2.TableUpdate], list[memoryview]]:
    """What an update record says of its rows, and the bytes behind its ranges."""
    messages = [
        log_pb2.TableUpdate(
            table=step.table,
            rows=step.ids.size,
            updates=step.updates,
            arguments=options_to_pb(changed_options(spec.tables[step.table].options, step.options)),
        )
        for step in steps
    ]
    return messages, [bytes_of(step.ids) for step in steps] + [bytes_of(step.gradients) for step in steps]


def decode_steps(messages: Sequence[log_pb2.TableUpdate], payload: memoryview, spec: ModelSpec) -> list[RowStep]:
    """From the bytes behind the ranges. Raises InvalidRequest when they are not as many as announced."""
    at, ids = 0, []
    for each in messages:
        ids.append(ids_in(payload, at, each.rows))
        at += 8 * each.rows
    steps = []
    for each, numbers in zip(messages, ids, strict=True):
        table = spec.tables[each.table]
        gradients = floats_in(payload, at, each.rows, table.dim)
        at += gradients.nbytes
        changed = row_options_from_pb(each.arguments)
        steps.append(RowStep(each.table, numbers, gradients, each.updates, {**table.options, **changed}))
    taken(payload, at, 0, whole=True)
    return steps


def apply_rows(replica: Replica, entry: RowsEntry, skipped: Skipped | None = None) -> None:
    """Do what ``entry`` says. ``skipped``: buckets of tables that contain it already."""
    skip = skipped or {}
    match entry:
        case RowsLoaded():
            table, left = replica.tables[entry.table], skip.get(entry.table)
            table.load(entry.ids, entry.rows, with_state=entry.with_state, only_new=entry.only_new, skip=left)
        case RowsDropped():
            replica.tables[entry.table].drop(entry.ids, entry.waiting, skip.get(entry.table))
        case BucketsPut():
            for number, contents in entry.contents:
                table = replica.tables[number]
                if number not in skip or not skip[number][contents.bucket]:
                    table.put(contents)
                table.updates = max(table.updates, contents.updates)


def ids_in(payload: memoryview, begin: int, count: int) -> Ids:
    """A copy of ``count`` ids from byte ``begin`` on. Raises InvalidRequest."""
    ids = np.empty(count, np.int64)
    bytes_of(ids)[:] = taken(payload, begin, ids.nbytes)
    return ids


def floats_in(payload: memoryview, begin: int, rows: int, width: int) -> npt.NDArray[np.float32]:
    """A copy of float32 [rows, width] from byte ``begin`` on. Raises InvalidRequest."""
    values = np.empty((rows, width), np.float32)
    bytes_of(values)[:] = taken(payload, begin, values.nbytes)
    return values


def bytes_of(array: npt.NDArray[np.generic]) -> memoryview:
    """The bytes of a C-contiguous array."""
    return memoryview(array.reshape(-1).view(np.uint8).data)
