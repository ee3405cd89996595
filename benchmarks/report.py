"""How results are shown and kept: the table, the ratios, the JSON file."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import psutil
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.ratios import Ratio
from benchmarks.rows import GB, MB, Key, Measures
from benchmarks.schedule import Outcome
from benchmarks.timing import Figures

BOTH_WAYS = frozenset({"step", "step, one call", "push+pull"})
ONE_WAY = frozenset({"push", "pull"})


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": str(os.cpu_count()),
        "memory": f"{psutil.virtual_memory().total / GB:.0f} GB",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "grpcio": grpc.__version__,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def to_json(outcome: Outcome, ratios: Sequence[Ratio]) -> dict[str, Any]:
    """Everything that was measured, as it is written to the file."""
    return {
        "machine": machine(),
        "rows": [
            {"name": str(key), **vars(key), "measures": {name: f.to_json() for name, f in measures.items()}}
            for key, measures in outcome.rows.items()
        ],
        "failures": {str(key): reason for key, reason in outcome.failures.items()},
        "ratios": [ratio.to_json() for ratio in ratios],
    }


def write(path: Path, outcome: Outcome, ratios: Sequence[Ratio]) -> None:
    """Write the JSON file; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(to_json(outcome, ratios), indent=2, ensure_ascii=False) + "\n")


def show(console: Console, outcome: Outcome, ratios: Sequence[Ratio]) -> None:
    """Print both tables, and why rows are not in them."""
    table = Table(title=", ".join(machine().values()))
    for name in ("row", "median", "quartiles", "99 %", "GB/s", "also"):
        table.add_column(name, justify="left" if name in ("row", "also") else "right")
    for key, measures in outcome.rows.items():
        table.add_row(str(key), *_cells(key, measures))
    console.print(table)
    for failed, reason in outcome.failures.items():
        console.print(f"no figures for {failed}: {reason.strip().splitlines()[-1]}", markup=False, highlight=False)
    if ratios:
        console.print(_ratio_table(ratios))


def _ratio_table(ratios: Sequence[Ratio]) -> Table:
    table = Table(title="ratios, of the rounds of this run")
    for name in ("ratio", "measured", "smallest and largest", "asked for", "reached"):
        table.add_column(name, justify="left" if name == "ratio" else "right")
    for ratio in ratios:
        reached = {True: "yes", False: "no", None: ""}[ratio.reached]
        spread = f"{ratio.low:.2f} – {ratio.high:.2f}"
        table.add_row(ratio.title, f"{ratio.value:.2f}", spread, ratio.target, reached)
    return table


def _cells(key: Key, measures: Measures) -> tuple[str, ...]:
    others = "  ".join(f"{_words(name)} {_unit(name, f.median)}" for name, f in measures.items() if name != "seconds")
    taken = measures.get("seconds")
    if taken is None:
        return "", "", "", "", others
    quartiles = f"{_seconds(taken.low)} – {_seconds(taken.high)}"
    p99 = "" if taken.p99 is None else _seconds(taken.p99)
    return _seconds(taken.median), quartiles, p99, _rate(key, taken), others


def _rate(key: Key, taken: Figures) -> str:
    rate = gigabytes_per_second(key, taken)
    return "" if rate is None else f"{rate:.2f}"


def gigabytes_per_second(key: Key, taken: Figures) -> float | None:
    """Bytes moved in both directions together, by time; None for what moves nothing between processes."""
    ways = 2 if key.operation in BOTH_WAYS else 1 if key.operation in ONE_WAY else 0
    return ways * key.nbytes / taken.median / GB if ways else None


def _words(measure: str) -> str:
    return measure.removesuffix("_seconds").removesuffix("_bytes").replace("_", " ")


def _unit(measure: str, value: float) -> str:
    if measure.endswith("_rows"):
        return f"{value:.3g}"
    return f"{value / MB:,.0f} MB" if measure.endswith("_bytes") else _seconds(value)


def _seconds(value: float) -> str:
    if value < 1e-3:
        return f"{value * 1e6:.0f} µs"
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.2f} s"
