"""Between log entries and what is written of them: a LogRecord message, and the bytes that follow it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from ps_protocol import convert
from ps_protocol.errors import InvalidRequest
from ps_protocol.frames import pieces_of
from ps_protocol.layout import Layout
from ps_protocol.model import Options
from ps_protocol.v1 import log_pb2, shard_pb2
from ps_server.consistency import Position, PushInfo, TrackerMemento, WorkerKey
from ps_server.log.row_messages import decode_steps, describe_buckets, encode_rows, encode_steps, read_buckets
from ps_server.log.updates import BucketsPut, Entry, Loaded, Placed, Prepared, RowsDropped, RowsLoaded, Switched, Update
from ps_server.optimizers import Region, Step, describe, read_state, taken, tensor_bytes


class EntryWriter:
    """Used by one log, from its lane. Equal options of successive updates are written as text once."""

    def __init__(self) -> None:
        self._options: tuple[Sequence[Options], list[str]] = ((), [])

    def encode(self, entry: Entry) -> tuple[bytes, list[memoryview]]:
        """The message of ``entry``, and the bytes that follow it as views of its memory."""
        match entry:
            case Placed(shard_map):
                record = log_pb2.LogRecord(place=log_pb2.PlaceRecord(shard_map=convert.shard_map_to_pb(shard_map)))
                return record.SerializeToString(), []
            case Loaded(model, region, entries, tracker):
                load = log_pb2.LoadRecord(
                    model=model,
                    with_region=region is not None,
                    state=describe(entries or ()),
                    with_state=entries is not None,
                    tracker=json.dumps(tracker.to_json()) if tracker else "",
                )
                pieces = [region.bytes] if region else []
                pieces += [tensor_bytes(tensor) for _, tensor in entries or ()]
                return log_pb2.LogRecord(load=load).SerializeToString(), pieces
            case Update():
                return self._update(entry)
            case Prepared():
                return _prepared(entry)
            case Switched(model, epoch):
                return log_pb2.LogRecord(switch=log_pb2.SwitchRecord(model=model, epoch=epoch)).SerializeToString(), []
            case RowsLoaded() | RowsDropped() | BucketsPut():
                record, pieces = encode_rows(entry)
                return record.SerializeToString(), pieces

    def _update(self, update: Update) -> tuple[bytes, list[memoryview]]:
        step = update.step
        if step.options is not self._options[0]:
            self._options = step.options, [convert.options_to_json(options) for options in step.options]
        tables, rows = encode_steps(step.tables)
        message = log_pb2.UpdateRecord(
            model=update.model,
            version=update.version,
            pushes=[_push_to_pb(push) for push in update.pushes],
            absent=sorted(step.absent),
            group_options=self._options[1],
            scale=step.scale,
            buffer_weight=step.buffer_weight,
            is_round=update.is_round,
            tables=tables,
        )
        layout = step.gradients.layout
        ranges = layout.ranges(step.absent, buffers=step.buffer_weight != 0)
        return log_pb2.LogRecord(update=message).SerializeToString(), pieces_of(step.gradients.bytes, ranges) + rows


def _prepared(entry: Prepared) -> tuple[bytes, list[memoryview]]:
    prepare = log_pb2.PrepareRecord(
        shard_map=convert.shard_map_to_pb(entry.shard_map),
        incoming=entry.incoming,
        state=describe(entry.entries),
        tracker=json.dumps(entry.tracker.to_json()) if entry.tracker else "",
        buckets=describe_buckets(entry.buckets),
    )
    pieces = [entry.values, *(tensor_bytes(tensor) for _, tensor in entry.entries)]
    pieces += [piece for _, contents in entry.buckets for piece in contents.pieces()]
    return log_pb2.LogRecord(prepare=prepare).SerializeToString(), pieces


def decode_prepare(record: log_pb2.PrepareRecord, payload: memoryview, shard: int) -> Prepared:
    """Its bytes are copied. Raises InvalidRequest when they are not as many as announced."""
    shard_map = convert.shard_map_from_pb(record.shard_map)
    slices = Layout.of(shard_map, shard).slices
    if any(index >= len(slices) for index in record.incoming):
        raise InvalidRequest("a slice comes that is not in the next shard map", actual=str(max(record.incoming)))
    size = sum(slices[index].end - slices[index].begin for index in record.incoming)
    values = memoryview(bytearray(taken(payload, 0, size)))
    tracker = TrackerMemento.from_json(json.loads(record.tracker)) if record.tracker else None
    rows = len(payload) - sum(bucket.payload_bytes for bucket in record.buckets)
    buckets = read_buckets(record.buckets, payload[rows:], shard_map.spec)
    state = read_state(record.state, payload[size:rows])
    return Prepared(shard_map, tuple(record.incoming), values, state, tracker, buckets)


def decode_place(record: log_pb2.PlaceRecord) -> Placed:
    """Raises InvalidRequest for a model this version does not know."""
    return Placed(convert.shard_map_from_pb(record.shard_map))


def decode_load(record: log_pb2.LoadRecord, payload: memoryview, layout: Layout) -> Loaded:
    """Raises InvalidRequest when the bytes are not as many as announced."""
    region = None
    if record.with_region:
        region = Region(layout)
        region.bytes[:] = taken(payload, 0, layout.region_bytes)
    entries = read_state(record.state, payload[layout.region_bytes * record.with_region :])
    tracker = TrackerMemento.from_json(json.loads(record.tracker)) if record.tracker else None
    return Loaded(record.model, region, entries if record.with_state else None, tracker)


def decode_update(
    record: log_pb2.UpdateRecord,
    payload: memoryview,
    gradients: Region,
    options: Mapping[tuple[str, ...], Sequence[Options]],
) -> Update:
    """The update, its bytes copied into ``gradients``. ``options`` holds group options by their texts.

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
        options[tuple(record.group_options)],
        record.scale,
        record.buffer_weight,
        decode_steps(record.tables, payload[position:], layout.shard_map.spec),
    )
    return Update(record.model, record.version, tuple(map(_push_from_pb, record.pushes)), record.is_round, step)


class OptionTexts(dict[tuple[str, ...], Sequence[Options]]):
    """Group options by their JSON texts, read once while they stay the same."""

    def __missing__(self, texts: tuple[str, ...]) -> Sequence[Options]:
        self.clear()
        self[texts] = tuple(map(convert.options_from_json, texts))
        return self[texts]


def _push_to_pb(push: PushInfo) -> log_pb2.LoggedPush:
    return log_pb2.LoggedPush(
        worker=shard_pb2.WorkerId(rank=push.worker.rank, incarnation=push.worker.incarnation),
        sequence=push.sequence,
        phase=push.position.phase,
        clock=push.position.clock,
        pulled_version=push.pulled_version,
    )


def _push_from_pb(push: log_pb2.LoggedPush) -> PushInfo:
    worker = WorkerKey(push.worker.rank, push.worker.incarnation)
    return PushInfo(worker, push.sequence, Position(push.phase, push.clock), push.pulled_version)
