"""What a row of the table is: its key, its name, and what measures it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from typing import Protocol

from benchmarks.timing import Figures

KB, MB, GB = 1_000, 1_000_000, 1_000_000_000


@dataclass(frozen=True)
class Key:
    """Which row: who does what with how much. Ratios name rows by it."""

    system: str
    operation: str
    nbytes: int
    tensors: int = 1
    workers: int = 1
    shards: int = 1
    #: Of a sparse table; then ``nbytes`` is 0.
    rows: int = 0

    def __str__(self) -> str:
        parts = [f"{self.system}: {self.operation}"]
        parts += [size(self.nbytes)] * (self.nbytes > 0)
        parts += [f"{self.rows:,} rows"] * (self.rows > 0)
        parts += [f"{self.tensors:,} tensors"] * (self.tensors > 1)
        parts += [f"{self.workers} workers"] * (self.workers > 1)
        parts += [f"{self.shards} shards"] * (self.shards > 1)
        return ", ".join(parts)


def size(nbytes: int) -> str:
    """As 100 MB."""
    for unit, name in ((GB, "GB"), (MB, "MB"), (KB, "KB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes} B"


#: Figures of one row by what was measured: "seconds", "shard_cpu_seconds", "compute_seconds", "peak_bytes", …
Measures = Mapping[str, Figures]
Rows = Mapping[Key, Measures]


class Running(Protocol):
    """A system that is up. Called from the main thread; gives samples by name of measure."""

    def run(self, operation: str, count: int, warm_up: int) -> dict[str, list[float]]:
        """Do ``operation`` ``count`` times; the samples hold one entry or more for every measure."""

    def rest(self) -> None:
        """Another row is measured now."""

    def wake(self) -> None:
        """It is measured now."""


@dataclass(frozen=True)
class Subject:
    """Something to be measured: how to bring it up, and the rows it gives."""

    keys: tuple[Key, ...]
    open: Callable[[], AbstractContextManager[Running]]
    #: Whether a small look leaves it out.
    quick: bool = True


@dataclass(frozen=True)
class Group:
    """Subjects measured in turn, round by round, so that what disturbs the machine disturbs all of them."""

    title: str
    subjects: tuple[Subject, ...]
    rounds: int
    #: Timed operations per visit, and untimed ones before.
    count: int
    warm_up: int = 1
    #: False: memory is not enough for all at once, so that each visit brings its subject up.
    together: bool = True

    def only(self, words: tuple[str, ...]) -> Group:
        """The same with the rows whose name holds one of ``words``; all of them without words."""
        chosen = []
        for subject in self.subjects:
            keys = tuple(key for key in subject.keys if not words or any(word in str(key) for word in words))
            if keys:
                chosen.append(Subject(keys, subject.open, subject.quick))
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return Group(**(values | {"subjects": tuple(chosen)}))


@dataclass
class Samples:
    """Samples of one row, by measure and round. Filled by the schedule."""

    rounds: dict[str, list[list[float]]] = field(default_factory=dict)

    def add(self, visit: Mapping[str, list[float]]) -> None:
        """One round's samples."""
        for measure, samples in visit.items():
            self.rounds.setdefault(measure, []).append(samples)

    def measures(self) -> dict[str, Figures]:
        """Figures of all rounds."""
        return {measure: Figures.of(rounds) for measure, rounds in self.rounds.items()}
