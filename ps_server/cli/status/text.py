"""The status of a cluster as text: tables for a terminal, one line for a log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ps_protocol.client.model_status import TableTotals
from ps_protocol.cluster.events import JobEvent
from ps_protocol.cluster.job_state import current_members, expiring, headline, job_state, note_of, time_text
from ps_protocol.cluster.view import ClusterStatus, MemberStats, MemberStatus, Role
from ps_protocol.text import printable
from ps_server.cli.status.columns import (
    GAP,
    SPEED,
    WORKER_COLUMNS,
    Column,
    fitting,
    metrics_text,
    queue_text,
    shard_columns,
    versions_of,
)

SHOWN_DECISIONS = 3
"""How many of the coordinator's last decisions are shown below the tables."""

WIDE = 80
"""Terminals with fewer columns get a table's most important numbers."""


def elapsed_text(seconds: float) -> str:
    """h:mm:ss, or mm:ss below one hour."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def _table(columns: Sequence[Column[MemberStatus]], members: Sequence[MemberStatus], width: int) -> Table:
    shown = fitting(columns, members, width)
    rows = (([shortened(column.cell(entry), room) for column, room in shown], bool(entry.gone)) for entry in members)
    return _grid([(column.title, column.numeric) for column, _ in shown], rows)


def shortened(cell: str, room: int) -> str:
    """``cell``, without what a terminal would obey, in ``room`` columns."""
    text = Text(printable(cell))
    text.truncate(room, overflow="ellipsis")
    return text.plain


def _table_of_tables(tables: Sequence[TableTotals], width: int) -> Table:
    titles = ["", "rows", "MB", "updates", "waiting", "expired", "evicted", "model"][: 4 if width < WIDE else None]
    rows = []
    for each in tables:
        numbers = (each.rows, f"{each.size_bytes / 1e6:.1f}", each.updates, each.waiting, each.expired, each.evicted)
        cells = [str(each), *map(str, numbers), each.model]
        rows.append((cells[: len(titles)], each.answered < each.shards))
    return _grid([(title, title not in ("", "model")) for title in titles], rows)


def _table_of_versions(versions: Mapping[str, tuple[int, int]]) -> Table:
    rows = [([f"model {name}", _span(lowest, highest)], False) for name, (lowest, highest) in versions.items()]
    return _grid([("", False), ("version", True)], rows)


def _span(lowest: int, highest: int) -> str:
    return str(lowest) if lowest == highest else f"{lowest}–{highest}"


def _grid(titles: Iterable[tuple[str, bool]], rows: Iterable[tuple[Sequence[str], bool]]) -> Table:
    """``titles``: with True for a column of numbers; ``rows``: with True for a dim row."""
    grid = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="bold")
    for title, numeric in titles:
        grid.add_column(title, justify="right" if numeric else "left", no_wrap=True)
    for cells, dim in rows:
        grid.add_row(*(Text(printable(cell)) for cell in cells), style="dim" if dim else None)
    return grid


def _notes(members: Iterable[MemberStatus]) -> list[Text]:
    """In full, how members failed or were lost, or what they are busy with; members with the same note share a line."""
    names: dict[str, list[str]] = {}
    for entry in members:
        if note := note_of(entry):
            names.setdefault(note, []).append(str(entry.member))
    return [Text(printable(f"{', '.join(who)} {note}")) for note, who in names.items()]


def status_tables(
    status: ClusterStatus, width: int, elapsed_seconds: float | None = None, tables: Sequence[TableTotals] = ()
) -> Group:
    """The whole status for a terminal of ``width`` columns; versions of several models, ``tables`` and errors are
    at the end.
    """
    elapsed = "" if elapsed_seconds is None else f" · {elapsed_text(elapsed_seconds)}"
    scripts = current_members(status, Role.WORKER) + current_members(status, Role.EVALUATOR)
    shards = current_members(status, Role.SHARD)
    servers = shards + current_members(status, Role.STANDBY)
    lags = {entry.member.index: entry.stats.standby_lag for entry in shards if not entry.gone}
    versions = versions_of(shards)
    several = len(versions) > 1
    return Group(
        Text(headline(status) + elapsed, style="bold", no_wrap=True, overflow="ellipsis"),
        _table(WORKER_COLUMNS, scripts, width),
        _table(shard_columns(status.view.spare, lags, with_version=not several), servers, width),
        *([_table_of_versions(versions)] if several else ()),
        *([_table_of_tables(tables, width)] if tables else ()),
        *_notes([*scripts, *servers]),
        *([Text(printable(soon), style="yellow")] if (soon := expiring(status)) else ()),
        *(_decision(event) for event in status.decisions[-SHOWN_DECISIONS:]),
    )


def _decision(event: JobEvent) -> Text:
    style = "yellow" if event.warning else ""
    return Text(printable(f"{time_text(event.at_seconds)} {event.text}"), style=style)


def _versions(stats: MemberStats) -> str:
    if len(stats.versions) < 2:
        return f"version {stats.version}"
    return "versions " + ", ".join(f"{name} {version}" for name, version in sorted(stats.versions.items()))


def status_line(status: ClusterStatus, tables: Sequence[TableTotals] = ()) -> str:
    """The status in one line, without the time."""
    parts = [str(status.view.consistency), str(job_state(status))]
    for entry in current_members(status, Role.WORKER):
        stats = entry.stats
        rates = "" if entry.gone else f" {stats.steps_per_second:.1f} steps/s"
        rates += f" {stats.samples_per_second:.0f} samples/s" if stats.samples and not entry.gone else ""
        numbers = f"step {stats.steps}{rates} stale {stats.staleness}"
        parts.append(" ".join(filter(None, (str(entry.member), numbers, metrics_text(entry), entry.gone))))
    for entry in current_members(status, Role.SHARD):
        stats = entry.stats
        words = [f"{entry.member} {_versions(stats)}"]
        words += [f"{stats.steps_per_second:.0f} pushes/s {SPEED.cell(entry)} MB/s"] if not entry.gone else []
        words += [f"{stats.dropped} dropped"] if stats.dropped else []
        words += [f"{queue} pushes wait"] if (queue := queue_text(stats.queued_pushes)) else []
        words += [f"standby {stats.standby_lag} records behind"] if stats.standby_lag is not None else []
        parts.append(" ".join([*words, *filter(None, [entry.gone or stats.activity])]))
    parts += [f"{each} {each.rows} rows {each.size_bytes / 1e6:.1f} MB" for each in tables]
    parts += [soon] if (soon := expiring(status)) else []
    return printable(" | ".join(parts))
