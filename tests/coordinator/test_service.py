"""The real server and the real client, over loopback."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.cluster.view import JoinRequest, LogCounts, Member, MemberStats, Role, TableCounts
from ps_protocol.errors import Fenced, InvalidRequest, ProtocolVersionMismatch, UnknownModel, UnknownShard
from ps_protocol.model.spec import Consistency, DType, Kind, Mode, ModelSpec, StalePolicy, Variable
from ps_protocol.rpc.channel import open_channel
from ps_protocol.v1 import coordinator_pb2 as pb
from ps_protocol.v1.coordinator_pb2_grpc import CoordinatorStub
from ps_server.coordinator.settings import ClusterSettings
from tests.support.coordinators import connected, running_coordinator

SPEC = ModelSpec(
    "net",
    "torch.optim.SGD",
    (Variable("w", (1000, 4), DType.FLOAT32), Variable("mean", (4,), DType.FLOAT32, Kind.BUFFER)),
    ({"lr": 0.1, "momentum": 0.9, "nesterov": True, "dampening": 0},),
)


@pytest.fixture
def client() -> Iterator[CoordinatorClient]:
    with connected(ClusterSettings(expected_shards=2, expected_workers=2, seed=11, lease_seconds=60.0)) as client:
        yield client


def shards(client: CoordinatorClient) -> list[Member]:
    return [client.join(JoinRequest(Role.SHARD, i, f"127.0.0.1:{i + 1}"), f"shard {i}").member for i in range(2)]


def worker(client: CoordinatorClient, rank: int | None = None) -> Member:
    return client.join(JoinRequest(Role.WORKER, rank), f"worker {rank} {threading.get_ident()}").member


def test_a_join_tells_place_lease_and_seed(client: CoordinatorClient) -> None:
    joined = client.join(JoinRequest(Role.WORKER), "a")
    assert client.join(JoinRequest(Role.WORKER), "a") == joined
    assert (joined.member.index, joined.seed, joined.phase, joined.lease_seconds) == (0, 11, 0, 60.0)
    with pytest.raises(UnknownShard, match="0 to 1"):
        client.join(JoinRequest(Role.SHARD, 2, "127.0.0.1:1"), "b")


def test_a_heartbeat_carries_statistics_into_the_status(client: CoordinatorClient) -> None:
    member = worker(client, 0)
    stats = MemberStats(
        *(3, 2, 1.5, 2.5, 3.5, 4),
        metrics={"loss": 0.25},
        versions={"net": 2, "critic": 1},
        phase=1,
        clock=7,
        wait_seconds={"round": 1.5},
        streams={"shm": 2, "grpc": 1},
        held_bytes=4096,
        log=LogCounts(9, 8000, 700, 1.5),
        tables=(TableCounts("net", "ads", 5, 1, 640, 7, 1, 1),),
        queued_pushes=1.5,
        queued_bytes=6e6,
    )
    client.heartbeat(member, stats)
    (status,) = client.get_status().members
    assert (status.member, status.stats, status.gone) == (member, stats, "")
    assert status.pid
    assert status.host


def test_a_heartbeat_is_told_when_the_next_one_is_due(
    client: CoordinatorClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = worker(client, 0)
    monkeypatch.setattr("ps_server.coordinator.membership.state.BEATS_PER_SECOND", 0.5)
    assert client.heartbeat(member, MemberStats()).next_seconds == 2.0


def test_a_watch_shows_the_cluster_now_and_after_every_change(client: CoordinatorClient) -> None:
    member = worker(client, 1)
    stream = client.watch()
    views = iter(stream)
    assert next(views).members == (member,)
    sync = Consistency(Mode.SYNC, backup=1)
    changed = client.set_consistency(sync)
    assert next(views) == changed
    assert changed.consistency == sync
    stream.cancel()


def test_a_watch_with_the_present_revision_waits_for_the_next_one(client: CoordinatorClient) -> None:
    revision = client.join(JoinRequest(Role.WORKER), "a").revision
    stream = client.watch(revision)
    client.join(JoinRequest(Role.WORKER), "b")
    assert next(iter(stream)).revision == revision + 1
    stream.cancel()


def test_a_view_and_a_shard_map_arrive_as_they_were_sent(client: CoordinatorClient) -> None:
    members = (*shards(client), worker(client, 0), worker(client, 1))
    mode = Consistency(Mode.SSP, 3, 0, StalePolicy.REJECT, 5)
    assert client.set_consistency(mode).consistency == mode
    shard_map = client.declare_model(members[2], SPEC)
    assert shard_map.spec == SPEC
    assert client.get_shard_map("net") == shard_map
    assert {s.shard for s in shard_map.slices} == {0, 1}
    view = client.get_status().view
    assert (view.members, view.consistency) == (members, mode)
    assert (view.models, view.expected_shards, view.expected_workers) == ({"net": 1}, 2, 2)
    assert (view.started, view.finished) == (True, False)


def test_other_errors_keep_their_type_and_fields(client: CoordinatorClient) -> None:
    with pytest.raises(UnknownModel, match="'nothing'"):
        client.get_shard_map("nothing")
    with pytest.raises(InvalidRequest, match=r"backup below.*remedy"):
        client.set_consistency(Consistency(Mode.SYNC, backup=9))


def test_a_parked_barrier_opens_for_all_when_the_last_one_arrives(client: CoordinatorClient) -> None:
    shards(client)
    a, b = worker(client, 0), worker(client, 1)
    assert client.barrier(a, 0, wait_seconds=0).missing_ranks == (1,)
    with ThreadPoolExecutor(1) as pool:
        parked = pool.submit(client.barrier, a, 0, 30.0)
        assert client.barrier(b, 0, wait_seconds=30.0).released
        assert parked.result(60).released
    assert client.barrier(a, 0, wait_seconds=30.0).released


def test_a_parked_barrier_ends_when_its_worker_is_replaced(client: CoordinatorClient) -> None:
    shards(client)
    a, b = worker(client, 0), worker(client, 1)
    client.barrier(b, 0, wait_seconds=0)
    with ThreadPoolExecutor(1) as pool:
        parked = pool.submit(client.barrier, b, 0, 30.0)
        client.join(JoinRequest(Role.WORKER, 1, take_over=True), "the new worker 1")
        with pytest.raises(Fenced):
            parked.result(60)
    assert not client.barrier(a, 0, wait_seconds=0).released


def test_a_barrier_is_answered_before_the_deadline_of_its_caller(
    client: CoordinatorClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ps_server.coordinator.times.ANSWER_SECONDS", 59.0)
    member = worker(client, 0)
    with open_channel(client.address) as channel:
        request = pb.BarrierRequest(rank=0, incarnation=member.incarnation, wait_seconds=30)
        assert not CoordinatorStub(channel).Barrier(request, timeout=60.0).released


@pytest.mark.parametrize("seconds", [float("nan"), -1.0, float("-inf")])
def test_a_wait_that_is_no_length_of_time_is_refused(client: CoordinatorClient, seconds: float) -> None:
    member = worker(client, 0)
    for call, request in (
        ("Barrier", pb.BarrierRequest(rank=0, incarnation=member.incarnation, wait_seconds=seconds)),
        ("LeaseData", pb.LeaseDataRequest(rank=0, incarnation=member.incarnation, wait_seconds=seconds)),
    ):
        with open_channel(client.address) as channel, pytest.raises(grpc.RpcError) as caught:
            getattr(CoordinatorStub(channel), call)(request, timeout=60.0)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_join_of_another_protocol_version_or_of_no_role_is_refused(client: CoordinatorClient) -> None:
    with open_channel(client.address) as channel:
        for version, role, code in ((99, pb.ROLE_WORKER, "FAILED_PRECONDITION"), (1, 0, "INVALID_ARGUMENT")):
            with pytest.raises(grpc.RpcError) as caught:
                CoordinatorStub(channel).Join(pb.JoinRequest(role=role, protocol_version=version, token="t"))
            assert caught.value.code() is grpc.StatusCode[code]


def test_a_call_that_the_server_does_not_know_names_both_sides() -> None:
    class Newer(CoordinatorClient):
        def __init__(self, address: str) -> None:
            super().__init__(address)
            self._connection.stub.GetStatus = self._connection._channel.unary_unary(
                "/ps_protocol.v1.Coordinator/Newer",
                request_serializer=pb.GetStatusRequest.SerializeToString,
                response_deserializer=pb.ClusterStatus.FromString,
            )

    with (
        running_coordinator() as coordinator,
        Newer(coordinator.address) as client,
        pytest.raises(ProtocolVersionMismatch, match="same torch-ps on both sides"),
    ):
        client.get_status()


def test_health_and_reflection_name_the_service() -> None:
    name = "ps_protocol.v1.Coordinator"
    with running_coordinator() as coordinator, open_channel(coordinator.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", name):
            answer = health.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        (listed,) = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([ask]))
        assert name in {s.name for s in listed.list_services_response.service}
