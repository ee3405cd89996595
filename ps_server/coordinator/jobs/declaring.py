"""Reads, compares and places declared models in another thread, so that the event loop can renew leases."""

from __future__ import annotations

import asyncio

from ps_protocol.cluster.view import Role
from ps_protocol.model.spec import ShardMap
from ps_protocol.v1 import common_pb2
from ps_protocol.wire.convert.model import SHARD_MAP, SPEC
from ps_server.coordinator.driver import Driver


class DeclarationThread:
    """Called by the service, on the driver's loop. Handles one declaration at a time, in order.

    The cost of a declaration grows with its variables, so it is read only once its sender is known to be a live worker.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._turn = asyncio.Lock()
        #: The encoded newest map of each model, for workers and shards alike.
        self._messages: dict[str, tuple[ShardMap, common_pb2.ShardMap]] = {}

    async def declare(self, rank: int, incarnation: int, spec: common_pb2.ModelSpec) -> common_pb2.ShardMap:
        """See PlacementState.plan and adopt."""
        self._driver.check_member(Role.WORKER, rank, incarnation)
        async with self._turn:
            self._driver.check_member(Role.WORKER, rank, incarnation)
            read = await asyncio.to_thread(SPEC.from_pb, spec)
            plan = self._driver.plan(rank, incarnation, read)
            made = await asyncio.to_thread(plan.make)
            return await self._message(self._driver.adopt(rank, incarnation, plan, made))

    async def shard_map(self, model: str) -> common_pb2.ShardMap:
        """See PlacementState.shard_map."""
        return await self._message(self._driver.shard_map(model))

    async def _message(self, shard_map: ShardMap) -> common_pb2.ShardMap:
        name = shard_map.spec.name
        known, message = self._messages.get(name, (None, None))
        if message is None or known is not shard_map:
            message = await asyncio.to_thread(SHARD_MAP.to_pb, shard_map)
            self._messages[name] = shard_map, message
            for released in self._messages.keys() - self._driver.shard_maps.keys():
                del self._messages[released]
        return message
