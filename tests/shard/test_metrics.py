"""Each metric of a shard moves when its cause happens."""

from __future__ import annotations

import asyncio
import errno
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import pytest

from ps_protocol.cluster.weights import WeightsPiece, WeightsVersion
from ps_protocol.errors import Unavailable
from ps_protocol.metrics.definition import HistogramValue
from ps_protocol.model.spec import Consistency, Mode, StalePolicy
from ps_protocol.model.tables import RowLife
from ps_protocol.security.security import OFF
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.v1 import shard_pb2_grpc
from ps_protocol.weights.memory import VersionMemory
from ps_protocol.weights.pieces import PieceSource, receive
from ps_protocol.wire.convert.options import options_to_pb
from ps_server.cli.options.storage import Durability, StorageConfig
from ps_server.limits import ShardLimits
from ps_server.shard import weights as shard_weights
from ps_server.shard.metrics import SHARD, ShardMetrics, staleness_value
from ps_server.shard.standby.log_feed import LogFeed
from tests.optimizers.test_option_ranges import _defaults
from tests.shard.step.test_failing_steps import RAISING
from tests.shard.tables.test_expiry import age
from tests.support.seeds import drawn_seed
from tests.support.shards import StubStream, TestShard, flat, gradients, running_shard, start, wait_until
from tests.support.tables import RowStream, array, start_with, table_spec

SYNC = Consistency(Mode.SYNC)

Found = dict[tuple[str, ...], float]


def read(shard: TestShard, feed: LogFeed | None = None) -> Found:
    """By name without prefix and by labels; of a histogram the number of values."""
    assert shard.storage
    assert shard.service
    executor = shard.registry.context.executor
    metrics = ShardMetrics(shard.counters, shard.registry, executor, shard.storage, shard.service, feed)

    async def on_loop() -> Found:
        found = {}
        for sample in metrics.read():
            value = sample.value
            number = float(sum(value.counts)) if isinstance(value, HistogramValue) else float(value)
            found[sample.metric.name.removeprefix("torch_ps_"), *sample.labels] = number
        return found

    return shard.loop.run(on_loop())


@dataclass(frozen=True)
class Cause:
    """What happens on a shard of two workers, and what it adds to which metrics."""

    name: str
    act: Callable[[TestShard], None]
    adds: dict[tuple[str, ...], float]
    consistency: Consistency = field(default_factory=Consistency)

    def __str__(self) -> str:
        return self.name


def stream_of(shard: TestShard, rank: int = 0) -> StubStream:
    return StubStream(shard, rank=rank, incarnation=rank + 1)


def one_step(shard: TestShard) -> None:
    model = shard.model()
    stream_of(shard).exchange(flat(model.layout, *gradients(model, 1)))


def repeated(shard: TestShard) -> None:
    model, stream = shard.model(), stream_of(shard)
    stream.exchange(flat(model.layout, *gradients(model, 1)))
    stream.exchange(flat(model.layout, *gradients(model, 1)), sequence=1, clock=1)


def nan(shard: TestShard) -> None:
    model = shard.model()
    bad = gradients(model, 1)
    bad[0].fill_(float("nan"))
    stream_of(shard).exchange(flat(model.layout, *bad))


def stale(shard: TestShard) -> None:
    model, one, two = shard.model(), stream_of(shard), stream_of(shard, 1)
    one.exchange(flat(model.layout, *gradients(model, 1)))
    two.exchange(flat(model.layout, *gradients(model, 2)))


def skipped(shard: TestShard) -> None:
    stream_of(shard).exchange(b"", skipped=True)


def whole_round(shard: TestShard) -> None:
    model, one, two = shard.model(), stream_of(shard), stream_of(shard, 1)
    one.push(flat(model.layout, *gradients(model, 1)))
    wait_until(lambda: model.parked_pulls == 1)
    two.exchange(flat(model.layout, *gradients(model, 2)))
    result, _ = one.result()
    assert result.waited_micros > 0


def waiting(shard: TestShard) -> None:
    model = shard.model()
    shard.kept = stream_of(shard)  # type: ignore[attr-defined]  # the stream stays open
    shard.kept.push(flat(model.layout, *gradients(model, 1)))  # type: ignore[attr-defined]
    wait_until(lambda: model.parked_pulls == 1)


CAUSES = [
    Cause(
        "a step",
        one_step,
        {
            ("pushes_total", "model", "applied"): 1,
            ("pushes_received_total",): 1,
            ("model_version", "model"): 1,
            ("staleness_updates", "model"): 1,
            ("apply_seconds", "model"): 1,
            ("pull_seconds", "model"): 1,
            ("pull_wait_seconds", "model"): 0,
            ("clock_most", "model"): 1,
            ("clock_least", "model"): 0,
            ("log_records",): 1,
        },
    ),
    Cause(
        "a push that comes twice",
        repeated,
        {("pushes_total", "model", "duplicate"): 1, ("pushes_received_total",): 2, ("model_version", "model"): 1},
    ),
    Cause(
        "a gradient that is not finite",
        nan,
        {("pushes_refused_total", "model", "non_finite"): 1, ("pushes_total", "model", "applied"): 0},
    ),
    Cause(
        "a push above the threshold of staleness",
        stale,
        {("pushes_total", "model", "stale"): 1, ("pushes_total", "model", "applied"): 1},
        Consistency(Mode.ASYNC, stale_policy=StalePolicy.REJECT, stale_threshold=0),
    ),
    Cause("a step without gradients", skipped, {("pushes_total", "model", "skipped"): 1}),
    Cause(
        "a round of two workers",
        whole_round,
        {
            ("sync_round_seconds", "model"): 1,
            ("pull_wait_seconds", "model"): 1,
            ("pushes_total", "model", "applied"): 2,
            ("model_version", "model"): 1,
        },
        SYNC,
    ),
    Cause(
        "a pull that waits for the other worker",
        waiting,
        {("parked_pulls", "model"): 1, ("streams", "model", "grpc"): 1, ("apply_seconds", "model"): 0},
        SYNC,
    ),
]


@pytest.mark.parametrize("cause", CAUSES, ids=str)
def test_a_cause_moves_its_metrics(cause: Cause, tmp_path: Any) -> None:
    storage = StorageConfig(Durability.DURABLE, tmp_path)
    with running_shard({0: 1, 1: 2}, cause.consistency, storage_config=storage) as shard:
        start(shard)
        before = read(shard)
        cause.act(shard)

        def moved() -> Found:
            after = read(shard)
            return {name: after.get(name, 0.0) - before.get(name, 0.0) for name in cause.adds}

        # What is counted after a reply was sent may come a moment later than the reply.
        wait_until(lambda: moved() == cause.adds)
        if hasattr(shard, "kept"):
            shard.kept.cancel()


def test_bytes_are_counted_by_direction_and_transport() -> None:
    with running_shard() as shard:
        model, _ = start(shard)
        before = read(shard)
        one_step(shard)
        size = model.layout.region_bytes
        wait_until(lambda: read(shard)["bytes_total", "sent", "grpc"] > before["bytes_total", "sent", "grpc"])
        after = read(shard)
        assert after["bytes_total", "received", "grpc"] - before["bytes_total", "received", "grpc"] == size
        assert after["bytes_total", "sent", "grpc"] - before["bytes_total", "sent", "grpc"] == size
        assert after["bytes_total", "sent", "bulk"] == after["bytes_total", "sent", "shm"] == 0
        assert after["variable_bytes", "model"] == size
        assert after["variables", "model"] == len(model.layout.slices)


def test_pieces_of_published_weights_are_counted_where_they_are_held_and_when_they_are_sent() -> None:
    with running_shard() as shard:
        model, _ = start(shard)
        assert shard.service
        weights = shard.service.weights

        async def held(number: int) -> WeightsVersion:
            await weights.take(model, "policy", number, (1,))
            piece = await weights.finish("policy", number)
            size = len(piece.native.data)
            return WeightsVersion(number, "model", 1, "", 0.0, (WeightsPiece(0, 1, "", piece.native.checksum, size),))

        one, two = shard.loop.run(held(1)), shard.loop.run(held(2))
        source = PieceSource(shard.channel, shard.address, OFF, bulk=False, maps=False)
        whole, _ = receive("policy", one, lambda _: source, None, None, 60.0, VersionMemory())
        wait_until(lambda: read(shard)["weights_sent_bytes_total", "full"] == one.size_bytes)
        receive("policy", two, lambda _: source, None, whole, 60.0, VersionMemory())
        found = read(shard)
        assert found["weights_held_bytes", "policy"] == 2 * one.size_bytes
        assert (found["weights_sent_bytes_total", "full"], found["weights_sent_bytes_total", "delta"]) == (
            one.size_bytes,
            0,
        )


def test_a_reader_that_has_everything_and_ends_the_call_at_once_is_counted_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def ended(context: object, data: bytes) -> None:
        await written(context, data)
        if not pb.GetPieceReply.FromString(data).HasField("header"):
            raise Unavailable("the reader has ended the call")

    written = shard_weights.write
    with running_shard() as shard:
        model, _ = start(shard)
        assert shard.service
        weights = shard.service.weights

        async def held() -> pb.GetPieceRequest:
            await weights.take(model, "policy", 1, (1,))
            piece = await weights.finish("policy", 1)
            return pb.GetPieceRequest(name="policy", number=1, checksum=piece.native.checksum)

        request = shard.loop.run(held())
        size = read(shard)["weights_held_bytes", "policy"]
        monkeypatch.setattr(shard_weights, "write", ended)
        stub = shard_pb2_grpc.ShardStub(shard.channel)
        with pytest.raises(grpc.RpcError):
            list(stub.GetPiece(request))
        assert read(shard)["weights_sent_bytes_total", "full"] == size


def test_log_fsync_and_snapshots(tmp_path: Any) -> None:
    with running_shard(storage_config=StorageConfig(Durability.DURABLE, tmp_path, fsync=True)) as shard:
        start(shard)
        before = read(shard)
        one_step(shard)
        after = read(shard)
        assert after["log_bytes_total",] > before["log_bytes_total",]
        assert after["log_fsync_seconds",] > before["log_fsync_seconds",]
        assert after["log_lag_records",] > before["log_lag_records",]
        wait_until(lambda: read(shard)["log_lag_seconds",] > 0.3)
        assert shard.storage
        assert shard.storage.snapshotter
        shard.loop.run(shard.storage.snapshotter.take())
        done = read(shard)
        assert (done["log_lag_records",], done["log_lag_seconds",]) == (0, 0)
        assert done["snapshot_seconds",] - after["snapshot_seconds",] == 1
        assert done["snapshot_bytes_total",] > after["snapshot_bytes_total",]
        assert done["recovery_seconds",] > 0


def test_rows_of_tables_their_admission_and_their_end() -> None:
    with running_shard() as shard:
        start_with(shard, table_spec(life=RowLife(expire_after_updates=1, admit_after=2)))
        stream = RowStream(shard)

        def push(*ids: int) -> None:
            rows = array(*ids), np.ones((len(ids), 4), np.float32)
            stream.exchange_rows(bytes(shard.model().layout.region_bytes), {0: rows})

        push(1, 2)
        first = read(shard)
        assert (first["table_rows", "model", "ads"], first["table_waiting_ids", "model", "ads"]) == (0, 2)
        push(1, 2)
        second = read(shard)
        assert (second["table_rows", "model", "ads"], second["table_admissions_total", "model", "ads"]) == (2, 2)
        assert second["table_bytes", "model", "ads"] > 0
        push(2)
        push(2)
        age(shard)
        last = read(shard)
        assert last["table_rows", "model", "ads"] == 1
        assert last["table_evictions_total", "model", "ads", "expired"] == 1
        assert last["feed_readers", "model", "ads"] == 0
        stream.end()


def test_rows_of_tables_that_leave_memory_and_come_back(tmp_path: Any) -> None:
    storage = StorageConfig(Durability.DURABLE, tmp_path, table_memory_bytes=2 << 20)
    with running_shard(storage_config=storage) as shard:
        start_with(shard, table_spec())
        stream = RowStream(shard)

        def push(begin: int) -> None:
            rows = np.arange(begin, begin + 10_000), np.ones((10_000, 4), np.float32)
            stream.exchange_rows(bytes(shard.model().layout.region_bytes), {0: rows})

        for begin in range(0, 100_000, 10_000):
            push(begin)
        wait_until(lambda: read(shard)["table_rows_on_disk", "model", "ads"] > 0)
        before = read(shard)
        assert before["table_memory_bytes", "model", "ads"] < before["table_bytes", "model", "ads"]
        assert before["table_disk_bytes", "model", "ads"] > 0
        assert before["table_disk_traffic_bytes_total", "model", "ads", "written"] > 0
        push(0)
        after = read(shard)
        assert after["table_rows_found_total", "model", "ads", "disk"] > 0
        assert after["table_rows_found_total", "model", "ads", "memory"] > 0
        assert after["table_disk_traffic_bytes_total", "model", "ads", "read"] > 0
        stream.end()


class StuckReader:
    """The context of a Feed call whose client does not read while ``held``."""

    def __init__(self) -> None:
        self.free = asyncio.Event()
        self.free.set()

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def write(self, data: bytes) -> None:
        await self.free.wait()


def test_a_reader_of_changes_that_does_not_read_lags_by_the_updates_it_lacks() -> None:
    lag, limit = ("feed_lag_updates", "model", "ads"), ("limit_refusals_total", "feeds")
    with running_shard(limits=ShardLimits(max_feeds=1)) as shard:
        start_with(shard, table_spec())
        stream, rows = RowStream(shard), (array(1, 2), np.ones((2, 4), np.float32))
        dense = bytes(shard.model().layout.region_bytes)
        request = pb.FeedRequest(model="model", table=0, follow=True)
        assert shard.service
        changes = shard.service._changes

        async def follow() -> tuple[StuckReader, asyncio.Task[None]]:
            reader = StuckReader()
            return reader, asyncio.create_task(changes.serve(request, reader))  # type: ignore[arg-type]

        async def hold() -> None:
            reader.free.clear()

        async def go_on() -> None:
            reader.free.set()

        async def end() -> None:
            reading.cancel()
            await asyncio.wait([reading])

        stream.exchange_rows(dense, {0: rows})
        reader, reading = shard.loop.run(follow())
        wait_until(lambda: read(shard)[lag] == 0)
        found = read(shard)
        assert (found["feed_readers", "model", "ads"], found["limit_used", "feeds"]) == (1, 1)
        assert found["limit_most", "feeds"] == 1
        shard.loop.run(hold())
        for _ in range(3):
            stream.exchange_rows(dense, {0: rows})
        assert read(shard)[lag] == 3
        before = read(shard)
        refused = shard.loop.run(follow())[1]
        wait_until(refused.done)
        assert isinstance(refused.exception(), Unavailable)
        assert read(shard)[limit] - before.get(limit, 0) == 1
        shard.loop.run(go_on())
        wait_until(lambda: read(shard)[lag] == 0)
        shard.loop.run(end())
        found = read(shard)
        assert (found["feed_readers", "model", "ads"], found["limit_used", "feeds"]) == (0, 0)
        stream.end()


def test_a_step_that_raises_is_counted_as_failed_and_as_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps_server.shard.step.options.require_in_range", lambda spec, options: None)
    name, options = RAISING[0]
    with running_shard() as shard:
        model, _ = start(shard, optimizer=f"torch.optim.{name}", **_defaults(name))
        before = read(shard)
        payload = flat(model.layout, *gradients(model, 1))
        StubStream(shard).exchange(payload, groups=[options_to_pb(options)])
        after = read(shard)
        for moved in (("pushes_failed_total", "model"), ("pushes_total", "model", "applied")):
            assert after[moved] - before.get(moved, 0) == 1


def test_work_that_waits_for_the_executor_is_its_queue() -> None:
    free = threading.Event()
    with running_shard() as shard:
        executor = shard.registry.context.executor

        async def queue() -> None:
            for _ in range(3):
                executor.submit(lambda: free.wait(60), 1 << 62)

        assert read(shard)["queue_depth",] == 0
        shard.loop.run(queue())
        try:
            assert read(shard)["queue_depth",] == 3
        finally:
            free.set()
        wait_until(lambda: read(shard)["queue_depth",] == 0)


def test_a_snapshot_that_cannot_be_written_is_a_failure(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def __init__(self, *_: Any) -> None:
            raise OSError(errno.ENOSPC, "the disk is full")

    with running_shard(storage_config=StorageConfig(Durability.DURABLE, tmp_path)) as shard:
        start(shard)
        one_step(shard)
        assert shard.storage
        assert shard.storage.snapshotter
        with monkeypatch.context() as patched:
            patched.setattr("ps_server.shard.durability.snapshotter.SnapshotWriter", Full)
            patched.setattr("ps_server.shard.times.FULL_RETRY_SECONDS", 0.01)
            shard.loop.run(shard.storage.snapshotter._try())
        assert read(shard)["snapshot_failures_total",] == 1
        assert read(shard)["snapshot_seconds",] == 0


def test_staleness_in_buckets_has_every_push_once() -> None:
    seed = drawn_seed()
    counts = [random.Random(seed).randrange(9) for _ in range(64)]
    found = staleness_value(counts)
    assert sum(found.counts) == sum(counts)
    assert found.counts[0] == counts[0]
    assert found.counts[-1] == counts[63]
    assert found.sum == sum(staleness * count for staleness, count in enumerate(counts))


def test_a_process_serves_every_metric_without_a_standby_or_a_reader(tmp_path: Any) -> None:
    storage = StorageConfig(Durability.DURABLE, tmp_path, table_memory_bytes=16 << 20)
    with running_shard(storage_config=storage) as shard:
        start_with(shard, table_spec())
        one = RowStream(shard)
        one.exchange(bytes(shard.model().layout.region_bytes))
        read_names = {name for name, *_ in read(shard)}
        missing = {metric.name.removeprefix("torch_ps_") for metric in SHARD.metrics} - read_names
        security = {"auth_failures_total", "certificate_expiry_timestamp_seconds"}
        assert missing == security | {
            "pushes_refused_total",
            "weights_held_bytes",
            "standby_connected",
            "standby_lag_records",
            "standby_lag_seconds",
        }
        one.end()
