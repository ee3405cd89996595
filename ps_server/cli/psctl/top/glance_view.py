"""The job at a glance in a terminal: totals with their curves, alerts, workers, shards, tables, the last events."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ps_protocol.cluster.history import Curve, Curves
from ps_protocol.text import printable
from ps_server.cli.status.columns import GAP, NOTHING, REPORTED, Column, fitting, queue_text
from ps_server.cli.status.text import elapsed_text, shortened
from ps_server.glance.job import JobGlance
from ps_server.glance.shards import ShardGlance, TableGlance
from ps_server.glance.workers import WorkerGlance

T = TypeVar("T")

SPARKS = "▁▂▃▄▅▆▇█"
EVENTS = 6
FEWEST_WORKERS = 4

_WRONG = ("lost", "failed", "missing", "silent")
_ENDED = ("left", "stopped", "lost", "failed", "missing")
_STYLES: Mapping[str, str] = {"live": "green", "busy": "yellow", **dict.fromkeys(_WRONG, "bold red")}

NO_LIMIT = 1 << 16
"""Columns and lines where the output is no terminal."""


def glance_view(glance: JobGlance, curves: Curves, width: int = NO_LIMIT, height: int = NO_LIMIT) -> Group:
    """The whole view for a terminal of ``width`` columns and ``height`` lines: the least important columns and workers
    are left out.
    """
    texts = [_headline(glance), *_curves(glance, curves)]
    texts += [Text(printable(f"! {alert.text}"), style="bold red") for alert in glance.alerts]
    rest: list[RenderableType] = [_table(_SHARDS, glance.shards, lambda shard: shard.state, width)]
    if glance.tables:
        rest.append(_table(_TABLES, glance.tables, lambda table: "", width))
    rest += _events(glance)
    lines = sum(-(-max(1, text.cell_len) // width) for text in texts)
    used = lines + len(rest) + len(glance.shards) + len(glance.tables) + 2
    return Group(*texts, *_workers(glance.workers, max(FEWEST_WORKERS, height - used - 2), width), *rest)


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
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= unit:
            return f"{value / (1e3 if name == 'k' else unit):.1f}{name}"
    return f"{value:.4g}"


def _headline(glance: JobGlance) -> Text:
    words = f"{glance.headline} · {elapsed_text(glance.elapsed_seconds)}"
    return Text(printable(words), style="bold")


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


def _workers(workers: Sequence[WorkerGlance], most: int, width: int) -> Iterable[RenderableType]:
    shown = workers
    if len(workers) > most:
        # What is worth a look comes first.
        ranked = sorted(workers, key=lambda each: (each.state not in _WRONG, not each.straggler, each.state in _ENDED))
        shown = sorted(ranked[:most], key=lambda each: (each.evaluator, each.index))
    yield _table(_WORKERS, shown, lambda worker: worker.state, width)
    if len(shown) < len(workers):
        yield Text(f"and {len(workers) - len(shown)} more workers", style="dim")


def _state(worker: WorkerGlance) -> str:
    return f"{worker.state}, straggler" if worker.straggler else worker.state


def _rate(value: Callable[[WorkerGlance], float]) -> Callable[[WorkerGlance], str]:
    return lambda worker: NOTHING if worker.state in _ENDED else short(value(worker))


def _waits(worker: WorkerGlance) -> str:
    if worker.wait_share is None or worker.state in _ENDED:
        return ""
    share = f"{worker.wait_share:.0%}"
    return f"{share} {worker.waits_for}" if worker.waits_for else share


def _reported(worker: WorkerGlance) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in worker.reported.items())


#: In a narrow terminal, those with the highest numbers are left out first.
_WORKERS: tuple[Column[WorkerGlance], ...] = (
    Column("worker", lambda worker: worker.name, numeric=False),
    Column("state", _state, numeric=False),
    Column("step", lambda worker: str(worker.steps)),
    Column("behind", lambda worker: NOTHING if worker.state in _ENDED else str(worker.behind), spare=3),
    Column("steps/s", _rate(lambda worker: worker.steps_per_second), spare=1),
    Column("samples/s", _rate(lambda worker: worker.samples_per_second), spare=5),
    Column("staleness", lambda worker: str(worker.staleness), spare=6),
    Column("waits", _waits, numeric=False, spare=2, optional=True),
    Column(REPORTED, _reported, numeric=False, spare=4, optional=True),
    Column("over", lambda worker: worker.transport, numeric=False, spare=7, optional=True),
    Column("note", lambda worker: worker.note, numeric=False, spare=8, optional=True),
)


def _standby(shard: ShardGlance) -> str:
    lag = "" if shard.standby_lag is None else f", {shard.standby_lag} behind"
    return shard.standby + lag if shard.standby else ""


def _queue(shard: ShardGlance) -> str:
    pushes = queue_text(shard.queued_pushes)
    return f"{pushes} ({short(shard.queued_bytes)}B)" if pushes else ""


def _log(shard: ShardGlance) -> str:
    return f"{short(shard.log.unsaved_bytes)}B since snapshot" if shard.log else ""


_SHARDS: tuple[Column[ShardGlance], ...] = (
    Column("shard", lambda shard: shard.name, numeric=False),
    Column("state", lambda shard: shard.state, numeric=False),
    Column("version", lambda shard: ", ".join(map(str, shard.versions.values())), spare=2, optional=True),
    Column("pushes/s", lambda shard: short(shard.pushes_per_second), spare=1),
    Column("bytes/s", lambda shard: short(shard.bytes_per_second), spare=5),
    Column("holds", lambda shard: f"{short(shard.held_bytes + shard.table_bytes)}B", spare=6),
    Column("dropped", lambda shard: str(shard.dropped or ""), spare=4, optional=True),
    Column("queue", _queue, spare=4, optional=True),
    Column("streams", lambda shard: _pairs(shard.streams), numeric=False, spare=7, optional=True),
    Column("log", _log, numeric=False, spare=8, optional=True),
    Column("standby", _standby, numeric=False, spare=3, optional=True),
    Column("note", lambda shard: shard.note, numeric=False, spare=9, optional=True),
)

_TABLES: tuple[Column[TableGlance], ...] = (
    Column("table", lambda table: f"table {table.table}", numeric=False),
    Column("rows", lambda table: short(table.rows)),
    Column("rows/s", lambda table: short(table.growth), spare=1),
    Column("bytes", lambda table: short(table.size_bytes), spare=2),
    Column("waiting", lambda table: short(table.waiting), spare=3),
    Column("admitted", lambda table: short(table.inserted), spare=4),
    Column("expired", lambda table: short(table.expired), spare=5),
    Column("evicted", lambda table: short(table.evicted), spare=6),
)


def _pairs(counts: Mapping[str, int]) -> str:
    return " ".join(f"{name} {count}" for name, count in counts.items())


def _table(columns: Sequence[Column[T]], rows: Sequence[T], state: Callable[[T], str], width: int) -> Table:
    """``state`` of a row gives the colour of its state."""
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="bold")
    shown = fitting(columns, rows, width)
    for column, _ in shown:
        table.add_column(column.title, justify="right" if column.numeric else "left", no_wrap=True)
    for row in rows:
        style = _STYLES.get(state(row), "dim" if state(row) else "")
        cells = ((column, shortened(column.cell(row), room)) for column, room in shown)
        table.add_row(*(Text(text, style=style if column.title == "state" else "") for column, text in cells))
    return table


def _events(glance: JobGlance) -> list[RenderableType]:
    return [
        Text(
            printable(f"{time.strftime('%H:%M:%S', time.localtime(event.at_seconds))}  {event.text}"),
            style="red" if event.warning else "dim",
            no_wrap=True,
            overflow="ellipsis",
        )
        for event in glance.events[-EVENTS:]
    ]
