"""How a cluster's status is shown to people: tables for a terminal, one line for a log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ps_protocol.text import printable
from ps_protocol.view import ClusterStatus, MemberStatus, Role

NARROW_WIDTH = 80
"""Terminals with fewer columns get the ones that matter most."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table of members."""

    title: str
    cell: Callable[[MemberStatus], str]
    numeric: bool = True
    #: Shown in narrow terminals too.
    essential: bool = True


@dataclass(frozen=True, slots=True)
class TableTotals:
    """A table of one model, summed over the shards that answered."""

    model: str
    table: str
    rows: int
    #: Ids that have been used and have no row yet.
    waiting: int
    size_bytes: int
    #: Of the table, and not summed.
    updates: int
    #: Since each of the shards began.
    inserted: int
    expired: int
    evicted: int
    #: How many hold a part of the model, and how many of them told of the table.
    shards: int
    answered: int

    def __str__(self) -> str:
        unheard = "" if self.answered == self.shards else f" ({self.answered} of {self.shards} shards)"
        return f"table {self.table}{unheard}"


def metrics_text(entry: MemberStatus) -> str:
    """What the training script reported."""
    return "  ".join(f"{name} {value:.4g}" for name, value in entry.stats.metrics.items())


NAME = Column("", lambda entry: str(entry.member), numeric=False)
SPEED = Column("MB/s", lambda entry: f"{entry.stats.bytes_per_second / 1e6:.1f}", essential=False)
STATE = Column("state", lambda entry: entry.gone or "live", numeric=False, essential=False)

WORKER_COLUMNS = (
    NAME,
    Column("step", lambda entry: f"{entry.stats.steps}"),
    Column("samples/s", lambda entry: f"{entry.stats.samples_per_second:.0f}"),
    SPEED,
    Column("over", lambda entry: entry.stats.transport, numeric=False, essential=False),
    Column("staleness", lambda entry: f"{entry.stats.staleness}", essential=False),
    STATE,
    Column("reported", metrics_text, numeric=False),
)


def shard_columns(spare: Set[int]) -> tuple[Column, ...]:
    """What is shown of shards, of which those in ``spare`` hold nothing."""

    def state(entry: MemberStatus) -> str:
        return "spare" if not entry.gone and entry.member.index in spare else STATE.cell(entry)

    return (
        NAME,
        Column("version", lambda entry: f"{entry.stats.version}"),
        Column("pushes/s", lambda entry: f"{entry.stats.steps_per_second:.1f}"),
        Column("MB/s", SPEED.cell),
        replace(STATE, cell=state),
        Column("address", lambda entry: entry.member.address, numeric=False, essential=False),
    )


def current_members(status: ClusterStatus, role: Role) -> list[MemberStatus]:
    """One entry per place, by index: who lives there, or else who was there last."""
    places: dict[int, MemberStatus] = {}
    for entry in status.members:
        known = places.get(entry.member.index)
        if entry.member.role is role and (known is None or known.member.incarnation < entry.member.incarnation):
            places[entry.member.index] = entry
    return [places[index] for index in sorted(places)]


def headline(status: ClusterStatus) -> str:
    """Mode, state of the job, who is there, models."""
    view = status.view
    live, used = view.live(Role.SHARD).keys(), view.used_shards
    workers, shards, spare = len(view.live(Role.WORKER)), len(live & set(used)), len(live & view.spare)
    expected = f" of {view.expected_workers}" if view.expected_workers else ""
    state = "finished" if view.finished else "training" if view.started else "waiting for members"
    beside = f" and {spare} spare" if spare else ""
    parts = [str(view.consistency), state, f"{shards} of {len(used)} shards{beside}", f"{workers}{expected} workers"]
    if view.moving:
        parts.append("moving slices")
    if view.models:
        parts.append("models " + ", ".join(sorted(view.models)))
    return printable(" · ".join(parts))


def elapsed_text(seconds: float) -> str:
    """h:mm:ss, without the hours while there are none."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def _table(columns: tuple[Column, ...], members: list[MemberStatus], narrow: bool) -> Table:
    shown = [column for column in columns if column.essential or not narrow]
    rows = (([column.cell(entry) for column in shown], bool(entry.gone)) for entry in members)
    return _grid([(column.title, column.numeric) for column in shown], rows)


def _table_of_tables(tables: Sequence[TableTotals], narrow: bool) -> Table:
    titles = ["", "rows", "MB", "updates", "waiting", "expired", "evicted", "model"][: 4 if narrow else None]
    rows = []
    for each in tables:
        numbers = (each.rows, f"{each.size_bytes / 1e6:.1f}", each.updates, each.waiting, each.expired, each.evicted)
        cells = [str(each), *map(str, numbers), each.model]
        rows.append((cells[: len(titles)], each.answered < each.shards))
    return _grid([(title, title not in ("", "model")) for title in titles], rows)


def _grid(titles: Iterable[tuple[str, bool]], rows: Iterable[tuple[Sequence[str], bool]]) -> Table:
    """``titles`` with whether numbers are below; ``rows`` with whether they are dim."""
    grid = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title, numeric in titles:
        grid.add_column(title, justify="right" if numeric else "left", no_wrap=True)
    for cells, dim in rows:
        grid.add_row(*(Text(printable(cell)) for cell in cells), style="dim" if dim else None)
    return grid


def status_tables(
    status: ClusterStatus, width: int, elapsed_seconds: float | None = None, tables: Sequence[TableTotals] = ()
) -> Group:
    """The whole status for a terminal of ``width`` columns; ``tables`` of its models come last."""
    time = "" if elapsed_seconds is None else f" · {elapsed_text(elapsed_seconds)}"
    scripts = current_members(status, Role.WORKER) + current_members(status, Role.EVALUATOR)
    servers = current_members(status, Role.SHARD) + current_members(status, Role.STANDBY)
    narrow = width < NARROW_WIDTH
    return Group(
        Text(headline(status) + time, style="bold", no_wrap=True, overflow="ellipsis"),
        _table(WORKER_COLUMNS, scripts, narrow),
        _table(shard_columns(status.view.spare), servers, narrow),
        *([_table_of_tables(tables, narrow)] if tables else ()),
    )


def status_line(status: ClusterStatus, tables: Sequence[TableTotals] = ()) -> str:
    """The same in one line, without the time."""
    parts = [str(status.view.consistency)]
    for entry in current_members(status, Role.WORKER):
        stats = entry.stats
        numbers = f"step {stats.steps} {stats.samples_per_second:.0f} samples/s stale {stats.staleness}"
        parts.append(" ".join(filter(None, (str(entry.member), numbers, metrics_text(entry), entry.gone))))
    for entry in current_members(status, Role.SHARD):
        numbers = f"version {entry.stats.version} {entry.stats.steps_per_second:.0f} pushes/s {SPEED.cell(entry)} MB/s"
        parts.append(f"{entry.member} {numbers}")
    parts += [f"{each} {each.rows} rows {each.size_bytes / 1e6:.1f} MB" for each in tables]
    return printable(" | ".join(parts))
