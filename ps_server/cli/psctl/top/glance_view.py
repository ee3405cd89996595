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
from ps_server.cli.status.columns import queue_text
from ps_server.cli.status.text import elapsed_text
from ps_server.glance.job import JobGlance
from ps_server.glance.shards import ShardGlance, TableGlance
from ps_server.glance.workers import WorkerGlance

T = TypeVar("T")

SPARKS = "▁▂▃▄▅▆▇█"
NOTHING = "–"
EVENTS = 6
FEWEST_WORKERS = 4

_WRONG = ("lost", "failed", "missing", "silent")
_ENDED = ("left", "stopped", "lost", "failed", "missing")
_STYLES: Mapping[str, str] = {"live": "green", "busy": "yellow", **dict.fromkeys(_WRONG, "bold red")}

Columns = Sequence[tuple[str, Callable[[T], str], bool]]
"""Title, cell, and whether it is a number."""


def glance_view(glance: JobGlance, curves: Curves, height: int | None) -> Group:
    """The whole view. ``height``: lines of the terminal, which limits the number of workers; None: no limit."""
    parts: list[RenderableType] = [_headline(glance), *_curves(glance, curves)]
    parts += [Text(printable(f"! {alert.text}"), style="bold red") for alert in glance.alerts]
    rest: list[RenderableType] = [_table("shard", _SHARDS, glance.shards, _state_of_shard)]
    if glance.tables:
        rest.append(_table("table", _TABLES, glance.tables, lambda table: ""))
    rest += _events(glance)
    used = len(parts) + len(rest) + len(glance.shards) + len(glance.tables) + 2
    most = None if height is None else max(FEWEST_WORKERS, height - used - 2)
    return Group(*parts, *_workers(glance.workers, most), *rest)


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
    return Text(printable(words), style="bold", no_wrap=True, overflow="ellipsis")


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


def _workers(workers: Sequence[WorkerGlance], most: int | None) -> Iterable[RenderableType]:
    shown = workers
    if most is not None and len(workers) > most:
        # What is worth a look comes first.
        ranked = sorted(workers, key=lambda each: (each.state not in _WRONG, not each.straggler, each.state in _ENDED))
        shown = sorted(ranked[:most], key=lambda each: (each.evaluator, each.index))
    yield _table("worker", _WORKERS, shown, lambda worker: worker.state)
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


_WORKERS: Columns[WorkerGlance] = (
    ("", lambda worker: worker.name, False),
    ("state", _state, False),
    ("step", lambda worker: str(worker.steps), True),
    ("behind", lambda worker: NOTHING if worker.state in _ENDED else str(worker.behind), True),
    ("steps/s", _rate(lambda worker: worker.steps_per_second), True),
    ("samples/s", _rate(lambda worker: worker.samples_per_second), True),
    ("staleness", lambda worker: str(worker.staleness), True),
    ("waits", _waits, False),
    ("reported", _reported, False),
    ("over", lambda worker: worker.transport, False),
    ("", lambda worker: worker.note, False),
)


def _standby(shard: ShardGlance) -> str:
    lag = "" if shard.standby_lag is None else f", {shard.standby_lag} behind"
    return shard.standby + lag if shard.standby else ""


def _queue(shard: ShardGlance) -> str:
    pushes = queue_text(shard.queued_pushes)
    return f"{pushes} ({short(shard.queued_bytes)}B)" if pushes else ""


def _log(shard: ShardGlance) -> str:
    return f"{short(shard.log.unsaved_bytes)}B since snapshot" if shard.log else ""


def _state_of_shard(shard: ShardGlance) -> str:
    return shard.state


_SHARDS: Columns[ShardGlance] = (
    ("", lambda shard: shard.name, False),
    ("state", _state_of_shard, False),
    ("version", lambda shard: ", ".join(map(str, shard.versions.values())), True),
    ("pushes/s", lambda shard: short(shard.pushes_per_second), True),
    ("bytes/s", lambda shard: short(shard.bytes_per_second), True),
    ("holds", lambda shard: f"{short(shard.held_bytes + shard.table_bytes)}B", True),
    ("dropped", lambda shard: str(shard.dropped or ""), True),
    ("queue", _queue, True),
    ("streams", lambda shard: " ".join(f"{name} {count}" for name, count in shard.streams.items()), False),
    ("log", _log, False),
    ("standby", _standby, False),
    ("", lambda shard: shard.note, False),
)

_TABLES: Columns[TableGlance] = (
    ("", lambda table: f"table {table.table}", False),
    ("rows", lambda table: short(table.rows), True),
    ("rows/s", lambda table: short(table.growth), True),
    ("bytes", lambda table: short(table.size_bytes), True),
    ("waiting", lambda table: short(table.waiting), True),
    ("admitted", lambda table: short(table.inserted), True),
    ("expired", lambda table: short(table.expired), True),
    ("evicted", lambda table: short(table.evicted), True),
)


def _table(what: str, columns: Columns[T], rows: Sequence[T], state: Callable[[T], str]) -> Table:
    """Columns that are empty in all rows are left out; ``state`` of a row gives its colour."""
    cells = [[printable(cell(row)) for _, cell, _ in columns] for row in rows]
    used = [number for number in range(len(columns)) if number == 0 or any(row[number] for row in cells)]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for number in used:
        title, _, numeric = columns[number]
        table.add_column(title or (what if number == 0 else ""), justify="right" if numeric else "left", no_wrap=True)
    for row, texts in zip(rows, cells, strict=True):
        style = _STYLES.get(state(row), "dim" if state(row) else "")
        table.add_row(*(Text(texts[number], style=style if columns[number][0] == "state" else "") for number in used))
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
