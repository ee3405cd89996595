"""What a worker's end leaves behind is given back at once: no cycle of errors waits for the garbage collector."""

from __future__ import annotations

import asyncio
import gc
import weakref

import grpc
import pytest

from ps_protocol.cluster.requests import StageRequest
from ps_protocol.cluster.transport import Transport
from ps_protocol.model.spec import Consistency, Mode
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.v1 import shard_pb2_grpc
from ps_server.consistency import WorkerKey
from ps_server.shard.counters import Counters
from ps_server.shard.step.stream import StepStream
from tests.support.length import paired
from tests.support.shards import wait_until
from tests.support.side_channels import BULK, SHM, header, worker_of
from tests.transports.support import BLOCKING, LARGE, Line, begin, is_idle, running_shard, shared_mappings

pytestmark = pytest.mark.usefixtures("loop", "quiet")


@pytest.fixture
def _no_collector():
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    yield
    if enabled:
        gc.enable()


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize(
    ("transport", "end"), paired([BULK, SHM], ["in a push", "in a reply", "while a pull is parked"]), ids=str
)
def test_a_worker_that_vanishes_leaves_no_memory_mapped(transport, end):
    parked = end == "while a pull is parked"
    with running_shard({0: 1, 1: 2}, Consistency(Mode.SYNC) if parked else None) as shard:
        model, _ = begin(shard, *BLOCKING)
        before = shared_mappings()
        with worker_of(shard, transport) as worker:
            channel = worker.confirmed()
            if end == "in a push":
                channel.send(push=header())
                channel.socket.sendall(bytes(700_000))
                wait_until(lambda: model.pool.in_use == 1)
            else:
                channel.send(push=header(skipped=True))
                wait_until(lambda: model.parked_pulls == 1 or not parked)
        wait_until(lambda: shared_mappings() <= before)


@pytest.mark.usefixtures("_no_collector")
def test_a_stream_that_is_cancelled_while_it_ends_keeps_neither_its_errors_nor_a_part_of_a_push():
    class Lost(ConnectionResetError):
        pass

    class LosesItsWorker:
        """One part of a push comes, then the connection is reset."""

        kind = Transport.BULK

        def __init__(self) -> None:
            self.messages = [StageRequest(0, 4)]

        async def receive(self, at_once: object = None) -> StageRequest:
            if self.messages:
                return self.messages.pop()
            raise Lost

        async def receive_payload(self, pieces: object) -> None:
            pass

    async def scenario() -> list[weakref.ref[BaseException]]:
        ending, go = asyncio.Event(), asyncio.Event()

        async def ends_slowly() -> None:
            try:
                await go.wait()
            finally:
                ending.set()
                await go.wait()

        stream = StepStream(LosesItsWorker(), model, WorkerKey(0, 1), Counters())
        serving = asyncio.ensure_future(stream.run(ends_slowly))
        await ending.wait()
        errors = [weakref.ref(each) for each in gc.get_objects() if isinstance(each, Lost)]
        serving.cancel()
        go.set()
        await asyncio.wait([serving])
        assert serving.cancelled()
        return errors

    with running_shard() as shard:
        model, _ = begin(shard, *LARGE)
        (error,) = shard.loop.run(scenario())
        wait_until(lambda: error() is None)
        assert is_idle(model)


def test_the_end_of_a_stream_that_was_replaced_does_not_hide_the_transport_of_its_successor():
    def transports() -> list[int]:
        with grpc.insecure_channel(shard.address) as channel:
            status = shard_pb2_grpc.ShardStub(channel).GetModel(pb.GetModelRequest(model="model"))
        return [clock.transport for clock in status.clocks]

    with running_shard() as shard:
        model, _ = begin(shard, *LARGE)
        first = Line(shard, model, "bulk")
        first.exchange([None] * 3)
        second = Line(shard, model, "shm")
        second.exchange([None] * 3)
        streams = len(model.streams)
        first.close()
        wait_until(lambda: model.pool.spare == 0)
        assert transports() == [SHM]
        second.close()
        wait_until(lambda: transports() == [0])
        assert (streams, len(model.streams)) == (1, 0)
