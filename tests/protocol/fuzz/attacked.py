"""A shard that is sent anything, a worker that trains on it in peace, and the errors it has logged."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
import pytest
from hypothesis import HealthCheck

from ps_protocol import PROTOCOL_VERSION
from ps_protocol.errors import InternalError, PsError
from ps_protocol.v1 import shard_pb2 as pb
from ps_server.shard.step.model import ShardModel
from tests.support.length import examples
from tests.support.shards import StubStream, TestShard, error_of, flat, gradients, running_shard, start, wait_until
from tests.transports.support import UvloopThread

SERVICE = "/ps_protocol.v1.Shard/"
PAYLOAD_BYTES = 128
"""The parameters of the model that ``start`` makes."""


@dataclass(repr=False)
class Target:
    """A shard, a worker that trains on it in peace, and the errors it has logged."""

    shard: TestShard
    model: ShardModel
    bystander: StubStream
    logged: list[str] = field(default_factory=list)
    #: All are as long on the wire: hypothesis wants examples of the same length when it repeats one.
    incarnation: int = 1 << 56

    def newcomer(self) -> int:
        """The incarnation of a worker of rank 0 that nobody has heard of."""
        self.incarnation += 1
        self.shard.set_view({0: self.incarnation, 1: 2})
        return self.incarnation

    def opening(self) -> bytes:
        worker = pb.WorkerId(rank=0, incarnation=self.newcomer())
        message = pb.Open(model="model", worker=worker, protocol_version=PROTOCOL_VERSION)
        return pb.StepRequest(open=message).SerializeToString()

    def assert_unharmed(self) -> None:
        wait_until(lambda: self.model.pool.in_use == 0)
        version = self.model.tracker.version
        payload = flat(self.model.layout, *gradients(self.model, 1))
        result, parameters = self.bystander.exchange(payload)
        assert (result.outcome, result.version) == (pb.OUTCOME_APPLIED, version + 1)
        assert len(parameters) == PAYLOAD_BYTES
        wait_until(lambda: self.model.pool.in_use == 0)
        logged = self.logged[:]
        self.logged.clear()
        assert logged == []


class Errors(logging.Handler):
    """Keeps what was logged as an error: of the server's, or of an event loop about a task nobody looked after."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(f"{record.name}: {record.getMessage()} {record.exc_info[1] if record.exc_info else ''}")


@contextmanager
def target() -> Iterator[Target]:
    # What earlier tests have left behind may end with a word about a task.
    gc.collect()
    handler = Errors()
    logging.getLogger().addHandler(handler)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tests.support.shards.LoopThread", UvloopThread)
            patch.setattr("ps_server.shard.times.UNKNOWN_SECONDS", 0.02)
            with running_shard({0: 1, 1: 2}) as shard:
                model, _ = start(shard)
                bystander = StubStream(shard, rank=1, incarnation=2)
                yield Target(shard, model, bystander, handler.found)
                bystander.end()
    finally:
        logging.getLogger().removeHandler(handler)


whole_streams = examples(100, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def call(attacked: Target, method: str, messages: list[bytes]) -> PsError | None:
    """Send all on one call and end it; the typed error it ended with. Fails when there is none."""
    channel, path = attacked.shard.channel, SERVICE + method
    try:
        if method in ("GetRows", "SaveBuckets"):
            answers = channel.unary_stream(path)(messages[0], timeout=60)
        elif method == "Step":
            answers = channel.stream_stream(path)(iter(messages), timeout=60)
        else:
            answers = [channel.stream_unary(path)(iter(messages), timeout=60)]
        for _ in answers:
            pass
    except grpc.RpcError as failure:
        error = error_of(failure)
        assert not isinstance(error, InternalError), error
        return error
    return None
