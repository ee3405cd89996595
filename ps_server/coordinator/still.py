"""Has the shards hold still at one point of the job, and talks to them meanwhile: for checkpoints and moves alike."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from ps_protocol.channel import CLIENT_OPTIONS, SHARD_KEY
from ps_protocol.client.errors import translate
from ps_protocol.errors import NotReady, Unavailable
from ps_protocol.model import ShardMap
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.v1 import shard_pb2_grpc
from ps_protocol.view import Member, Role
from ps_server.coordinator.driver import Driver

FREEZE_SECONDS = 10.0
"""How long a shard holds still without hearing more of a cut, and how long it may take to answer."""

_THAW_SECONDS = 1.0


class Torn(Unavailable):
    """The shards were not at one point: a worker or a shard was lost meanwhile."""


class ShardCalls:
    """Calls to one shard, on the coordinator's event loop."""

    def __init__(self, member: Member, token: str = "") -> None:
        """``token``: with which it joined; without it the shard answers only what changes nothing."""
        self.member = member
        key = pb.ShardKey(incarnation=member.incarnation, token=token)
        self._metadata = ((SHARD_KEY, key.SerializeToString()),) if token else ()
        self._peer = f"{member} at {member.address}"
        self._channel = grpc.aio.insecure_channel(member.address, CLIENT_OPTIONS)
        self._stub = shard_pb2_grpc.ShardStub(self._channel)  # type: ignore[no-untyped-call]

    async def call(self, method: str, request: Any, seconds: float = FREEZE_SECONDS) -> Any:
        """Raises the typed error of the shard, Unavailable when it does not answer."""
        try:
            return await getattr(self._stub, method)(request, timeout=seconds, metadata=self._metadata)
        except grpc.RpcError as error:
            raise translate(error, self._peer) from error

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()


@dataclass(slots=True)
class Stillness:
    """Shards that hold still for the cut of this name."""

    cut: str
    shards: Mapping[int, ShardCalls]
    #: What each said of its models.
    frozen: Mapping[int, pb.FreezeReply]
    #: The shards go on by themselves: they are not told to thaw, whatever happens.
    decided: bool = False

    def complete(self, maps: Mapping[str, ShardMap]) -> dict[str, ShardMap]:
        """Those of ``maps`` whose models have values on every shard that holds anything of them."""
        having = {number: {model.model for model in reply.models} for number, reply in self.frozen.items()}
        return {
            name: maps[name]
            for name in sorted(maps)
            if all(name in having.get(number, ()) for number in maps[name].holders)
        }

    def targets(self, maps: Mapping[str, ShardMap]) -> dict[int, list[pb.ModelCut]]:
        """For each shard, up to where the models are to go of which it holds anything."""
        models = {name: _furthest(name, self._standings(name, shard_map)) for name, shard_map in maps.items()}
        holding = {name: set(shard_map.holders) for name, shard_map in maps.items()}
        return {number: [models[name] for name in maps if number in holding[name]] for number in self.shards}

    def _standings(self, name: str, shard_map: ShardMap) -> list[pb.ModelCut]:
        return [model for number in shard_map.holders for model in self.frozen[number].models if model.model == name]


@asynccontextmanager
async def held_still(driver: Driver, numbers: Iterable[int], cut: str) -> AsyncIterator[Stillness]:
    """The shards of these ``numbers``, holding still; they go on at the latest when the block ends.

    Raises NotReady when one of them is away, and their errors.
    """
    members, tokens, wanted = driver.view.live(Role.SHARD), driver.shard_tokens, sorted(numbers)
    if missing := [number for number in wanted if number not in members]:
        raise NotReady("a shard is away", shard=", ".join(map(str, missing)), remedy="start it, then try again")
    # One that has just been replaced has another token: the place and the token are of one incarnation, or it refuses.
    shards = {number: ShardCalls(members[number], tokens.get(members[number].incarnation, "")) for number in wanted}
    still = Stillness(cut, shards, {})
    try:
        request = pb.FreezeRequest(cut=cut, seconds=FREEZE_SECONDS)
        replies = await all_of(shard.call("Freeze", request) for shard in shards.values())
        still.frozen = dict(zip(shards, replies, strict=True))
        yield still
    except BaseException:
        if not still.decided:
            thaws = (shard.call("Thaw", pb.ThawRequest(cut=cut), _THAW_SECONDS) for shard in shards.values())
            await asyncio.gather(*thaws, return_exceptions=True)
        raise
    finally:
        for shard in shards.values():
            await shard.close()


async def all_of(calls: Iterable[Any]) -> list[Any]:
    """The results of all; the first error once all have ended."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return list(results)


def check_one_cut(cuts: Iterable[Sequence[pb.ModelCut]]) -> None:
    """Raises Torn when two shards stood at different points of a model; each told of the models it holds."""
    points: dict[str, tuple[Any, ...]] = {}
    for model in (model for models in cuts for model in models):
        point = (
            model.phase,
            model.clock,
            tuple((a.worker.rank, a.worker.incarnation, a.sequence) for a in model.accepted if a.sequence),
        )
        if points.setdefault(model.model, point) != point:
            raise Torn(
                f"the shards were not at one point of model '{model.model}'",
                remedy="try again: a worker came, went or was lost meanwhile",
            )


def _furthest(name: str, standings: Iterable[pb.ModelCut]) -> pb.ModelCut:
    """What any shard has accepted: to there all are to go."""
    furthest: dict[tuple[int, int], int] = {}
    for accepted in (accepted for model in standings for accepted in model.accepted):
        worker = accepted.worker.rank, accepted.worker.incarnation
        furthest[worker] = max(furthest.get(worker, 0), accepted.sequence)
    return pb.ModelCut(
        model=name,
        accepted=[
            pb.WorkerSequence(worker=pb.WorkerId(rank=rank, incarnation=incarnation), sequence=sequence)
            for (rank, incarnation), sequence in furthest.items()
        ],
    )
