"""Many trainings in processes of their own: settings times seeds."""

from __future__ import annotations

import json
import math
import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.learning.laboratory import Outcome, Setting, train
from benchmarks.learning.tasks import TASKS
from ps_protocol.launch.rehearsal import speeds_of


@dataclass(frozen=True)
class Run:
    """One training, by what can be sent to another process."""

    task: str
    setting: Setting
    speeds: str
    seed: int

    @property
    def name(self) -> str:
        """Everything that it is made from, as JSON."""
        setting = asdict(self.setting) | {"consistency": str(self.setting.consistency)}
        return json.dumps({"task": self.task, "speeds": self.speeds, "seed": self.seed, **setting}, sort_keys=True)


@dataclass
class Row:
    """The trainings of one setting, one for each seed."""

    task: str
    setting: Setting
    speeds: str
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def mean(self) -> float:
        """Of the measure at the end; infinite where a training diverged."""
        return statistics.fmean(outcome.measure for outcome in self.outcomes)

    @property
    def spread(self) -> float:
        """Standard deviation of the measure over the seeds; 0 for one."""
        measures = [outcome.measure for outcome in self.outcomes]
        return statistics.stdev(measures) if len(measures) > 1 and self.diverged == 0 else 0.0

    @property
    def diverged(self) -> int:
        """How many trainings diverged."""
        return sum(outcome.diverged for outcome in self.outcomes)

    def seconds_to(self, measure: float) -> float | None:
        """Median virtual seconds until the measure is ``measure`` or less; None: most trainings do not reach it."""
        reached = [
            next((seconds for seconds, _, value in outcome.curve if value <= measure), float("inf"))
            for outcome in self.outcomes
        ]
        middle = statistics.median(reached)
        return None if middle == float("inf") else middle

    @property
    def score(self) -> float:
        """Mean of the task's score at the end; NaN where a training diverged."""
        return statistics.fmean(outcome.score for outcome in self.outcomes)

    @property
    def score_spread(self) -> float:
        """Standard deviation of the score over the seeds; 0 for one."""
        return statistics.stdev(outcome.score for outcome in self.outcomes) if len(self.outcomes) > 1 else 0.0

    def as_json(self) -> dict[str, Any]:
        """Everything, as JSON has it: no infinity."""
        setting = asdict(self.setting) | {"consistency": str(self.setting.consistency)}
        outcomes = [_as_json(outcome) for outcome in self.outcomes]
        return {"task": self.task, "speeds": self.speeds, **setting, "outcomes": outcomes}


class Kept:
    """Outcomes by their runs, one JSON line of a file for each: what is there is not made again."""

    def __init__(self, path: Path | None = None) -> None:
        """None: kept in memory alone. Raises click.BadParameter for a file that is not such a one."""
        self._path = path
        self._outcomes: dict[str, Outcome] = {}
        if path is None or not path.exists():
            return
        try:
            for line in path.read_text().splitlines():
                found = json.loads(line)
                self._outcomes[json.dumps(found["run"], sort_keys=True)] = _outcome_of(found["outcome"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise click.BadParameter(f"{path} is not a file of outcomes: {error}") from error

    def __contains__(self, run: Run) -> bool:
        return run.name in self._outcomes

    def __getitem__(self, run: Run) -> Outcome:
        return self._outcomes[run.name]

    def add(self, run: Run, outcome: Outcome) -> None:
        """Keep what came of ``run``."""
        self._outcomes[run.name] = outcome
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({"run": json.loads(run.name), "outcome": _as_json(outcome)}) + "\n")


def run_all(
    runs: Sequence[Run], processes: int, on_done: Callable[[int, int], None], kept: Kept | None = None
) -> list[Row]:
    """Make all ``runs``, ``processes`` at a time; rows in the order in which their settings come in ``runs``.

    Those that are in ``kept`` are taken from there, and the others added. ``on_done`` is told how many of how many are
    done. Raises what a training raises.
    """
    kept = kept or Kept()
    missing = [run for run in {run.name: run for run in runs}.values() if run not in kept]
    with ExitStack() as stack:
        made: Iterator[Outcome] = map(make, missing)
        if processes > 1 and missing:
            context = multiprocessing.get_context("spawn")
            made = stack.enter_context(ProcessPoolExecutor(processes, mp_context=context)).map(make, missing)
        for number, (run, outcome) in enumerate(zip(missing, made, strict=True), 1):
            kept.add(run, outcome)
            on_done(len(runs) - len(missing) + number, len(runs))
    rows: dict[str, Row] = {}
    for run in runs:
        row = rows.setdefault(replace(run, seed=0).name, Row(run.task, run.setting, run.speeds))
        row.outcomes.append(kept[run])
    return list(rows.values())


def make(run: Run) -> Outcome:
    """Make one training, with one thread of torch: more would change its bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return train(TASKS[run.task](), run.setting, speeds_of(run.speeds, run.setting.workers, run.seed), run.seed)
    finally:
        torch.set_num_threads(threads)


def _as_json(outcome: Outcome) -> dict[str, Any]:
    return (
        asdict(outcome)
        | {"measure": _finite(outcome.measure), "score": _finite(outcome.score)}
        | {"curve": [(at, pushes, _finite(value)) for at, pushes, value in outcome.curve]}
    )


def _outcome_of(found: dict[str, Any]) -> Outcome:
    curve = [(at, pushes, math.inf if value is None else value) for at, pushes, value in found["curve"]]
    measure, score = (default if found[name] is None else found[name] for name, default in _MISSING.items())
    staleness = {int(age): count for age, count in found["staleness"].items()}
    return Outcome(**{**found, "measure": measure, "score": score, "staleness": staleness, "curve": curve})


_MISSING = {"measure": math.inf, "score": math.nan}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
