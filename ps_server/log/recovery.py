"""Brings a shard's models back from its data directory: the newest snapshot, then every record behind it."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ps_protocol.errors import DamagedData
from ps_server.log.folder import DataFolder
from ps_server.log.manifest import ModelPart
from ps_server.log.models import RecoveredModel, new_model
from ps_server.log.replay import Replay
from ps_server.log.scan import End, Record, Scan
from ps_server.log.segments import Segment, SegmentFolder
from ps_server.log.snapshots import Snapshot, let_log_go_on, newest_snapshot
from ps_server.optimizers import Region, StateEntry, read_state

logger = logging.getLogger(__name__)

_TOLD_EVERY_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a data directory held."""

    models: dict[str, RecoveredModel]
    #: The last record.
    number: int
    end: End | None
    #: The incarnation that wrote that record; 0 when it is not in the log any more.
    writer: int = 0


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
    model.buckets = _put_buckets(snapshot, part, model)
    return model


def _put_buckets(snapshot: Snapshot, part: ModelPart, model: RecoveredModel) -> dict[int, npt.NDArray[np.int64]]:
    """By table, the last record that each bucket contains. Raises DamagedData.

    A table is then at the update of its oldest bucket: when it rose from there, the records say.
    """
    tables, updates = model.replica.tables, dict[int, int]()
    numbers = {table: np.full(held.spec.buckets, np.iinfo(np.int64).max) for table, held in enumerate(tables)}
    for table, here in enumerate(model.replica.layout.buckets):
        numbers[table][list(here)] = 0
    for number, group in snapshot.buckets(part):
        for table, contents in group:
            tables[table].put(contents)
            numbers[table][contents.bucket] = number
            updates[table] = min(contents.updates, updates.get(table, contents.updates))
    for table, oldest in updates.items():
        tables[table].updates = oldest
    return numbers
