"""The three consistency modes as rules: what becomes of a push, how far rounds are due, how far pulls are answered.

Every bound is one on positions: one comparison per question, however many workers there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ps_protocol.model.spec import Consistency, Mode
from ps_server.consistency.events import FOREVER, Position, PushDecision, PushInfo, Verdict
from ps_server.consistency.stale import Factor, factor_of
from ps_server.consistency.vector import ClockVector


class Rule(Protocol):
    """One mode. Pure: every answer is computed from the arguments and the mode's own numbers."""

    @property
    def collects(self) -> bool:
        """Whether pushes are collected into rounds."""

    @property
    def grace_seconds(self) -> float:
        """How long a round that has its quorum waits for the pushes it still lacks."""

    @property
    def lookahead(self) -> int:
        """Steps that a pull may count as standing further on, because its parameters are used later."""

    def decide(self, push: PushInfo, staleness: int, workers: int, applied: Position) -> PushDecision:
        """The verdict on a new push. ``workers``: how many are live; ``applied``: the last round taken."""

    def due(self, clocks: ClockVector) -> Position:
        """Rounds up to here are to be applied now."""

    def quorum(self, clocks: ClockVector) -> Position:
        """Rounds up to here have enough pushes to be applied when their grace time is over."""

    def answered(self, clocks: ClockVector, applied: Position) -> Position:
        """A pull of a worker that stands no higher than this is answered now."""


@dataclass(frozen=True, slots=True)
class OnArrival:
    """What async and ssp share: a push is applied alone, when it comes, as the rule for stale ones has it."""

    factor: Factor

    collects = False
    grace_seconds = 0.0

    @property
    def lookahead(self) -> int:
        """The mode sets no bound."""
        return 0

    def decide(self, push: PushInfo, staleness: int, workers: int, applied: Position) -> PushDecision:
        """APPLY, STALE or SKIP."""
        if push.skipped:
            return PushDecision(Verdict.SKIP)
        if not staleness or (factor := self.factor(staleness, workers)) == 1.0:
            return PushDecision(Verdict.APPLY, 1.0, staleness)
        if not factor:
            return PushDecision(
                Verdict.STALE, staleness=staleness, reason=f"staleness {staleness}, the rule is to {self.factor}"
            )
        return PushDecision(Verdict.APPLY, factor, staleness)

    def due(self, clocks: ClockVector) -> Position:
        """Every round: what a synchronous time before has left is applied as it is."""
        return FOREVER

    def quorum(self, clocks: ClockVector) -> Position:
        """Every round."""
        return FOREVER


@dataclass(frozen=True, slots=True)
class Async(OnArrival):
    """No worker waits."""

    def answered(self, clocks: ClockVector, applied: Position) -> Position:
        """Every pull."""
        return FOREVER


@dataclass(frozen=True, slots=True)
class Ssp(OnArrival):
    """Stale synchronous parallel: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
    Server", NIPS 2013, section 2. A worker's own pushes are always in what it pulls.
    """

    #: Steps a worker may be ahead of the slowest.
    bound: int

    @property
    def lookahead(self) -> int:
        """The bound is on the use of the parameters."""
        return self.bound

    def answered(self, clocks: ClockVector, applied: Position) -> Position:
        """Up to ``bound`` steps ahead of the slowest participant; no barrier is crossed before all have reached it."""
        slowest = clocks.frontier()
        return Position(slowest.phase, slowest.clock + self.bound)


@dataclass(frozen=True, slots=True)
class Sync:
    """Synchronous rounds with backup workers: Chen et al., "Revisiting Distributed Synchronous SGD", 2016, section 3.

    A round has its quorum when at most ``backup`` live participants stand below it. It is due then, or with a grace
    time when none does or that time is over. A push held for a worker that died since stays in its round but does not
    stand for a live one.
    """

    #: Pushes of a step that may be missing when it is applied.
    backup: int
    grace_seconds: float = 0.0

    collects = True
    lookahead = 0

    def decide(self, push: PushInfo, staleness: int, workers: int, applied: Position) -> PushDecision:
        """HOLD, LATE or SKIP."""
        if push.position <= applied:
            return PushDecision(Verdict.LATE, reason=f"{push.position} was applied without it; now at {applied}")
        return PushDecision(Verdict.SKIP if push.skipped else Verdict.HOLD)

    def due(self, clocks: ClockVector) -> Position:
        """What all participants have reached; without a grace time, what all but ``backup`` have."""
        return clocks.frontier(0 if self.grace_seconds else self.backup)

    def quorum(self, clocks: ClockVector) -> Position:
        """What all but ``backup`` participants have reached."""
        return clocks.frontier(self.backup)

    def answered(self, clocks: ClockVector, applied: Position) -> Position:
        """What has been applied; or, for steps made before the job became synchronous, what has its quorum."""
        return max(applied, self.quorum(clocks))


def rule_for(consistency: Consistency) -> Rule:
    """The rule of ``consistency``."""
    match consistency.mode:
        case Mode.ASYNC:
            return Async(factor_of(consistency.stale))
        case Mode.SSP:
            return Ssp(factor_of(consistency.stale), consistency.staleness)
        case Mode.SYNC:
            return Sync(consistency.backup, consistency.grace_seconds)
