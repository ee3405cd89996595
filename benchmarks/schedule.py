"""In which order rows are measured: round robin over the subjects of a group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from benchmarks.processes import ChildFailed
from benchmarks.rows import Group, Key, Measures, Running, Samples, Subject

Report = Callable[[int, Key], None]
"""Told which round of which row begins."""


@dataclass
class Outcome:
    """What became of rows: figures, or why there are none."""

    rows: dict[Key, Measures] = field(default_factory=dict)
    failures: dict[Key, str] = field(default_factory=dict)

    def add(self, other: Outcome) -> None:
        """Take another group's rows in."""
        self.rows |= other.rows
        self.failures |= other.failures


def measure(group: Group, report: Report) -> Outcome:
    """Measure all rows of ``group``. A subject whose child fails is left out from there on; the others go on."""
    samples = {key: Samples() for subject in group.subjects for key in subject.keys}
    failures: dict[Key, str] = {}

    @contextmanager
    def noting_failures(subject: Subject) -> Iterator[None]:
        try:
            yield
        except ChildFailed as error:
            failures.update(dict.fromkeys(subject.keys, str(error)))

    with ExitStack() as stack:
        running: dict[int, Running] = {}
        if group.together:
            for number, subject in enumerate(group.subjects):
                with noting_failures(subject):
                    running[number] = stack.enter_context(subject.open())
                    running[number].rest()
        for round_number in range(group.rounds):
            for number, subject in enumerate(group.subjects):
                if subject.keys[0] in failures:
                    continue
                with noting_failures(subject), _awake(running[number]) if group.together else subject.open() as held:
                    for key in subject.keys:
                        report(round_number, key)
                        samples[key].add(held.run(key.operation, group.count, group.warm_up))
    return Outcome({key: taken.measures() for key, taken in samples.items() if key not in failures}, failures)


@contextmanager
def _awake(running: Running) -> Iterator[Running]:
    running.wake()
    try:
        yield running
    finally:
        running.rest()
