"""Decides about the rounds of one host: whom the leader waits for, who is in a round, and who pushes by itself."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from ps_worker.host.messages import FOREVER, Deposit, HostWorker, Position, RoundAnswer, Separate

HOLD_SECONDS = 0.2
"""ssp: a deposit that comes while the leader is in an exchange waits so long for its end. The leader itself may wait
for that worker."""


@dataclass(frozen=True, slots=True)
class Tell:
    """Send ``message`` to a follower."""

    worker: HostWorker
    message: RoundAnswer | Separate


@dataclass(frozen=True, slots=True)
class Dismiss:
    """End the connection of a follower; ``why`` is for the log, empty: there is nothing to log."""

    worker: HostWorker
    why: str = ""


Command = Tell | Dismiss


@dataclass(frozen=True, slots=True)
class Lead:
    """The leader's exchange."""

    position: Position
    #: The mode makes one update of the pushes of one position.
    collects: bool
    #: Answers may wait for other workers.
    bounded: bool
    #: How long to wait for a follower; None: as long as it is live, for no answer comes without it.
    patience_seconds: float | None
    #: How long to wait for a worker that has not connected; None: as long as it is live.
    expects_seconds: float | None = 0.0
    #: Of the leader's last push that every shard has taken; one that failed may have come to none.
    reached: Position = (0, 0)


def may_come(away: Position, reached: Position) -> bool:
    """Whether a worker comes that makes no push before ``away`` with others. ``reached``: as in ``Lead``.

    In lockstep the push before that, which it makes by itself, may wait for one of the leader.
    """
    phase, clock = away
    return clock <= 1 or (phase, clock - 1) <= reached


@dataclass(slots=True)
class _Follower:
    revision: int
    deposit: Deposit | None = None
    deposited_at: float = 0.0
    #: It makes no push before this position.
    away: Position = (0, 0)
    #: Of the last push that it was told to make by itself.
    separated: Position = (0, 0)
    #: Since it was told so, or has said so, it has sent no deposit.
    is_apart: bool = False

    def may_come(self, reached: Position) -> bool:
        """Whether it may push without more pushes of a leader that has ``reached`` a position, in lockstep."""
        return not self.is_apart or (self.separated <= reached and may_come(self.away, reached))


@dataclass(slots=True)
class HostRounds:
    """The state of a leader. Calls come one at a time, with the time ``now`` in seconds of a steady clock.

    An exchange begins with ``lead``; once ``is_complete`` the workers ``taken`` are in its round, and it ends with
    ``answered`` or ``dissolve``. A deposit is in one round or is told to be pushed separately, never both.

    No worker waits for ever. A follower waits for the leader while that waits for others or computes, and is told so
    where that is not sure to come: when the leader waits in an exchange for other workers, perhaps for this one, or is
    away. The leader does not wait for a follower that was told to push by itself and may wait for the leader's push.
    """

    #: Workers of the host that have not connected, and that the first exchange waits for.
    expected: set[HostWorker] = field(default_factory=set)
    #: In the round under way, and to be told what becomes of it, by rank.
    taken: dict[HostWorker, Deposit] = field(default_factory=dict)
    #: Exchanges begun.
    exchanges: int = 0
    _followers: dict[HostWorker, _Follower] = field(default_factory=dict)
    _lead: Lead | None = None
    _led_at: float = 0.0
    #: The exchange under way waits for nobody of the host any more.
    _is_closed: bool = False
    #: The leader makes no push before this position.
    _away: Position = (0, 0)

    @property
    def is_complete(self) -> bool:
        """Whether the exchange under way waits for nobody of the host any more."""
        return self._is_closed

    @property
    def waits_for(self) -> list[HostWorker]:
        """The workers that the exchange under way waits for, by rank."""
        return sorted(self._waited_for())

    @property
    def pending(self) -> list[HostWorker]:
        """The workers whose deposits are in no round yet."""
        return [worker for worker, _ in self._pending()]

    @property
    def may_wait(self) -> bool:
        """Whether the leader is in an exchange that may wait for workers of other hosts."""
        return self._lead is not None and self._is_closed and self._lead.bounded

    # -- followers

    def join(self, worker: HostWorker, revision: int) -> list[Command]:
        """``worker`` has connected; ``revision``: of a membership that includes it."""
        ended = [each for each in self._followers if each.rank == worker.rank]
        for each in ended:
            self._forget(each)
        self._followers[worker] = _Follower(revision)
        self.expected.discard(worker)
        return [Dismiss(each, "it connected again") for each in ended]

    def deposit(self, worker: HostWorker, deposit: Deposit, now: float) -> list[Command]:
        """``worker`` waits with its push."""
        follower = self._followers[worker]
        follower.away, follower.is_apart = (0, 0), False
        follower.deposit, follower.deposited_at = deposit, now
        if self._is_closed:
            lead = self._lead
            if lead is not None and lead.collects and deposit.position <= lead.position:
                return [self._separate(worker, "the others of the host had been waited for long enough")]
            return []
        if self._lead is not None:
            return [*self._misfits(), *self._look()]
        if deposit.position < self._away:
            return [self._separate(worker, "the leader is away")]
        return []

    def away(self, worker: HostWorker, until: Position) -> list[Command]:
        """``worker`` makes no push before ``until``, or makes it by itself."""
        follower = self._followers[worker]
        follower.away, follower.deposit, follower.is_apart = until, None, True
        return self._look()

    def gone(self, worker: HostWorker) -> list[Command]:
        """The connection of ``worker`` has ended: nothing is told to it, also where its deposit has been pushed."""
        self._forget(worker)
        return self._look()

    # -- the leader

    def lead(self, lead: Lead, now: float) -> list[Command]:
        """The leader begins an exchange."""
        self._lead, self._led_at, self._is_closed, self._away = lead, now, False, (0, 0)
        self.taken = {}
        self.exchanges += 1
        return [*self._misfits(), *self._look()]

    def tick(self, now: float, live: Mapping[int, int], revision: int, *, bounded: bool = False) -> list[Command]:
        """Time has passed. ``live``: workers of the membership of ``revision``, rank to incarnation.

        ``bounded``: in the mode that is in force by now answers may wait for other workers.
        """
        gone = [
            worker
            for worker, follower in self._followers.items()
            if live.get(worker.rank) != worker.incarnation and revision >= follower.revision
        ]
        commands: list[Command] = [Dismiss(worker, "it is no member of the job any more") for worker in gone]
        for worker in gone:
            self._forget(worker)
        self.expected = {each for each in self.expected if live.get(each.rank) == each.incarnation}
        lead = self._lead
        if lead is None:
            return commands
        if self._is_closed:
            if (lead.bounded or bounded) and not lead.collects:
                commands += self._released(now, "the leader waits for other workers")
            return commands
        if lead.expects_seconds is not None and now - self._led_at >= lead.expects_seconds:
            self.expected = set()
        if lead.patience_seconds is not None and now - self._led_at >= lead.patience_seconds:
            for worker in set(self.waits_for) - self.expected:
                self._forget(worker)
                commands.append(Dismiss(worker, f"it has sent nothing for {lead.patience_seconds:g} s"))
        return [*commands, *self._look()]

    def without(self, workers: Collection[HostWorker]) -> None:
        """The deposits of ``workers`` are in the round no more, and their connections have ended."""
        for worker in workers:
            self._forget(worker)

    def answered(self, answer: RoundAnswer) -> list[Command]:
        """The round was pushed and answered: so are its workers. The exchange has ended."""
        commands: list[Command] = [Tell(worker, answer) for worker in self.taken]
        self._end()
        return commands

    def dissolve(self, why: str) -> list[Command]:
        """The workers of the round push by themselves, and the exchange goes on without them."""
        taken, self.taken = self.taken, {}
        for worker, deposit in taken.items():
            self._followers[worker].deposit = deposit
        return [self._separate(worker, why) for worker in taken]

    def ended(self) -> None:
        """The exchange has ended, without a round."""
        self._end()

    def leave_until(self, position: Position = FOREVER) -> list[Command]:
        """The leader makes no push before ``position``, or makes it by itself; until its next ``lead``."""
        self._away = position
        waiting = [worker for worker, follower in self._pending() if _position(follower) < position]
        return [self._separate(worker, "the leader is away") for worker in waiting]

    # -- where the leader and the followers step several models

    def separate(self, worker: HostWorker, why: str) -> list[Command]:
        """The deposit of ``worker``, which is in no round, is pushed separately."""
        return [self._separate(worker, why)]

    def blocked(self, worker: HostWorker) -> list[Command]:
        """``worker`` may wait for this one in a step of another model: the exchange under way does not wait for it."""
        lead, follower = self._lead, self._followers.get(worker)
        if lead is not None and follower is not None:
            follower.separated, follower.is_apart = max(follower.separated, lead.position), True
        return self._look()

    def release(self, now: float) -> list[Command]:
        """The leader may wait, in a step of another model, for a worker that waits for one of these deposits."""
        return self._released(now, "the leader waits for other workers in another model") if self._lead is None else []

    # -- how

    def _forget(self, worker: HostWorker) -> None:
        self._followers.pop(worker, None)
        self.taken.pop(worker, None)

    def _released(self, now: float, why: str) -> list[Command]:
        old = [worker for worker, each in self._pending() if now - each.deposited_at >= HOLD_SECONDS]
        return [self._separate(worker, why) for worker in old]

    def _end(self) -> None:
        self._lead, self._is_closed, self.taken = None, False, {}

    def _pending(self) -> list[tuple[HostWorker, _Follower]]:
        return [(worker, each) for worker, each in self._followers.items() if each.deposit is not None]

    def _misfits(self) -> list[Command]:
        """The deposits of another position push by themselves, where an answer waits for what workers stand at."""
        lead = self._lead
        if lead is None or not lead.bounded:
            return []
        others = [worker for worker, each in self._pending() if _position(each) != lead.position]
        return [self._separate(worker, "the leader is at another step") for worker in others]

    def _separate(self, worker: HostWorker, why: str) -> Tell:
        follower = self._followers[worker]
        follower.separated, follower.is_apart, follower.deposit = _position(follower), True, None
        return Tell(worker, Separate(why))

    def _waited_for(self) -> Iterator[HostWorker]:
        lead = self._lead
        if lead is None or self._is_closed:
            return
        yield from self.expected
        for worker, each in self._followers.items():
            if each.deposit is not None or each.away > lead.position:
                continue
            if lead.collects and (each.separated >= lead.position or not each.may_come(lead.reached)):
                continue
            if lead.bounded and not lead.collects and each.is_apart:
                continue
            yield worker

    def _look(self) -> list[Command]:
        """Close the round if nobody is waited for any more."""
        if self._lead is None or self._is_closed or any(True for _ in self._waited_for()):
            return []
        self._is_closed, self.expected = True, set()
        for worker, each in sorted(self._pending()):
            if each.deposit is not None:
                self.taken[worker], each.deposit = each.deposit, None
        return []


def _position(follower: _Follower) -> Position:
    return follower.deposit.position if follower.deposit is not None else (0, 0)
