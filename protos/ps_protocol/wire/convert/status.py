"""Between what a shard says of one model and the message that says it."""

from __future__ import annotations

from ps_protocol.cluster.model_status import ModelStatus, TableStatus, WorkerStatus
from ps_protocol.model.spec import Consistency, ShardMap
from ps_protocol.text import printable
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire.convert.enums import transport_from_pb, transport_to_pb
from ps_protocol.wire.convert.model import consistency_to_pb, shard_map_to_pb


def model_status_to_pb(status: ModelStatus, shard_map: ShardMap, consistency: Consistency) -> pb.ModelStatus:
    """The wire form of a model's status; it names the shard map and the mode that the shard has, too."""
    return pb.ModelStatus(
        shard_map=shard_map_to_pb(shard_map),
        version=status.version,
        initialised=status.initialised,
        consistency=consistency_to_pb(consistency),
        clocks=[
            pb.WorkerClock(
                rank=each.rank,
                incarnation=each.incarnation,
                phase=each.phase,
                clock=each.clock,
                last_sequence=each.last_sequence,
                transport=transport_to_pb(each.transport),
                has_values=each.has_values,
            )
            for each in status.clocks
        ],
        staleness_counts=status.staleness_counts,
        outcomes=status.outcomes,
        parked_pulls=status.parked_pulls,
        assigned=status.assigned,
        assigned_checksums=status.assigned_checksums,
        learning_rates=status.learning_rates,
        tables=[
            pb.TableStatus(
                name=each.name,
                rows=each.rows,
                waiting=each.waiting,
                size_bytes=each.size_bytes,
                updates=each.updates,
                inserted=each.inserted,
                expired=each.expired,
                evicted=each.evicted,
                learning_rate=each.learning_rate,
            )
            for each in status.tables
        ],
    )


def model_status_from_pb(message: pb.ModelStatus) -> ModelStatus:
    """A model's status."""
    return ModelStatus(
        epoch=message.shard_map.epoch,
        version=message.version,
        initialised=message.initialised,
        clocks=tuple(
            WorkerStatus(
                each.rank,
                each.incarnation,
                each.phase,
                each.clock,
                each.last_sequence,
                transport_from_pb(each.transport),
                each.has_values,
            )
            for each in message.clocks
        ),
        staleness_counts=tuple(message.staleness_counts),
        outcomes={printable(name): count for name, count in message.outcomes.items()},
        parked_pulls=message.parked_pulls,
        tables=tuple(
            TableStatus(
                name=printable(each.name),
                rows=each.rows,
                waiting=each.waiting,
                size_bytes=each.size_bytes,
                updates=each.updates,
                inserted=each.inserted,
                expired=each.expired,
                evicted=each.evicted,
                learning_rate=each.learning_rate if each.HasField("learning_rate") else None,
            )
            for each in message.tables
        ),
        assigned=message.assigned,
        assigned_checksums=dict(message.assigned_checksums),
        learning_rates=tuple(message.learning_rates),
    )
