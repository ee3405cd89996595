"""Pauses all shards at one point of the job, and calls them while they are paused: for checkpoints and moves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from ps_protocol import times
from ps_protocol.cluster.quiesced import ModelPosition
from ps_protocol.cluster.view import Role
from ps_protocol.errors import NotReady, Unavailable
from ps_protocol.model.spec import ShardMap
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.jobs.shard_control import ShardControl


class QuiesceLost(Unavailable):
    """The shards were not at one point: a worker or a shard was lost meanwhile."""


@dataclass(slots=True)
class Quiesce:
    """Shards that are paused for the quiesce of this name."""

    name: str
    shards: Mapping[int, ShardControl]
    #: The reply of each: the positions of its models.
    paused: Mapping[int, Sequence[ModelPosition]]
    #: The shards resume by themselves: they are not told to, whatever happens.
    decided: bool = False

    def complete(self, maps: Mapping[str, ShardMap]) -> dict[str, ShardMap]:
        """Those of ``maps`` whose models have values on every shard that holds anything of them."""
        having = {number: {each.model for each in positions} for number, positions in self.paused.items()}
        return {
            name: maps[name]
            for name in sorted(maps)
            if all(name in having.get(number, ()) for number in maps[name].holders)
        }

    def targets(self, maps: Mapping[str, ShardMap]) -> dict[int, list[ModelPosition]]:
        """For each shard, the positions up to which the models that it holds parts of have to catch up."""
        models = {name: _furthest(name, self._positions(name, shard_map)) for name, shard_map in maps.items()}
        holding = {name: set(shard_map.holders) for name, shard_map in maps.items()}
        return {number: [models[name] for name in maps if number in holding[name]] for number in self.shards}

    def _positions(self, name: str, shard_map: ShardMap) -> list[ModelPosition]:
        return [model for number in shard_map.holders for model in self.paused[number] if model.model == name]


@asynccontextmanager
async def connected(driver: Driver, numbers: Iterable[int]) -> AsyncIterator[Mapping[int, ShardControl]]:
    """The shards of these ``numbers``, to be called until the block ends. Raises NotReady when one is missing."""
    members, tokens, wanted = driver.view.live(Role.SHARD), driver.shard_tokens, sorted(numbers)
    if missing := [number for number in wanted if number not in members]:
        raise NotReady("a shard is missing", shard=", ".join(map(str, missing)), remedy="start it, then try again")
    # A shard that has just been replaced has another token: with that of another incarnation it refuses the call.
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
    """The results of all; the first error once all have ended."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return list(results)


def check_same_position(reports: Iterable[Sequence[ModelPosition]]) -> None:
    """Raises QuiesceLost when two shards were at different positions of a model; each reports the models it holds."""
    points: dict[str, tuple[Any, ...]] = {}
    for model in (model for models in reports for model in models):
        accepted = tuple((worker, sequence) for worker, sequence in model.accepted.items() if sequence)
        # While the mode changes, a push may wait for its round on one shard and be applied on another.
        point = model.phase, model.clock, accepted, tuple(model.open.items())
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
