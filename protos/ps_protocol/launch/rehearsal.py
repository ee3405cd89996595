"""A rehearsal: what ps-run tells the process that makes one, and what comes back. How fast virtual workers compute."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from ps_protocol.errors import ConfigError
from ps_protocol.records import from_plain, to_plain

MODULE = "ps_worker.rehearsal.main"
"""The module of the process. Its arguments are a ``RehearsalPlan`` and the number of a descriptor, on which it writes
``RehearsalNews``, one a line."""

Speeds = Callable[[int, int], float]
"""Seconds that worker ``rank`` computes for its step number ``step``, which counts from 1."""


@dataclass(frozen=True, slots=True)
class RehearsalPlan:
    """One script under one mode."""

    #: Path of a script, or name of a module.
    script: str
    arguments: tuple[str, ...]
    module: bool
    workers: int
    #: See ``speeds_of``.
    speeds: str
    #: Settings of the coordinator: the mode.
    settings: Mapping[str, Any]
    #: Of the job, for shuffling, and of the random number generators of every worker before its script begins.
    seed: int
    #: Steps after which each worker ends; None: as many as the script makes.
    steps: int | None
    #: What ``cluster.report`` is asked for.
    metric: str
    #: Torch threads.
    threads: int

    def to_json(self) -> str:
        """As the argument of a program."""
        return json.dumps(to_plain(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The plan that ``to_json`` wrote."""
        return from_plain(cls, json.loads(text))


@dataclass(slots=True)
class RehearsalNews:
    """How far a rehearsal has come; the last one is its result."""

    #: Steps of all workers.
    steps: int = 0
    #: Virtual seconds.
    seconds: float = 0.0
    finished: bool = False
    #: The metric by virtual time, as each worker reported it: (seconds, value). Only in the result, as all below.
    reports: list[tuple[float, float]] = field(default_factory=list)
    #: Names of what was reported.
    metrics: list[str] = field(default_factory=list)
    #: Pushes by staleness.
    staleness: dict[int, int] = field(default_factory=dict)
    #: Why it ended early, with worker and step; empty: it did not.
    failure: str = ""
    #: The traceback of ``failure``.
    traceback: str = ""
    #: A gradient was not finite.
    not_finite: bool = False
    #: What differs from a real job, in a line each.
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        """In one line."""
        return json.dumps(to_plain(self))

    @classmethod
    def from_json(cls, line: str) -> Self:
        """What ``to_json`` wrote."""
        return from_plain(cls, json.loads(line))


def speeds_of(text: str, workers: int, seed: int) -> Speeds:
    """What ``text`` describes, the same for the same ``seed``:

    ``equal``; ``exponential``: each step takes an exponentially distributed time; ``slow:K``: the last worker is K
    times slower; ``1,1,0.25``: the speed of each worker, repeated where there are more; ``trace:FILE``:
    see ``from_trace``. An equal worker takes 1 second.

    Raises ConfigError, which says what is wrong.
    """
    name, _, argument = text.partition(":")
    if name == "equal" and not argument:
        return lambda rank, step: 1.0
    if name == "exponential" and not argument:
        import numpy as np  # here, because ps-run would import it at each start

        return lambda rank, step: float(np.random.default_rng((seed, rank, step)).exponential())
    if name == "slow":
        factor = _positive(argument, "the factor of slow:K")
        return lambda rank, step: factor if rank == workers - 1 else 1.0
    if name == "trace":
        return from_trace(Path(argument), workers)
    speeds = [_positive(each, "a speed") for each in text.split(",")]
    if workers % len(speeds):
        raise ConfigError(
            f"{text!r} has {len(speeds)} speeds for {workers} workers",
            remedy="give one number for each worker, or a list that fits in several times",
        )
    return lambda rank, step: 1.0 / speeds[rank % len(speeds)]


def from_trace(path: Path, workers: int) -> Speeds:
    """The times in a text file with one line per pause: ``rank step seconds``.

    A step that has a line takes 1 second and the pause, such as that of a pre-empted machine; any other takes 1 second.
    Raises ConfigError, which names the file and the line.
    """
    pauses: dict[tuple[int, int], float] = {}
    try:
        lines = path.read_text().splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        try:
            rank, step, seconds = int(words[0]), int(words[1]), float(words[2])
        except (ValueError, IndexError):
            raise ConfigError(f"{path}, line {number}: expected 'rank step seconds', got {line!r}") from None
        if not (0 <= rank < workers and step >= 1 and 0 <= seconds < math.inf):
            raise ConfigError(
                f"{path}, line {number}: expected a rank below {workers}, a step from 1 and seconds from 0, "
                f"got {line!r}"
            )
        pauses[rank, step] = pauses.get((rank, step), 0.0) + seconds
    return lambda rank, step: 1.0 + pauses.get((rank, step), 0.0)


def _positive(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(
            f"{what} is a number above 0, not {text!r}",
            remedy="speeds are equal, exponential, slow:K, trace:FILE, or one number for each worker, as in 1,1,0.25",
        )
    return value
