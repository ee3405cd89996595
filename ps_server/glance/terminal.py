"""Draws the job at a glance for terminals: live for ``psctl top``, as tables for ``psctl status`` and ``ps-run``, and
as one line for a log.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ps_protocol.client.model_status import TableTotals
from ps_protocol.cluster.history import Curve, Curves, JobHistory
from ps_protocol.cluster.job_state import current_members, diverging, expiring, note_of, time_text
from ps_protocol.cluster.view import ClusterStatus, JobEvent, Role
from ps_protocol.text import printable
from ps_server.glance.job import JobGlance, glance_of
from ps_server.glance.publications import PublicationGlance, ReaderGlance
from ps_server.glance.shards import ShardGlance, TableGlance
from ps_server.glance.workers import WorkerGlance

T = TypeVar("T")
Member = TypeVar("Member", WorkerGlance, ShardGlance)

GAP = 2
"""Cells between two columns."""

NOTHING = "–"
"""In place of a number that does not apply, such as a rate of a member that has ended."""

FEWEST_QUEUED = 0.05
"""Fewer pushes that wait at a shard are none in one decimal, and are not shown."""

SPARKS = "▁▂▃▄▅▆▇█"
EVENTS = 6
PUBLICATIONS = 8
LATE_READERS = 4
FEWEST_WORKERS = 4

SHOWN_DECISIONS = 3
"""How many of the last decisions of the coordinator the tables of a status show."""

_WRONG = ("lost", "failed", "missing", "silent")
_ENDED = ("left", "stopped", "took over", "lost", "failed", "missing")
_STYLES: Mapping[str, str] = {"live": "green", "busy": "yellow", **dict.fromkeys(_WRONG, "bold red")}

NO_LIMIT = 1 << 16
"""Columns and lines where the output is no terminal."""


def glance_view(glance: JobGlance, curves: Curves, width: int = NO_LIMIT, height: int = NO_LIMIT) -> Group:
    """The whole view for a terminal of ``width`` columns and ``height`` lines: the least important columns and workers
    are left out.
    """
    texts = [_headline(glance, glance.elapsed_seconds), *_curves(glance, curves)]
    texts += [Text(printable(f"! {alert.text}"), style="bold red") for alert in glance.alerts]
    shards = (*_SHARDS, Column("note", lambda shard: shard.note, numeric=False, spare=9, optional=True))
    rest: list[RenderableType] = [*_shards(glance, shards, width)]
    if glance.tables:
        rest.append(_table(_TABLES, glance.tables, width))
    published = list(_published(glance, width))
    rest += published
    rest += [_event(event, f"{time_text(event.at_seconds)[11:]} ", one_line=True) for event in glance.events[-EVENTS:]]
    lines = sum(-(-max(1, text.cell_len) // width) for text in texts)
    used = lines + len(rest) + len(glance.shards) + len(glance.tables) + 2
    used += sum(each.row_count for each in published if isinstance(each, Table))
    return Group(*texts, *_workers(glance.workers, max(FEWEST_WORKERS, height - used - 2), width), *rest)


def status_tables(
    status: ClusterStatus, width: int, elapsed_seconds: float | None = None, tables: Sequence[TableTotals] = ()
) -> Group:
    """The whole status for a terminal of ``width`` columns; ``tables``, errors and decisions are at the end."""
    glance = _now(status)
    return Group(
        _headline(glance, elapsed_seconds),
        _table(_WORKERS, glance.workers, width, lambda worker: worker.state),
        *_shards(glance, _SHARDS, width),
        *([_table(_TOTALS, tables, width)] if tables else ()),
        *_notes(status),
        *([Text(printable(text), style="bold red")] if (text := diverging(status)) else ()),
        *([Text(printable(soon), style="yellow")] if (soon := expiring(status)) else ()),
        *(_event(event, time_text(event.at_seconds)) for event in status.decisions[-SHOWN_DECISIONS:]),
    )


def status_line(status: ClusterStatus, tables: Sequence[TableTotals] = ()) -> str:
    """The status in one line, without the time."""
    glance = _now(status)
    parts = [glance.mode, glance.state]
    parts += [_worker_words(worker) for worker in glance.workers if not worker.evaluator]
    parts += [_shard_words(shard) for shard in glance.shards]
    parts += [f"{each} {each.rows} rows {short(each.size_bytes)}B" for each in tables]
    parts += [text for text in (diverging(status), expiring(status)) if text]
    return printable(" | ".join(parts))


def _worker_words(worker: WorkerGlance) -> str:
    ended = worker.state in _ENDED
    words = [f"{worker.name} step {worker.steps}"]
    words += [f"{short(worker.steps_per_second)} steps/s"] if not ended else []
    words += [f"{short(worker.samples_per_second)} samples/s"] if worker.samples_per_second and not ended else []
    words += [f"stale {worker.staleness}", _reported(worker), worker.note or worker.state * ended]
    return " ".join(filter(None, words))


def _shard_words(shard: ShardGlance) -> str:
    if shard.state == "missing":
        return f"{shard.name} missing"
    ended = shard.state in _ENDED
    words = [shard.name, _versions(shard)]
    if not ended:
        words += [f"{short(shard.pushes_per_second)} pushes/s {short(shard.bytes_per_second)}B/s"]
    words += [f"{shard.dropped} dropped"] if shard.dropped else []
    words += [f"{_queued(shard)} pushes wait"] if _queued(shard) else []
    words += [f"standby {shard.standby_lag} records behind"] if shard.standby_lag is not None else []
    return " ".join(filter(None, [*words, shard.note or shard.state * ended]))


def _versions(shard: ShardGlance) -> str:
    if len(shard.versions) < 2:
        return f"version {max(shard.versions.values(), default=0)}"
    return "versions " + ", ".join(f"{name} {version}" for name, version in shard.versions.items())


def _now(status: ClusterStatus) -> JobGlance:
    """What there is to see of ``status`` alone: no waits, no silence, and before a job starts no shard is missing."""
    glance = glance_of(JobHistory(status, status.at_seconds, status.at_seconds, heartbeat_seconds=math.inf))
    there = tuple(shard for shard in glance.shards if status.view.started or shard.state != "missing")
    return replace(glance, shards=there)


def _notes(status: ClusterStatus) -> list[Text]:
    """In full, how members failed or were lost, or what they are busy with; members with the same note share a line."""
    names: dict[str, list[str]] = {}
    for role in (Role.WORKER, Role.EVALUATOR, Role.SHARD, Role.STANDBY):
        for entry in current_members(status, role):
            if note := note_of(entry):
                names.setdefault(note, []).append(str(entry.member))
    return [Text(printable(f"{', '.join(who)} {note}")) for note, who in names.items()]


def elapsed_text(seconds: float) -> str:
    """h:mm:ss, or mm:ss below one hour."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def spark(values: Sequence[float], width: int = 24) -> str:
    """The last ``width`` of ``values`` as bars between their least and greatest; a space where one is not known."""
    shown = list(values[-width:])
    known = [value for value in shown if math.isfinite(value)]
    if not known:
        return ""
    low, high = min(known), max(known)

    def bar(value: float) -> str:
        if not math.isfinite(value):
            return " "
        return SPARKS[int((value - low) / (high - low) * (len(SPARKS) - 1))] if high > low else SPARKS[0]

    return "".join(map(bar, shown))


def short(value: float) -> str:
    """A number in a few characters."""
    if not math.isfinite(value):
        return NOTHING
    if abs(value) >= 1e15:  # a loss that diverges
        return f"{value:.3g}"
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= unit:
            return f"{value / (1e3 if name == 'k' else unit):.1f}{name}"
    return f"{value:.4g}"


def _headline(glance: JobGlance, elapsed_seconds: float | None) -> Text:
    elapsed = "" if elapsed_seconds is None else f" · {elapsed_text(elapsed_seconds)}"
    return Text(printable(glance.headline + elapsed), style="bold", no_wrap=True, overflow="ellipsis")


def _curves(glance: JobGlance, curves: Curves) -> Iterable[Text]:
    totals = {
        "steps/s": glance.steps_per_second,
        "samples/s": glance.samples_per_second,
        "bytes/s": glance.bytes_per_second,
    }
    by_name: dict[tuple[str, bool], Curve] = {(each.name, each.reported): each for each in curves.curves}
    shown = [(name, value, by_name.get((name, False))) for name, value in totals.items() if value]
    shown += [(name, value, by_name.get((name, True))) for name, value in glance.reported.items()]
    for name, value, curve in shown:
        bars = spark(curve.mean) if curve else ""
        yield Text(printable(f"{name[:18]:<18} {short(value):>9}  {bars}"), no_wrap=True, overflow="ellipsis")


def _event(event: JobEvent, at: str, *, one_line: bool = False) -> Text:
    text = Text(printable(f"{at} {event.text}"), style="yellow" if event.warning else "dim")
    text.no_wrap, text.overflow = one_line, "ellipsis" if one_line else "fold"
    return text


# Tables.


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """One column of a table."""

    title: str
    cell: Callable[[T], str]
    numeric: bool = True
    #: In a narrow terminal, columns with the highest number are left out first; 0: never left out.
    spare: int = 0
    #: Left out when it is empty for all rows.
    optional: bool = False


REPORTED = "reported"


def fitting(columns: Sequence[Column[T]], rows: Sequence[T], width: int) -> list[tuple[Column[T], int]]:
    """The columns that a terminal of ``width`` shows, in order, with their widths. The least important ones are left
    out. Only reported metrics, which can have any length, are shortened.
    """
    shown = {
        each: max(map(cell_len, [each.title, *map(each.cell, rows)]))
        for each in columns
        if not each.optional or any(map(each.cell, rows))
    }
    report = next((each for each in shown if each.title == REPORTED), None)
    asked = shown.get(report, 0) if report else 0
    if report:
        shown[report] = min(asked, max(cell_len(REPORTED), width // 3))
    while _needed(shown) > width and (least := max(shown, key=lambda each: each.spare)).spare > 0:
        del shown[least]
    if report in shown:
        shown[report] = min(asked, shown[report] + width - _needed(shown))
    return list(shown.items())


def _needed(widths: Mapping[Column[T], int]) -> int:
    return sum(widths.values()) + GAP * (len(widths) - 1)


def _table(
    columns: Sequence[Column[T]], rows: Sequence[T], width: int, state: Callable[[T], str] = lambda row: ""
) -> Table:
    """``state`` of a row gives the colour of its state."""
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="bold")
    shown = fitting(columns, rows, width)
    for column, _ in shown:
        table.add_column(column.title, justify="right" if column.numeric else "left", no_wrap=True)
    for row in rows:
        style = _STYLES.get(state(row), "dim" if state(row) else "")
        cells = ((column, _shortened(column.cell(row), room)) for column, room in shown)
        table.add_row(*(Text(text, style=style if column.title == "state" else "") for column, text in cells))
    return table


def _shortened(cell: str, room: int) -> str:
    """``cell``, without what a terminal would obey, in ``room`` columns."""
    text = Text(printable(cell))
    text.truncate(room, overflow="ellipsis")
    return text.plain


# Workers.


def _workers(workers: Sequence[WorkerGlance], most: int, width: int) -> Iterable[RenderableType]:
    shown = workers
    if len(workers) > most:
        # What is worth a look comes first.
        ranked = sorted(workers, key=lambda each: (each.state not in _WRONG, not each.straggler, each.state in _ENDED))
        shown = sorted(ranked[:most], key=lambda each: (each.evaluator, each.index))
    note: Column[WorkerGlance] = Column("note", lambda worker: worker.note, numeric=False, spare=8, optional=True)
    yield _table((*_WORKERS, note), shown, width, lambda worker: worker.state)
    if len(shown) < len(workers):
        yield Text(f"and {len(workers) - len(shown)} more workers", style="dim")


def _state(worker: WorkerGlance) -> str:
    return f"{worker.state}, straggler" if worker.straggler else worker.state


def _rate(value: Callable[[Member], float]) -> Callable[[Member], str]:
    """A cell with a rate per second; NOTHING for a member that has ended."""
    return lambda member: NOTHING if member.state in _ENDED else short(value(member))


def _samples(worker: WorkerGlance) -> str:
    return short(worker.samples_per_second) if worker.samples_per_second and worker.state not in _ENDED else ""


def _waits(worker: WorkerGlance) -> str:
    if worker.wait_share is None or worker.state in _ENDED:
        return ""
    share = f"{worker.wait_share:.0%}"
    return f"{share} {worker.waits_for}" if worker.waits_for else share


def _reported(worker: WorkerGlance) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in worker.reported.items())


_WORKERS: tuple[Column[WorkerGlance], ...] = (
    Column("", lambda worker: worker.name, numeric=False),
    Column("state", _state, numeric=False),
    Column("step", lambda worker: str(worker.steps)),
    Column("behind", lambda worker: NOTHING if worker.state in _ENDED else str(worker.behind), spare=3),
    Column("steps/s", _rate(lambda worker: worker.steps_per_second), spare=1),
    Column("samples/s", _samples, spare=5, optional=True),
    Column("staleness", lambda worker: str(worker.staleness), spare=6),
    Column("waits", _waits, numeric=False, spare=2, optional=True),
    Column(REPORTED, _reported, numeric=False, spare=4, optional=True),
    Column("over", lambda worker: worker.transport, numeric=False, spare=7, optional=True),
)


# Shards and tables.


def _shards(glance: JobGlance, columns: Sequence[Column[ShardGlance]], width: int) -> Iterable[Table]:
    """The shards; of several models, each has its version below."""
    spans: dict[str, list[int]] = {}
    for shard in glance.shards:
        for name, version in shard.versions.items() if shard.state not in _ENDED else ():
            spans.setdefault(name, []).append(version)
    several = len(spans) > 1
    shown = [column for column in columns if not (several and column.title == "version")]
    yield _table(shown, glance.shards, width, lambda shard: shard.state)
    if several:
        yield _table(_SPANS, sorted(spans.items()), width)


def _span(model: tuple[str, list[int]]) -> str:
    lowest, highest = min(model[1]), max(model[1])
    return str(lowest) if lowest == highest else f"{lowest}–{highest}"


def _standby(shard: ShardGlance) -> str:
    lag = "" if shard.standby_lag is None else f", {shard.standby_lag} behind"
    return shard.standby + lag if shard.standby else ""


def _queued(shard: ShardGlance) -> str:
    """How many pushes wait, empty for none, as a mean rounds them."""
    return f"{shard.queued_pushes:.1f}" if shard.queued_pushes >= FEWEST_QUEUED else ""


def _queue(shard: ShardGlance) -> str:
    return f"{_queued(shard)} ({short(shard.queued_bytes)}B)" if _queued(shard) else ""


def _log(shard: ShardGlance) -> str:
    return f"{short(shard.log.unsaved_bytes)}B since snapshot" if shard.log else ""


_SHARDS: tuple[Column[ShardGlance], ...] = (
    Column("", lambda shard: shard.name, numeric=False),
    Column("state", lambda shard: shard.state, numeric=False),
    Column("version", lambda shard: ", ".join(map(str, shard.versions.values())), spare=2, optional=True),
    Column("pushes/s", _rate(lambda shard: shard.pushes_per_second), spare=1),
    Column("bytes/s", _rate(lambda shard: shard.bytes_per_second), spare=5),
    Column("holds", lambda shard: f"{short(shard.held_bytes + shard.table_bytes)}B", spare=6),
    Column("dropped", lambda shard: str(shard.dropped or ""), spare=4, optional=True),
    Column("queue", _queue, spare=4, optional=True),
    Column(
        "streams",
        lambda shard: " ".join(f"{name} {count}" for name, count in shard.streams.items()),
        numeric=False,
        spare=7,
        optional=True,
    ),
    Column("log", _log, numeric=False, spare=8, optional=True),
    Column("standby", _standby, numeric=False, spare=3, optional=True),
    Column("address", lambda shard: shard.address, numeric=False, spare=10, optional=True),
)

_SPANS: tuple[Column[tuple[str, list[int]]], ...] = (
    Column("", lambda model: f"model {model[0]}", numeric=False),
    Column("version", _span),
)

_TABLES: tuple[Column[TableGlance], ...] = (
    Column("", lambda table: f"table {table.table}", numeric=False),
    Column("rows", lambda table: str(table.rows)),
    Column("rows/s", lambda table: short(table.growth), spare=1),
    Column("bytes", lambda table: short(table.size_bytes), spare=2),
    Column("on disk", lambda table: str(table.on_disk), spare=3),
    Column("waiting", lambda table: str(table.waiting), spare=4),
    Column("admitted", lambda table: str(table.inserted), spare=5),
    Column("expired", lambda table: str(table.expired), spare=6),
    Column("evicted", lambda table: str(table.evicted), spare=7),
)


# Published weights.


def _published(glance: JobGlance, width: int) -> Iterable[RenderableType]:
    """The first names, and the readers that are furthest behind."""
    if not glance.publications:
        return
    names = glance.publications[:PUBLICATIONS]
    age: Column[PublicationGlance] = Column("age", lambda each: _age(each, glance.at_seconds), spare=3)
    yield _table((*_PUBLICATIONS[:3], age, *_PUBLICATIONS[3:]), names, width)
    if more := len(glance.publications) - len(names):
        yield Text(f"and {more} more names", style="dim")
    late = [reader for reader in glance.readers if reader.behind][:LATE_READERS]
    if late:
        yield _table(_LATE, late, width)
        count = sum(each.readers for each in glance.publications)
        if more := count - len(late):
            yield Text(f"and {more} more readers", style="dim")


def _age(publication: PublicationGlance, now: float) -> str:
    return elapsed_text(max(0.0, now - publication.at_seconds)) if publication.version else ""


def _moved(each: PublicationGlance | ReaderGlance) -> str:
    """What was received as deltas and whole, and what that saved."""
    if not each.delta_bytes and not each.full_bytes:
        return ""
    return f"{short(each.delta_bytes)}B / {short(each.full_bytes)}B, saved {short(each.saved_bytes)}B"


_PUBLICATIONS: tuple[Column[PublicationGlance], ...] = (
    Column("", lambda each: f"weights {each.name}", numeric=False),
    Column("version", lambda each: str(each.version or NOTHING)),
    Column("step", lambda each: str(each.step) if each.version else "", spare=2),
    Column("bytes", lambda each: short(each.size_bytes), spare=5),
    Column("readers", lambda each: str(each.readers), spare=1),
    Column("by relays", lambda each: str(each.relayed or ""), spare=4, optional=True),
    Column("behind", lambda each: str(each.behind) if each.readers else "", spare=1),
    Column("deltas / whole", _moved, spare=6, optional=True),
)

_LATE: tuple[Column[ReaderGlance], ...] = (
    Column("", lambda reader: f"reader {reader.name}", numeric=False),
    Column("of", lambda reader: reader.publication, numeric=False, spare=2),
    Column("version", lambda reader: str(reader.version or NOTHING), spare=1),
    Column("behind", lambda reader: str(reader.behind)),
    Column("serves", lambda reader: str(reader.serves or ""), spare=2, optional=True),
    Column("deltas / whole", _moved, spare=3, optional=True),
)

_TOTALS: tuple[Column[TableTotals], ...] = (
    Column("", str, numeric=False),
    Column("rows", lambda table: str(table.rows)),
    Column("bytes", lambda table: short(table.size_bytes), spare=1),
    Column("updates", lambda table: str(table.updates), spare=2),
    Column("waiting", lambda table: str(table.waiting), spare=3),
    Column("expired", lambda table: str(table.expired), spare=4),
    Column("evicted", lambda table: str(table.evicted), spare=5),
    Column("model", lambda table: table.model, numeric=False, spare=6),
)
