"""Between the positions of models that hold still and the messages that name them."""

from __future__ import annotations

from collections.abc import Iterable

from ps_protocol.cluster.quiesced import ModelPosition
from ps_protocol.v1 import shard_pb2 as pb


def positions_to_pb(positions: Iterable[ModelPosition]) -> list[pb.ModelCut]:
    """The wire form of ``positions``."""
    return [
        pb.ModelCut(
            model=each.model,
            accepted=[
                pb.WorkerSequence(worker=pb.WorkerId(rank=rank, incarnation=incarnation), sequence=sequence)
                for (rank, incarnation), sequence in each.accepted.items()
            ],
            phase=each.phase,
            clock=each.clock,
        )
        for each in positions
    ]


def positions_from_pb(messages: Iterable[pb.ModelCut]) -> list[ModelPosition]:
    """What ``messages`` name."""
    return [
        ModelPosition(
            each.model,
            {(a.worker.rank, a.worker.incarnation): a.sequence for a in each.accepted},
            each.phase,
            each.clock,
        )
        for each in messages
    ]
