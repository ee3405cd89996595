"""Brings a shard's models back from its data directory: the newest snapshot, then every record behind it."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ps_protocol.errors import DamagedData
from ps_protocol.logs import EventLogger
from ps_server.log.folder import DataFolder
from ps_server.log.head import REMEDY, HeadFile, LogHead
from ps_server.log.record import END_BYTES, HEADER_BYTES
from ps_server.log.scan import End, Record, Scan
from ps_server.log.segments import LogSegment, SegmentFolder
from ps_server.log.snapshots import ModelPart, Snapshot, let_log_go_on, newest_snapshot
from ps_server.optimizers.state import StateEntry, read_state
from ps_server.state.apply import Replay
from ps_server.state.model_state import ModelState, new_model
from ps_server.state.region import Region
from ps_server.tables import SavedBuckets
from ps_server.tables.bucket_contents import BucketChanges
from ps_server.tables.row_memory import RowMemory

logger = EventLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a data directory held."""

    models: dict[str, ModelState]
    #: The last record.
    number: int
    end: End | None
    #: Records up to this one are in the snapshot; those after it, which were replayed, take so many bytes.
    saved_number: int = 0
    unsaved_bytes: int = 0
    #: The incarnation that wrote that record; 0 when it is not in the log any more.
    writer: int = 0
    #: Every push that was acknowledged by who wrote here must be in it.
    promised: bool = False


_ELSEWHERE = np.iinfo(np.int64).max


class _HalfDone(Exception):
    """A step of ``model`` raised in the middle: everything is read again, with copies before its steps."""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.model = model


def recover(folder: DataFolder, *, log_goes_on: bool, row_memory: RowMemory | None = None) -> Recovered:
    """Recover everything in ``folder``. ``log_goes_on``: the log will be written all the time from now on.
    ``row_memory``: for the rows of tables.

    A step that raises is skipped, and its model is as before it. Raises as ``_recover``.
    """
    careful: set[str] = set()
    while True:
        try:
            return _recover(folder, careful, log_goes_on=log_goes_on, row_memory=row_memory)
        except _HalfDone as half:
            logger.warning("recovery", "a step of model '%s' raised in a replay, which begins again", half.model)
            careful.add(half.model)


def _recover(
    folder: DataFolder, careful: Collection[str], *, log_goes_on: bool, row_memory: RowMemory | None
) -> Recovered:
    """Recover everything in ``folder``. ``careful``: models whose steps may raise.

    A record that was not finished is cut off, with a log message. Raises DamagedData; then nothing was changed.
    """
    began = time.monotonic()
    shard = folder.identity.shard
    head = HeadFile(folder.log).read() if folder.identity.log else None
    snapshot = newest_snapshot(folder.snapshots, folder.identity.snapshot)
    found = SegmentFolder(folder.log, sync=False).live()
    _check_segment(head, found, folder)
    segments = _needed(found, snapshot, log_goes_on=log_goes_on)
    after = snapshot.number if snapshot else 0
    replay = Replay(
        shard,
        {part.shard_map.spec.name: _from_snapshot(snapshot, part, shard, row_memory) for part in snapshot.models}
        if snapshot
        else {},
        careful,
        row_memory,
    )
    scan = Scan(segments, after, in_order=head is not None and head.same_boot)
    number, told = after, began
    for record in scan:
        _take(replay, record, folder, careful)
        number = record.number
        if time.monotonic() - told > 2.0:
            told = time.monotonic()
            logger.info("recovery", "shard %d: replaying its log, at record %d", shard, number)
    if head and number > after:
        _say_torch(head, shard, number - after)
    if snapshot and number < snapshot.through:
        raise DamagedData(
            f"the log of {folder.path} ends at record {number}, before its snapshot was whole",
            expected=f"record {snapshot.through}",
            actual=f"record {number}",
            remedy=REMEDY,
        )
    if head and number < head.number:
        _too_short(head, folder, number)
    _forget(found, segments, head, folder)
    if snapshot and log_goes_on and not snapshot.log_goes_on:
        let_log_go_on(snapshot)
    if scan.end and scan.end.torn:
        _cut_off(scan.end, head, shard)
    if number:
        logger.info(
            "recovery",
            "shard %d: restored %d models from %s and %d records in %.1f s",
            shard,
            len(replay.models),
            f"a snapshot at {after}" if snapshot else "no snapshot",
            number - after,
            time.monotonic() - began,
        )
    # A log that was not written all the time may end before the snapshot does: then it continues in a new segment.
    end = scan.end if scan.end and scan.end.number == number + 1 else None
    promised = head is not None and head.promises
    return Recovered(replay.models, number, end, after, scan.behind_bytes, scan.writer, promised)


def _say_torch(head: LogHead, shard: int, records: int) -> None:
    """Warn of a replay under another version of torch; decision 24 explains why it is not refused."""
    if head.torch != torch.__version__:
        logger.warning(
            "recovery",
            "shard %d: the last %d records were applied with torch %s and are replayed with torch %s: parameters may "
            "differ in the last digits from those served before; to have the same ones, start the shard with torch %s "
            "and stop it: that leaves a snapshot, and nothing is replayed after it",
            shard,
            records,
            head.torch,
            torch.__version__,
            head.torch,
        )


def _check_segment(head: LogHead | None, found: list[LogSegment], folder: DataFolder) -> None:
    """Raises DamagedData when the segment that was in use is missing, or shorter than it was."""
    if head is None or not head.segment:
        return
    path = folder.log / f"{head.segment:020}.log"
    sizes = [segment.size_bytes for segment in found if segment.first == head.segment]
    if not sizes or sizes[0] < head.segment_bytes:
        raise DamagedData(
            f"the segment {path} of the log is " + (f"cut at byte {sizes[0]}" if sizes else "missing"),
            expected=f"a file of {head.segment_bytes} bytes: it was in use when the shard last began one",
            actual=f"{sizes[0]} bytes" if sizes else "no such file",
            remedy=REMEDY,
        )


def _too_short(head: LogHead, folder: DataFolder, number: int) -> None:
    """Raises DamagedData, unless the end was lost with the power, which was not promised to be survived."""
    error = DamagedData(
        f"the log in {folder.log} ends at record {number}, and was longer before",
        expected=f"record {head.number}",
        actual=f"record {number}",
        remedy=REMEDY,
    )
    if head.promises:
        raise error
    logger.warning(
        "recovery.cut",
        "%s. The machine was started again since, and there is no --fsync: this may be what that took",
        error,
    )


def _forget(found: list[LogSegment], kept: list[LogSegment], head: LogHead | None, folder: DataFolder) -> None:
    """Remove the segments that do not count."""
    gone = [segment for segment in found if segment not in kept]
    if head and any(segment.first == head.segment for segment in gone):
        # First, or the next start would miss it.
        last = kept[-1] if kept else None
        first, size_bytes = (last.first, last.size_bytes) if last else (0, 0)
        HeadFile(folder.log).write(replace(head, segment=first, segment_bytes=size_bytes))
    for segment in gone:
        segment.path.unlink()


def _cut_off(end: End, head: LogHead | None, shard: int) -> None:
    """Log which record counts as never finished, and erase what could be misread as a record."""
    descriptor = os.open(end.segment.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        for mark in end.marks:
            os.pwrite(descriptor, bytes(END_BYTES), mark)
        for offset in (end.offset, *end.later):
            os.pwrite(descriptor, bytes(HEADER_BYTES), offset)
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)
    if head is not None and head.same_boot:
        why = "its end was never written, as when a process is killed while it writes"
    else:
        why = (
            "it was never finished, or damaged later: which, is unknown after a new start of the machine; a worker "
            "that had it acknowledged will be refused"
        )
    place = f"{end.segment.path} at byte {end.offset}"
    logger.warning(
        "recovery.cut", "shard %d: record %d is not whole and is cut off: %s; %s", shard, end.number, place, why
    )


def _needed(segments: list[LogSegment], snapshot: Snapshot | None, *, log_goes_on: bool) -> list[LogSegment]:
    """The segments that count. Others are of a snapshot that was never whole, or of one before the newest."""
    after = snapshot.number if snapshot else 0
    if snapshot is None and not log_goes_on and segments and segments[0].first > 1:
        return []
    if snapshot is not None and not snapshot.log_goes_on:
        segments = [segment for segment in segments if segment.first <= snapshot.through]
    while len(segments) > 1 and segments[1].first <= after + 1:
        segments = segments[1:]
    return segments


def _take(replay: Replay, record: Record, folder: DataFolder, careful: Collection[str]) -> None:
    try:
        replay.take(record.number, record.message, record.payload)
    except Exception as error:
        if replay.half_done is not None and replay.half_done not in careful:
            raise _HalfDone(replay.half_done) from error
        raise DamagedData(
            f"record {record.number} in {folder.log} cannot be replayed: {type(error).__name__}: {error}",
            remedy="see whether the torch-ps or torch version has changed; nothing was changed",
        ) from error


def _from_snapshot(snapshot: Snapshot, part: ModelPart, shard: int, row_memory: RowMemory | None) -> ModelState:
    model = new_model(part.shard_map, shard, row_memory)
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


def _ahead(found: Iterator[T]) -> Iterator[T]:
    """The same, each one found in another thread while the one before is used."""
    with ThreadPoolExecutor(1, "snapshot") as reader:
        coming = reader.submit(next, found, None)
        while (one := coming.result()) is not None:
            coming = reader.submit(next, found, None)
            yield one


def _put_buckets(snapshot: Snapshot, part: ModelPart, model: ModelState) -> dict[int, npt.NDArray[np.int64]]:
    """By table, the last record that each bucket contains. Raises DamagedData.

    A table is then at the update of its oldest bucket; the records of the log take it further.
    """
    tables = model.replica.tables
    numbers = {table: np.full(held.spec.buckets, _ELSEWHERE) for table, held in enumerate(tables)}
    updates = {table: np.full(held.spec.buckets, -1) for table, held in enumerate(tables)}
    for table, here in enumerate(model.replica.layout.buckets):
        numbers[table][list(here)] = 0
    for number, group in _ahead(snapshot.buckets(part)):
        for table, saved in group:
            contents = saved.contents if isinstance(saved, BucketChanges) else saved
            if numbers[table][contents.bucket] == _ELSEWHERE:
                continue  # An earlier part may have buckets that have left since.
            if isinstance(saved, BucketChanges):
                tables[table].put_changes(saved)
            else:
                tables[table].put(saved)
            numbers[table][contents.bucket] = number
            updates[table][contents.bucket] = contents.updates
    for table, found in updates.items():
        held = tables[table]
        put = np.flatnonzero(found >= 0)
        if put.size:
            held.updates = int(found[put].min())
        held.saved = SavedBuckets(held.spec.buckets, part.rows)
        for bucket in put:
            held.saved.note(held, int(bucket), int(found[bucket]))
    return numbers
