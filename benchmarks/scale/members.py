"""Members without work, many in one process: each has a connection, joins, renews its lease and watches the view."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from ps_protocol import PROTOCOL_VERSION
from ps_protocol.rpc.channel import CLIENT_OPTIONS
from ps_protocol.v1 import coordinator_pb2 as pb
from ps_protocol.v1.coordinator_pb2_grpc import CoordinatorStub

JOINS_AT_A_TIME = 64
REMEMBERED_VIEWS = 256
CALL_SECONDS = 300.0
AGAIN_SECONDS = 0.5

_BREAKS = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED})

# Without it all channels of a process to one address share a connection.
_OPTIONS = (*CLIENT_OPTIONS, ("grpc.use_local_subchannel_pool", 1))


class Members:
    """``count`` members at the coordinator at ``address``, from rank ``first`` on.

    They live on the event loop of a thread of their own; methods are called from another one.
    """

    def __init__(self, address: str, count: int, first: int, beat_seconds: float, *, shards: bool = False) -> None:
        self._address = address
        self._role = pb.ROLE_SHARD if shards else pb.ROLE_WORKER
        self._beat_seconds = beat_seconds
        #: Of each member: revisions of views, with the time of CLOCK_MONOTONIC at which each came.
        self._seen: list[deque[tuple[int, float]]] = [deque(maxlen=REMEMBERED_VIEWS) for _ in range(count)]
        self._failures: list[str] = []
        self._breaks = 0
        self._beats = 0
        self._numbers = range(first, first + count)
        self._gate = asyncio.Semaphore(JOINS_AT_A_TIME)
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._live(),), daemon=True)
        self._thread.start()

    def wait(self, revision: int, seconds: float = 300.0) -> list[float]:
        """When each member saw a view of at least ``revision``, by CLOCK_MONOTONIC.

        Raises RuntimeError when a member failed, or after ``seconds``.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.check()
            first = [next((at for known, at in tuple(each) if known >= revision), None) for each in self._seen]
            if None not in first:
                return [at for at in first if at is not None]
            time.sleep(0.05)
        raise RuntimeError(f"revision {revision} has not reached all members")

    def check(self) -> int:
        """How many calls broke off and were repeated. Raises RuntimeError when a member failed."""
        if self._failures:
            raise RuntimeError(self._failures[0])
        return self._breaks

    def beats(self) -> int:
        """Heartbeats that were answered."""
        return self._beats

    def close(self) -> None:
        """End all members without a word, as a crash would."""
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()
        self._loop.close()

    async def _live(self) -> None:
        tasks = [
            asyncio.create_task(self._member(number, seen))
            for number, seen in zip(self._numbers, self._seen, strict=True)
        ]
        await self._ended.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _member(self, number: int, seen: deque[tuple[int, float]]) -> None:
        async with grpc.aio.insecure_channel(self._address, _OPTIONS) as channel:
            stub = CoordinatorStub(channel)
            try:
                async with self._gate:
                    joined = await self._join(stub, number)
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._watch(stub, joined, seen))
                    group.create_task(self._beat(stub, joined))
            except (grpc.RpcError, ExceptionGroup) as error:
                self._failures.append(f"member {number}: {error!r}")

    async def _join(self, stub: CoordinatorStub, number: int) -> pb.JoinReply:
        while True:
            with self._counted_breaks():
                return await stub.Join(self._join_request(number), timeout=CALL_SECONDS, wait_for_ready=True)
            await asyncio.sleep(AGAIN_SECONDS)

    def _join_request(self, number: int) -> pb.JoinRequest:
        address = f"127.0.0.1:{10_000 + number}" if self._role == pb.ROLE_SHARD else ""
        return pb.JoinRequest(
            role=self._role,
            index=number,
            address=address,
            protocol_version=PROTOCOL_VERSION,
            token=f"{self._role} {number}",
        )

    async def _watch(self, stub: CoordinatorStub, joined: pb.JoinReply, seen: deque[tuple[int, float]]) -> None:
        place = {"role": self._role, "index": joined.index, "incarnation": joined.incarnation}
        request = pb.WatchRequest(takes_changes=True, **place)
        while True:
            with self._counted_breaks():
                async for view in stub.Watch(request):
                    seen.append((view.revision, time.monotonic()))
                    request.known_revision = view.revision
            await asyncio.sleep(AGAIN_SECONDS)

    async def _beat(self, stub: CoordinatorStub, joined: pb.JoinReply) -> None:
        request = pb.HeartbeatRequest(role=self._role, index=joined.index, incarnation=joined.incarnation)
        await asyncio.sleep(random.random() * self._beat_seconds)
        while True:
            began, pause = time.monotonic(), self._beat_seconds
            request.stats.steps += 10
            request.stats.steps_per_second = 10.0
            request.stats.transport = "bulk"
            request.stats.metrics["loss"] = 1.0
            with self._counted_breaks():
                pause = max(pause, (await stub.Heartbeat(request, timeout=CALL_SECONDS)).next_seconds)
                self._beats += 1
            await asyncio.sleep(max(0.0, pause - (time.monotonic() - began)))

    @contextmanager
    def _counted_breaks(self) -> Iterator[None]:
        """As the SDK, members call again when a connection breaks, as on a machine that is too busy for its pings."""
        try:
            yield
        except grpc.RpcError as error:
            if error.code() not in _BREAKS:
                raise
            self._breaks += 1


@contextmanager
def members(address: str, count: int, first: int, beat_seconds: float, shards: bool) -> Iterator[Members]:
    """The role of a child process."""
    made = Members(address, count, first, beat_seconds, shards=shards)
    try:
        yield made
    finally:
        made.close()
