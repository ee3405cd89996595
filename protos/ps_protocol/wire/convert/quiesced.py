"""Between the positions of models that hold still and the messages that name them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ps_protocol.cluster.quiesced import ModelPosition
from ps_protocol.v1 import shard_pb2 as pb


def positions_to_pb(positions: Iterable[ModelPosition]) -> list[pb.ModelCut]:
    """The wire form of ``positions``."""
    return [
        pb.ModelCut(
            model=each.model,
            accepted=_sequences_to_pb(each.accepted),
            phase=each.phase,
            clock=each.clock,
            open=_sequences_to_pb(each.open),
        )
        for each in positions
    ]


def positions_from_pb(messages: Iterable[pb.ModelCut]) -> list[ModelPosition]:
    """What ``messages`` name."""
    return [
        ModelPosition(
            each.model,
            _sequences_from_pb(each.accepted),
            each.phase,
            each.clock,
            _sequences_from_pb(each.open),
        )
        for each in messages
    ]


def _sequences_to_pb(sequences: Mapping[tuple[int, int], int]) -> list[pb.WorkerSequence]:
    return [
        pb.WorkerSequence(worker=pb.WorkerId(rank=rank, incarnation=incarnation), sequence=sequence)
        for (rank, incarnation), sequence in sequences.items()
    ]


def _sequences_from_pb(messages: Iterable[pb.WorkerSequence]) -> dict[tuple[int, int], int]:
    return {(each.worker.rank, each.worker.incarnation): each.sequence for each in messages}
