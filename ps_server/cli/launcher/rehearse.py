"""The command ps-run rehearse: a script with virtual workers in one process for each mode, and what each came to."""

from __future__ import annotations

import json
import math
import os
import selectors
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.status import Status
from rich.table import Table

from ps_protocol.errors import ConfigError
from ps_protocol.launch.child import READ_BYTES, Child
from ps_protocol.launch.rehearsal import MODULE, RehearsalNews, RehearsalPlan, speeds_of
from ps_protocol.model.spec import Consistency, Mode
from ps_server.cli.options.common import clean_errors
from ps_server.cli.options.mode import MODES, ModeOptions
from ps_server.settings import configured, given_settings, options

DIVERGED = 20.0
"""A training has diverged when its metric is so many times what it was at the beginning, or not finite."""

_ROWS = 10
ROSE = 2.0
"""The verdict names the highest value of a metric that was so many times what it was at the beginning."""

_OTHERS = {
    Mode.SYNC: ("staleness", "stale_policy", "stale_threshold"),
    Mode.SSP: ("backup",),
    Mode.ASYNC: ("backup", "staleness"),
}
"""Options that have no effect in a mode."""


@dataclass(slots=True)
class Rehearsed:
    """What one mode came to."""

    consistency: Consistency
    news: RehearsalNews = field(default_factory=RehearsalNews)

    @property
    def values(self) -> list[float]:
        """Of the metric, in the order in which they were reported."""
        return [value for _, value in self.news.reports]

    @property
    def last(self) -> float:
        """Mean of the metric at the end; NaN without one."""
        return self.tenths()[-1] if self.values else math.nan

    def tenths(self) -> list[float]:
        """Means of the metric over each tenth of all reports; fewer where there are fewer reports."""
        values = self.values
        parts = min(_ROWS, len(values))
        return [_mean(values[len(values) * n // parts : len(values) * (n + 1) // parts]) for n in range(parts)]

    @property
    def diverged(self) -> bool:
        """Whether gradients or the metric have grown without bound."""
        values = self.values
        if self.news.not_finite or any(not math.isfinite(value) for value in values):
            return True
        tenths = self.tenths()
        return bool(tenths) and self.last > DIVERGED * abs(tenths[0])

    @property
    def failed(self) -> bool:
        """Whether it ended early, or its script failed, for another reason."""
        return bool(self.news.failure) and not self.diverged

    @property
    def verdict(self) -> str:
        """In a word or two."""
        if self.failed:
            return "failed"
        if self.diverged:
            return "diverged"
        if not self.news.finished:
            return "not finished"
        tenths = self.tenths()
        return f"rose to {max(tenths):.3g}" if tenths and max(tenths) > ROSE * abs(tenths[0]) else ""

    @property
    def mean_staleness(self) -> float:
        """In updates, over the pushes."""
        counts = self.news.staleness
        return sum(age * count for age, count in counts.items()) / max(1, sum(counts.values()))

    def staleness_below(self, part: float) -> int:
        """The staleness that ``part`` of the pushes do not exceed."""
        left = part * sum(self.news.staleness.values())
        for age, count in self.news.staleness.items():
            left -= count
            if left <= 0:
                return age
        return 0

    def as_json(self) -> dict[str, Any]:
        """Everything, as JSON has it: no NaN."""
        found = {**asdict(self.news), "mode": str(self.consistency), "verdict": self.verdict, "last": self.last}
        return {name: _plain(value) for name, value in found.items()}


class RehearsalProcess(Child):
    """The process of one mode. Used by the thread that starts it."""

    def __init__(self, rehearsed: Rehearsed, plan: RehearsalPlan) -> None:
        """Start it."""
        self.rehearsed = rehearsed
        self.news, theirs = os.pipe()
        self._line = bytearray()
        command = [sys.executable, "-P", "-m", MODULE, plan.to_json(), str(theirs)]
        try:
            super().__init__(str(rehearsed.consistency), command, dict(os.environ), inherited=(theirs,))
        finally:
            os.close(theirs)

    def read_news(self) -> bool:
        """Take what has come; whether there may be more."""
        data = os.read(self.news, READ_BYTES)
        *lines, rest = data.split(b"\n")
        for line in lines:
            self.rehearsed.news = RehearsalNews.from_json((self._line + line).decode())
            self._line.clear()
        self._line += rest
        return bool(data)


class Rehearsals:
    """Makes all rehearsals, some at a time, and shows how far they are."""

    def __init__(self, all_: Sequence[tuple[Rehearsed, RehearsalPlan]], jobs: int, *, all_output: bool) -> None:
        self._waiting = deque(all_)
        self._jobs = jobs
        self._all_output = all_output
        self._console = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._running: list[RehearsalProcess] = []
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Return when all have ended. Ctrl-C ends them, and is raised."""
        try:
            with self._console.status("starting") as status:
                while self._waiting or self._running:
                    while self._waiting and len(self._running) < self._jobs:
                        self._begin(*self._waiting.popleft())
                    self._look(status)
        finally:
            for process in self._running:
                process.kill()
                os.close(process.news)
            self._selector.close()

    def _begin(self, rehearsed: Rehearsed, plan: RehearsalPlan) -> None:
        process = RehearsalProcess(rehearsed, plan)
        self._running.append(process)
        self._selector.register(process.news, selectors.EVENT_READ, process)
        self._selector.register(process.output, selectors.EVENT_READ, process)

    def _look(self, status: Status) -> None:
        for key, _ in self._selector.select(0.2):
            process: RehearsalProcess = key.data
            if key.fd == process.output:
                lines = process.read()
                if lines is None:
                    self._selector.unregister(key.fd)
                self._show(process, lines or ())
            elif not process.read_news():
                self._selector.unregister(key.fd)
        for process in list(self._running):
            if (
                not {process.news, process.output} & {key.fd for key in self._selector.get_map().values()}
                and (code := process.poll()) is not None
            ):
                self._running.remove(process)
                self._ended(process, code)
        status.update(", ".join(self._progress(process) for process in self._running))

    def _ended(self, process: RehearsalProcess, code: int) -> None:
        self._show(process, process.read_rest())
        os.close(process.news)
        news = process.rehearsed.news
        if not news.finished:
            news.failure = f"the process of the rehearsal ended with exit code {code}"

    def _show(self, process: RehearsalProcess, lines: Sequence[str]) -> None:
        for line in lines:
            if self._all_output or not line.startswith("worker ") or line.startswith("worker 0 |"):
                self._console.print(f"{process.name} | {line}")

    def _progress(self, process: RehearsalProcess) -> str:
        news = process.rehearsed.news
        return (
            f"{process.name}: {news.steps} steps in {news.seconds:.4g} virtual seconds" if news.steps else process.name
        )


@click.command(context_settings={"allow_interspersed_args": False, "max_content_width": 110})
@click.option(
    "--workers", type=click.IntRange(1, 1024), default=4, show_default=True, help="Number of virtual workers."
)
@click.option(
    "--speeds",
    default="equal",
    show_default=True,
    help="How fast they compute: equal, exponential (times of steps), slow:K (the last worker is K times slower), one "
    "number for each worker as in 1,1,1,0.25 (repeated if there are more workers), or trace:FILE with lines 'rank step "
    "seconds' of pauses. A step of an equal worker takes 1 virtual second.",
)
@click.option(
    "--mode",
    "modes",
    type=MODES,
    multiple=True,
    default=[Mode.SYNC.value, Mode.SSP.value, Mode.ASYNC.value],
    show_default=True,
    help="May be given several times.",
)
@options(ModeOptions)
@click.option(
    "--steps", type=click.IntRange(1), help="End each worker after so many steps.  [default: when its script ends]"
)
@click.option(
    "--metric", default="loss", show_default=True, metavar="NAME", help="What to show of cluster.report(NAME=…)."
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the job, for shuffling.")
@click.option(
    "--jobs", type=click.IntRange(1), metavar="N", help="Modes at a time.  [default: all, one for each core at most]"
)
@click.option(
    "--threads", type=click.IntRange(1), help="Number of torch threads of a mode.  [default: its share of the cores]"
)
@click.option("--all-output", is_flag=True, help="Show what all workers print, not worker 0 alone.")
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write everything to this file."
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is the name of a module, as in python -m.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def rehearse(
    context: click.Context,
    /,
    *,
    workers: int,
    speeds: str,
    modes: Sequence[str],
    steps: int | None,
    metric: str,
    seed: int,
    jobs: int | None,
    threads: int | None,
    all_output: bool,
    json_path: Path | None,
    module: bool,
    script: str,
    arguments: tuple[str, ...],
    **others: Any,
) -> None:
    """Run SCRIPT with virtual workers, one at a time in one process, and print its loss by virtual time for each mode.

    SCRIPT is as for ps-run, and reports its loss with cluster.report(loss=…). Each worker runs it in a thread of its
    own; servers are those of a job. Delays are exact: a step takes as long as --speeds says, messages take no time. The
    same command gives the same numbers. The exit code is 1 when a script failed, and 0 when one has diverged.
    """
    modes = list(dict.fromkeys(modes))
    if not module and not Path(script).is_file():
        raise click.UsageError(f"no such script: '{script}' (in {Path.cwd()})")
    cores = len(os.sched_getaffinity(0))
    at_a_time = jobs or min(len(modes), cores)
    given = given_settings(context, ModeOptions)
    with clean_errors():
        if json_path is not None:
            _check_file(json_path)
        speeds_of(speeds, workers, seed)
        _check_effect(modes, given)
        planned = []
        for mode in modes:
            settings = {name: value for name, value in given.items() if name not in _OTHERS[Mode(mode)]}
            refined = configured(ModeOptions, {name: settings.get(name) for name in others})
            plan = RehearsalPlan(
                script=script,
                arguments=arguments,
                module=module,
                workers=workers,
                speeds=speeds,
                settings={"mode": mode, **{name: getattr(value, "value", value) for name, value in settings.items()}},
                seed=seed,
                steps=steps,
                metric=metric,
                threads=threads or max(1, cores // at_a_time),
            )
            planned.append((Rehearsed(refined.consistency(mode)), plan))
    found = [rehearsed for rehearsed, _ in planned]
    interrupted = False
    try:
        Rehearsals(planned, at_a_time, all_output=all_output).run()
    except KeyboardInterrupt:
        interrupted = True
    show(found, metric)
    if json_path is not None:
        written = {"workers": workers, "speeds": speeds, "metric": metric, "modes": [each.as_json() for each in found]}
        json_path.write_text(json.dumps(written, indent=1) + "\n")
    if interrupted:
        sys.exit(130)
    sys.exit(int(any(each.failed for each in found)))


def _check_file(path: Path) -> None:
    """Raises ConfigError where the result could not be written."""
    try:
        path.open("a").close()
    except OSError as error:
        raise ConfigError(f"--json: {path} cannot be written: {error.strerror}") from error


def _check_effect(modes: Sequence[str], given: Mapping[str, object]) -> None:
    """Raises click.UsageError for an option that has no effect in any of the modes, ConfigError for a time."""
    if "grace_seconds" in given:
        raise ConfigError(
            "--grace-seconds counts real time, and a rehearsal has a virtual clock", remedy="leave it out"
        )
    for option in fields(ModeOptions):
        if option.name in given and all(option.name in _OTHERS[Mode(mode)] for mode in modes):
            flag = f"--{option.name.replace('_', '-')}"
            raise click.UsageError(f"{flag} has no effect in mode {' and '.join(modes)}")


def show(found: Sequence[Rehearsed], metric: str) -> None:
    """Print the metric by virtual time, all modes beside each other, and then what each came to."""
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False, markup=False, emoji=False)
    if any(each.news.reports for each in found):
        console.print(_curves(found, metric))
    summary = Table("mode", f"last {metric}", "steps", "virtual seconds", "staleness: mean", "p99", "")
    for each in found:
        last = "–" if each.diverged or math.isnan(each.last) else f"{each.last:.4g}"
        summary.add_row(
            str(each.consistency),
            last,
            str(each.news.steps),
            f"{each.news.seconds:.4g}",
            f"{each.mean_staleness:.3g}",
            str(each.staleness_below(0.99)),
            each.verdict,
        )
    console.print(summary)
    for each in found:
        for line in (each.news.failure, *each.news.notes):
            if line:
                console.print(f"{each.consistency}: {line}", soft_wrap=True)
        if each.failed and each.news.traceback:
            console.print(each.news.traceback, soft_wrap=True)
        if each.news.finished and not each.news.failure and not each.news.reports:
            others = f"; it reports {', '.join(each.news.metrics)}" if each.news.metrics else ""
            console.print(
                f"{each.consistency}: the script reports no '{metric}': call cluster.report({metric}=…) after each "
                f"step, or give --metric{others}",
                soft_wrap=True,
            )


def _curves(found: Sequence[Rehearsed], metric: str) -> Table:
    """The mean of the metric in each tenth of the longest rehearsal."""
    longest = max(each.news.reports[-1][0] for each in found if each.news.reports)
    table = Table(f"{metric} until second", *(str(each.consistency) for each in found))
    for row in range(_ROWS):
        begin, end = longest * row / _ROWS, longest * (row + 1) / _ROWS
        cells = []
        for each in found:
            values = [value for at, value in each.news.reports if begin < at <= end or (not row and at <= begin)]
            cells.append(f"{_mean(values):.4g}" if values else "")
        table.add_row(f"{end:.4g}", *cells)
    return table


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _plain(value: Any) -> Any:
    """``value`` with None in place of what JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
