"""The columns of a status table: their cells, and which of them fit a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rich.cells import cell_len

from ps_protocol.cluster.job_state import state_of
from ps_protocol.cluster.view import MemberStats, MemberStatus, Role

#: Between two columns.
GAP = 2

NOTHING = "–"
"""In place of a number that does not apply, such as a rate of a member that has ended."""

FEWEST_QUEUED = 0.05
"""Pushes that wait at a shard, of which a view tells; fewer are none in one decimal."""


T = TypeVar("T")


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


def metrics_text(entry: MemberStatus) -> str:
    """The metrics that the training script reported."""
    return "  ".join(f"{name} {value:.4g}" for name, value in entry.stats.metrics.items())


def rate(value: Callable[[MemberStats], float], digits: int = 1) -> Callable[[MemberStatus], str]:
    """A cell with a rate per second; NOTHING for a member that has ended."""
    return lambda entry: NOTHING if entry.gone else f"{value(entry.stats):.{digits}f}"


def _positive(value: Callable[[MemberStats], int]) -> Callable[[MemberStatus], str]:
    return lambda entry: str(value(entry.stats) or "")


def queue_text(queued_pushes: float) -> str:
    """How many pushes wait for their turn at a shard; empty for none, as a mean rounds them."""
    return f"{queued_pushes:.1f}" if queued_pushes >= FEWEST_QUEUED else ""


REPORTED = "reported"
NAME: Column[MemberStatus] = Column("", lambda entry: str(entry.member), numeric=False)
SPEED: Column[MemberStatus] = Column("MB/s", rate(lambda stats: stats.bytes_per_second / 1e6), spare=5)

WORKER_COLUMNS: tuple[Column[MemberStatus], ...] = (
    NAME,
    Column("state", state_of, numeric=False),
    Column("step", lambda entry: f"{entry.stats.steps}"),
    Column("steps/s", rate(lambda stats: stats.steps_per_second), spare=2),
    Column(
        "samples/s",
        lambda entry: rate(lambda stats: stats.samples_per_second, 0)(entry) if entry.stats.samples else "",
        spare=3,
        optional=True,
    ),
    Column("staleness", lambda entry: f"{entry.stats.staleness}", spare=6),
    SPEED,
    Column("over", lambda entry: entry.stats.transport, numeric=False, spare=7, optional=True),
    Column(REPORTED, metrics_text, numeric=False, spare=1, optional=True),
)


def versions_of(shards: Iterable[MemberStatus]) -> dict[str, tuple[int, int]]:
    """The lowest and the highest version of each model over the live ``shards``, by model name."""
    told: dict[str, list[int]] = {}
    for entry in shards:
        for name, version in entry.stats.versions.items() if not entry.gone else ():
            told.setdefault(name, []).append(version)
    return {name: (min(versions), max(versions)) for name, versions in sorted(told.items())}


def shard_columns(
    spare: frozenset[int], lags: Mapping[int, int | None], *, with_version: bool = True
) -> tuple[Column[MemberStatus], ...]:
    """Columns of shards and standbys. ``spare``: shards that hold nothing; ``lags``: records that each standby lacks.

    ``with_version``: with the version of the one model of a shard.
    """

    def state(entry: MemberStatus) -> str:
        return state_of(entry, entry.member.role is Role.SHARD and entry.member.index in spare)

    def lag(entry: MemberStatus) -> str:
        behind = lags.get(entry.member.index)
        if entry.member.role is not Role.STANDBY or entry.gone or behind is None:
            return ""
        return f"{behind} record{'' if behind == 1 else 's'}"

    return (
        NAME,
        Column("state", state, numeric=False),
        *([Column("version", _of_shards(lambda entry: f"{entry.stats.version}"))] if with_version else ()),
        Column("pushes/s", _of_shards(rate(lambda stats: stats.steps_per_second)), spare=2),
        Column("dropped", _positive(lambda stats: stats.dropped), spare=3, optional=True),
        Column("queue", lambda entry: queue_text(entry.stats.queued_pushes), spare=4, optional=True),
        Column("MB/s", _of_shards(SPEED.cell), spare=5),
        Column("behind", lag, spare=4, optional=True),
        Column("address", lambda entry: entry.member.address, numeric=False, spare=6, optional=True),
    )


def _of_shards(cell: Callable[[MemberStatus], str]) -> Callable[[MemberStatus], str]:
    return lambda entry: "" if entry.member.role is Role.STANDBY else cell(entry)


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
