"""Between the history of a job and the message that tells it."""

from __future__ import annotations

from ps_protocol.cluster.history import CheckpointFacts, Curve, Curves, JobHistory, PlacedVariable
from ps_protocol.text import printable
from ps_protocol.v1 import coordinator_pb2 as pb
from ps_protocol.wire.convert.cluster import event_from_pb, event_to_pb, status_from_pb, status_to_pb


def history_to_pb(history: JobHistory) -> pb.JobHistory:
    """The wire form of a job's history."""
    curves = history.curves
    return pb.JobHistory(
        status=status_to_pb(history.status),
        at_seconds=history.at_seconds,
        began_seconds=history.began_seconds,
        heartbeat_seconds=history.heartbeat_seconds,
        lease_seconds=history.lease_seconds,
        times=curves.times,
        curves=[
            pb.Curve(name=each.name, reported=each.reported, mean=each.mean, low=each.low, high=each.high)
            for each in curves.curves
        ],
        point_seconds=curves.point_seconds,
        generation=curves.generation,
        events=map(event_to_pb, history.events),
        checkpoints=[
            pb.CheckpointFacts(
                folder=each.folder, size_bytes=each.size_bytes, seconds=each.seconds, at_seconds=each.at_seconds
            )
            for each in history.checkpoints
        ],
        placement=[
            pb.PlacedVariable(
                model=each.model, name=each.name, amounts=dict(each.amounts), table=each.table, count=each.count
            )
            for each in history.placement
        ],
        wait_shares=[pb.WaitShares(rank=rank, shares=dict(each)) for rank, each in history.wait_shares.items()],
        table_growth=[
            pb.TableGrowth(model=model, table=table, rows_per_second=rate)
            for (model, table), rate in history.table_growth.items()
        ],
        configuration=dict(history.configuration),
    )


def history_from_pb(message: pb.JobHistory) -> JobHistory:
    """A job's history. Raises InvalidRequest for an unknown role or mode."""
    curves = tuple(
        Curve(printable(each.name), each.reported, tuple(each.mean), tuple(each.low), tuple(each.high))
        for each in message.curves
    )
    return JobHistory(
        status=status_from_pb(message.status),
        at_seconds=message.at_seconds,
        began_seconds=message.began_seconds,
        heartbeat_seconds=message.heartbeat_seconds,
        lease_seconds=message.lease_seconds,
        curves=Curves(tuple(message.times), curves, message.point_seconds, message.generation),
        events=tuple(map(event_from_pb, message.events)),
        checkpoints=tuple(
            CheckpointFacts(printable(each.folder), each.size_bytes, each.seconds, each.at_seconds)
            for each in message.checkpoints
        ),
        placement=tuple(
            PlacedVariable(printable(each.model), printable(each.name), dict(each.amounts), each.table, each.count)
            for each in message.placement
        ),
        wait_shares={
            each.rank: {printable(reason): share for reason, share in each.shares.items()}
            for each in message.wait_shares
        },
        table_growth={
            (printable(each.model), printable(each.table)): each.rows_per_second for each in message.table_growth
        },
        configuration={printable(name): printable(value) for name, value in message.configuration.items()},
    )
