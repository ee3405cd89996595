"""What the consistency modes decide on: workers, positions, pushes, and the decisions."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from ps_protocol.cluster.answers import Outcome


class Position(NamedTuple):
    """How far a worker has come, ordered by phase, then clock."""

    #: Barriers passed.
    phase: int
    #: Steps pushed in this phase.
    clock: int

    def __str__(self) -> str:
        return f"step {self.clock} of phase {self.phase}" if self.phase else f"step {self.clock}"


START = Position(0, 0)
"""Nothing pushed, no barrier passed."""

FOREVER = Position(1 << 64, 0)
"""Beyond every position: phases are 64-bit on the wire."""


@dataclass(frozen=True, slots=True, order=True)
class WorkerKey:
    """One process of a worker."""

    rank: int
    #: Assigned by the coordinator; a later life of the rank has a higher one, and none comes back.
    incarnation: int

    def __str__(self) -> str:
        return f"worker {self.rank} (incarnation {self.incarnation})"


@dataclass(slots=True, unsafe_hash=True)
class PushInfo:
    """A push without its gradients. (worker, sequence) names it. Not changed once made; frozen, making takes thrice as
    long.

    A combined push has the mean of several workers' gradients, and moves the clock and the sequence of each of them. It
    is one push in everything else: one update, one entry of a round, counted once.
    """

    worker: WorkerKey
    #: From 1, rising within an incarnation; gaps are allowed.
    sequence: int
    #: Where the worker stands with this push.
    position: Position
    #: Version of the parameters the gradients were computed on; of a combined push the lowest.
    pulled_version: int
    #: The step was skipped (non-finite gradients): it moves the clock and changes nothing else.
    skipped: bool = False
    #: Of a combined push: what its other workers would have pushed, by rank.
    others: tuple[PushInfo, ...] = ()

    @property
    def contributions(self) -> tuple[PushInfo, ...]:
        """Of each worker whose gradients are in it, the sender first."""
        return (self, *self.others)

    @property
    def workers(self) -> int:
        """How many have gradients in it."""
        return 1 + sum([not each.skipped for each in self.others])

    @property
    def first_worker(self) -> WorkerKey:
        """The one of lowest rank: who sends a combined push does not decide where it stands in a sum."""
        return min([each.worker for each in self.contributions])

    @property
    def lowest(self) -> Position:
        """The position of the worker that has come least far with it. In a mode that has pulls wait they differ only
        where async has just ended; and a pull must not wait for a worker that it is the answer to.
        """
        return min([each.position for each in self.contributions])


class Verdict(enum.Enum):
    """What becomes of a push; the values are the names the outcomes are counted under."""

    #: Applied now, alone.
    APPLY = "applied"
    #: Kept for the round of its position; counted as applied when the round is taken.
    HOLD = "held"
    #: Accepted before under this sequence; nothing changes.
    DUPLICATE = "duplicate"
    #: Its round was applied without it.
    LATE = "late"
    #: Dropped: staler than the threshold.
    STALE = "stale"
    #: Moves the clock only.
    SKIP = "skipped"
    #: A combined push that cannot be taken as one: nothing changes, and each of its workers pushes by itself.
    SEPARATE = "separate"

    #: By identity, as members compare: that of Enum is written in Python, and steps look members up.
    __hash__ = object.__hash__


OUTCOMES = {
    Verdict.APPLY: Outcome.APPLIED,
    Verdict.HOLD: Outcome.APPLIED,
    Verdict.DUPLICATE: Outcome.DUPLICATE,
    Verdict.LATE: Outcome.LATE,
    Verdict.STALE: Outcome.STALE,
    Verdict.SKIP: Outcome.SKIPPED,
    Verdict.SEPARATE: Outcome.SEPARATE,
}
"""The outcome in the answer to a push, by its verdict."""


@dataclass(slots=True)
class PushDecision:
    """The verdict on one push, and why. Not changed once made, as ``PushInfo``."""

    verdict: Verdict
    #: Factor on the learning rate of this push's step.
    scale: float = 1.0
    #: Versions made since the worker pulled, when decided (async and ssp only).
    staleness: int = 0
    #: For people; empty where the verdict says it all.
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Round:
    """The pushes of one synchronous step, applied as one; none when all of its pushes were skipped.

    A worker replaced while its push was held may be in it twice, under two incarnations.
    """

    position: Position
    #: In order of rank, then incarnation, so that a sum over them does not depend on arrival.
    contributions: tuple[PushInfo, ...]
    #: Versions made since each contribution's pull.
    staleness: tuple[int, ...]
    #: Version once it is applied; as before when there is no contribution.
    version: int


@dataclass(frozen=True, slots=True)
class ParticipantStatus:
    """Where a participant stands, for status pages."""

    worker: WorkerKey
    position: Position
    #: 0: no push accepted from this incarnation.
    last_sequence: int
