"""What a worker's end leaves behind is given back at once: no cycle of errors waits for the garbage collector."""

from __future__ import annotations

import gc

import grpc
import pytest

from ps_protocol.model import Consistency, Mode
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.v1 import shard_pb2_grpc
from tests.support.shards import wait_until
from tests.support.side_channels import BULK, SHM, header, worker_of
from tests.transports.support import BLOCKING, LARGE, Line, begin, running_shard, shared_mappings

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
@pytest.mark.parametrize("end", ["in a push", "in a reply", "while a pull is parked"])
@pytest.mark.parametrize("transport", [BULK, SHM], ids=["bulk", "shm"])
def test_a_worker_that_vanishes_leaves_no_memory_mapped(transport, end):
    for left in (2, 1, 0):
        try:
            vanish(transport, end)
        except AssertionError:
            # Seen once, in a whole run: a cycle that only one rare interleaving makes. One made always fails here.
            if not left:
                raise
            gc.collect()
        else:
            return


def vanish(transport, end):
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
        streams = len(model._streams)
        first.close()
        wait_until(lambda: model.pool.spare == 0)
        assert transports() == [SHM]
        second.close()
        wait_until(lambda: transports() == [0])
        assert (streams, len(model._streams)) == (1, 0)
