"""Pauses all shards at one position of the job, for checkpoints and moves, and calls them while they are paused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc

from ps_protocol import retry, times
from ps_protocol.cluster.model_status import ModelPosition, ModelStatus
from ps_protocol.cluster.view import Member, Role
from ps_protocol.cluster.weights import PublishAsk, WeightsPiece
from ps_protocol.errors import NotReady, Unavailable
from ps_protocol.model.spec import ShardMap
from ps_protocol.rpc.channel import OpenChannel, open_async_channel
from ps_protocol.rpc.client_errors import translate
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.v1 import shard_pb2_grpc
from ps_protocol.wire.convert.model import SHARD_MAP
from ps_protocol.wire.convert.shard import POSITION, ShardKey, model_status_from_pb
from ps_server.checkpoint.messages import part_from_pb
from ps_server.checkpoint.record import ShardPart
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.publications import PublishPlan

T = TypeVar("T")

_CAPTURE, _CAPTURE_REPLIES = "/ps_protocol.v1.Shard/Capture", 2
_TRIES = 6


class Busy:
    """Used on the coordinator's event loop: one thing at a time changes the job, and one at a time pauses its shards.

    As a lock it is both, for what pauses shards to change something: a batch of a move, a mode, a restore. A checkpoint
    has ``job`` until it is written, but ``pause`` for its cut alone. Versions of weights, which change nothing, take
    ``pause`` alone: they are published while a checkpoint is being written.
    """

    def __init__(self) -> None:
        #: Taken first.
        self.job = asyncio.Lock()
        self.pause = asyncio.Lock()

    def locked(self) -> bool:
        """Whether something changes the job, or writes a checkpoint of it."""
        return self.job.locked()

    async def acquire(self) -> None:
        """Take both."""
        await self.job.acquire()
        try:
            await self.pause.acquire()
        except BaseException:
            self.job.release()
            raise

    def release(self) -> None:
        """Give both back."""
        self.pause.release()
        self.job.release()

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(self, *_: object) -> None:
        self.release()


class ShardControl:
    """Used on the coordinator's event loop. Every call raises the shard's typed error, or Unavailable."""

    def __init__(self, member: Member, token: str = "", open_channel: OpenChannel = open_async_channel) -> None:
        """``token``: the one the shard joined with; without it the shard answers only read-only calls.

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
        """The shard's status of ``model``. Raises ModelMoved if the shard map of ``epoch`` (0: any) is out of date."""
        request = pb.GetModelRequest(model=model, epoch=epoch)
        return model_status_from_pb(await self._call("GetModel", request, seconds))

    async def pause(self, name: str, seconds: float) -> tuple[ModelPosition, ...]:
        """Pause decisions about pushes for ``seconds``; returns the positions of the models that have values."""
        reply = await self._call("Pause", pb.PauseRequest(quiesce=name, seconds=seconds))
        return POSITION.all_from_pb(reply.models)

    async def catch_up(self, name: str, targets: Iterable[ModelPosition], seconds: float) -> tuple[ModelPosition, ...]:
        """Catch up to ``targets`` and pause there, for ``seconds`` at most; returns the positions reached."""
        request = pb.CatchUpRequest(quiesce=name, models=POSITION.all_to_pb(targets), seconds=seconds)
        return POSITION.all_from_pb((await self._call("CatchUp", request, seconds)).models)

    async def write(
        self,
        name: str,
        targets: Iterable[ModelPosition],
        folder: Path,
        full_every: int,
        resumed: Callable[[], object],
    ) -> tuple[tuple[ModelPosition, ...], list[ShardPart]]:
        """Catch up to ``targets`` and write a part of a checkpoint; returns the positions and the written part.

        ``resumed`` is called once the shard trains on, while it writes.
        """
        models = POSITION.all_to_pb(targets)
        request = pb.CaptureRequest(quiesce=name, folder=str(folder), models=models, full_every=full_every)
        method: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(_CAPTURE)
        call = method(request.SerializeToString(), timeout=times.CHECKPOINT_SECONDS, metadata=self._metadata)
        replies = []
        try:
            while isinstance(data := await call.read(), bytes):
                replies.append(pb.CaptureReply.FromString(data))
                resumed()
        except grpc.RpcError as error:
            raise translate(error, self._peer) from error
        finally:
            call.cancel()
        if len(replies) != _CAPTURE_REPLIES:
            raise Unavailable(f"{self._peer} did not say what it has written", remedy="try again")
        cut, written = replies
        return POSITION.all_from_pb(cut.models), [part_from_pb(part) for part in written.parts]

    async def take_piece(
        self, name: str, targets: Iterable[ModelPosition], ask: PublishAsk, plan: PublishPlan
    ) -> tuple[ModelPosition, ...]:
        """Catch up to ``targets`` and hold a piece of a version; returns the positions. The shard writes it."""
        models = POSITION.all_to_pb(targets)
        request = pb.TakePieceRequest(quiesce=name, models=models, name=ask.name, number=plan.number, kept=plan.kept)
        return POSITION.all_from_pb((await self._call("TakePiece", request, times.CALL_SECONDS)).models)

    async def finish_piece(self, ask: PublishAsk, number: int) -> WeightsPiece:
        """The piece that was taken, once it is written."""
        request = pb.FinishPieceRequest(name=ask.name, number=number)
        reply = await self._call("FinishPiece", request, times.CHECKPOINT_SECONDS)
        shard = self.member
        return WeightsPiece(shard.index, shard.incarnation, reply.directory, reply.checksum, reply.size_bytes)

    async def keep_pieces(self, ask: PublishAsk, plan: PublishPlan) -> None:
        """Remove the pieces of versions that are not kept; the shard holds nothing of the model any more."""
        request = pb.KeepPiecesRequest(name=ask.name, kept=plan.kept, newest=plan.number - 1)
        await self._call("KeepPieces", request)

    async def make_room(self, maps: Iterable[ShardMap], seconds: float) -> None:
        """Prepare memory and log for the next ``maps``; the shard continues meanwhile."""
        await self._call("MakeRoom", pb.MakeRoomRequest(models=map(SHARD_MAP.to_pb, maps)), seconds)

    async def prepare(self, name: str, revision: int, maps: Iterable[ShardMap], seconds: float) -> None:
        """Fetch the slices of the next ``maps``; the shard stays paused until a view contains the decision."""
        models = map(SHARD_MAP.to_pb, maps)
        await self._call(
            "StageReshard", pb.StageReshardRequest(quiesce=name, membership_revision=revision, models=models), seconds
        )

    async def restore(self, name: str, folder: Path) -> Sequence[str]:
        """Restore the values of a checkpoint; returns the names of the models."""
        request = pb.RestoreRequest(folder=str(folder), quiesce=name)
        return list((await self._call("Restore", request, times.CHECKPOINT_SECONDS)).models)

    async def resume(self, name: str, seconds: float = 1.0, revision: int = 0) -> None:
        """Resume decisions about pushes, once the shard has the view of ``revision``."""
        await self._call("Resume", pb.ResumeRequest(quiesce=name, membership_revision=revision), seconds)

    async def _call(self, method: str, request: Any, seconds: float = times.CALL_SECONDS) -> Any:
        try:
            return await getattr(self._stub, method)(request, timeout=seconds, metadata=self._metadata)
        except grpc.RpcError as error:
            raise translate(error, self._peer) from error


class QuiesceLost(Unavailable):
    """The shards were not at one position: a worker or a shard was lost meanwhile."""


async def at_one_point(attempt: Callable[[], Awaitable[T]]) -> T:
    """The result of ``attempt``, repeated after a pause where it raises QuiesceLost. Raises the last one."""
    pause = 0.0
    for _ in range(_TRIES - 1):
        try:
            return await attempt()
        except QuiesceLost:
            pause = retry.CUT.after(pause)
        await asyncio.sleep(pause)
    return await attempt()


@dataclass(slots=True)
class Quiesce:
    """The shards that are paused under this name."""

    name: str
    shards: Mapping[int, ShardControl]
    #: The reply of each shard: the positions of its models.
    paused: Mapping[int, Sequence[ModelPosition]]
    #: The shards resume by themselves, without a call.
    decided: bool = False

    def complete(self, maps: Mapping[str, ShardMap]) -> dict[str, ShardMap]:
        """The ``maps`` whose models have values on each of their shards."""
        having = {number: {each.model for each in positions} for number, positions in self.paused.items()}
        return {
            name: maps[name]
            for name in sorted(maps)
            if all(name in having.get(number, ()) for number in maps[name].holders)
        }

    def targets(self, maps: Mapping[str, ShardMap]) -> dict[int, list[ModelPosition]]:
        """For each shard, the positions to which its models have to catch up."""
        models = {name: _furthest(name, self._positions(name, shard_map)) for name, shard_map in maps.items()}
        holding = {name: set(shard_map.holders) for name, shard_map in maps.items()}
        return {number: [models[name] for name in maps if number in holding[name]] for number in self.shards}

    def _positions(self, name: str, shard_map: ShardMap) -> list[ModelPosition]:
        return [model for number in shard_map.holders for model in self.paused[number] if model.model == name]


@asynccontextmanager
async def connected(driver: Driver, numbers: Iterable[int]) -> AsyncIterator[Mapping[int, ShardControl]]:
    """Connect to the shards of these ``numbers`` until the block ends. Raises NotReady when one is missing."""
    members, tokens, wanted = driver.view.live(Role.SHARD), driver.shard_tokens, sorted(numbers)
    if missing := [number for number in wanted if number not in members]:
        raise NotReady("a shard is missing", shard=", ".join(map(str, missing)), remedy="start it, then try again")
    # A shard that was just replaced has another token, and refuses that of its predecessor.
    tokens_of = {number: tokens.get(members[number].incarnation, "") for number in wanted}
    shards = {number: ShardControl(members[number], tokens_of[number], driver.open_shard) for number in wanted}
    try:
        yield shards
    finally:
        for shard in shards.values():
            await shard.close()


@asynccontextmanager
async def quiesced(shards: Mapping[int, ShardControl], name: str) -> AsyncIterator[Quiesce]:
    """Pause ``shards``; they resume at the latest when the block ends. Raises their errors."""
    quiesce = Quiesce(name, shards, {})
    try:
        replies = await all_of(shard.pause(name, times.QUIESCE_SECONDS) for shard in shards.values())
        quiesce.paused = dict(zip(shards, replies, strict=True))
        yield quiesce
    except BaseException:
        if not quiesce.decided:
            await asyncio.gather(*(shard.resume(name) for shard in shards.values()), return_exceptions=True)
        raise


async def all_of(calls: Iterable[Any]) -> list[Any]:
    """The results of all; raises the first error once all have ended."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return list(results)


def check_same_position(reports: Iterable[Sequence[ModelPosition]]) -> None:
    """Raises QuiesceLost if two shards report different positions of a model.

    The last round applied is not compared: a shard that was killed while the mode left sync has the same pushes without
    a round, and a round of workers that are gone may be known to some shards only.
    """
    points: dict[str, tuple[Any, ...]] = {}
    for model in (model for models in reports for model in models):
        accepted = tuple((worker, sequence) for worker, sequence in model.accepted.items() if sequence)
        # While the mode changes, a push may wait for its round on one shard and be applied on another.
        point = accepted, tuple(model.open.items())
        if points.setdefault(model.model, point) != point:
            raise QuiesceLost(
                f"the shards were not at one point of model '{model.model}'",
                remedy="try again: a worker came, went or was lost meanwhile",
            )


def _furthest(name: str, positions: Iterable[ModelPosition]) -> ModelPosition:
    """The newest pushes that any shard has accepted: all shards catch up to these."""
    furthest: dict[tuple[int, int], int] = {}
    for position in positions:
        for worker, sequence in position.accepted.items():
            furthest[worker] = max(furthest.get(worker, 0), sequence)
    return ModelPosition(name, furthest)
