"""``python -m benchmarks``: measure, print a table, write it as JSON."""

from __future__ import annotations

import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path

import click
import grpc
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measure import Figures, all_rows

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "grpcio": grpc.__version__,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


@click.command()
@click.option("--quick", is_flag=True, help="Small sizes and few repetitions: a look, not a measurement.")
@click.option("--only", default="", help="Only rows whose name contains this.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), default=RESULTS / "latest.json")
def main(quick: bool, only: str, output: Path) -> None:
    """Measure torch-ps on this machine, on loopback, with real server processes."""
    console = Console()
    results: dict[str, Figures] = {}
    rows = {name: row for name, row in all_rows(quick).items() if only in name}
    for number, (name, row) in enumerate(rows.items(), 1):
        console.print(f"[{number}/{len(rows)}] {name} …", markup=False)
        results[name] = row()
    table = Table(title=", ".join(machine().values()))
    table.add_column("row")
    table.add_column("figures")
    for name, figures in results.items():
        table.add_row(name, "  ".join(f"{key} {value:,.4g}" for key, value in figures.items()))
    console.print(table)
    output.parent.mkdir(exist_ok=True)
    output.write_text(json.dumps({"machine": machine(), "rows": results}, indent=2) + "\n")
    console.print(f"written to {output}")


if __name__ == "__main__":
    main()
