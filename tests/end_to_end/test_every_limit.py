"""Each limit is hit over a real server: the client is told or cut off, the limit's counter grows, others go on.

In this process; about 8 s of CPU.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import grpc
import numpy as np
import pytest

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.cluster.leases import LeaseAsk
from ps_protocol.cluster.view import JoinRequest, Member, Role
from ps_protocol.errors import InvalidRequest, PsError, Unavailable
from ps_protocol.model.spec import ModelSpec
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.v1 import shard_pb2_grpc
from ps_server import limits as names
from ps_server.coordinator.settings import ClusterSettings
from ps_server.limits import LIMITS, JobLimits, LimitCounts, ServerLimits, ShardLimits
from ps_server.serving.metrics import read_limits
from ps_server.shard import byte_budget
from ps_server.shard.config import SideChannelConfig
from tests.coordinator.test_server_limits import Begun, Server, refused, serving
from tests.support.coordinators import running_coordinator
from tests.support.shards import StubStream, error_of, flat, gradients, running_shard, simple_spec, start, wait_until
from tests.support.side_channels import BULK, Worker
from tests.support.tables import array, get_rows, spec_with, start_with, table_spec, writer


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """What waits for room does not wait for long."""
    monkeypatch.setattr(byte_budget, "PATIENCE_SECONDS", dict.fromkeys(byte_budget.PATIENCE_SECONDS, 0.1))


def counted(counts: LimitCounts, limit: str) -> None:
    """Wait until the metric shows one refusal by ``limit``."""
    wait_until(lambda: counts.counts[limit] >= 1)
    samples = [each for each in read_limits(counts) if each.labels == (limit,)]
    assert samples[0].value >= 1


# Calls: a server of calls that wait.


@contextmanager
def calling(**limits: float) -> Iterator[tuple[Server, Callable[[], grpc.Channel]]]:
    with serving(ServerLimits(**limits)) as server, ExitStack() as stack:  # type: ignore[arg-type]

        def connected() -> grpc.Channel:
            options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))
            return stack.enter_context(grpc.insecure_channel(server.address, options))

        yield server, connected


def answered(channel: grpc.Channel) -> bool:
    return bool(channel.unary_unary("/test.Waiting/unary_unary")(b"", timeout=60, wait_for_ready=True) == b"done")


def closed(connection: socket.socket) -> bool:
    """Wait until the server has closed it, whatever it sends before."""
    connection.settimeout(60)
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        pass
    connection.close()
    return True


def hit_calls() -> None:
    too_many_calls(names.CALLS, "--max-calls", max_calls=1)


def hit_peer_calls() -> None:
    too_many_calls(names.PEER_CALLS, "--max-peer-calls", max_peer_calls=1)


def too_many_calls(limit: str, flag: str, **limits: float) -> None:
    with calling(**limits) as (server, connected):
        held = Begun(connected(), "unary_unary")
        wait_until(lambda: server.handler.begun == 1)
        error = refused(Begun(connected(), "unary_unary"))
        assert isinstance(error, Unavailable)
        assert flag in error.remedy
        counted(server.counts, limit)
        server.release()
        assert held.answer() == b"done"


def hit_metadata() -> None:
    with calling(max_metadata_bytes=4096) as (server, connected):
        server.release()
        channel = connected()
        large = channel.unary_unary("/test.Waiting/unary_unary").future(b"", 60, (("x", "y" * 5000),))
        begun = Begun.__new__(Begun)
        begun._streams, begun.future = False, large
        error = refused(begun)
        assert isinstance(error, InvalidRequest)
        assert "--max-metadata-bytes" in error.remedy
        counted(server.counts, names.METADATA)
        assert answered(channel)


# A shard


def error_in(call_: Callable[[], object]) -> PsError:
    with pytest.raises(grpc.RpcError) as caught:
        call_()
    return error_of(caught.value)


def hit_first_message() -> None:
    limits = ShardLimits()
    with running_shard(limits=limits) as shard:
        model, _ = start(shard)
        stopped = threading.Event()
        # For this call only: on a busy machine others would be given up, too.
        object.__setattr__(limits, "first_message_seconds", 0.2)

        def nothing() -> Iterator[pb.StepRequest]:
            stopped.wait(60)
            yield from ()

        silent = shard_pb2_grpc.ShardStub(shard.channel).Step(nothing())
        assert isinstance(error_in(lambda: next(silent)), Unavailable)
        counted(shard.registry.context.limit_counts, names.FIRST_MESSAGE)
        stopped.set()
        object.__setattr__(limits, "first_message_seconds", 60.0)
        stream = StubStream(shard)
        assert stream.exchange(flat(model.layout, *gradients(model, 1)))[0].outcome
        stream.end()


def too_many_feeds(limit: str, flag: str, limits: ShardLimits) -> None:
    with running_shard(limits=limits) as shard:
        start_with(shard, table_spec())
        stub = shard_pb2_grpc.ShardStub(shard.channel)
        followed = pb.FeedRequest(model="model", table=0, follow=True)
        reader = stub.Feed(followed)
        next(reader)
        error = error_in(lambda: next(stub.Feed(followed)))
        assert isinstance(error, Unavailable)
        assert flag in error.remedy
        counted(shard.registry.context.limit_counts, limit)
        assert get_rows(shard, array(1), 4).shape == (1, 4)
        reader.cancel()


def hit_feeds() -> None:
    too_many_feeds(names.FEEDS, "--max-feeds", ShardLimits(max_feeds=1))


def hit_peer_feeds() -> None:
    too_many_feeds(names.PEER_FEEDS, "--max-peer-feeds", ShardLimits(max_peer_feeds=1))


def hit_answers() -> None:
    """Somebody does not read its answer: others of its kind are refused, a worker is not."""
    with running_shard(answer_bytes=1 << 20) as shard:
        model = start_with(shard, table_spec())
        context = shard.registry.context
        taking = context.answers.taken(byte_budget.READERS, 1 << 20)
        shard.loop.run(taking.__aenter__())
        error = error_in(lambda: get_rows(shard, np.arange(100), 4))
        assert isinstance(error, Unavailable)
        assert "--answer-mb" in error.remedy
        counted(context.limit_counts, names.ANSWERS)
        stream = StubStream(shard)
        assert stream.exchange(bytes(model.layout.region_bytes))[0].outcome
        stream.end()
        shard.loop.run(taking.__aexit__(None, None, None))


def hit_uploads() -> None:
    """A worker that stalls in an upload has its share: its next one is refused, and another worker steps on."""
    with running_shard({0: 1, 1: 2}, upload_bytes=256 << 10) as shard:
        model = start_with(shard, table_spec(dim=4), shapes=((200, 200),))
        context, stub = shard.registry.context, shard_pb2_grpc.ShardStub(shard.channel)
        header = pb.LoadRowsRequest(
            header=pb.LoadRowsHeader(model="model", table=0, rows=100_000, worker=writer(shard))
        )
        released = threading.Event()

        def stalling() -> Iterator[pb.LoadRowsRequest]:
            yield header
            released.wait(60)

        stalled = stub.LoadRows.future(stalling())
        wait_until(lambda: context.uploads.used_bytes > 0)
        payload = bytes(model.layout.region_bytes)
        assert len(payload) > byte_budget.FREE_BYTES
        stream = StubStream(shard)
        stream.push(payload)
        error = error_in(stream.result)
        assert isinstance(error, Unavailable)
        assert "--upload-mb" in error.remedy
        counted(context.limit_counts, names.UPLOADS)
        other = StubStream(shard, rank=1, incarnation=2)
        assert other.exchange(payload)[0].outcome
        other.end()
        stalled.cancel()
        released.set()


def hit_side_handshakes() -> None:
    with running_shard(side_channel_config=SideChannelConfig(max_handshakes=1)) as shard:
        start(shard)
        worker = Worker(shard, BULK)
        place = shard.address.rpartition(":")[0], worker.offered.port
        strangers = [socket.create_connection(place) for _ in range(2)]
        assert closed(strangers[0])
        counted(shard.registry.context.limit_counts, names.SIDE_HANDSHAKES)
        worker.confirmed()
        worker.close()
        strangers[1].close()


def hit_token_time() -> None:
    with running_shard(side_channel_config=SideChannelConfig(token_seconds=0.2)) as shard:
        start(shard)
        worker = Worker(shard, BULK)
        assert closed(socket.create_connection((shard.address.rpartition(":")[0], worker.offered.port)))
        counted(shard.registry.context.limit_counts, names.TOKEN_TIME)
        worker.close()


# A job


def of_job(limit: str, flag: str, allowed: JobLimits, spec: ModelSpec, *before: ModelSpec) -> None:
    """One client's declaration is refused, and another client's is not."""
    settings = ClusterSettings(expected_workers=2, lease_seconds=600, limits=allowed)
    with running_coordinator(settings) as coordinator, ExitStack() as stack:
        one, other = (stack.enter_context(CoordinatorClient(coordinator.address)) for _ in range(2))
        one.join(JoinRequest(Role.SHARD, 0, "127.0.0.1:1"), "s")
        workers = [
            client.join(JoinRequest(Role.WORKER, rank), f"w{rank}").member for rank, client in ((0, one), (1, other))
        ]
        for each in before:
            one.declare_model(workers[0], each)
        with pytest.raises(InvalidRequest) as caught:
            one.declare_model(workers[0], spec)
        assert flag in str(caught.value)
        counted(coordinator.limit_counts, limit)
        known = before[0] if before else simple_spec((2,), name="m")
        assert other.declare_model(workers[1], known).spec.name == known.name


SMALL = simple_spec((2,), name="m")


def hit_models() -> None:
    of_job(names.MODELS, "--max-models", JobLimits(max_models=1), replace(SMALL, name="n"), SMALL)


def hit_variables() -> None:
    of_job(names.VARIABLES, "--max-variables", JobLimits(max_variables=1), simple_spec((2,), (2,), name="n"))


def hit_slices() -> None:
    many = simple_spec(*[(2,)] * 40, name="n")
    of_job(names.SLICES, "--max-slices", JobLimits(max_slices=30), many)


def hit_tables() -> None:
    spec = replace(spec_with(table_spec("a"), table_spec("b")), name="n")
    of_job(names.TABLES, "--max-tables", JobLimits(max_tables=1), spec)


def hit_buckets() -> None:
    of_job(names.BUCKETS, "--max-buckets", JobLimits(max_buckets=8), replace(spec_with(table_spec("a")), name="n"))


def hit_model_bytes() -> None:
    of_job(names.MODEL_BYTES, "--max-model-bytes", JobLimits(max_model_bytes=1000), simple_spec((300,), name="n"))


def hit_names() -> None:
    long = replace(SMALL, name="n" * 33)
    of_job(names.NAMES, "--max-name-bytes", JobLimits(max_name_bytes=32), long)


HITS: dict[str, Callable[[], None]] = {limit: globals()[f"hit_{limit}"] for limit in LIMITS}


@pytest.mark.parametrize("limit", LIMITS)
def test_a_limit_is_told_counted_and_costs_others_nothing(limit):
    HITS[limit]()


def test_the_name_of_a_dataset_has_the_limit_of_the_job():
    settings = ClusterSettings(expected_workers=1, lease_seconds=600, limits=JobLimits(max_name_bytes=8))
    with running_coordinator(settings) as coordinator, CoordinatorClient(coordinator.address) as client:
        worker: Member = client.join(JoinRequest(Role.WORKER, 0), "w").member
        with pytest.raises(InvalidRequest, match=r"the name of a dataset is too long.*--max-name-bytes"):
            client.lease_data(worker, LeaseAsk("d" * 9, 10, 0, 1, 1))
        counted(coordinator.limit_counts, names.NAMES)
