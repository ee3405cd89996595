"""How long each virtual worker computes for each of its steps, in virtual seconds. The mean of an equal worker is 1."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import numpy as np

Speeds = Callable[[int, int], float]
"""Seconds that worker ``rank`` computes for its step number ``step``, which counts from 1."""


def speeds_of(text: str, workers: int, seed: int) -> Speeds:
    """What ``text`` describes, the same for the same ``seed``:

    ``equal``; ``exponential``: each step takes an exponentially distributed time; ``slow:K``: the last worker is K
    times slower; ``1,1,0.25``: the speed of each worker; ``trace:FILE``: see ``from_trace``.

    Raises click.BadParameter, which says what is wrong.
    """
    name, _, argument = text.partition(":")
    if name == "equal" and not argument:
        return lambda rank, step: 1.0
    if name == "exponential" and not argument:
        return lambda rank, step: float(np.random.default_rng((seed, rank, step)).exponential())
    if name == "slow":
        factor = _positive(argument, "the factor of slow:K")
        return lambda rank, step: factor if rank == workers - 1 else 1.0
    if name == "trace":
        return from_trace(Path(argument), workers)
    speeds = [_positive(each, "a speed") for each in text.split(",")]
    if len(speeds) != workers:
        raise click.BadParameter(f"{text!r} has {len(speeds)} speeds for {workers} workers")
    return lambda rank, step: 1.0 / speeds[rank]


def from_trace(path: Path, workers: int) -> Speeds:
    """The times in a text file with one line per pause: ``rank step seconds``.

    A step that has a line takes 1 second and the pause, such as that of a pre-empted machine; any other takes 1 second.
    Raises click.BadParameter, which names the file and the line.
    """
    pauses: dict[tuple[int, int], float] = {}
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise click.BadParameter(f"{path} cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        try:
            rank, step, seconds = int(words[0]), int(words[1]), float(words[2])
        except (ValueError, IndexError):
            raise click.BadParameter(f"{path}, line {number}: expected 'rank step seconds', got {line!r}") from None
        if not (0 <= rank < workers and step >= 1 and 0 <= seconds < math.inf):
            raise click.BadParameter(
                f"{path}, line {number}: expected a rank below {workers}, a step from 1 and seconds from 0, "
                f"got {line!r}"
            )
        pauses[rank, step] = pauses.get((rank, step), 0.0) + seconds
    return lambda rank, step: 1.0 + pauses.get((rank, step), 0.0)


def mean_seconds(speeds: Speeds, workers: int, steps: int = 1000) -> Sequence[float]:
    """The mean time of a step of each worker over its first ``steps`` steps."""
    return [sum(speeds(rank, step) for step in range(1, steps + 1)) / steps for rank in range(workers)]


def _positive(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise click.BadParameter(
            f"{what} is a number above 0, not {text!r}; speeds are equal, exponential, slow:K, trace:FILE, or one "
            "number for each worker, as in 1,1,0.25"
        )
    return value
