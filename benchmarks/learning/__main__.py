"""``python -m benchmarks.learning``: what asynchronous updates do to a model, by trainings on a virtual clock."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks import report
from benchmarks.learning.grid import Kept, Row, Run, run_all
from benchmarks.learning.laboratory import Setting
from benchmarks.learning.rules import RULES, check
from benchmarks.learning.stability import measured
from benchmarks.learning.studies import STUDIES, Train, Training
from benchmarks.learning.tasks import TASKS
from ps_protocol.errors import PsError
from ps_protocol.launch.rehearsal import speeds_of
from ps_protocol.model.spec import Consistency, Mode, StaleRule
from ps_server.cli.options.common import clean_errors
from ps_worker.model.momentum import largest_stable_rate


def consistency_of(text: str) -> Consistency:
    """What ``sync``, ``sync:BACKUP``, ``async`` and ``ssp:STALENESS`` mean, with a rule behind, as ``+scale:workers``.

    Raises click.BadParameter.
    """
    name, _, policy = text.partition("+")
    try:
        mode, _, number = name.partition(":")
        stale = StaleRule.parse(policy) if policy else None
        match mode:
            case "sync" if not policy:
                return Consistency(Mode.SYNC, backup=int(number or 0))
            case "async" if not number:
                return Consistency(Mode.ASYNC).with_rule(stale)
            case "ssp":
                return Consistency(Mode.SSP, int(number)).with_rule(stale)
    except (ValueError, PsError):
        pass
    raise click.BadParameter(f"{text!r} is none of sync, sync:1, async, ssp:4, async+scale:workers, ssp:4+reject:8")


class _Modes(click.ParamType):
    name = "mode"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if isinstance(value, Consistency) else consistency_of(value)


class _Arguments(click.ParamType):
    name = "name=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        key, sign, text = value.partition("=")
        try:
            if not sign or not key.isidentifier():
                raise ValueError
            return key, json.loads(text.lower() if text.lower() in ("true", "false") else text)
        except ValueError:
            return self.fail(f"{value!r} is not like momentum=0.9, nesterov=true or betas=[0.9,0.98]", param, ctx)


@click.group()
def main() -> None:
    """What asynchronous updates do to a model: trainings on a virtual clock, with exact delays.

    Virtual workers compute gradients one after the other in this process. Decisions and updates are those of the
    shards. The same command gives the same figures, to the last bit on one machine.
    """


@main.command()
@click.option("--task", "tasks", type=click.Choice(list(TASKS)), multiple=True, default=["digits"], show_default=True)
@click.option("--optimizer", "optimizers", multiple=True, default=["SGD"], show_default=True, help="Of torch.optim.")
@click.option("--arg", "arguments", type=_Arguments(), multiple=True, help="Of the optimizers, as in momentum=0.9.")
@click.option(
    "--lr", "rates", type=click.FloatRange(0, min_open=True), multiple=True, default=[0.05], show_default=True
)
@click.option("--mode", "modes", type=_Modes(), multiple=True, default=["sync", "async"], show_default=True)
@click.option(
    "--rule",
    "rules",
    type=click.Choice(list(RULES)),
    multiple=True,
    default=["plain"],
    show_default=True,
    help="What becomes of old gradients in async and ssp.",
)
@click.option("--workers", "counts", type=click.IntRange(1, 1024), multiple=True, default=[4], show_default=True)
@click.option(
    "--speeds", default="equal", show_default=True, help="equal, exponential, slow:K, trace:FILE, or 1,1,0.25."
)
@click.option("--pushes", type=click.IntRange(1), default=800, show_default=True, help="Of all workers of a training.")
@click.option(
    "--warmup",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.0,
    show_default=True,
    help="Part of the pushes over which the learning rate rises.",
)
@click.option("--decay", is_flag=True, help="The learning rate then falls to 0, along a line.")
@click.option("--seeds", type=click.IntRange(1), default=5, show_default=True, help="Trainings of each setting.")
@click.option("--processes", type=click.IntRange(1), default=None, help="At a time. Default: one for each core.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write everything here.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Write a PNG: measure by virtual time.")
def run(
    tasks: Sequence[str],
    optimizers: Sequence[str],
    arguments: Sequence[tuple[str, Any]],
    rates: Sequence[float],
    modes: Sequence[Consistency],
    rules: Sequence[str],
    counts: Sequence[int],
    speeds: str,
    pushes: int,
    warmup: float,
    decay: bool,
    seeds: int,
    processes: int | None,
    json_path: Path | None,
    plot: Path | None,
) -> None:
    """Train every combination of the options, with each seed.

    Options that may be given several times span a grid. With several learning rates a second table has the best rate of
    each other setting.
    """
    with clean_errors():
        for workers in counts:
            speeds_of(speeds, workers, 0)
    settings = [
        (task, Setting(optimizer, {"lr": rate, **dict(arguments)}, mode, workers, pushes, 20, rule, warmup, decay))
        for task in tasks
        for optimizer in optimizers
        for workers in counts
        for mode in modes
        for rule in rules
        for rate in rates
    ]
    for _, setting in settings:
        check(setting.rule, setting.optimizer, setting.options)
    runs = [Run(task, setting, speeds, seed) for task, setting in settings for seed in range(seeds)]
    rows = _run(runs, processes)
    _show(rows)
    if len(rates) > 1:
        _show_best(rows)
    if json_path:
        found = {"machine": report.machine(), "rows": [row.as_json() for row in rows]}
        json_path.write_text(json.dumps(found, indent=1) + "\n")
    if plot:
        draw(rows, plot)


@main.command()
@click.option(
    "--momentum", "momenta", type=click.FloatRange(0, 1, max_open=True), multiple=True, default=[0.0, 0.5, 0.9]
)
@click.option("--delay", "delays", type=click.IntRange(0, 255), multiple=True, default=[0, 1, 2, 3, 7, 15, 31])
@click.option("--train", is_flag=True, help="Find each rate by trainings, too. Takes minutes.")
def stability(momenta: Sequence[float], delays: Sequence[int], train: bool) -> None:
    """The largest stable learning rate, times the curvature, of SGD on a quadratic with gradients of a given age.

    W equal workers in async make gradients W - 1 updates old.
    """
    table = Table("momentum", "kind", *(f"delay {delay}" for delay in delays))
    for momentum in momenta:
        for nesterov in (False, True) if momentum else (False,):
            kind = "Nesterov" if nesterov else "classical" if momentum else ""
            cells = [f"{largest_stable_rate(delay, momentum, nesterov=nesterov):.3g}" for delay in delays]
            table.add_row(f"{momentum:g}", kind, *cells)
            if train:
                found = [f"{measured(delay, momentum, nesterov=nesterov):.3g}" for delay in delays]
                table.add_row("", "trained", *found)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _study(name: str, study: Callable[[Train], str]) -> click.Command:
    """The command that makes the trainings of ``study`` and prints its table."""

    @click.option("--seeds", type=click.IntRange(1), default=5, show_default=True, help="Trainings of each setting.")
    @click.option("--processes", type=click.IntRange(1), default=None, help="At a time. Default: one for each core.")
    @click.option(
        "--kept",
        type=click.Path(dir_okay=False, path_type=Path),
        help="A file with a JSON line for each training: those that it has are not made again.",
    )
    @click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Write a PNG: measure by time.")
    def command(seeds: int, processes: int | None, kept: Path | None, plot: Path | None) -> None:
        outcomes, rows = Kept(kept), list[Row]()

        def train(trainings: Sequence[Training]) -> Sequence[Row]:
            runs = [Run(task, setting, speeds, seed) for task, setting, speeds in trainings for seed in range(seeds)]
            found = _run(runs, processes, outcomes)
            rows.extend(found)
            return found

        click.echo(study(train))
        if plot:
            draw(rows, plot)

    return click.command(name, help=f"{study.__doc__}\n\nPrints a table in Markdown.")(command)


for _name_of, _made in STUDIES.items():
    main.add_command(_study(_name_of, _made))


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG: the measure of the first seed of each row by virtual seconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tasks = list(dict.fromkeys(row.task for row in rows))
    figure, axes = pyplot.subplots(1, len(tasks), figsize=(6 * len(tasks), 4), squeeze=False, layout="constrained")
    for axis, task in zip(axes[0], tasks, strict=True):
        for row in rows:
            if row.task == task:
                seconds, _, values = zip(*row.outcomes[0].curve, strict=True)
                axis.plot(seconds, values, label=_name(row))
        axis.set(title=task, xlabel="virtual seconds", ylabel=TASKS[task]().measure_name, yscale="log")
        axis.grid(alpha=0.3)
        axis.legend(fontsize="x-small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _run(runs: Sequence[Run], processes: int | None, kept: Kept | None = None) -> list[Row]:
    console = Console(stderr=True)
    try:
        with console.status(f"0 of {len(runs)} trainings") as status:
            return run_all(
                runs,
                processes or os.cpu_count() or 1,
                lambda done, all_: status.update(f"{done} of {all_} trainings"),
                kept,
            )
    except PsError as error:
        raise click.ClickException(str(error)) from error


def _show(rows: Sequence[Row]) -> None:
    table = Table("task", "setting", "mean", "spread", "score", "diverged", "seconds", "staleness", "dropped")
    for row in rows:
        outcomes = row.outcomes
        table.add_row(
            row.task,
            _name(row),
            "–" if row.diverged else f"{row.mean:.4g}",
            "–" if row.diverged else f"{row.spread:.2g}",
            "–" if row.diverged else f"{sum(outcome.score for outcome in outcomes) / len(outcomes):.4g}",
            f"{row.diverged} of {len(outcomes)}",
            f"{sum(outcome.seconds for outcome in outcomes) / len(outcomes):.4g}",
            f"{sum(outcome.mean_staleness for outcome in outcomes) / len(outcomes):.3g}",
            f"{sum(outcome.dropped for outcome in outcomes) / len(outcomes):.3g}",
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _show_best(rows: Sequence[Row]) -> None:
    """Of each setting the row of its best learning rate, and the largest rate at which no training diverged."""
    table = Table("task", "setting", "best lr", "mean", "spread", "largest lr without divergence")
    settings: dict[str, list[Row]] = {}
    for row in rows:
        options = {**row.setting.options, "lr": None}
        settings.setdefault(row.task + _name(replace(row, setting=replace(row.setting, options=options))), []).append(
            row
        )
    for alike in settings.values():
        whole = [row for row in alike if not row.diverged]
        if not whole:
            table.add_row(alike[0].task, _name(alike[0], "lr"), "–", "–", "–", "none")
            continue
        best = min(whole, key=lambda row: row.mean)
        rate, largest = best.setting.options["lr"], max(row.setting.options["lr"] for row in whole)
        table.add_row(
            best.task, _name(best, "lr"), f"{rate:g}", f"{best.mean:.4g}", f"{best.spread:.2g}", f"{largest:g}"
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _name(row: Row, without: str = "") -> str:
    setting = row.setting
    options = [f"{name}={value}" for name, value in setting.options.items() if name != without]
    rule = [] if setting.rule == "plain" else [setting.rule]
    return " ".join([setting.optimizer, *options, str(setting.consistency), *rule, f"{setting.workers} workers"])


if __name__ == "__main__":
    main()
