"""``make bench``: choose rows, measure them side by side, show and keep the results."""

from __future__ import annotations

import signal
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import plot as plotting
from benchmarks import report
from benchmarks.catalog import groups
from benchmarks.ratios import ratios
from benchmarks.rows import Group, Key
from benchmarks.schedule import Outcome, measure

WIDTH = 150
"""Characters of a line where there is no terminal to ask."""

RESULTS = Path(__file__).parent / "results"


@click.command()
@click.option("--quick", is_flag=True, help="Two sizes and few repetitions: a look, not a measurement.")
@click.option("--only", multiple=True, help="Only rows whose name contains this; may be repeated.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), default=RESULTS / "latest.json")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), default=RESULTS / "latest.png")
@click.option("--list", "names_only", is_flag=True, help="Show the names of the rows and measure nothing.")
def main(quick: bool, only: tuple[str, ...], output: Path, plot: Path, names_only: bool) -> None:
    """Measure torch-ps, its peers and its floor on this machine, on loopback, with real processes.

    Rows of a group are measured in turn, round by round. Ctrl-C ends every process and shows nothing.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    chosen = [group for group in (found.only(only) for found in groups(quick)) if group.subjects]
    if not chosen:
        raise click.UsageError("no row has such a name; --list shows the names")
    if names_only:
        for group in chosen:
            for subject in group.subjects:
                console.print("\n".join(map(str, subject.keys)), highlight=False)
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    outcome = Outcome()
    for number, group in enumerate(chosen, 1):
        console.print(f"[{number}/{len(chosen)}] {group.title}", markup=False, highlight=False)
        outcome.add(_measured(console, group))
    found = ratios(outcome.rows)
    report.show(console, outcome, found)
    report.write(output, outcome, found)
    console.print(f"written to {output}")
    if plotting.draw(outcome.rows, plot):
        console.print(f"plot in {plot}")
    if outcome.failures:
        raise click.ClickException(f"{len(outcome.failures)} rows have no figures")


def _measured(console: Console, group: Group) -> Outcome:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    visits = group.rounds * sum(len(subject.keys) for subject in group.subjects)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("processes start", total=visits)

        def report_visit(round_number: int, key: Key) -> None:
            progress.update(task, advance=1, description=f"round {round_number + 1}  {key}")

        return measure(group, report_visit)
