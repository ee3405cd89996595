"""How many workers and shards a job has: the range it begins with, and the numbers that were asked for since."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Self

from ps_protocol.errors import ConfigError, InvalidRequest

MOST_RANKS = 1 << 16
"""Ranks are below this number."""

ENDED = "ended by scale"
"""The reason with which a worker leaves that its job no longer needs."""

FORMS = "a number, MIN:MAX, or 0 for any number of workers that come and go"


@dataclass(frozen=True, slots=True)
class WorkerRange:
    """The number of workers of a job: a fixed one, or ``least`` to begin with and ``most`` at the same time."""

    least: int
    most: int

    @classmethod
    def of(cls, value: object, name: str = "--workers") -> Self:
        """From a number, a text such as "2:8", or a pair; 0 is any number. Raises ConfigError, naming ``name``."""
        if isinstance(value, cls):
            return value
        try:
            least, most = _two(value)
        except (TypeError, ValueError):
            raise ConfigError(f"{name} is not understood", expected=FORMS, actual=repr(value)) from None
        if least == most == 0:
            return cls(0, MOST_RANKS)
        if not 0 <= least <= most <= MOST_RANKS or not most:
            raise ConfigError(
                f"{name} is not a range of workers", expected=f"0 <= MIN <= MAX <= {MOST_RANKS}", actual=str(value)
            )
        return cls(least, most)

    @property
    def fixed(self) -> int:
        """The number of workers where it never changes; 0 where they come and go."""
        return self.least if self.least == self.most else 0

    @property
    def bounded(self) -> bool:
        """Whether a number of workers was named that is the most."""
        return self.most < MOST_RANKS

    def __str__(self) -> str:
        if self.fixed or not self.bounded:
            return str(self.least)
        return f"{self.least}:{self.most}"


def _two(value: Any) -> tuple[int, int]:
    """The least and the most of a number, a text or a pair. Raises TypeError, ValueError."""
    if isinstance(value, str):
        value = [int(part) for part in value.split(":")]
    least, most = [value, value] if isinstance(value, int) else [*value, *value][:2] if len(value) == 1 else value
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in (least, most)):
        raise TypeError
    return least, most


@dataclass(frozen=True, slots=True)
class ScaleAsk:
    """The processes that a caller wants a job to have; None: no change. Raises InvalidRequest for a wrong number."""

    workers: int | None = None
    shards: int | None = None

    def __post_init__(self) -> None:
        for name, number in (("workers", self.workers), ("shards", self.shards)):
            if number is not None and (type(number) is not int or not 0 <= number <= MOST_RANKS):
                raise InvalidRequest(
                    f"a job cannot have as many {name}", expected=f"0 to {MOST_RANKS}", actual=repr(number)
                )


@dataclass(frozen=True, slots=True)
class ScaleOrder:
    """The processes that the program which starts them is to have running, as the coordinator orders."""

    #: Rises with every change that a caller asked for; 0: the job was never scaled.
    number: int = 0
    #: The ranks of workers that are to run; None: those that the job began with.
    ranks: frozenset[int] | None = None
    #: The numbers of shards that are to run, which may be more than are wanted as long as they hold anything.
    shards: frozenset[int] | None = None
    #: Those of them that have to be started, since they were asked for. Others are never started in their place.
    added_shards: frozenset[int] = frozenset()
    #: Members of the job.
    live_ranks: frozenset[int] = frozenset()
    live_shards: frozenset[int] = frozenset()
    #: Every worker has left after training.
    finished: bool = False
    #: Workers that have left after training, and that nobody has asked to end: their processes end by themselves.
    done_ranks: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class ScaleProgress:
    """What a job that is being scaled waits for, in words; with ``done`` what it has now."""

    text: str
    done: bool = False


def named(what: str, numbers: Collection[int], most: int = 8) -> str:
    """In words: "worker 3", "workers 3, 4 and 5", "workers 3, 4, … (12 of them)"."""
    ordered = sorted(numbers)
    if len(ordered) == 1:
        return f"{what} {ordered[0]}"
    if len(ordered) > most:
        return f"{what}s {', '.join(map(str, ordered[:most]))}, … ({len(ordered)} of them)"
    return f"{what}s {', '.join(map(str, ordered[:-1]))} and {ordered[-1]}"
