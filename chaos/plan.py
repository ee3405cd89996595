"""Decides which fault comes when: a pure function of the seed."""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


class Kind(enum.Enum):
    """What can happen. Each lasts for the fault's seconds, but for KILL and HANG, which nothing undoes."""

    #: kill -9.
    KILL = "kill"
    #: SIGSTOP, then SIGCONT: a machine that hangs, and a clock that jumps.
    FREEZE = "freeze"
    #: SIGSTOP for good, of a server: the program that started it has to notice, and to replace it.
    HANG = "hang"
    #: Every connection through a link ends, and new ones are refused.
    CUT = "cut"
    #: Nothing passes a link, and nobody is told.
    HUSH = "hush"
    #: No room is left on the disk of the shards.
    FULL = "full disk"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault."""

    at_seconds: float
    kind: Kind
    #: A process, a link, or the disk.
    target: str
    seconds: float = 0.0

    def __str__(self) -> str:
        lasting = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.kind.value} {self.target}{lasting}"


@dataclass(frozen=True, slots=True)
class Targets:
    """What faults can hit."""

    processes: Sequence[str]
    #: Those of ``processes`` that are servers.
    servers: Sequence[str]
    links: Sequence[str]
    #: None where the disk cannot be filled without filling others'.
    disk: str | None


REPLACED_SECONDS = 60.0
"""For a server that hangs to be noticed, killed and started again: a coordinator after half a minute."""


def plan(
    seed: int, seconds: float, every_seconds: float, lease_seconds: float, targets: Targets, *, kills_only: bool
) -> list[Fault]:
    """A kill every ``every_seconds``, and another fault in the middle of every second pause.

    Other faults last up to one and a half leases: some members lose their place over them, some do not. The last ends
    in time for its effects to pass.
    """
    end = seconds - min(10.0, seconds / 4)
    drawn = _drawn(random.Random(seed), end, every_seconds, lease_seconds, targets)
    return [fault for fault in drawn if fault.kind is Kind.KILL or not kills_only]


def _drawn(chance: random.Random, end: float, every: float, lease: float, targets: Targets) -> Iterator[Fault]:
    others = [Kind.FREEZE, Kind.HANG, Kind.CUT, Kind.HUSH, *([Kind.FULL] if targets.disk else [])]
    number = 1
    while number * every < end:
        yield Fault(number * every, Kind.KILL, chance.choice(targets.processes))
        at, lasting = (number + 0.5) * every, chance.uniform(0.2, 1.5) * lease
        if number % 2 and at + lasting < end:
            kind = chance.choice(others if at + REPLACED_SECONDS < end else [k for k in others if k is not Kind.HANG])
            match kind:
                case Kind.HANG:
                    yield Fault(at, kind, chance.choice(targets.servers))
                case Kind.FREEZE:
                    yield Fault(at, kind, chance.choice(targets.processes), lasting)
                case Kind.FULL:
                    yield Fault(at, kind, targets.disk or "", lasting)
                case _:
                    yield Fault(at, kind, chance.choice(targets.links), lasting)
        number += 1
