"""The key that the coordinator shows to a shard, as metadata of its calls."""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.message import DecodeError

from ps_protocol.errors import InvalidRequest
from ps_protocol.rpc.channel import SHARD_KEY
from ps_protocol.v1 import shard_pb2 as pb


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
