"""The coordinator's calls to one shard: pause, catch up, write, restore, prepare, resume, and status of a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import grpc

from ps_protocol import times
from ps_protocol.cluster.model_status import ModelStatus
from ps_protocol.cluster.quiesced import ModelPosition
from ps_protocol.cluster.view import Member
from ps_protocol.model.spec import ShardMap
from ps_protocol.rpc.channel import OpenChannel, open_async_channel
from ps_protocol.rpc.client_errors import translate
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.v1 import shard_pb2_grpc
from ps_protocol.wire.convert.model import SHARD_MAP
from ps_protocol.wire.convert.shard import POSITION, ShardKey, model_status_from_pb
from ps_server.checkpoint.messages import part_from_pb
from ps_server.checkpoint.record import ShardPart


class ShardControl:
    """Used on the coordinator's event loop. Every call raises the shard's typed error, or Unavailable."""

    def __init__(self, member: Member, token: str = "", open_channel: OpenChannel = open_async_channel) -> None:
        """``token``: the one the shard joined with; without it the shard answers only calls that change nothing.

        ``open_channel`` opens a channel to an address, with the credentials of the coordinator.
        """
        self.member = member
        self._metadata = ShardKey(member.incarnation, token).metadata() if token else ()
        self._peer = f"{member} at {member.address}"
        self._channel = open_channel(member.address)
        self._stub = shard_pb2_grpc.ShardStub(self._channel)  # type: ignore[no-untyped-call]

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

    async def model_status(self, model: str, seconds: float = times.CALL_SECONDS, epoch: int = 0) -> ModelStatus:
        """The shard's view of ``model``, by the shard map of ``epoch``, 0: any; ModelMoved where that is over."""
        request = pb.GetModelRequest(model=model, epoch=epoch)
        return model_status_from_pb(await self._call("GetModel", request, seconds))

    async def pause(self, name: str, seconds: float) -> tuple[ModelPosition, ...]:
        """Decide about no push for ``seconds``; returns the positions of the models that have values."""
        reply = await self._call("Pause", pb.PauseRequest(quiesce=name, seconds=seconds))
        return POSITION.all_from_pb(reply.models)

    async def catch_up(self, name: str, targets: Iterable[ModelPosition], seconds: float) -> tuple[ModelPosition, ...]:
        """Catch up to ``targets`` and pause there, for ``seconds`` at most; returns the positions reached."""
        request = pb.CatchUpRequest(quiesce=name, models=POSITION.all_to_pb(targets), seconds=seconds)
        return POSITION.all_from_pb((await self._call("CatchUp", request, seconds)).models)

    async def write(
        self, name: str, targets: Iterable[ModelPosition], folder: Path, full_every: int
    ) -> tuple[tuple[ModelPosition, ...], list[ShardPart]]:
        """Catch up to ``targets`` and write a part of a checkpoint; returns the positions, and what was written."""
        models = POSITION.all_to_pb(targets)
        request = pb.CaptureRequest(quiesce=name, folder=str(folder), models=models, full_every=full_every)
        reply = await self._call("Capture", request, times.CHECKPOINT_SECONDS)
        return POSITION.all_from_pb(reply.models), [part_from_pb(part) for part in reply.parts]

    async def make_room(self, maps: Iterable[ShardMap], seconds: float) -> None:
        """Have memory and log for the next ``maps``; the shard goes on meanwhile."""
        await self._call("MakeRoom", pb.MakeRoomRequest(models=map(SHARD_MAP.to_pb, maps)), seconds)

    async def prepare(self, name: str, revision: int, maps: Iterable[ShardMap], seconds: float) -> None:
        """Fetch what the next ``maps`` need; the shard stays paused until a view says how the move was decided."""
        models = map(SHARD_MAP.to_pb, maps)
        await self._call(
            "StageReshard", pb.StageReshardRequest(quiesce=name, membership_revision=revision, models=models), seconds
        )

    async def restore(self, folder: Path) -> Sequence[str]:
        """Take the values of a checkpoint; returns the names of the models."""
        request = pb.RestoreRequest(folder=str(folder))
        return list((await self._call("Restore", request, times.CHECKPOINT_SECONDS)).models)

    async def resume(self, name: str, seconds: float = 1.0) -> None:
        """Continue to decide about pushes."""
        await self._call("Resume", pb.ResumeRequest(quiesce=name), seconds)

    async def _call(self, method: str, request: Any, seconds: float = times.CALL_SECONDS) -> Any:
        try:
            return await getattr(self._stub, method)(request, timeout=seconds, metadata=self._metadata)
        except grpc.RpcError as error:
            raise translate(error, self._peer) from error
