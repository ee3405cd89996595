"""Calls from this shard to the others of its job, over channels that stay open."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc

from ps_protocol.cluster.view import ClusterView, Role
from ps_protocol.errors import InternalError, PsError, Unavailable
from ps_protocol.logs import EventLogger
from ps_protocol.rpc.channel import OpenChannel
from ps_protocol.rpc.client_errors import translate
from ps_protocol.times import CONNECT_SECONDS, SHARD_CALL_SECONDS
from ps_protocol.v1 import shard_pb2 as pb
from ps_server.consistency import Position
from ps_server.consistency.tracker_state import position_to_pb
from ps_server.shard import times

logger = EventLogger(__name__)


_GET_MODEL = "/ps_protocol.v1.Shard/GetModel"
_METHOD = "/ps_protocol.v1.Shard/GetRoundNorm"


class ShardPeers:
    """Owned by a Registry, on the shard's event loop."""

    def __init__(self, view: Callable[[], ClusterView], open_channel: OpenChannel) -> None:
        """``view``: the newest of the cluster. ``open_channel`` opens a channel with the credentials of this shard."""
        self._view = view
        self._open_channel = open_channel
        #: By number of the shard: its address, and the channel there.
        self._channels: dict[int, tuple[str, grpc.aio.Channel]] = {}

    async def round_norm(self, shard: int, model: str, epoch: int, position: Position) -> float:
        """What ``shard`` adds to the squared norm of a round. Returns when that is known, also of a shard that is away.

        A caller whose shard map is over gets no answer: it is cancelled when it has the next one.
        """
        request = pb.RoundNormRequest(model=model, epoch=epoch, position=position_to_pb(position))
        told = ""
        while True:
            try:
                if (found := await self._asked(shard, request)) is not None:
                    return found
            except PsError as error:
                if told != type(error).__name__:
                    told = type(error).__name__
                    logger.warning(
                        "model.waits", "model '%s' waits for the gradient norm of shard %d: %s", model, shard, error
                    )
                await asyncio.sleep(times.RETRY_SECONDS)

    async def _asked(self, shard: int, request: pb.RoundNormRequest) -> float | None:
        channel = await self.channel(shard)
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(_METHOD)
        try:
            data = await call(request.SerializeToString(), timeout=SHARD_CALL_SECONDS)
        except grpc.RpcError as failed:
            raise translate(failed, self.name(shard)) from failed
        reply = pb.RoundNormReply.FromString(data)
        if not reply.HasField("squared_norm"):
            return None
        if reply.squared_norm < 0.0:
            raise InternalError(f"shard {shard} has a negative squared norm", actual=str(reply.squared_norm))
        return reply.squared_norm

    async def connect(self, shard: int, model: str) -> None:
        """Have a connection to ``shard``, which has ``model``, for a call that is to come. Raises what it answers."""
        channel = await self.channel(shard)
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(_GET_MODEL)
        try:
            await call(pb.GetModelRequest(model=model).SerializeToString(), timeout=CONNECT_SECONDS)
        except grpc.RpcError as failed:
            raise translate(failed, self.name(shard)) from failed

    def name(self, shard: int) -> str:
        """Of a shard, for messages."""
        return f"shard {shard} at {self._channels[shard][0]}" if shard in self._channels else f"shard {shard}"

    async def channel(self, shard: int) -> grpc.aio.Channel:
        """To the process that is ``shard`` now; it stays open. Raises Unavailable for one that is away."""
        member = self._view().live(Role.SHARD).get(shard)
        if member is None:
            raise Unavailable(f"shard {shard} is away", shard=str(shard), remedy="start it again")
        address, channel = self._channels.get(shard, ("", None))
        if channel is None or address != member.address:
            if channel is not None:
                await channel.close()
            channel = self._open_channel(member.address)
            self._channels[shard] = member.address, channel
        return channel

    async def close(self) -> None:
        """Close all channels; others are opened when they are needed."""
        channels, self._channels = self._channels, {}
        for _, channel in channels.values():
            await channel.close()
