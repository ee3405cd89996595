"""What one client may ask of the coordinator: membership is checked first, then limits, and then it is laid out."""

import threading
import tracemalloc
from dataclasses import replace

import pytest

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.cluster.view import JoinRequest, Member, MemberStats, Role
from ps_protocol.errors import Fenced, InvalidRequest
from ps_protocol.model.row_optimizers import ROW_OPTIMIZERS
from ps_protocol.model.spec import DType, ModelSpec, Variable
from ps_protocol.model.tables import RowInit, TableSpec
from ps_protocol.wire.convert import model as convert
from ps_server.coordinator.placement import declaration
from ps_server.coordinator.placement.variables import (
    Balanced,
    FixedShards,
    MaxSize,
    MinSize,
    PartitionRule,
    most_slices,
    place,
)
from ps_server.coordinator.settings import ClusterSettings
from ps_server.limits import JobLimits
from tests.coordinator.cluster import SPEC, Cluster
from tests.support.coordinators import connected

LARGE = (
    (1 << 47,),
    (1 << 44,),
    (1 << 60, 0),
    (1 << 62,) * 60,
    (1,) * 65,
    (1 << 40, 1 << 40),
)


def of_shape(*shape: int, name: str = "net") -> ModelSpec:
    return replace(SPEC, name=name, variables=(Variable("w", shape, DType.FLOAT32),))


def table(name: str, buckets: int) -> TableSpec:
    return TableSpec(name, 4, 0, RowInit("constant"), "sgd", ROW_OPTIMIZERS["sgd"].defaults(), buckets=buckets)


def ready(**settings: object) -> Cluster:
    c = Cluster(**settings)
    c.shard()
    return c


@pytest.mark.parametrize("shape", LARGE)
@pytest.mark.parametrize("rule", [None, FixedShards(7), MinSize(1 << 10, 1 << 30), MaxSize(1 << 10)])
def test_a_shape_that_no_job_holds_is_refused_at_no_cost(shape: tuple[int, ...], rule: PartitionRule | None) -> None:
    c = ready(**({"partition": rule} if rule else {}))
    worker = c.worker()
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match=r"larger than this job allows|too many dimensions") as caught:
            c.declare(worker, of_shape(*shape))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert caught.value.variable == "w"
    c.declare(worker)


def test_all_models_of_a_job_share_its_bytes() -> None:
    c = ready(limits=JobLimits(max_model_bytes=4000))
    worker = c.worker()
    c.declare(worker, of_shape(600, name="first"))
    with pytest.raises(InvalidRequest, match=r"--max-model-bytes.*actual: 2400 bytes, and 2400 of the others"):
        c.declare(worker, of_shape(600, name="second"))
    c.declare(worker, of_shape(400, name="second"))
    c.declare(worker, of_shape(600, name="first"))


def test_the_number_of_models_is_limited_and_known_ones_are_still_found() -> None:
    c = ready(limits=JobLimits(max_models=2))
    worker = c.worker()
    first = c.declare(worker, of_shape(4, name="0"))
    c.declare(worker, of_shape(4, name="1"))
    with pytest.raises(InvalidRequest, match=r"models; expected: at most 2 in all models"):
        c.declare(worker, of_shape(4, name="2"))
    assert c.declare(worker, of_shape(4, name="0")) is first


def test_many_buckets_in_few_bytes_are_refused() -> None:
    c = ready()
    spec = replace(SPEC, tables=tuple(table(f"t{number}", 1 << 16) for number in range(100)))
    with pytest.raises(InvalidRequest, match=r"buckets of tables.*at most 262144.*6553600"):
        c.declare(c.worker(), spec)


def test_the_usual_tables_are_many() -> None:
    c = ready()
    c.declare(c.worker(), replace(SPEC, tables=tuple(table(f"t{number}", 256) for number in range(1000))))


def test_slices_are_limited_whatever_the_rule() -> None:
    c = ready(partition=MaxSize(1), limits=JobLimits(max_slices=1000))
    with pytest.raises(InvalidRequest, match=r"slices.*at most 1000"):
        c.declare(c.worker(), of_shape(2000))


@pytest.mark.parametrize("rule", [None, FixedShards(3), MinSize(64, 5), MaxSize(64), MaxSize(64, 2)])
def test_the_bound_on_slices_holds(rule: PartitionRule | None) -> None:
    for shape in ((), (0,), (1,), (7, 3), (1000,), (5, 0), (3, 40_000_000)):
        spec = replace(SPEC, variables=tuple(Variable(f"w{n}", shape, DType.FLOAT32) for n in range(3)))
        for shards in (1, 2, 5):
            used = rule or Balanced()
            assert len(place(spec, shards, used)) <= most_slices(spec, shards, used)


@pytest.mark.parametrize(
    "spec",
    [
        replace(SPEC, name="n" * 257),
        replace(SPEC, variables=(Variable("é" * 2100, (1,), DType.FLOAT32),)),
        replace(SPEC, tables=(table("t" * 300, 256),)),
    ],
)
def test_a_name_that_is_too_long_is_refused(spec: ModelSpec) -> None:
    c = ready()
    with pytest.raises(InvalidRequest, match=r"the name of .* is too long"):
        c.declare(c.worker(), spec)


@pytest.mark.parametrize("field", ["address", "token", "host", "directory"])
def test_texts_of_a_join_are_short(field: str) -> None:
    c = Cluster()
    ask = JoinRequest(Role.SHARD, 0, "host:1", "token", host="h", directory="d")
    with pytest.raises(InvalidRequest, match=rf"the {field} of a shard that joins is too long.*at most 256 bytes"):
        c.state.membership.join(replace(ask, **{field: "x" * 257}), 0.0)
    assert not c.state.view.members


def shard_and_worker(client: CoordinatorClient) -> Member:
    client.join(JoinRequest(Role.SHARD, 0, "127.0.0.1:1"), "shard")
    return client.join(JoinRequest(Role.WORKER), "worker").member


def test_who_is_no_member_is_refused_before_anything_of_a_model_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    with connected(ClusterSettings(lease_seconds=60.0)) as client:
        member = shard_and_worker(client)
        monkeypatch.setattr("ps_server.coordinator.jobs.declaring.SPEC", None)
        with pytest.raises(Fenced):
            client.declare_model(replace(member, incarnation=member.incarnation + 7), SPEC)


def test_a_request_above_4_mb_is_one_typed_error() -> None:
    with connected(ClusterSettings(lease_seconds=60.0)) as client:
        member = shard_and_worker(client)
        many = tuple(Variable(f"a variable with a long name {n}", (1,), DType.FLOAT32) for n in range(110_000))
        spec = replace(SPEC, variables=many)
        assert convert.SPEC.to_pb(spec).ByteSize() > 4 << 20
        with pytest.raises(InvalidRequest, match="does not take a message of this size"):
            client.declare_model(member, spec)
        client.heartbeat(member, MemberStats())


def test_leases_are_renewed_while_a_model_is_compared_and_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    begun = threading.Event()
    real = declaration.first_map

    def slow(*arguments: object) -> object:
        begun.set()
        assert goes_on.wait(60)
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(declaration, "first_map", slow)
    with connected(ClusterSettings(lease_seconds=60.0)) as client:
        member = shard_and_worker(client)
        placed: list[object] = []
        declaring = threading.Thread(target=lambda: placed.append(client.declare_model(member, SPEC, 60.0)))
        declaring.start()
        assert begun.wait(60)
        for _ in range(3):
            client.heartbeat(member, MemberStats())
        goes_on.set()
        declaring.join(120)
        assert placed == [client.get_shard_map("net")]


def test_statistics_of_one_member_do_not_crowd_out_the_others() -> None:
    with connected(ClusterSettings(lease_seconds=60.0)) as client:
        member = shard_and_worker(client)
        client.heartbeat(
            member, MemberStats(metrics={f"{n} is long" * 90: 1.0 for n in range(999)}, transport="x" * 5000)
        )
        (status,) = [each for each in client.get_status().members if each.member == member]
        assert len(status.stats.metrics) == 64
        assert max(map(len, status.stats.metrics)) <= 256
        assert len(status.stats.transport) == 256


def test_comparing_models_costs_time_by_their_variables_and_not_by_the_square() -> None:
    """Comparisons of names are counted, not seconds."""
    compared = 0

    class Name(str):
        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    def spec() -> ModelSpec:
        return replace(SPEC, variables=tuple(Variable(Name(f"v{n}"), (1,), DType.FLOAT32) for n in range(2000)))

    c = ready()
    worker = c.worker()
    c.declare(worker, spec())
    c.declare(worker, spec())
    assert compared < 2000 * 20
