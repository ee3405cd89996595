"""Runs damages from a seed, each subject in turn, and counts what came of them."""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.damage.hurt import draw
from tests.damage.judge import BAD, Subject, judge


@dataclass
class Report:
    """What came of a campaign."""

    #: By subject and outcome.
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    #: What must not be: each with what repeats it.
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def table(self) -> str:
        """One line per subject."""
        outcomes = sorted({outcome for _, outcome in self.counts})
        subjects = dict.fromkeys(subject for subject, _ in self.counts)
        lines = [f"{'':28}" + "".join(f"{outcome:>12}" for outcome in outcomes)]
        for subject in subjects:
            lines.append(f"{subject:28}" + "".join(f"{self.counts[subject, outcome]:>12}" for outcome in outcomes))
        sums = [sum(count for (_, each), count in self.counts.items() if each == outcome) for outcome in outcomes]
        lines.append(f"{'all':28}" + "".join(f"{count:>12}" for count in sums))
        return "\n".join(lines)


def run(
    subjects: Sequence[Subject],
    folder: Path,
    *,
    seed: int,
    damages: int,
    say: Callable[[str], None] = lambda text: None,
) -> Report:
    """``damages`` in all, in ``folder``; the directories themselves are the same for every seed."""
    report, chance, began = Report(), random.Random(seed), time.monotonic()
    expected: dict[str, object] = {}
    for subject in subjects:
        whole = folder / "whole" / subject.name
        whole.mkdir(parents=True)
        subject.make(whole)
        expected[subject.name] = subject.read(_copy(whole, folder / "work"))
    logging.disable(logging.ERROR)
    try:
        for number in range(damages):
            subject = subjects[number % len(subjects)]
            whole = folder / "whole" / subject.name
            damage = draw(whole, chance)
            verdict = judge(subject, whole, expected[subject.name], folder / "work", damage)
            report.counts[subject.name, verdict.outcome] += 1
            if verdict.outcome in BAD:
                report.failures.append(f"{subject.name}: {damage}: {verdict.outcome} {verdict.detail}")
                say(report.failures[-1])
            if number % 500 == 499:
                say(f"{number + 1} damages in {time.monotonic() - began:.0f} s")
    finally:
        logging.disable(logging.NOTSET)
    report.seconds = time.monotonic() - began
    return report


def _copy(whole: Path, work: Path) -> Path:
    """Reading may change a directory: the whole one stays as it was written."""
    import shutil

    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(whole, work)
    return work
