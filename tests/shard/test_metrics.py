"""Each metric of a shard moves when its cause happens."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from ps_protocol.metrics.definition import HistogramValue
from ps_protocol.model.spec import Consistency, Mode, StalePolicy
from ps_protocol.model.tables import RowLife
from ps_server.cli.options.storage import Durability, StorageConfig
from ps_server.shard.metrics import SHARD, ShardMetrics, staleness_value
from tests.shard.tables.test_expiry import age
from tests.support.shards import StubStream, TestShard, flat, gradients, running_shard, start, wait_until
from tests.support.tables import RowStream, array, start_with, table_spec

SYNC = Consistency(Mode.SYNC)

Found = dict[tuple[str, ...], float]


def read(shard: TestShard) -> Found:
    """By name without prefix and by labels; of a histogram the number of values."""
    assert shard.storage
    assert shard.service
    executor = shard.registry.context.executor
    metrics = ShardMetrics(shard.counters, shard.registry, executor, shard.storage, shard.service, None)

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


def test_log_fsync_and_snapshots(tmp_path: Any) -> None:
    with running_shard(storage_config=StorageConfig(Durability.DURABLE, tmp_path, fsync=True)) as shard:
        start(shard)
        before = read(shard)
        one_step(shard)
        after = read(shard)
        for name in ("log_bytes_total", "log_fsync_seconds", "log_lag_records"):
            assert after[name,] > before[name,]
        assert shard.storage
        assert shard.storage.snapshotter
        shard.loop.run(shard.storage.snapshotter.take())
        done = read(shard)
        assert done["log_lag_records",] == 0
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


def test_staleness_in_buckets_has_every_push_once() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    counts = [random.Random(seed).randrange(9) for _ in range(64)]
    found = staleness_value(counts)
    assert sum(found.counts) == sum(counts)
    assert found.counts[0] == counts[0]
    assert found.counts[-1] == counts[63]
    assert found.sum == sum(staleness * count for staleness, count in enumerate(counts))


def test_a_process_serves_every_metric_without_a_standby_or_a_reader(tmp_path: Any) -> None:
    with running_shard(storage_config=StorageConfig(Durability.DURABLE, tmp_path)) as shard:
        start_with(shard, table_spec())
        one = RowStream(shard)
        one.exchange(bytes(shard.model().layout.region_bytes))
        read_names = {name for name, *_ in read(shard)}
        missing = {metric.name.removeprefix("torch_ps_") for metric in SHARD.metrics} - read_names
        security = {"auth_failures_total", "certificate_expiry_timestamp_seconds"}
        assert missing == security | {"pushes_refused_total", "standby_connected", "standby_lag_records"}
        one.end()
