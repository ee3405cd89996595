"""Brings a simulated shard back from its disk: the snapshot, then the records that the real Scan finds behind it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from ps_protocol.errors import PsError
from ps_protocol.layout import Layout
from ps_protocol.model import Consistency, ShardMap
from ps_protocol.v1 import log_pb2
from ps_server.consistency import Tracker
from ps_server.log.messages import OptionTexts, decode_load, decode_place, decode_update
from ps_server.log.scan import Record
from ps_server.optimizers import Region
from simulation.disk import Disk, Mapped, Scan, place_of
from simulation.scheduler import Violation

PARTS = 2
"""Values of a shard: 64-bit sums of what was pushed to it. More than one, so that a snapshot can be of two ages."""


@dataclass
class SimReplica:
    """What a shard holds of the model: its values stand for parameters, adding stands for the optimizer's step."""

    shard_map: ShardMap
    layout: Layout
    tracker: Tracker
    values: list[int] = field(default_factory=lambda: [0] * PARTS)
    initialised: bool = False

    @cached_property
    def gradients(self) -> Region:
        """Memory for one update."""
        return Region(self.layout)


@dataclass(slots=True)
class Restored:
    """What a disk held."""

    replica: SimReplica | None
    number: int
    end: tuple[int, int] | None


@dataclass(slots=True)
class _Ages:
    """The last record that each part of a snapshot contains."""

    tracker: int = 0
    parts: list[int] = field(default_factory=lambda: [0] * PARTS)


def new_replica(shard_map: ShardMap, shard: int) -> SimReplica:
    """A model that has just been placed."""
    return SimReplica(shard_map, Layout.of(shard_map, shard), Tracker(Consistency()))


def restore(disk: Disk, shard: int, shard_map: ShardMap | None, *, log_goes_on: bool) -> Restored:
    """The state on ``disk``, by the rules of ps_server.log.recover. Raises Violation for a damaged log.

    A snapshot does not hold the shard map here; ``shard_map`` is the one it was taken of.
    """
    snapshot, replica, ages = disk.snapshot, None, _Ages()
    segments = disk.segments
    if snapshot is None and not log_goes_on:
        # A snapshot that never became whole was the first: what was logged beside it begins nowhere.
        segments = []
    if snapshot is not None:
        if shard_map is None:
            raise Violation("a snapshot of a model that was never placed")
        if not snapshot.log_goes_on:
            segments = [segment for segment in segments if segment.first <= snapshot.through]
        replica = new_replica(shard_map, shard)
        replica.tracker.restore(type(snapshot.tracker).from_json(snapshot.tracker.to_json()))
        replica.values = [value for _, value in snapshot.parts]
        replica.initialised = snapshot.initialised
        ages = _Ages(snapshot.tracker_number, [number for number, _ in snapshot.parts])
    after = number = snapshot.number if snapshot else 0
    # What a snapshot has made superfluous and nobody has cut yet may have gaps.
    while len(segments) > 1 and segments[1].first <= after + 1:
        segments = segments[1:]
    with Mapped(segments) as mapped:
        scan = Scan(mapped.segments, after)
        try:
            for record in scan:
                replica = _take(replica, record, ages, shard)
                number = record.number
        except PsError as error:
            raise Violation(f"shard {shard} finds its log damaged after a crash: {error}") from error
        end = place_of(scan.end) if scan.end and scan.end.number == number + 1 else None
    if snapshot and number < snapshot.through:
        raise Violation(f"shard {shard}: the log ends at {number}, its snapshot was whole at {snapshot.through}")
    disk.segments = segments
    if snapshot and log_goes_on:
        snapshot.log_goes_on = True
    return Restored(replica, number, end)


def _take(replica: SimReplica | None, record: Record, ages: _Ages, shard: int) -> SimReplica:
    message = log_pb2.LogRecord.FromString(record.message)
    match message.WhichOneof("body"):
        case "place":
            return replica or new_replica(decode_place(message.place).shard_map, shard)
        case "load":
            assert replica is not None
            loaded = decode_load(message.load, record.payload, replica.layout)
            if loaded.region is not None and any(record.number > age for age in ages.parts):
                replica.values = values_in(loaded.region)
                replica.initialised = True
        case _:
            assert replica is not None
            region = replica.gradients
            update = decode_update(message.update, record.payload, region, OptionTexts())
            for part, value in enumerate(values_in(region)):
                if record.number > ages.parts[part]:
                    replica.values[part] += value
            if record.number > ages.tracker:
                replica.tracker.replay(update.pushes, update.version, is_round=update.is_round)
    return replica


def values_in(region: Region) -> list[int]:
    """The values a region carries."""
    return [int.from_bytes(region.bytes[8 * part : 8 * part + 8], "little") for part in range(PARTS)]


def write_values(values: list[int], region: Region) -> None:
    """Put ``values`` into a region."""
    for part, value in enumerate(values):
        region.bytes[8 * part : 8 * part + 8] = value.to_bytes(8, "little")
