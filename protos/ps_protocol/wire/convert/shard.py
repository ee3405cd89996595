"""Between what shards report and announce beside their step streams, and the messages for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from ps_protocol.cluster.model_status import ModelPosition, ModelStatus, TableStatus, WorkerStatus
from ps_protocol.errors import InvalidRequest
from ps_protocol.model.payload_headers import BucketHeader, StateHeader
from ps_protocol.rpc.channel import SHARD_KEY
from ps_protocol.text import printable
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire.convert.fields import GIVEN, Converter, Special
from ps_protocol.wire.convert.step import transport_from_pb, transport_to_pb


def _sequences_to_pb(sequences: Mapping[tuple[int, int], int]) -> list[pb.WorkerSequence]:
    return [
        pb.WorkerSequence(worker=pb.WorkerId(rank=rank, incarnation=incarnation), sequence=sequence)
        for (rank, incarnation), sequence in sequences.items()
    ]


_SEQUENCES = Special(
    _sequences_to_pb,
    lambda messages: {(each.worker.rank, each.worker.incarnation): each.sequence for each in messages},
)

POSITION = Converter(ModelPosition, pb.ModelCut, accepted=_SEQUENCES, open=_SEQUENCES)
STATE_HEADER = Converter(StateHeader, pb.StateTensor, slice_index=Special(int, int, "slice"))
BUCKET_HEADER = Converter(BucketHeader, pb.Bucket)
#: The message has the shard map and the mode of the shard, too.
MODEL_STATUS = Converter(
    ModelStatus,
    pb.ModelStatus,
    printable,
    epoch=GIVEN,
    clocks=Converter(WorkerStatus, pb.WorkerClock, transport=Special(transport_to_pb, transport_from_pb)),
    tables=Converter(TableStatus, pb.TableStatus, printable),
)


def model_status_from_pb(message: pb.ModelStatus) -> ModelStatus:
    """The status of a model on a shard."""
    return MODEL_STATUS.from_pb(message, epoch=message.shard_map.epoch)


@dataclass(frozen=True, slots=True)
class ShardKey:
    """Names one process of a shard, and proves that its sender is the coordinator that this process joined."""

    incarnation: int
    #: The token of its join; only that shard and the coordinator know it.
    token: str

    def metadata(self) -> tuple[tuple[str, bytes], ...]:
        """Of a call."""
        message = pb.ShardKey(incarnation=self.incarnation, token=self.token)
        return ((SHARD_KEY, message.SerializeToString()),)

    @classmethod
    def read(cls, value: str | bytes) -> ShardKey:
        """Raises InvalidRequest for a value that is no key."""
        try:
            key = pb.ShardKey.FromString(value if isinstance(value, bytes) else value.encode())
        except DecodeError as error:
            raise InvalidRequest(f"the metadata {SHARD_KEY} is no ShardKey") from error
        return cls(key.incarnation, key.token)
