"""The metrics of a shard, defined here, and what its heartbeats report: both read from what the shard's parts count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from ps_protocol.cluster.view import MemberStats, TableCounts, UpdateCounts
from ps_protocol.metrics.common import COMMON, read_common
from ps_protocol.metrics.definition import Catalogue, HistogramValue, Sample
from ps_server.consistency import FAILED, Verdict
from ps_server.serving.metrics import SERVER, read_limits
from ps_server.shard.counters import Counters
from ps_server.shard.durability.storage import Storage
from ps_server.shard.execution.executor import ShardExecutor
from ps_server.shard.registry import Registry
from ps_server.shard.service import ShardService
from ps_server.shard.standby.log_feed import LogFeed
from ps_server.shard.step.model import ShardModel

SHARD = Catalogue("shard", "shard", COMMON, SERVER)

_STALENESS = (0.0, 1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0, 34.0, 62.0)

SERVING = SHARD.gauge("shard_serving", "1 while this process holds its place; 0 while it starts or is a standby.")

PUSHES = SHARD.counter(
    "pushes_total",
    "Pushes decided, by result: applied, duplicate, late, stale or skipped. A push whose step then raised counts as "
    "applied here.",
    "model",
    "result",
)
REFUSED = SHARD.counter("pushes_refused_total", "Pushes refused with an error, by its code.", "model", "reason")
FAILED_STEPS = SHARD.counter("pushes_failed_total", "Pushes whose step raised and was undone.", "model")
RECEIVED = SHARD.counter("pushes_received_total", "Pushes that came whole, repeated ones too.")
STALENESS = SHARD.histogram(
    "staleness_updates",
    "Updates between a push's pull and its apply. In the sum, 63 and more count as 63.",
    "model",
)
APPLY = SHARD.histogram("apply_seconds", "One update: its record in the log and the optimizer's step.", "model")
PULL = SHARD.histogram(
    "pull_seconds",
    "From the moment that the mode lets a pull be answered until the parameters are sent; waits for the apply.",
    "model",
)
PULL_WAIT = SHARD.histogram(
    "pull_wait_seconds", "How long pulls waited for other workers; pulls that did not wait are not counted.", "model"
)
ROUND = SHARD.histogram("sync_round_seconds", "From the first push of a round to its apply, in mode sync.", "model")
PARKED = SHARD.gauge("parked_pulls", "Pulls that wait for the consistency mode now.", "model")
VERSION = SHARD.gauge("model_version", "Updates that the parameters contain.", "model")
CLOCK_LEAST = SHARD.gauge(
    "clock_least", "The fewest steps that a worker that takes part has pushed in the present phase: its clock.", "model"
)
CLOCK_MOST = SHARD.gauge(
    "clock_most", "The most steps that a worker that takes part has pushed in the present phase.", "model"
)
BYTES = SHARD.counter("bytes_total", "Payload bytes of pushes, pulls and rows.", "direction", "transport")
STREAMS = SHARD.gauge("streams", "Open step streams.", "model", "transport")
QUEUE = SHARD.gauge("queue_depth", "Updates, copies and other work on large tensors that run or wait for their turn.")

VARIABLES = SHARD.gauge("variables", "Slices of variables on this shard.", "model")
VARIABLE_BYTES = SHARD.gauge("variable_bytes", "Bytes of the values of variables on this shard.", "model")
TABLE_ROWS = SHARD.gauge("table_rows", "Rows of a table on this shard.", "model", "table")
TABLE_BYTES = SHARD.gauge(
    "table_bytes", "Bytes of a table on this shard, in memory and on disk: rows, ids and maps.", "model", "table"
)
TABLE_ON_DISK = SHARD.gauge("table_rows_on_disk", "Rows that are not in memory, for --table-memory.", "model", "table")
TABLE_MEMORY = SHARD.gauge("table_memory_bytes", "Bytes of memory of a table on this shard.", "model", "table")
TABLE_FILE = SHARD.gauge("table_disk_bytes", "Bytes of the file with the rows on disk.", "model", "table")
TABLE_FOUND = SHARD.counter(
    "table_rows_found_total",
    "Rows of look-ups and pushes, with --table-memory, by where they were: memory or disk.",
    "model",
    "table",
    "place",
)
TABLE_TRAFFIC = SHARD.counter(
    "table_disk_traffic_bytes_total", "Bytes of rows read from disk, and written.", "model", "table", "direction"
)
TABLE_WAITING = SHARD.gauge("table_waiting_ids", "Ids that were used and have no row yet.", "model", "table")
ADMISSIONS = SHARD.counter("table_admissions_total", "Rows added by updates and loads.", "model", "table")
EVICTIONS = SHARD.counter(
    "table_evictions_total", "Rows dropped, by reason: expired or evicted.", "model", "table", "reason"
)
FEED_READERS = SHARD.gauge("feed_readers", "Streams that read what changes in a table.", "model", "table")
FEED_LAG = SHARD.gauge(
    "feed_lag_updates", "Updates of the table that the slowest reader has not got.", "model", "table"
)

WEIGHTS_BYTES = SHARD.gauge(
    "weights_held_bytes", "Bytes of the pieces of published weights that the shard keeps.", "name"
)
WEIGHTS_SENT = SHARD.counter(
    "weights_sent_bytes_total", "Bytes of published weights sent to readers, by form: delta or full.", "form"
)

LOG_BYTES = SHARD.counter("log_bytes_total", "Bytes written to the log.")
LOG_RECORDS = SHARD.gauge("log_records", "Number of the last record of the log.")
LOG_FSYNC = SHARD.histogram("log_fsync_seconds", "How long the disk took to have a record, where it is waited for.")
LOG_LAG = SHARD.gauge("log_lag_records", "Records that no snapshot holds: a restart replays them.")
LOG_LAG_SECONDS = SHARD.gauge(
    "log_lag_seconds",
    "Age of the oldest record that no snapshot holds, 0 without one: with --durability snapshot what a kill now would "
    "lose, with durable what a restart replays.",
)
SNAPSHOT = SHARD.histogram("snapshot_seconds", "Duration of snapshots.")
SNAPSHOT_BYTES = SHARD.counter("snapshot_bytes_total", "Bytes written in snapshots.")
SNAPSHOT_FAILURES = SHARD.counter("snapshot_failures_total", "Snapshots that failed and were tried again.")
RECOVERY = SHARD.gauge("recovery_seconds", "How long reading the data directory took at the start.")
STANDBY = SHARD.gauge("standby_connected", "Whether a standby follows the log: 1 or 0.")
STANDBY_LAG = SHARD.gauge("standby_lag_records", "Records of the log that the standby does not have yet.")
STANDBY_LAG_SECONDS = SHARD.gauge(
    "standby_lag_seconds",
    "Age of the oldest record that the standby does not have yet, 0 without one: with --acknowledge before what the "
    "loss of this shard now would lose.",
)


class ShardMetrics:
    """Reads the numbers of one shard process. Called on its event loop."""

    def __init__(
        self,
        counters: Counters,
        registry: Registry,
        executor: ShardExecutor,
        storage: Storage,
        service: ShardService,
        feed: LogFeed | None,
    ) -> None:
        self._counters = counters
        self._registry = registry
        self._executor = executor
        self._storage = storage
        self._service = service
        self._feed = feed
        #: It holds its place.
        self.serving = False

    def read(self) -> Iterator[Sample]:
        """All numbers as they are now."""
        yield from read_common()
        yield from read_limits(self._registry.context.limit_counts)
        yield SERVING.of(self.serving)
        yield from self._traffic()
        for model in self._registry.models:
            yield from _model(model)
            yield from _tables(model)
        yield from self._readers()
        yield from self._weights()
        yield from self._durability()

    def _traffic(self) -> Iterator[Sample]:
        counters = self._counters
        yield RECEIVED.of(counters.pushes)
        for (model, reason), count in counters.refused.items():
            yield REFUSED.of(count, model, reason.lower())
        for transport, traffic in counters.traffic.items():
            yield BYTES.of(traffic.received, "received", transport.value)
            yield BYTES.of(traffic.sent, "sent", transport.value)
        yield QUEUE.of(self._executor.queued)

    def _readers(self) -> Iterator[Sample]:
        lags: dict[tuple[str, str], list[int]] = {}
        for name, table_name, lag in self._service.feed_lags:
            lags.setdefault((name, table_name), []).append(lag)
        for model in self._registry.models:
            for table in model.tables:
                found = lags.get((model.name, table.spec.name), [])
                yield FEED_READERS.of(len(found), model.name, table.spec.name)
                yield FEED_LAG.of(max(found, default=0), model.name, table.spec.name)

    def _weights(self) -> Iterator[Sample]:
        weights, held = self._service.weights, Counter[str]()
        for name, _, size in weights.held:
            held[name] += size
        for name, size in held.items():
            yield WEIGHTS_BYTES.of(size, name)
        yield WEIGHTS_SENT.of(weights.delta_bytes, "delta")
        yield WEIGHTS_SENT.of(weights.full_bytes, "full")

    def _durability(self) -> Iterator[Sample]:
        storage = self._storage
        if (log := storage.durable) is not None:
            yield LOG_BYTES.of(log.written_bytes)
            yield LOG_RECORDS.of(log.number)
            yield LOG_FSYNC.of(log.syncs.value)
            yield RECOVERY.of(storage.recovery_seconds)
        if log is not None and (snapshotter := storage.snapshotter) is not None:
            yield LOG_LAG.of(log.unsaved_records)
            yield LOG_LAG_SECONDS.of(storage.age_seconds(log.saved.number))
            yield SNAPSHOT.of(snapshotter.times.value)
            yield SNAPSHOT_BYTES.of(snapshotter.written_bytes)
            yield SNAPSHOT_FAILURES.of(snapshotter.failures)
        if self._feed is not None:
            lag, held = self._feed.lag, self._feed.held_number
            yield STANDBY.of(lag is not None)
            if lag is not None and held is not None:
                yield STANDBY_LAG.of(lag)
                yield STANDBY_LAG_SECONDS.of(storage.age_seconds(held))


def _model(model: ShardModel) -> Iterator[Sample]:
    name, tracker, times, layout = model.name, model.tracker, model.times, model.layout
    outcomes = tracker.counts.outcomes
    failed = outcomes.get(FAILED, 0)
    for verdict in Verdict:
        if verdict.value in outcomes:
            # Decided first, and taken back when the step raises: together they only rise.
            yield PUSHES.of(outcomes[verdict.value] + failed * (verdict is Verdict.APPLY), name, verdict.value)
    yield FAILED_STEPS.of(failed, name)
    yield STALENESS.of(staleness_value(tracker.counts.staleness), name)
    yield APPLY.of(times.apply.value, name)
    yield PULL.of(times.reply.value, name)
    yield PULL_WAIT.of(times.wait.value, name)
    yield ROUND.of(times.round.value, name)
    yield PARKED.of(model.parked_pulls, name)
    yield VERSION.of(tracker.version, name)
    if clocks := [standing.position.clock for standing in tracker.clocks()]:
        yield CLOCK_LEAST.of(min(clocks), name)
        yield CLOCK_MOST.of(max(clocks), name)
    open_streams = list(model.streams.transports.values())
    for transport in set(open_streams):
        yield STREAMS.of(open_streams.count(transport), name, transport.value)
    yield VARIABLES.of(len(layout.slices), name)
    yield VARIABLE_BYTES.of(layout.region_bytes, name)


def _tables(model: ShardModel) -> Iterator[Sample]:
    for table in model.tables:
        name, label = model.name, table.spec.name
        yield TABLE_ROWS.of(table.rows, name, label)
        yield TABLE_BYTES.of(table.size_bytes, name, label)
        yield TABLE_MEMORY.of(table.memory_bytes, name, label)
        if (paged := table.paged) is not None:
            yield TABLE_ON_DISK.of(paged.on_disk, name, label)
            yield TABLE_FILE.of(paged.disk_bytes, name, label)
            yield TABLE_FOUND.of(paged.wanted - paged.missed, name, label, "memory")
            yield TABLE_FOUND.of(paged.missed, name, label, "disk")
            read, written = paged.traffic
            yield TABLE_TRAFFIC.of(read, name, label, "read")
            yield TABLE_TRAFFIC.of(written, name, label, "written")
        yield TABLE_WAITING.of(table.waiting, name, label)
        yield ADMISSIONS.of(table.inserted, name, label)
        yield EVICTIONS.of(table.expired, name, label, "expired")
        yield EVICTIONS.of(table.evicted, name, label, "evicted")


def staleness_value(counts: list[int]) -> HistogramValue:
    """The histogram of ``counts``, of which ``counts[i]`` pushes had staleness i; the last had that or more."""
    ends = [0, *(int(bound) + 1 for bound in _STALENESS), len(counts)]
    return HistogramValue(
        _STALENESS,
        tuple(sum(counts[begin:end]) for begin, end in pairwise(ends)),
        float(sum(staleness * count for staleness, count in enumerate(counts))),
    )


def shard_stats(counters: Counters, registry: Registry) -> MemberStats:
    """The numbers of this moment. Called by the heartbeat thread, while the event loop and the executor change them:
    each is one word.
    """
    versions, models = registry.versions, registry.models
    return replace(
        counters.stats([model.times for model in models]),
        version=max(versions.values(), default=0),
        versions=versions,
        activity=registry.activity,
        streams=_stream_counts(models),
        held_bytes=sum(model.layout.region_bytes for model in models),
        tables=tuple(counts for model in models for counts in _table_counts(model)),
        updates=tuple(counts for model in models if (counts := _update_counts(model)) is not None),
    )


def _update_counts(model: ShardModel) -> UpdateCounts | None:
    """What was applied on arrival since the last call."""
    counts = model.samples.take(model.name, model.tracker.counts.staleness)
    return None if model.tracker.collects else counts


def _stream_counts(models: list[ShardModel]) -> dict[str, int]:
    found = Counter(transport.value for model in models for transport in list(model.streams.transports.values()))
    return dict(sorted(found.items()))


def _table_counts(model: ShardModel) -> list[TableCounts]:
    return [
        TableCounts(
            model=model.name,
            table=table.spec.name,
            rows=table.rows,
            waiting=table.waiting,
            size_bytes=table.size_bytes,
            inserted=table.inserted,
            expired=table.expired,
            evicted=table.evicted,
            on_disk=table.on_disk,
        )
        for table in model.tables
    ]
