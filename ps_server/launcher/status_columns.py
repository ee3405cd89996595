"""Decides which columns of a status table a terminal shows, and what stands in them for one member."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from ps_protocol.view import MemberStats, MemberStatus, Role

#: Between two columns.
GAP = 2

NOTHING = "–"
"""Where a number means nothing: a rate of a member that has ended."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table of members."""

    title: str
    cell: Callable[[MemberStatus], str]
    numeric: bool = True
    #: The higher, the sooner it is left out of a terminal that is too narrow; 0: never.
    spare: int = 0
    #: Left out where no member has anything to say in it.
    optional: bool = False


def state_of(entry: MemberStatus, spare: bool = False) -> str:
    """In one word: "live", "busy" before it can do its usual work, "spare", "left" at a clean end, "stopped" when told
    to, "failed", or "lost".
    """
    how, _, why = entry.gone.partition(": ")
    if not how:
        return "busy" if entry.stats.activity else "spare" if spare else "live"
    if how != "left":
        return "lost"
    return {"": "left", "stopped": "stopped"}.get(why, "failed")


def note_of(entry: MemberStatus) -> str:
    """How a member failed or was lost, or what it is busy with, in its own words; empty for others."""
    if not entry.gone and entry.stats.activity:
        return f"busy: {entry.stats.activity}"
    if state_of(entry) not in ("failed", "lost"):
        return ""
    return f"{state_of(entry)}: {entry.gone.removeprefix('left: ')}"


def metrics_text(entry: MemberStatus) -> str:
    """What the training script reported."""
    return "  ".join(f"{name} {value:.4g}" for name, value in entry.stats.metrics.items())


def rate(value: Callable[[MemberStats], float], digits: int = 1) -> Callable[[MemberStatus], str]:
    """A cell with something per second; of a member that has ended it says nothing."""
    return lambda entry: NOTHING if entry.gone else f"{value(entry.stats):.{digits}f}"


def _positive(value: Callable[[MemberStats], int]) -> Callable[[MemberStatus], str]:
    return lambda entry: str(value(entry.stats) or "")


REPORTED = "reported"
NAME = Column("", lambda entry: str(entry.member), numeric=False)
SPEED = Column("MB/s", rate(lambda stats: stats.bytes_per_second / 1e6), spare=5)

WORKER_COLUMNS = (
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


def shard_columns(spare: frozenset[int], lags: Mapping[int, int | None]) -> tuple[Column, ...]:
    """Of shards and standbys. Those in ``spare`` hold nothing; ``lags``: what the standby of each shard lacks."""

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
        Column("version", lambda entry: "" if entry.member.role is Role.STANDBY else f"{entry.stats.version}"),
        Column("pushes/s", _of_shards(rate(lambda stats: stats.steps_per_second)), spare=2),
        Column("dropped", _positive(lambda stats: stats.dropped), spare=3, optional=True),
        Column("MB/s", _of_shards(SPEED.cell), spare=5),
        Column("behind", lag, spare=4, optional=True),
        Column("address", lambda entry: entry.member.address, numeric=False, spare=6, optional=True),
    )


def _of_shards(cell: Callable[[MemberStatus], str]) -> Callable[[MemberStatus], str]:
    return lambda entry: "" if entry.member.role is Role.STANDBY else cell(entry)


def fitting(columns: Sequence[Column], members: Sequence[MemberStatus], width: int) -> list[tuple[Column, int]]:
    """What a terminal of ``width`` shows, in order, with the width of each column: those that matter least are left
    out. Only what was reported, which is as long as the script likes, is shortened to what is left.
    """
    shown = {
        each: max(map(cell_len, [each.title, *map(each.cell, members)]))
        for each in columns
        if not each.optional or any(map(each.cell, members))
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


def _needed(widths: Mapping[Column, int]) -> int:
    return sum(widths.values()) + GAP * (len(widths) - 1)
