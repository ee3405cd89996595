"""Which systems are measured in turn, for how long, and the tables that come of it.

In async, one model of one tensor, plain SGD, gradients that are there already; a step is push, apply and pull of the
whole model. All workers of a system run at the same time, for as long as a visit is.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import psutil

from benchmarks import ours, report
from benchmarks.peers import grpc_echo, mxnet_async, torch_rpc
from benchmarks.processes import fork_children
from benchmarks.ratios import Ratio
from benchmarks.rows import KB, MB, Group, Key, Rows, Subject, size
from benchmarks.schedule import Outcome, measure
from benchmarks.timing import Figures

SIZES = {size(nbytes): nbytes for nbytes in (10 * KB, MB, 10 * MB, 100 * MB)}
WORKERS = (1, 2, 4, 8, 16)
QUICK_SIZES, QUICK_WORKERS = (10 * KB, MB), (1, 4)
SLOW = 3
"""Slow workers beside one that is timed."""

SHM, BULK, GRPC = map(ours.system, ours.TRANSPORTS)
SYSTEMS = {
    SHM: ours.STEP,
    BULK: ours.STEP,
    GRPC: ours.STEP,
    grpc_echo.SYSTEM: grpc_echo.ECHO,
    torch_rpc.SHM: torch_rpc.ONE_CALL,
    torch_rpc.TCP: torch_rpc.ONE_CALL,
    mxnet_async.SYSTEM: mxnet_async.STEP,
}
"""The operation of each system, in the order of the columns."""

PAIRS = (
    (SHM, torch_rpc.SHM),
    (BULK, torch_rpc.TCP),
    (GRPC, torch_rpc.TCP),
    (SHM, mxnet_async.SYSTEM),
    (BULK, mxnet_async.SYSTEM),
    (GRPC, mxnet_async.SYSTEM),
    (GRPC, grpc_echo.SYSTEM),
)
"""What is compared with what: one machine's memory with the same, sockets with sockets; gRPC with an echo of its bytes,
which applies nothing.
"""

ASKED = {
    (8, 10 * KB, BULK, mxnet_async.SYSTEM): 3.0,
    (8, 10 * KB, GRPC, mxnet_async.SYSTEM): 1.2,
    (8, MB, BULK, torch_rpc.TCP): 1.8,
    (8, MB, SHM, torch_rpc.SHM): 2.0,
    (8, MB, GRPC, torch_rpc.TCP): 1.0,
    (1, MB, GRPC, torch_rpc.TCP): 1.1,
    (1, 10 * MB, GRPC, torch_rpc.TCP): 1.1,
    (1, 100 * MB, GRPC, torch_rpc.TCP): 1.1,
}
"""By workers, bytes and the two systems: how many times faster the first has to be."""

RESULTS = Path(__file__).parents[1] / "results" / "crowd.json"

START_SECONDS, WORKER_SECONDS = 4.0, 0.25
"""What a system takes to begin and to end, and each of its workers, on two cores."""


@dataclass(frozen=True)
class Pace:
    """How often and how long everything is measured."""

    rounds: int
    seconds: float

    def visit(self, nbytes: int, workers: int) -> float:
        """Seconds of one visit: of large models and many workers long enough for a few steps each."""
        return self.seconds * (1 + nbytes * workers / (400 * MB))


FULL, QUICK = Pace(5, 1.0), Pace(3, 0.3)


def groups(
    sizes: Sequence[int], counts: Sequence[int], pace: Pace, python: Path | None, memory: int
) -> Iterator[Group]:
    """For each size and number of workers the systems that are measured in turn; ``python`` has MXNet.

    They are up together where they need less than half of ``memory`` bytes, else one at a time.
    """
    for nbytes, workers in itertools.product(sizes, counts):
        seconds, key = pace.visit(nbytes, workers), Key("", "", nbytes, workers=workers)
        subjects = [ours.subject(transport, key, ours.STEP, seconds=seconds) for transport in ours.TRANSPORTS]
        subjects += [grpc_echo.subject(nbytes, workers, seconds)]
        subjects += [
            torch_rpc.subject(system, nbytes, workers=workers, operations=(torch_rpc.ONE_CALL,), seconds=seconds)
            for system in (torch_rpc.SHM, torch_rpc.TCP)
        ]
        subjects += [mxnet_async.subject(python, nbytes, workers, seconds)] if python else []
        yield _group(
            f"{workers} × {size(nbytes)}", subjects, pace, len(subjects) * _bytes(nbytes, workers) < memory / 2
        )
    if MB in sizes:
        key, seconds = Key("", "", MB), pace.visit(MB, 1)
        subjects = [ours.subject(each, key, ours.BESIDE, seconds=seconds, slow=SLOW) for each in ours.TRANSPORTS]
        yield _group(f"1 × {size(MB)} beside {SLOW} slow workers", subjects, pace, together=True)


def _group(title: str, subjects: Sequence[Subject], pace: Pace, together: bool) -> Group:
    return Group(title, tuple(subjects), pace.rounds, count=0, warm_up=0, together=together)


def _bytes(nbytes: int, workers: int) -> int:
    """Memory of a system: parameters, gradients and copies of each worker, and an interpreter that others share."""
    return (workers + 2) * (60 * MB + 5 * nbytes)


def needed_seconds(group: Group, pace: Pace) -> float:
    """About how long ``group`` takes."""
    seconds = 0.0
    for key in [key for subject in group.subjects for key in subject.keys]:
        seconds += group.rounds * (1.25 * pace.visit(key.nbytes, key.workers))
        seconds += (START_SECONDS + WORKER_SECONDS * key.workers) * (1 if group.together else group.rounds)
    return seconds


def _time(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 100 else f"{seconds:.0f} s"


# -- what is shown


def key_of(system: str, nbytes: int, workers: int) -> Key:
    """The row of a system."""
    return Key(system, SYSTEMS[system], nbytes, workers=workers)


def ratio(rows: Rows, own: Key, other: Key) -> Figures | None:
    """How many times as many steps ``own`` makes: of each round, for they lie side by side; None: not measured."""
    if own not in rows or other not in rows:
        return None
    pairs = zip(rows[other]["seconds"].rounds, rows[own]["seconds"].rounds, strict=True)
    return Figures.of([[theirs / mine] for theirs, mine in pairs])


def tables(rows: Rows) -> Iterator[str]:
    """Lines of Markdown: steps per second, ratios with quartiles, CPU time of a step, steps beside slow workers."""
    places = sorted({(key.nbytes, key.workers) for key in rows if key.operation != ours.BESIDE})
    systems = [system for system in SYSTEMS if any(key_of(system, *at) in rows for at in places)]
    if not places:
        return
    yield from _table("steps per second of all workers together", systems, places, lambda *at: _rate(rows, *at))
    yield from _table("CPU time of a step, ms: shard or server, worker", systems, places, lambda *at: _cpu(rows, *at))
    pairs = {f"{own} / {other}": (own, other) for own, other in PAIRS if own in systems and other in systems}
    if pairs:
        yield from _table(
            "times as many steps, with quartiles",
            list(pairs),
            places,
            lambda name, *at: _spread(ratio(rows, *(key_of(each, *at) for each in pairs[name]))),
        )
    beside = [key for key in rows if key.operation == ours.BESIDE]
    if beside:
        yield from ("", f"one worker beside {SLOW} that wait {ours.SLOW_SECONDS * 1e3:g} ms before each step", "")
    for key in beside:
        late = rows[key]["step_seconds"].p99
        tail = "" if late is None else f", 99th percentile {late * 1e3:.2f} ms"
        yield f"- {key.system}, {size(key.nbytes)}: {_steps(rows[key])} steps/s{tail}"


def _table(title: str, columns: Sequence[str], places: Sequence[tuple[int, int]], cell: Any) -> Iterator[str]:
    yield from ("", title, "", _line(("workers × size", *columns)), _line(("---", *["--:"] * len(columns))))
    for nbytes, workers in places:
        yield _line((f"{workers} × {size(nbytes)}", *(cell(column, nbytes, workers) for column in columns)))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _rate(rows: Rows, system: str, nbytes: int, workers: int) -> str:
    return _steps(rows.get(key_of(system, nbytes, workers), {}))


def _steps(measures: Mapping[str, Figures]) -> str:
    taken = measures.get("seconds")
    return "" if taken is None else f"{1 / taken.median:,.0f}" if taken.median < 0.1 else f"{1 / taken.median:.1f}"


def _cpu(rows: Rows, system: str, nbytes: int, workers: int) -> str:
    measures = rows.get(key_of(system, nbytes, workers), {})
    found = (measures.get(name) for name in ("server_cpu_seconds", "worker_cpu_seconds"))
    return ", ".join(f"{each.median * 1e3:.3g}" for each in found if each is not None)


def _spread(found: Figures | None) -> str:
    return "" if found is None else f"{found.median:.2f} [{found.low:.2f} – {found.high:.2f}]"


def ratios(rows: Rows) -> list[Ratio]:
    """What is asked, as far as it was measured; ``low`` and ``high`` are quartiles."""
    found = []
    for (workers, nbytes, own, other), bound in ASKED.items():
        figures = ratio(rows, key_of(own, nbytes, workers), key_of(other, nbytes, workers))
        if figures is not None:
            title = f"{workers} × {size(nbytes)}: {own} against {other}"
            reached = figures.median >= bound
            found.append(Ratio(title, figures.median, figures.low, figures.high, f"≥ {bound:g}", reached))
    return found


@click.command(help=__doc__.partition("\n\n")[2] if __doc__ else None)
@click.option("--quick", is_flag=True, help="Two sizes, two numbers of workers, few rounds: a look, not a measurement.")
@click.option("--workers", "counts", type=click.IntRange(1, 64), multiple=True, help="May be repeated.  [1 2 4 8 16]")
@click.option("--size", "sizes", type=click.Choice(list(SIZES)), multiple=True, help="May be repeated.")
@click.option("--only", multiple=True, help="Only rows whose name contains this, as grpc; may be repeated.")
@click.option(
    "--mxnet",
    "python",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="An interpreter that has MXNet. Default: this one, if it has.",
)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), default=RESULTS)
@click.option("--list", "names_only", is_flag=True, help="Show the rows and the time, and measure nothing.")
def main(
    quick: bool,
    counts: tuple[int, ...],
    sizes: tuple[str, ...],
    only: tuple[str, ...],
    python: Path | None,
    output: Path,
    names_only: bool,
) -> None:
    """Print tables in Markdown, and write everything as JSON."""
    pace = QUICK if quick else FULL
    nbytes = [SIZES[name] for name in sizes] or (QUICK_SIZES if quick else list(SIZES.values()))
    workers = counts or (QUICK_WORKERS if quick else WORKERS)
    python = python or mxnet_async.interpreter()
    available = psutil.virtual_memory().available
    chosen = [each for group in groups(nbytes, workers, pace, python, available) if (each := group.only(only)).subjects]
    if not chosen:
        raise click.UsageError("no row has such a name; --list shows the names")
    if python is None:
        click.echo("MXNet is not measured: this interpreter has none, and --mxnet names none")
    left = [needed_seconds(group, pace) for group in chosen]
    click.echo(f"{sum(len(group.subjects) for group in chosen)} rows, about {_time(sum(left))}")
    if names_only:
        for group in chosen:
            for subject in group.subjects:
                click.echo("\n".join(map(str, subject.keys)))
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    fork_children()
    outcome, begun, loads = Outcome(), time.monotonic(), [os.getloadavg()[0]]
    for number, group in enumerate(chosen):
        click.echo(f"[{number + 1}/{len(chosen)}] {group.title}; about {_time(sum(left[number:]))} to go", err=True)
        outcome.add(measure(group, lambda *_: None))
        loads.append(os.getloadavg()[0])
    click.echo(
        f"{', '.join(report.machine().values())}; {_time(time.monotonic() - begun)}, "
        f"load {loads[0]:.1f} before, {max(loads[1:]):.1f} at most"
    )
    for line in tables(outcome.rows):
        click.echo(line)
    asked = ratios(outcome.rows)
    if asked:
        click.echo("\nasked\n")
    for each in asked:
        reached = "reached" if each.reached else "not reached"
        click.echo(f"- {each.title}: {each.value:.2f} [{each.low:.2f} – {each.high:.2f}], {each.target}: {reached}")
    for key, reason in outcome.failures.items():
        click.echo(f"no figures for {key}: {reason.strip().splitlines()[-1]}")
    report.write(output, outcome, asked)
    click.echo(f"written to {output}")
    if outcome.failures:
        raise click.ClickException(f"{len(outcome.failures)} rows have no figures")
