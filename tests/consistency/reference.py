"""The rules once more, naively: plain lists, everything computed again at every question."""

from __future__ import annotations

from dataclasses import dataclass, field

from ps_protocol.model.spec import Consistency, Mode, StalePolicy
from ps_server.consistency import Position, PushInfo, Verdict, WorkerKey


@dataclass
class Reference:
    """Knows no heap, no counter and no cache; its inputs are checked by nobody."""

    consistency: Consistency
    live: dict[int, int] = field(default_factory=dict)
    accepted: list[PushInfo] = field(default_factory=list)
    #: Every position a live participant has had; the largest is where it stands.
    history: dict[WorkerKey, list[Position]] = field(default_factory=dict)
    ever: list[Position] = field(default_factory=lambda: [Position(0, 0)])
    held: list[PushInfo] = field(default_factory=list)
    #: Somebody has pushed since anybody takes part.
    begun: bool = False
    #: What each version was made of.
    updates: list[list[PushInfo]] = field(default_factory=list)
    taken: list[Position] = field(default_factory=lambda: [Position(0, 0)])
    #: Every look at the rounds: when, which was the lowest, and whether it had its quorum.
    looks: list[tuple[float, Position, bool]] = field(default_factory=list)

    def standing(self) -> dict[WorkerKey, Position]:
        return {worker: max(positions) for worker, positions in self.history.items()}

    def stand(self, worker: WorkerKey, position: Position) -> Position:
        self.history.setdefault(worker, []).append(position)
        self.ever.append(position)
        return self.standing()[worker]

    def below(self, position: Position) -> list[WorkerKey]:
        return [worker for worker, own in self.standing().items() if own < position]

    def members(self, live: dict[int, int]) -> None:
        self.live = dict(live)
        keys = {WorkerKey(rank, incarnation) for rank, incarnation in live.items()}
        self.history = {worker: positions for worker, positions in self.history.items() if worker in keys}
        self.begun = self.begun and bool(self.history)
        if not self.begun:
            # Rounds may have passed without pushes.
            applied = [
                self.taken[-1],
                *(each.position for pushes in self.updates for push in pushes for each in push.contributions),
            ]
            for key in keys - self.history.keys():
                self.stand(key, max(applied))

    def attach(self, worker: WorkerKey, phase: int) -> Position:
        if worker not in self.history:
            others = self.standing().values()
            current = max(min(others), self.taken[-1]) if others else max(self.ever)
            if current.phase == phase:
                return self.stand(worker, current)
            clocks = [position.clock for position in (self.taken[-1],) if position.phase == phase]
            return self.stand(worker, Position(phase, max(clocks, default=0)))
        return self.stand(worker, Position(phase, 0))

    def arrive(self, worker: WorkerKey, phase: int) -> None:
        self.stand(worker, Position(phase + 1, 0))

    def push(self, push: PushInfo) -> tuple[Verdict, float, int]:
        """Verdict, scale, staleness."""
        known = [self.knows(each) for each in push.contributions]
        if all(known):
            return Verdict.DUPLICATE, 1.0, 0
        if push.others and (any(known) or not all(self.may_step(each, push) for each in push.contributions)):
            return Verdict.SEPARATE, 1.0, 0
        self.accepted.append(push)
        self.begun = True
        for each in push.contributions:
            self.stand(each.worker, each.position)
        if self.consistency.mode is Mode.SYNC:
            if push.position <= self.taken[-1]:
                return Verdict.LATE, 1.0, 0
            self.held.append(push)
            return (Verdict.SKIP if push.skipped else Verdict.HOLD), 1.0, 0
        if push.skipped:
            return Verdict.SKIP, 1.0, 0
        staleness, policy = len(self.updates) - push.pulled_version, self.consistency.stale_policy
        threshold = len(self.live) if self.consistency.stale_by_workers else self.consistency.stale_threshold
        stale = staleness > threshold
        if stale and policy is StalePolicy.REJECT:
            return Verdict.STALE, 1.0, staleness
        self.updates.append([push])
        scaled = stale and policy is StalePolicy.SCALE
        return Verdict.APPLY, (max(threshold, 1) / staleness if scaled else 1.0), staleness

    def knows(self, push: PushInfo) -> bool:
        """Whether a push of its worker, which takes part, was accepted under its sequence, or a later one."""
        if push.worker not in self.history:
            return False
        each = (one for accepted in self.accepted for one in accepted.contributions)
        return any(one.worker == push.worker and one.sequence >= push.sequence for one in each)

    def may_step(self, push: PushInfo, whole: PushInfo) -> bool:
        """Whether ``push`` may be part of ``whole``."""
        own = self.standing().get(push.worker)
        same = push.position == whole.position or self.consistency.mode is Mode.ASYNC
        return own is not None and push.position > own and same

    def take_ready(self, now: float) -> list[tuple[Position, list[PushInfo]]]:
        rounds = []
        for position in sorted({push.position for push in self.held}):
            behind = len(self.below(position))
            self.looks.append((now, position, behind <= self.consistency.backup))
            if self.consistency.mode is Mode.SYNC and behind > self.consistency.backup:
                break
            if self.consistency.mode is Mode.SYNC and behind and self.waited() < self.consistency.grace_seconds:
                break
            pushes = [push for push in self.held if push.position == position and not push.skipped]
            pushes.sort(key=lambda push: min((one.worker.rank, one.worker.incarnation) for one in push.contributions))
            self.held = [push for push in self.held if push.position != position]
            if pushes:
                self.updates.append(pushes)
            self.taken.append(position)
            rounds.append((position, pushes))
        return rounds

    def waited(self, round: Position | None = None) -> float:
        """How long, at the last look, or at that at ``round``, the lowest round has been that and had its quorum."""
        looks = self.looks[:]
        while round and looks[-1][1] != round:
            looks.pop()
        now, position, _ = looks[-1]
        since = now
        for when, lowest, quorum in reversed(looks):
            if lowest != position or not quorum:
                break
            since = when
        return now - since

    def may_pull(self, position: Position) -> bool:
        if any(push.position <= position for push in self.held):
            return False
        match self.consistency.mode:
            case Mode.ASYNC:
                return True
            case Mode.SSP:
                return not self.below(Position(position.phase, position.clock - self.consistency.staleness))
            case Mode.SYNC:
                return position <= self.taken[-1] or len(self.below(position)) <= self.consistency.backup
