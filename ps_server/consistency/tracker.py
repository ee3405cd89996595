"""The consistency of one model on one shard: decides what becomes of each push, and which pulls wait."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ps_protocol.errors import Fenced, InvalidRequest
from ps_protocol.model.spec import Consistency
from ps_server.consistency.events import (
    FOREVER,
    START,
    ParticipantStatus,
    Position,
    PushDecision,
    PushInfo,
    Round,
    Verdict,
    WorkerKey,
)
from ps_server.consistency.modes import rule_for
from ps_server.consistency.rounds import PendingRounds, RoundNorms
from ps_server.consistency.tracker_state import Counts, TrackerState
from ps_server.consistency.vector import ClockVector

LIMIT = 1 << 48
"""Phases, clocks and sequences are below: others may have to continue from the highest."""


@dataclass(slots=True)
class _Participant:
    incarnation: int
    last_sequence: int = 0
    #: What a restart knows again: up to the last push applied, not those held.
    kept: tuple[int, Position] = (0, START)


class Tracker:
    """Called from the shard's event loop, one call at a time; does no I/O and never waits.

    Guarantees: a push is decided once, a repeated one is DUPLICATE; every held push is in exactly one round; positions
    only rise. After ``members``, ``configure``, ``push``, ``attach`` and ``arrive``, and at ``grace_ends``, the caller
    applies ``take_ready(now)`` and then looks which pulls may be answered.

    A participant is a live worker with a clock in the vector. The last sequence of a worker is kept as long as it is
    listed live and no longer: afterwards its pushes are fenced, and an incarnation does not come back.
    """

    def __init__(self, consistency: Consistency) -> None:
        self._consistency = consistency
        self._rule = rule_for(consistency)
        self._live: dict[int, int] = {}
        self._participants: dict[int, _Participant] = {}
        self._clocks = ClockVector()
        #: Others only read them.
        self.rounds = PendingRounds()
        #: Where gradients are clipped over several shards.
        self.norms = RoundNorms()
        #: The lowest round and since when it has had its quorum, while it waits for more than that.
        self._waiting: tuple[Position, float] | None = None
        self._started = False
        #: The highest position of a push that was applied.
        self._kept_highest = START
        #: Applies decided so far. A push that ``push`` answers with APPLY is the one that made this version.
        self.version = 0
        #: The last round taken; a late worker continues from here.
        self.applied = START
        self.counts = Counts()

    @property
    def consistency(self) -> Consistency:
        """The mode in force."""
        return self._consistency

    @property
    def collects(self) -> bool:
        """Whether the mode collects pushes into rounds."""
        return self._rule.collects

    def configure(self, consistency: Consistency) -> None:
        """Change the mode. When sync is left, every pending round is ready as it is."""
        self._consistency = consistency
        self._rule = rule_for(consistency)

    def members(self, live: Mapping[int, int]) -> None:
        """Replace the live workers, rank to incarnation. The clocks of all others leave the vector at once.

        Until the first push every listed worker takes part from the start; later, from its ``attach`` on. Without any
        participant left it is as before the first push, at the highest position applied or passed by a round.
        """
        self._live = dict(live)
        gone = [rank for rank, member in self._participants.items() if live.get(rank) != member.incarnation]
        for rank in gone:
            del self._participants[rank]
            self._clocks.remove(rank)
        self._started = self._started and bool(self._participants)
        if not self._started:
            for rank in sorted(live.keys() - self._participants.keys()):
                self._enter(WorkerKey(rank, live[rank]), max(self._kept_highest, self.applied))

    def attach(self, worker: WorkerKey, phase: int, clock: int | None = None) -> Position:
        """A stream of ``worker`` opened, the first or again; it has passed ``phase`` barriers. Returns where it stands.

        A participant keeps its place. A newcomer enters where the slowest stands, but not below what has been applied;
        alone, at the highest position ever reached; while the others stand in another phase, at the start of its own.

        ``clock`` is given by a worker that has made steps already. A restart forgets pushes that changed nothing; where
        none of this worker's is known, it enters at ``clock``: with different positions on two shards, workers could
        wait for each other. Raises Fenced, InvalidRequest for a position that cannot be.
        """
        self._fence(worker)
        if max(phase, clock or 0) >= LIMIT:
            raise _stands_out_of_range(worker, Position(phase, clock or 0), LIMIT)
        own = self._participants.get(worker.rank)
        if own is not None and (own.last_sequence or clock is None):
            position = max(self._clocks[worker.rank], Position(phase, clock or 0))
            self._clocks.place(worker.rank, position)
        else:
            position = self._entry(phase) if clock is None else Position(phase, clock)
            self._enter(worker, position)
        return position

    def answered(self, worker: WorkerKey, sequence: int) -> bool:
        """``worker`` has had the answers to its pushes up to ``sequence`` and sends none of them again; whether one of
        them is new here. A restart forgets those that changed nothing, and without a log others, too.

        Raises Fenced, or InvalidRequest before ``attach`` and for a sequence that cannot be.
        """
        participant = self._participant(worker)
        if sequence >= LIMIT:
            raise _sequence_out_of_range(worker, sequence, LIMIT)
        if sequence <= participant.last_sequence:
            return False
        participant.last_sequence = sequence
        return True

    def push(self, push: PushInfo) -> PushDecision:
        """Decide on one whole push. Raises Fenced, or InvalidRequest when its position does not rise.

        A combined push is taken for all of its workers or for none.
        """
        worker, position, sequence = push.worker, push.position, push.sequence
        rank = worker.rank
        participant = self._participants.get(rank)
        if participant is None or self._live.get(rank) != worker.incarnation:
            participant = self._participant(worker)
        if push.others and (why := self._apart(push)):
            return self.separate(why)
        if sequence <= participant.last_sequence:
            self.counts.outcomes[Verdict.DUPLICATE.value] += 1
            return PushDecision(Verdict.DUPLICATE, reason=f"push {sequence} was accepted before")
        own, clock = self._clocks.positions[rank], position.clock
        if sequence >= LIMIT or clock >= LIMIT or position.phase >= LIMIT:
            raise _out_of_range(push, LIMIT)
        if position <= own or clock < 1:
            raise _does_not_rise(push, own)
        staleness = max(0, self.version - push.pulled_version)
        decision = self._rule.decide(push, staleness, len(self._live), self.norms.closed or self.applied)
        participant.last_sequence = sequence
        self._clocks.place(rank, position)
        for other in push.others:
            self._participants[other.worker.rank].last_sequence = other.sequence
            self._clocks.place(other.worker.rank, other.position)
        self._started = True
        verdict = decision.verdict
        if verdict is Verdict.APPLY:
            self.version += 1
            self._applied(push, decision.staleness)
        elif verdict is Verdict.HOLD:
            self.rounds.add(push)
        else:
            if verdict is Verdict.SKIP and self._rule.collects:
                self.rounds.add(push)
            self.counts.outcomes[verdict.value] += 1
        return decision

    def _apart(self, push: PushInfo) -> str:
        """Why the workers of a combined push have to push one by one; empty: all of them are known, or none is and each
        may make its step. The sender is a participant.
        """
        known = 0
        for each in push.contributions:
            worker, position = each.worker, each.position
            participant = self._participants.get(worker.rank)
            if participant is None or participant.incarnation != worker.incarnation:
                return f"{worker} does not take part"
            if each.sequence <= participant.last_sequence:
                known += 1
            elif self._consistency.mode.bounded and position != push.position:
                return f"push {each.sequence} of {worker} is of another step"
            elif position <= self._clocks[worker.rank] or position.clock < 1 or max(*position, each.sequence) >= LIMIT:
                return f"push {each.sequence} of {worker} does not advance its clock"
        return "" if known in (0, len(push.contributions)) else "some of its workers' pushes were accepted before"

    def separate(self, reason: str) -> PushDecision:
        """The decision that the workers of a combined push have to push one by one, and why."""
        self.counts.outcomes[Verdict.SEPARATE.value] += 1
        return PushDecision(Verdict.SEPARATE, reason=reason)

    def arrive(self, worker: WorkerKey, phase: int) -> None:
        """``worker`` enters the barrier that ends ``phase`` and delays no other worker in it. Safe to repeat.

        Raises Fenced, or InvalidRequest before ``attach``.
        """
        self._participant(worker)
        position = Position(phase + 1, 0)
        self._clocks.place(worker.rank, max(self._clocks[worker.rank], position))

    def take_ready(self, now: float) -> list[Round]:
        """The rounds whose time has come, each once, to be applied in this order. ``now``: seconds of a steady clock.

        The grace time of a round begins when it is the lowest and has its quorum; it begins again when that is lost.
        """
        rounds = []
        while self.rounds.lowest is not FOREVER and self._is_due(self.rounds.lowest, now):
            rounds.append(self._take())
        return rounds

    def close_ready(self, now: float) -> tuple[PushInfo, ...] | None:
        """Close the lowest round if its time has come: later pushes of its position are LATE, and it is taken by
        ``take_closed``, in place of ``take_ready``. Returns its pushes; None when none is closed now.
        """
        lowest = self.rounds.lowest
        if self.norms.closed is not None or lowest is FOREVER or not self._is_due(lowest, now):
            return None
        self.norms.close(lowest)
        return self.rounds.first()

    def take_closed(self, squared_norm: float) -> Round:
        """The closed round, to be applied now. ``squared_norm``: this shard's part."""
        self.norms.taken(squared_norm)
        return self._take()

    def part_of_norm(self, position: Position) -> float | None:
        """What this shard adds to the squared norm of a round: 0 where that is made without it; None: not known yet."""
        known = self.norms.of(position)
        if known is None and position not in self.rounds:
            return 0.0 if position <= max(self.applied, self._rule.due(self._clocks)) else None
        return known

    @property
    def grace_ends(self) -> float | None:
        """When a round may be ready though nothing has happened; None when there is no such time."""
        return self._waiting[1] + self._rule.grace_seconds if self._waiting else None

    def may_pull(self, position: Position) -> bool:
        """Whether a pull of a worker that stands at ``position`` may be answered. Rounds not taken yet hold it back."""
        return position < self.rounds.lowest and position <= self._rule.answered(self._clocks, self.applied)

    def blocker(self, position: Position) -> str | None:
        """None when ``may_pull(position)``; else what it waits for, for people."""
        if self.may_pull(position):
            return None
        if self.rounds.lowest <= min(position, self._rule.due(self._clocks)):
            return self.norms.waits_for or f"{position} is about to be applied"
        rank, others = self._clocks.slowest()
        more = f" and {others} more" if others else ""
        return f"waiting for worker {rank}{more} at {self._clocks[rank]} ({self._consistency})"

    def pull_position(self, position: Position, ahead: int) -> Position:
        """Where a pull counts as standing whose parameters are used ``ahead`` steps later, if the mode bounds that."""
        return Position(position.phase, position.clock + min(ahead, self._rule.lookahead)) if ahead else position

    def resume(self, position: Position) -> Position:
        """Where a worker continues whose push at ``position`` was LATE: at the last round taken, if of its phase."""
        last = self.norms.closed or self.applied
        return max(position, last) if last.phase == position.phase else position

    def last_sequence(self, worker: WorkerKey) -> int:
        """Sequence of the last push accepted from ``worker``; 0 when there is none. Raises Fenced, InvalidRequest."""
        return self._participant(worker).last_sequence

    def clocks(self) -> tuple[ParticipantStatus, ...]:
        """Where the participants stand, by rank."""
        return tuple(
            ParticipantStatus(WorkerKey(rank, member.incarnation), self._clocks[rank], member.last_sequence)
            for rank, member in sorted(self._participants.items())
        )

    def persisted_state(self) -> TrackerState:
        """The state after ``version`` updates, from which a restart continues."""
        standings = (
            ParticipantStatus(WorkerKey(rank, member.incarnation), member.kept[1], member.kept[0])
            for rank, member in sorted(self._participants.items())
        )
        return TrackerState(
            self.version,
            self.applied,
            self._kept_highest,
            tuple(standings),
            dict(self.counts.outcomes),
            tuple(self.counts.staleness),
            self.norms.kept,
        )

    def restore(self, state: TrackerState) -> None:
        """Continue from ``state``, before any other call. Its workers count as live until ``members`` is called."""
        self.version, self.applied = state.version, state.applied
        for standing in state.standings:
            self._recall(standing.worker, standing.last_sequence, standing.position)
        self._kept_highest = max(self._kept_highest, state.highest)
        self._clocks.highest = max(self._clocks.highest, state.highest)
        self._started = state.version > 0
        self.norms.restore(state.norms)
        self.counts.outcomes.update(state.outcomes)
        self.counts.staleness[: len(state.staleness)] = state.staleness

    def replay(
        self, pushes: Sequence[PushInfo], version: int, *, is_round: bool, squared_norm: float | None = None
    ) -> None:
        """Take over one update from a log, in order: it made ``version``. ``squared_norm``: as in ``take_closed``."""
        if squared_norm is not None and pushes:
            self.norms.note(pushes[0].position, squared_norm)
        for push in pushes:
            self.counts.applied(self._staleness(push))
            for each in push.contributions:
                self._recall(each.worker, each.sequence, each.position)
            if is_round:
                self.applied = max(self.applied, push.position)
        self.version = version
        self._started = True

    def _take(self) -> Round:
        self.applied, pushes = self.rounds.take()
        staleness = tuple(map(self._staleness, pushes))
        for push, versions in zip(pushes, staleness, strict=True):
            self._applied(push, versions)
        self.version += bool(pushes)
        return Round(self.applied, pushes, staleness, self.version)

    def _is_due(self, lowest: Position, now: float) -> bool:
        """Whether the ``lowest`` round is to be applied now; notes since when it only waits for its grace time."""
        waiting, self._waiting = self._waiting, None
        if lowest <= self._rule.due(self._clocks):
            return True
        if lowest > self._rule.quorum(self._clocks):
            return False
        since = waiting[1] if waiting and waiting[0] == lowest else now
        if now >= since + self._rule.grace_seconds:
            return True
        self._waiting = lowest, since
        return False

    def _recall(self, worker: WorkerKey, sequence: int, position: Position) -> None:
        """A push of ``worker`` was applied. Of two lives of one rank the later one counts."""
        if position.clock:  # else it is in a barrier, whose end other workers may never see
            self._kept_highest = max(self._kept_highest, position)
        known = self._participants.get(worker.rank)
        if known is None or known.incarnation < worker.incarnation:
            self._enter(worker, position)
            self._live[worker.rank] = worker.incarnation
        elif known.incarnation > worker.incarnation:
            return
        participant = self._participants[worker.rank]
        position = max(position, self._clocks[worker.rank])
        participant.last_sequence = max(participant.last_sequence, sequence)
        participant.kept = (participant.last_sequence, position)
        self._clocks.place(worker.rank, position)

    def _applied(self, push: PushInfo, staleness: int) -> None:
        self.counts.applied(staleness)
        for each in push.contributions if push.others else (push,):
            worker, position = each.worker, each.position
            if position > self._kept_highest:
                self._kept_highest = position
            participant = self._participants.get(worker.rank)
            if participant is not None and participant.incarnation == worker.incarnation:
                participant.kept = each.sequence, position

    def _entry(self, phase: int) -> Position:
        last = self.norms.closed or self.applied
        current = max(self._clocks.frontier(), last) if self._participants else self._clocks.highest
        # Others may have entered the barrier that ends ``phase``; it will not open before the newcomer enters it too.
        return current if current.phase == phase else self.resume(Position(phase, 0))

    def _enter(self, worker: WorkerKey, position: Position) -> None:
        self._participants[worker.rank] = _Participant(worker.incarnation, kept=(0, position))
        self._clocks.place(worker.rank, position)

    def _staleness(self, push: PushInfo) -> int:
        return max(0, self.version - push.pulled_version)

    def _fence(self, worker: WorkerKey) -> None:
        incarnation = self._live.get(worker.rank)
        if incarnation != worker.incarnation:
            raise _not_live(worker, incarnation)

    def _participant(self, worker: WorkerKey) -> _Participant:
        self._fence(worker)
        participant = self._participants.get(worker.rank)
        if participant is None:
            raise _no_stream(worker)
        return participant


def _not_live(worker: WorkerKey, incarnation: int | None) -> Fenced:
    """``incarnation``: the live one of its rank."""
    return Fenced(
        f"{worker} is not a live member of the job",
        expected="a live worker" if incarnation is None else str(WorkerKey(worker.rank, incarnation)),
        actual=str(worker),
        remedy="its lease ended or a newer process took its rank: start the worker again",
    )


def _no_stream(worker: WorkerKey) -> InvalidRequest:
    """It has not attached."""
    return InvalidRequest(
        f"{worker} has not opened a stream of this model", remedy="open the stream before anything else"
    )


def _out_of_range(push: PushInfo, limit: int) -> InvalidRequest:
    """``limit``: phases, clocks and sequences are below."""
    return InvalidRequest(
        f"push {push.sequence} of {push.worker} names a position that is out of range",
        expected=f"phase, clock and sequence below {limit}",
        actual=str(push.position),
    )


def _does_not_rise(push: PushInfo, own: Position) -> InvalidRequest:
    """``own``: where its worker stands."""
    return InvalidRequest(
        f"push {push.sequence} of {push.worker} does not advance its clock",
        expected=f"a position above {own}, its clock from 1",
        actual=str(push.position),
        remedy="continue from the position the shard named when the stream opened",
    )


def _sequence_out_of_range(worker: WorkerKey, sequence: int, limit: int) -> InvalidRequest:
    """``limit``: sequences are below."""
    return InvalidRequest(
        f"the last push that {worker} has had answered is out of range",
        expected=f"a sequence below {limit}",
        actual=str(sequence),
    )


def _stands_out_of_range(worker: WorkerKey, position: Position, limit: int) -> InvalidRequest:
    """``limit``: phases and clocks are below."""
    return InvalidRequest(
        f"the position of {worker} is out of range",
        expected=f"phase and clock below {limit}",
        actual=str(position),
    )


T = TypeVar("T")


class ParkedPulls(Generic[T]):
    """Pulls that wait for the mode. Used on the loop that calls the Tracker; ``T`` stands for one pull.

    At any moment a pull of a lower position is answered no later than one of a higher, in every mode; so the lowest
    alone decides whether one may be answered, also after the mode has changed.
    """

    def __init__(self) -> None:
        #: Position, order of parking, token.
        self._heap: list[tuple[Position, int, T]] = []
        self._parked = 0
        #: The lowest position of a parked pull; None when there is none.
        self.lowest: Position | None = None

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[T]:
        """The tokens, in no particular order."""
        return (token for _, _, token in self._heap)

    def park(self, position: Position, token: T) -> None:
        """Keep ``token`` until a pull of a worker that stands at ``position`` may be answered."""
        self._parked += 1
        heapq.heappush(self._heap, (position, self._parked, token))
        self._note_lowest()

    def release(self, tracker: Tracker) -> list[T]:
        """Take out what may be answered now: lowest position first, then first parked."""
        tokens = []
        while self._heap and tracker.may_pull(self._heap[0][0]):
            tokens.append(heapq.heappop(self._heap)[2])
        self._note_lowest()
        return tokens

    def discard(self, token: T) -> None:
        """Forget ``token`` (its stream broke); nothing happens when it is not parked. Looks at all that are."""
        kept = [entry for entry in self._heap if entry[2] is not token]
        if len(kept) < len(self._heap):
            heapq.heapify(kept)
            self._heap = kept
            self._note_lowest()

    def _note_lowest(self) -> None:
        self.lowest = self._heap[0][0] if self._heap else None
