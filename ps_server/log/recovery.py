"""Brings a shard's models back from its data directory: the newest snapshot, then every record behind it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ps_protocol.errors import DamagedData, InvalidRequest
from ps_protocol.layout import Layout
from ps_protocol.model import Consistency, ShardMap
from ps_protocol.v1 import log_pb2
from ps_server.consistency import Tracker
from ps_server.log.folder import DataFolder
from ps_server.log.messages import OptionTexts, decode_load, decode_place, decode_update
from ps_server.log.scan import End, Record, Scan
from ps_server.log.segments import Segment, SegmentFolder
from ps_server.log.snapshots import ModelPart, Snapshot, let_log_go_on, newest_snapshot
from ps_server.optimizers import Block, Region, Replica, StateEntry, read_state

logger = logging.getLogger(__name__)

_TOLD_EVERY_SECONDS = 2.0


@dataclass(slots=True)
class RecoveredModel:
    """One model as it was; owned by whoever goes on with it."""

    shard_map: ShardMap
    replica: Replica
    tracker: Tracker
    initialised: bool = False
    #: Blocks that came from a snapshot, with the last record each contains.
    blocks: Sequence[tuple[Block, int]] = ()
    #: The last record that ``tracker`` contains.
    tracker_number: int = 0
    options: OptionTexts = field(default_factory=OptionTexts)
    #: Records that replaced values or state.
    loads: int = 0
    _gradients: Region | None = None

    @property
    def gradients(self) -> Region:
        """Memory for one update's gradients."""
        self._gradients = self._gradients or Region(self.replica.layout)
        return self._gradients


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a data directory held."""

    models: dict[str, RecoveredModel]
    #: The last record.
    number: int
    end: End | None
    #: The incarnation that wrote that record; 0 when it is not in the log any more.
    writer: int = 0


class Replay:
    """Applies records to models, in order. Used by recovery, and by a standby that follows another shard's log.

    A record is applied to every part that does not contain it yet, so the parts of a snapshot may be of different ages.
    """

    def __init__(self, shard: int, models: dict[str, RecoveredModel]) -> None:
        self._shard = shard
        self.models = models

    def take(self, number: int, message: bytes, payload: memoryview) -> None:
        """Apply one record. Raises InvalidRequest or DecodeError for one that no log of this version holds."""
        record = log_pb2.LogRecord.FromString(message)
        match record.WhichOneof("body"):
            case "place":
                shard_map = decode_place(record.place).shard_map
                self.models.setdefault(shard_map.spec.name, new_model(shard_map, self._shard))
            case "load":
                self._load(self._model(record.load.model), number, record.load, payload)
            case "update":
                self._update(self._model(record.update.model), number, record.update, payload)
            case other:
                raise InvalidRequest("a log record of an unknown kind", actual=str(other))

    def _load(self, model: RecoveredModel, number: int, record: log_pb2.LoadRecord, payload: memoryview) -> None:
        if all(number <= known for _, known in model.blocks) and model.blocks:
            return
        loaded = decode_load(record, payload, model.replica.layout)
        model.replica.load(loaded.region, loaded.entries)
        model.loads += 1
        model.initialised |= loaded.region is not None
        if loaded.tracker and number > model.tracker_number:
            model.tracker.restore(loaded.tracker)

    def _update(self, model: RecoveredModel, number: int, record: log_pb2.UpdateRecord, payload: memoryview) -> None:
        layout = model.replica.layout
        done = [block for block, known in model.blocks if number <= known]
        update = decode_update(record, payload, model.gradients, model.options)
        if len(done) < len(model.blocks) or not model.blocks:
            without = frozenset[int]().union(*(block.slices for block in done))
            buffers = not any(block.first >= layout.parameter_slices for block in done)
            model.replica.apply(update.step, without=without, buffers=buffers)
        if number > model.tracker_number:
            model.tracker.replay(update.pushes, update.version, is_round=update.is_round)

    def _model(self, name: str) -> RecoveredModel:
        if name not in self.models:
            raise InvalidRequest(f"the log holds records of model '{name}', which it never placed")
        return self.models[name]


def new_model(shard_map: ShardMap, shard: int) -> RecoveredModel:
    """A model that has just been placed."""
    return RecoveredModel(shard_map, Replica(Layout.of(shard_map, shard)), Tracker(Consistency()))


def recover(folder: DataFolder, *, log_goes_on: bool) -> Recovered:
    """Everything the directory holds. ``log_goes_on``: the log will be written all the time from now on.

    A record that was not finished is cut off, and said. Raises DamagedData; then nothing was changed.
    """
    began = time.monotonic()
    shard = folder.identity.shard
    snapshot = newest_snapshot(folder.snapshots)
    found = SegmentFolder(folder.log, sync=False).live()
    segments = _needed(found, snapshot, log_goes_on=log_goes_on)
    after = snapshot.number if snapshot else 0
    replay = Replay(
        shard,
        {part.shard_map.spec.name: _from_snapshot(snapshot, part, shard) for part in snapshot.models}
        if snapshot
        else {},
    )
    scan = Scan(segments, after)
    number, told = after, began
    for record in scan:
        _take(replay, record, folder)
        number = record.number
        if time.monotonic() - told > _TOLD_EVERY_SECONDS:
            told = time.monotonic()
            logger.info("shard %d: replaying its log, at record %d", shard, number)
    if snapshot and number < snapshot.through:
        raise DamagedData(
            f"the log of {folder.path} ends at record {number}, before its snapshot was whole",
            expected=f"record {snapshot.through}",
            actual=f"record {number}",
            remedy="nothing was changed: restore the data directory from a copy, or start with an empty one and a "
            "checkpoint",
        )
    for segment in found:
        if segment not in segments:
            segment.path.unlink()
    if snapshot and log_goes_on and not snapshot.log_goes_on:
        let_log_go_on(snapshot)
    if scan.end and scan.end.torn:
        logger.warning(
            "shard %d: record %d was not finished and is cut off: %s at byte %d; nobody had been told of it",
            shard,
            scan.end.number,
            scan.end.segment.path,
            scan.end.offset,
        )
    if number:
        logger.info(
            "shard %d: restored %d models from %s and %d records in %.1f s",
            shard,
            len(replay.models),
            f"a snapshot at {after}" if snapshot else "no snapshot",
            number - after,
            time.monotonic() - began,
        )
    # A log that was not written all the time may end before the snapshot does: then it goes on in a new segment.
    end = scan.end if scan.end and scan.end.number == number + 1 else None
    return Recovered(replay.models, number, end, scan.writer)


def _needed(segments: list[Segment], snapshot: Snapshot | None, *, log_goes_on: bool) -> list[Segment]:
    """The segments that count. Others are of a snapshot that was never whole, or of one before the newest."""
    after = snapshot.number if snapshot else 0
    if snapshot is None and not log_goes_on and segments and segments[0].first > 1:
        return []
    if snapshot is not None and not snapshot.log_goes_on:
        segments = [segment for segment in segments if segment.first <= snapshot.through]
    while len(segments) > 1 and segments[1].first <= after + 1:
        segments = segments[1:]
    return segments


def _take(replay: Replay, record: Record, folder: DataFolder) -> None:
    try:
        replay.take(record.number, record.message, record.payload)
    except Exception as error:
        raise DamagedData(
            f"record {record.number} in {folder.log} cannot be replayed: {type(error).__name__}: {error}",
            remedy="see whether the torch-ps or torch version has changed; nothing was changed",
        ) from error


def _from_snapshot(snapshot: Snapshot, part: ModelPart, shard: int) -> RecoveredModel:
    model = new_model(part.shard_map, shard)
    entries: list[StateEntry] = []
    region = Region(model.replica.layout)
    for place in part.blocks:
        data = snapshot.block_bytes(place)
        values = place.block.end - place.block.begin
        region.bytes[place.block.begin : place.block.end] = data[:values]
        entries += read_state(place.state, data[values:])
    model.replica.load(region, entries)
    model.tracker.restore(part.tracker)
    model.tracker_number, model.initialised = part.tracker_number, part.initialised
    model.blocks = [(place.block, place.number) for place in part.blocks]
    return model
