"""The call ``MakeRoom`` of a coordinator."""

from __future__ import annotations

from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire.convert.model import SHARD_MAP
from ps_server.shard.reshard.resharding import Resharding


async def make_room(resharding: Resharding, request: pb.MakeRoomRequest, _: object) -> pb.MakeRoomReply:
    """See ``Resharding.make_room``."""
    await resharding.make_room([SHARD_MAP.from_pb(message) for message in request.models])
    return pb.MakeRoomReply()
