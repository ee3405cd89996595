"""The shards of a job at a glance, with their standbys and tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ps_protocol.cluster.history import JobHistory
from ps_protocol.cluster.job_state import current_members, note_of, state_of
from ps_protocol.cluster.view import LogCounts, MemberStatus, Role, TableCounts
from ps_server.glance.workers import is_silent


@dataclass(frozen=True, slots=True)
class ShardGlance:
    """One shard, with the standby that follows it."""

    name: str
    index: int
    #: As ``state_of``, "silent", or "missing" for one that the job waits for.
    state: str
    note: str = ""
    #: By model.
    versions: Mapping[str, int] = field(default_factory=dict)
    pushes: int = 0
    pushes_per_second: float = 0.0
    bytes_per_second: float = 0.0
    dropped: int = 0
    #: Pushes that waited for their turn, a mean, and their bytes.
    queued_pushes: float = 0.0
    queued_bytes: float = 0.0
    #: Open streams by transport.
    streams: Mapping[str, int] = field(default_factory=dict)
    held_bytes: int = 0
    table_bytes: int = 0
    log: LogCounts | None = None
    #: "" without a standby, else its state; of one that took over, when.
    standby: str = ""
    #: Records of the log that the standby lacks; None without one that follows.
    standby_lag: int | None = None
    heard_seconds: float = 0.0
    address: str = ""
    host: str = ""
    pid: int = 0


@dataclass(frozen=True, slots=True)
class TableGlance:
    """A table, summed over its live shards."""

    model: str
    table: str
    rows: int
    #: Rows per second that it grows by.
    growth: float
    #: Ids that have been used and have no row yet.
    waiting: int
    size_bytes: int
    #: Since the start of each shard: rows that were admitted, that expired, that were evicted.
    inserted: int
    expired: int
    evicted: int
    shards: int
    #: Of the rows: those that are not in memory.
    on_disk: int = 0


def shards_of(history: JobHistory) -> tuple[ShardGlance, ...]:
    """By number, with those that are missing."""
    status = history.status
    entries = {entry.member.index: entry for entry in current_members(status, Role.SHARD)}
    standbys = {entry.member.index: entry for entry in current_members(status, Role.STANDBY)}
    numbers = sorted(entries.keys() | set(status.view.used_shards))
    return tuple(_glance(number, entries.get(number), standbys.get(number), history) for number in numbers)


def tables_of(history: JobHistory) -> tuple[TableGlance, ...]:
    """By model and name."""
    parts: dict[tuple[str, str], list[TableCounts]] = {}
    for entry in history.status.members:
        for counts in entry.stats.tables if not entry.gone else ():
            parts.setdefault((counts.model, counts.table), []).append(counts)
    return tuple(
        TableGlance(
            model=model,
            table=table,
            rows=sum(part.rows for part in found),
            growth=history.table_growth.get((model, table), 0.0),
            waiting=sum(part.waiting for part in found),
            size_bytes=sum(part.size_bytes for part in found),
            inserted=sum(part.inserted for part in found),
            expired=sum(part.expired for part in found),
            evicted=sum(part.evicted for part in found),
            shards=len(found),
            on_disk=sum(part.on_disk for part in found),
        )
        for (model, table), found in sorted(parts.items())
    )


def _standby_words(standby: MemberStatus | None, history: JobHistory) -> str:
    if standby is None:
        return ""
    if standby.gone:
        return note_of(standby).replace("no standby", "none") if state_of(standby) == "took over" else ""
    return "silent" if is_silent(standby, history) else "follows"


def _glance(number: int, entry: MemberStatus | None, standby: MemberStatus | None, history: JobHistory) -> ShardGlance:
    if entry is None:
        return ShardGlance(f"shard {number}", number, "missing")
    stats = entry.stats
    return ShardGlance(
        name=str(entry.member),
        index=number,
        state="silent" if is_silent(entry, history) else state_of(entry, number in history.status.view.spare),
        note=note_of(entry),
        versions=dict(sorted(stats.versions.items())),
        pushes=stats.steps,
        pushes_per_second=stats.steps_per_second,
        bytes_per_second=stats.bytes_per_second,
        dropped=stats.dropped,
        queued_pushes=stats.queued_pushes,
        queued_bytes=stats.queued_bytes,
        streams=dict(stats.streams),
        held_bytes=stats.held_bytes,
        table_bytes=sum(counts.size_bytes for counts in stats.tables),
        log=stats.log,
        standby=_standby_words(standby, history),
        standby_lag=stats.standby_lag,
        heard_seconds=entry.seconds_since_heartbeat,
        address=entry.member.address,
        host=entry.host,
        pid=entry.pid,
    )
