"""Between log entries and what is written of them: a LogRecord message, and the bytes that follow it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from ps_protocol.errors import InvalidRequest
from ps_protocol.model.layout import Layout
from ps_protocol.model.payload_headers import BucketHeader
from ps_protocol.model.spec import ModelSpec, Options
from ps_protocol.model.tables import Ids
from ps_protocol.v1 import common_pb2, log_pb2, shard_pb2
from ps_protocol.wire.convert import model as convert_model
from ps_protocol.wire.convert.options import changed_options, options_from_pb, options_to_pb, row_options_from_pb
from ps_protocol.wire.convert.shard import BUCKET_HEADER, STATE_HEADER
from ps_server.consistency import Position, PushInfo, TrackerState, WorkerKey
from ps_server.consistency.tracker_state import pushes_from_pb, pushes_to_pb
from ps_server.log.entries import (
    AppliedUpdate,
    BucketsPut,
    Entry,
    Loaded,
    Placed,
    Released,
    Resharded,
    RowsDropped,
    RowsEntry,
    RowsLoaded,
    StagedReshard,
)
from ps_server.optimizers.state import describe, read_state, taken, tensor_bytes
from ps_server.state.region import Region
from ps_server.state.replica import Replica, Skipped, Step
from ps_server.tables.bucket_contents import BucketChanges, BucketContents
from ps_server.tables.step import RowStep


class EntryWriter:
    """Encodes the entries of one log, in its executor. Equal options of successive updates are converted once."""

    def __init__(self) -> None:
        self._options: tuple[Sequence[Options], list[common_pb2.Options]] = ((), [])

    def encode(self, entry: Entry) -> tuple[bytes, list[memoryview]]:
        """The message of ``entry``, and the bytes that follow it as views of its memory."""
        match entry:
            case Placed(shard_map):
                record = log_pb2.LogRecord(
                    place=log_pb2.PlaceRecord(shard_map=convert_model.SHARD_MAP.to_pb(shard_map))
                )
                return record.SerializeToString(), []
            case Loaded(model, region, entries, tracker):
                load = log_pb2.LoadRecord(
                    model=model,
                    with_region=region is not None,
                    state=STATE_HEADER.all_to_pb(describe(entries or ())),
                    with_state=entries is not None,
                    pushes=pushes_to_pb(tracker) if tracker else None,
                )
                pieces = [region.bytes] if region else []
                pieces += [tensor_bytes(tensor) for _, tensor in entries or ()]
                return log_pb2.LogRecord(load=load).SerializeToString(), pieces
            case AppliedUpdate():
                return self._update(entry)
            case StagedReshard():
                return _prepared(entry)
            case Resharded(model, epoch):
                return log_pb2.LogRecord(switch=log_pb2.SwitchRecord(model=model, epoch=epoch)).SerializeToString(), []
            case Released(model, epoch):
                release = log_pb2.ReleaseRecord(model=model, epoch=epoch)
                return log_pb2.LogRecord(release=release).SerializeToString(), []
            case RowsLoaded() | RowsDropped() | BucketsPut():
                record, pieces = encode_rows(entry)
                return record.SerializeToString(), pieces

    def _update(self, update: AppliedUpdate) -> tuple[bytes, list[memoryview]]:
        step = update.step
        spec = step.gradients.layout.shard_map.spec
        if step.options is not self._options[0]:
            changed = map(changed_options, spec.group_options, step.options)
            self._options = step.options, list(map(options_to_pb, changed))
        tables, rows = encode_steps(step.tables, spec) if step.tables else ([], [])
        message = log_pb2.UpdateRecord(
            model=update.model,
            version=update.version,
            pushes=[_push_to_pb(push) for push in update.pushes],
            absent=sorted(step.absent),
            groups=self._options[1],
            scale=step.scale,
            buffer_weight=step.buffer_weight,
            is_round=update.is_round,
            tables=tables,
            squared_norm=step.squared_norm,
        )
        ranges = step.gradients.layout.ranges_without(step.absent, step.buffer_weight != 0)
        return log_pb2.LogRecord(update=message).SerializeToString(), step.gradients.pieces(ranges) + rows


def _prepared(entry: StagedReshard) -> tuple[bytes, list[memoryview]]:
    prepare = log_pb2.PrepareRecord(
        shard_map=convert_model.SHARD_MAP.to_pb(entry.shard_map),
        incoming=entry.incoming,
        state=STATE_HEADER.all_to_pb(describe(entry.entries)),
        pushes=pushes_to_pb(entry.tracker) if entry.tracker else None,
        buckets=BUCKET_HEADER.all_to_pb(describe_buckets(entry.buckets)),
    )
    pieces = [entry.values, *(tensor_bytes(tensor) for _, tensor in entry.entries)]
    pieces += [piece for _, contents in entry.buckets for piece in contents.pieces()]
    return log_pb2.LogRecord(prepare=prepare).SerializeToString(), pieces


class LoggedRecord:
    """One record of a log. Its content is decoded on demand, with the layout of its model."""

    def __init__(self, message: bytes, payload: memoryview) -> None:
        """Raises DecodeError."""
        self._record = log_pb2.LogRecord.FromString(message)
        self._payload = payload
        #: "place", "load", "update", "prepare", "switch", "release", "load_rows", "drop_rows" or "buckets"; "": of no
        #: known kind.
        self.kind: str = self._record.WhichOneof("body") or ""

    @property
    def model(self) -> str:
        """The name of the model it is of."""
        body = getattr(self._record, self.kind)
        return body.shard_map.spec.name if self.kind in ("place", "prepare") else body.model  # type: ignore[no-any-return]

    def place(self) -> Placed:
        """Of kind "place"."""
        return decode_place(self._record.place)

    def load(self, layout: Layout) -> Loaded:
        """Of kind "load"."""
        return decode_load(self._record.load, self._payload, layout)

    def update(self, gradients: Region, options: LoggedOptions) -> AppliedUpdate:
        """Of kind "update"."""
        return decode_update(self._record.update, self._payload, gradients, options)

    def prepare(self, shard: int) -> StagedReshard:
        """Of kind "prepare"."""
        return decode_prepare(self._record.prepare, self._payload, shard)

    def epoch(self) -> int:
        """Of kind "switch": of the shard map that holds from then on."""
        return self._record.switch.epoch

    def released(self) -> Released:
        """Of kind "release"."""
        return Released(self._record.release.model, self._record.release.epoch)

    def rows(self, spec: ModelSpec) -> RowsEntry:
        """Of one of the other kinds."""
        return decode_rows(self._record, self._payload, spec)


def decode_prepare(record: log_pb2.PrepareRecord, payload: memoryview, shard: int) -> StagedReshard:
    """Its bytes are copied. Raises InvalidRequest when they are not as many as announced."""
    shard_map = convert_model.SHARD_MAP.from_pb(record.shard_map)
    slices = Layout.of(shard_map, shard).slices
    if any(index >= len(slices) for index in record.incoming):
        raise InvalidRequest("a slice comes that is not in the next shard map", actual=str(max(record.incoming)))
    size = sum(slices[index].end - slices[index].begin for index in record.incoming)
    values = memoryview(bytearray(taken(payload, 0, size)))
    tracker = _tracker_of(record)
    rows = len(payload) - sum(bucket.payload_bytes for bucket in record.buckets)
    buckets = read_buckets(BUCKET_HEADER.all_from_pb(record.buckets), payload[rows:], shard_map.spec)
    state = read_state(STATE_HEADER.all_from_pb(record.state), payload[size:rows])
    return StagedReshard(shard_map, tuple(record.incoming), values, state, tracker, buckets)


def decode_place(record: log_pb2.PlaceRecord) -> Placed:
    """Raises InvalidRequest for a model this version does not know."""
    return Placed(convert_model.SHARD_MAP.from_pb(record.shard_map))


def decode_load(record: log_pb2.LoadRecord, payload: memoryview, layout: Layout) -> Loaded:
    """Raises InvalidRequest when the bytes are not as many as announced."""
    region = None
    if record.with_region:
        region = Region(layout)
        region.bytes[:] = taken(payload, 0, layout.region_bytes)
    entries = read_state(STATE_HEADER.all_from_pb(record.state), payload[layout.region_bytes * record.with_region :])
    tracker = _tracker_of(record)
    return Loaded(record.model, region, entries if record.with_state else None, tracker)


def decode_update(
    record: log_pb2.UpdateRecord,
    payload: memoryview,
    gradients: Region,
    options: LoggedOptions,
) -> AppliedUpdate:
    """The update, its bytes copied into ``gradients``. ``options`` reads those of the model's updates.

    Raises InvalidRequest when the bytes are not as many as announced.
    """
    layout = gradients.layout
    position = 0
    for begin, end in layout.ranges(record.absent, buffers=record.buffer_weight != 0):
        gradients.bytes[begin:end] = taken(payload, position, end - begin)
        position += end - begin
    step = Step(
        gradients,
        frozenset(record.absent),
        options.of(record, layout.shard_map.spec),
        record.scale,
        record.buffer_weight,
        decode_steps(record.tables, payload[position:], layout.shard_map.spec),
        record.squared_norm if record.HasField("squared_norm") else None,
    )
    return AppliedUpdate(record.model, record.version, tuple(map(_push_from_pb, record.pushes)), record.is_round, step)


class LoggedOptions:
    """The group options of one model's updates, read once while they stay the same."""

    def __init__(self) -> None:
        self._written: Sequence[bytes] | None = None
        self._options: Sequence[Options] = ()

    def of(self, record: log_pb2.UpdateRecord, spec: ModelSpec) -> Sequence[Options]:
        """The options of ``record``: those declared, and what it changes of them. Raises InvalidRequest."""
        written = [group.SerializeToString() for group in record.groups]
        if written != self._written:
            changed = [options_from_pb(group) for group in record.groups]
            if len(changed) != len(spec.group_options):
                raise InvalidRequest(
                    f"an update of model '{spec.name}' has options of other parameter groups",
                    expected=f"{len(spec.group_options)} groups",
                    actual=f"{len(changed)} groups",
                )
            pairs = zip(spec.group_options, changed, strict=True)
            self._options = tuple({**declared, **each} for declared, each in pairs)
            self._written = written
        return self._options


def _tracker_of(record: log_pb2.LoadRecord | log_pb2.PrepareRecord) -> TrackerState | None:
    return pushes_from_pb(record.pushes) if record.HasField("pushes") else None


def _push_to_pb(push: PushInfo) -> log_pb2.LoggedPush:
    message = log_pb2.LoggedPush(
        worker=shard_pb2.WorkerId(rank=push.worker.rank, incarnation=push.worker.incarnation),
        sequence=push.sequence,
        phase=push.position.phase,
        clock=push.position.clock,
        pulled_version=push.pulled_version,
    )
    if push.others:
        message.others.extend(map(_push_to_pb, push.others))
    return message


def _push_from_pb(push: log_pb2.LoggedPush) -> PushInfo:
    worker = WorkerKey(push.worker.rank, push.worker.incarnation)
    others = tuple(map(_push_from_pb, push.others))
    return PushInfo(worker, push.sequence, Position(push.phase, push.clock), push.pulled_version, others=others)


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


def encode_saved(group: Sequence[tuple[int, BucketContents | BucketChanges]]) -> tuple[bytes, list[memoryview]]:
    """The message of some buckets in a snapshot, and the bytes that follow it."""
    record, pieces, deletions = log_pb2.BucketsRecord(), list[memoryview](), list[memoryview]()
    for at, (table, saved) in enumerate(group):
        contents = saved.contents if isinstance(saved, BucketChanges) else saved
        record.buckets.append(BUCKET_HEADER.to_pb(contents.header(table)))
        pieces += contents.pieces()
        if isinstance(saved, BucketChanges):
            deleted, waiting_deleted = saved.deleted.size, saved.waiting_deleted.size
            record.changed.append(log_pb2.ChangedBucket(at=at, deleted=deleted, waiting_deleted=waiting_deleted))
            deletions += [bytes_of(saved.deleted), bytes_of(saved.waiting_deleted)]
    return record.SerializeToString(), pieces + deletions


def decode_saved(
    record: log_pb2.BucketsRecord, payload: memoryview, spec: ModelSpec
) -> list[tuple[int, BucketContents | BucketChanges]]:
    """What ``encode_saved`` wrote. Raises InvalidRequest."""
    headers = BUCKET_HEADER.all_from_pb(record.buckets)
    at = sum(header.payload_bytes for header in headers)
    found: list[tuple[int, BucketContents | BucketChanges]] = [*read_buckets(headers, payload[:at], spec)]
    for each in record.changed:
        deleted = ids_in(payload, at, each.deleted)
        waiting_deleted = ids_in(payload, at + deleted.nbytes, each.waiting_deleted)
        at += deleted.nbytes + waiting_deleted.nbytes
        table, contents = found[each.at] if each.at < len(found) else (0, None)
        if not isinstance(contents, BucketContents):
            raise InvalidRequest("changes of a bucket that is not there", actual=str(each.at))
        found[each.at] = table, BucketChanges(contents, deleted, waiting_deleted)
    taken(payload, at, 0, whole=True)
    return found


def update_row_bytes(dim: int) -> int:
    """Bytes of a row of a step in an update record: its id and its gradient."""
    return 8 + 4 * dim


def encode_steps(steps: Sequence[RowStep], spec: ModelSpec) -> tuple[list[log_pb2.TableUpdate], list[memoryview]]:
    """The table part of an update record, and the bytes behind its ranges."""
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
    """Apply ``entry``. ``skipped``: buckets of tables that contain it already."""
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
