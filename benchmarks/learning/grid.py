"""Many trainings in processes of their own: settings times seeds."""

from __future__ import annotations

import math
import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from benchmarks.learning.laboratory import Outcome, Setting, train
from benchmarks.learning.speeds import speeds_of
from benchmarks.learning.tasks import TASKS


@dataclass(frozen=True)
class Run:
    """One training, by what can be sent to another process."""

    task: str
    setting: Setting
    speeds: str
    seed: int


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

    def as_json(self) -> dict[str, Any]:
        """Everything, as JSON has it: no infinity."""
        setting = asdict(self.setting) | {"consistency": str(self.setting.consistency)}
        outcomes = [
            asdict(outcome)
            | {"measure": _finite(outcome.measure), "score": _finite(outcome.score)}
            | {"curve": [(at, pushes, _finite(value)) for at, pushes, value in outcome.curve]}
            for outcome in self.outcomes
        ]
        return {"task": self.task, "speeds": self.speeds, **setting, "outcomes": outcomes}


def run_all(runs: Sequence[Run], processes: int, on_done: Callable[[int, int], None]) -> list[Row]:
    """Make all ``runs``, ``processes`` at a time; rows in the order in which their settings come in ``runs``.

    ``on_done`` is told how many of how many are done. Raises what a training raises.
    """
    rows: dict[str, Row] = {}
    with ExitStack() as stack:
        made: Iterator[Outcome] = map(make, runs)
        if processes > 1:
            context = multiprocessing.get_context("spawn")
            made = stack.enter_context(ProcessPoolExecutor(processes, mp_context=context)).map(make, runs)
        for number, (run, outcome) in enumerate(zip(runs, made, strict=True), 1):
            row = rows.setdefault(_key(run), Row(run.task, run.setting, run.speeds))
            row.outcomes.append(outcome)
            on_done(number, len(runs))
    return list(rows.values())


def make(run: Run) -> Outcome:
    """Make one training, with one thread of torch: more would change its bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return train(TASKS[run.task](), run.setting, speeds_of(run.speeds, run.setting.workers, run.seed), run.seed)
    finally:
        torch.set_num_threads(threads)


def _key(run: Run) -> str:
    return repr((run.task, run.setting, run.speeds))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
