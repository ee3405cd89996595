"""Workers that have a step stream to one shard and nothing else, many in one process, each with its own connection."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from ps_protocol import PROTOCOL_VERSION
from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.cluster.view import JoinRequest, Role
from ps_protocol.model.spec import DType, ModelSpec, Variable
from ps_protocol.rpc.channel import CLIENT_OPTIONS
from ps_protocol.v1 import coordinator_pb2, shard_pb2
from ps_protocol.v1.coordinator_pb2_grpc import CoordinatorStub
from ps_protocol.v1.shard_pb2_grpc import ShardStub

MODEL = "model"
OPENED_AT_A_TIME = 32
CALL_SECONDS = 300.0
_OPTIONS = (*CLIENT_OPTIONS, ("grpc.use_local_subchannel_pool", 1))


def declare(address: str, nbytes: int) -> tuple[str, int]:
    """Place a model of ``nbytes`` of float32 on shard 0 and give it values; that shard's address, the map's epoch."""
    with CoordinatorClient(address) as client:
        joined = client.join(JoinRequest(Role.WORKER, None, ""), "the first worker")
        member = joined.member
        variable = Variable("weight", (nbytes // 4,), DType.FLOAT32)
        epoch = client.declare_model(member, ModelSpec(MODEL, "torch.optim.SGD", (variable,), ({"lr": 1e-6},))).epoch
        shard = client.get_status().view.live(Role.SHARD)[0].address
    with grpc.insecure_channel(shard) as channel:
        worker = shard_pb2.WorkerId(rank=member.index, incarnation=member.incarnation)
        # The shard may not have heard of this worker yet.
        head = shard_pb2.LoadHeader(model=MODEL, with_region=True, worker=worker, membership_revision=joined.revision)
        chunk = shard_pb2.Chunk(payload=bytes(nbytes))
        messages = [shard_pb2.LoadRequest(header=head), shard_pb2.LoadRequest(chunk=chunk)]
        ShardStub(channel).Load(iter(messages), timeout=60.0, wait_for_ready=True)
    return shard, epoch


class Streams:
    """``count`` workers from rank ``first`` on, on the event loop of a thread; methods are called from another one.

    They send no heartbeats: the job's leases have to be long.
    """

    def __init__(self, addresses: tuple[str, str], epoch: int, count: int, first: int, nbytes: int) -> None:
        """``addresses``: of the coordinator, and of the shard."""
        self._addresses = addresses
        self._epoch = epoch
        self._payload = bytes(nbytes)
        #: Steps made, streams that are open.
        self._steps = self._open = 0
        self._failures: list[str] = []
        self._gate = asyncio.Semaphore(OPENED_AT_A_TIME)
        self._pause_seconds: float | None = None
        self._loop = asyncio.new_event_loop()
        self._stepping, self._ended = asyncio.Event(), asyncio.Event()
        living = self._live(range(first, first + count))
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(living,), daemon=True)
        self._thread.start()

    def opened(self) -> int:
        """How many streams are open. Raises RuntimeError when one failed."""
        if self._failures:
            raise RuntimeError(self._failures[0])
        return self._open

    def steps(self) -> int:
        """Steps answered so far. Raises RuntimeError when a stream failed."""
        self.opened()
        return self._steps

    def step_every(self, seconds: float) -> None:
        """From now on each stream makes a step in this time."""
        self._pause_seconds = seconds
        self._loop.call_soon_threadsafe(self._stepping.set)

    def close(self) -> None:
        """End all streams."""
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()
        self._loop.close()

    async def _live(self, ranks: range) -> None:
        async with grpc.aio.insecure_channel(self._addresses[0]) as channel:
            tasks = []
            for rank in ranks:
                task = asyncio.create_task(self._worker(CoordinatorStub(channel), rank), name=f"worker {rank}")
                task.add_done_callback(self._note_end)
                tasks.append(task)
            await self._ended.wait()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _worker(self, coordinator: CoordinatorStub, rank: int) -> None:
        request = coordinator_pb2.JoinRequest(
            role=coordinator_pb2.ROLE_WORKER, index=rank, protocol_version=PROTOCOL_VERSION, token=f"stream {rank}"
        )
        async with grpc.aio.insecure_channel(self._addresses[1], _OPTIONS) as channel:
            async with self._gate:
                joined = await coordinator.Join(request, timeout=CALL_SECONDS, wait_for_ready=True)
                call = ShardStub(channel).Step(wait_for_ready=True)
                await call.write(shard_pb2.StepRequest(open=self._open_request(joined)))
                await self._answer(call, "opened")
            self._open += 1
            await self._stepping.wait()
            await asyncio.sleep(random.random() * (self._pause_seconds or 0.0))
            await self._step(call)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failures.append(f"{task.get_name()}: {error!r}")

    def _open_request(self, joined: coordinator_pb2.JoinReply) -> shard_pb2.Open:
        return shard_pb2.Open(
            model=MODEL,
            epoch=self._epoch,
            worker=shard_pb2.WorkerId(rank=joined.index, incarnation=joined.incarnation),
            membership_revision=joined.revision,
            protocol_version=PROTOCOL_VERSION,
        )

    async def _step(self, call: grpc.aio.StreamStreamCall[shard_pb2.StepRequest, shard_pb2.StepReply]) -> None:
        push, clock = shard_pb2.PushHeader(payload=self._payload, finite=True), self._loop.time
        while True:
            began = clock()
            push.sequence += 1
            push.clock += 1
            await call.write(shard_pb2.StepRequest(push=push))
            result = (await self._answer(call, "result")).result
            if result.payload_bytes != len(self._payload):
                raise RuntimeError(f"a step was answered with {result.payload_bytes} bytes: {result.error}")
            push.pulled_version = result.version
            self._steps += 1
            await asyncio.sleep(max(0.0, (self._pause_seconds or 0.0) - (clock() - began)))

    async def _answer(
        self, call: grpc.aio.StreamStreamCall[shard_pb2.StepRequest, shard_pb2.StepReply], kind: str
    ) -> shard_pb2.StepReply:
        """The next message that is no sign of life."""
        while True:
            reply = await call.read()
            if not isinstance(reply, shard_pb2.StepReply):
                raise RuntimeError("the stream ended")
            if (body := reply.WhichOneof("body")) == kind:
                return reply
            if body != "waiting":
                raise RuntimeError(f"{body} came, not {kind}")


@contextmanager
def streams(addresses: tuple[str, str], epoch: int, count: int, first: int, nbytes: int) -> Iterator[Streams]:
    """The role of a child process."""
    made = Streams(addresses, epoch, count, first, nbytes)
    try:
        yield made
    finally:
        made.close()
