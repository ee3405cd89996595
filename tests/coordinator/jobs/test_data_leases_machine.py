"""Random workers acquire, train, die, leave, repeat and overtake requests, which come late, too; a naive model counts
every item.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from ps_protocol.cluster.leases import IntervalSet, LeaseAsk, Span
from ps_protocol.errors import Fenced, InvalidRequest
from ps_server.coordinator.data_leases import DataLeases
from tests.support.length import examples

LENGTH = 23


@dataclass(eq=False)
class Life:
    rank: int
    incarnation: int
    epoch: int = 0
    sequence: int = 0
    #: Positions held, and those trained that were not reported.
    held: set[int] = field(default_factory=set)
    unreported: set[int] = field(default_factory=set)
    held_epoch: int = 0
    #: A request whose answer was lost.
    unanswered: LeaseAsk | None = None
    #: Every request: the network may deliver it again at any time.
    sent: list[LeaseAsk] = field(default_factory=list)


def spans(positions: set[int]) -> tuple[Span, ...]:
    return tuple(IntervalSet(Span(p, p + 1) for p in positions))


class Machine(RuleBasedStateMachine):
    """The model: how often each item of each epoch was trained, and by whom it is held now."""

    lives = Bundle("lives")

    def __init__(self) -> None:
        super().__init__()
        self.leases = DataLeases()
        self.live: dict[int, Life] = {}
        self.next_incarnation = 1
        self.trained: dict[tuple[int, int], int] = {}
        self.unclean: set[tuple[int, int]] = set()

    @rule(target=lives, rank=st.integers(0, 2))
    def join(self, rank: int) -> Life:
        if rank in self.live:
            self._lose(self.live[rank])
        life = self.live[rank] = Life(rank, self.next_incarnation)
        self.next_incarnation += 1
        self._members()
        return life

    @rule(life=lives, items=st.integers(1, LENGTH), lost=st.booleans())
    def acquire(self, life: Life, items: int, lost: bool) -> None:
        life = self.live.get(life.rank) or self.join(life.rank)
        ask = life.unanswered or self._ask(life, items)
        answer = self.leases.lease(life.rank, life.incarnation, ask).value
        if lost:
            life.unanswered = ask
            return
        life.unanswered = None
        life.unreported -= {p for span in ask.trained for p in range(span.begin, span.end)}
        if answer.done:
            assert not life.held
            assert not life.unreported
            assert all(self.trained.get((life.epoch, p)) for p in range(LENGTH))
            life.epoch += 1
        elif answer.span is not None:
            got = set(range(answer.span.begin, answer.span.end))
            assert len(got) <= ask.lease_items
            for other in self.live.values():
                assert not got & other.held
            life.held |= got
            life.held_epoch = answer.epoch

    @rule(back=st.integers(1, 2))
    def arrive_late(self, back: int) -> None:
        """Requests that were held up come when nobody waits for them any more, and nobody hears the answers."""
        for life in self.live.values():
            for ask in life.sent[-back:][:1]:
                with suppress(Fenced, InvalidRequest):
                    self.leases.lease(life.rank, life.incarnation, ask)

    @precondition(lambda self: self.live)
    @rule(life=lives, count=st.integers(1, 9))
    def train(self, life: Life, count: int) -> None:
        """Also a life that was lost and does not know it trains on: what it has may be trained twice."""
        for position in sorted(life.held)[:count]:
            life.held.remove(position)
            life.unreported.add(position)
            key = life.held_epoch, position
            self.trained[key] = self.trained.get(key, 0) + 1
            if self.live.get(life.rank) is not life:
                self.unclean.add(key)

    @rule(life=lives)
    def leave(self, life: Life) -> None:
        """Report all, give back the rest, and go."""
        if self.live.get(life.rank) is not life:
            return
        self.leases.lease(life.rank, life.incarnation, self._ask(life, 0))
        life.unreported.clear()
        self._lose(life)
        self._members()

    @rule(life=consumes(lives), late=st.integers(0, 2))
    def die(self, life: Life, late: int) -> None:
        if self.live.get(life.rank) is life:
            self._lose(life)
            self._members()
        if late:
            # What it held is free, and nobody has asked again.
            self.arrive_late(late)

    @rule()
    def restart_the_coordinator(self) -> None:
        self.leases = DataLeases.restore(json.loads(json.dumps(self.leases.persisted_state())))
        self._members()

    @invariant()
    def nothing_is_trained_twice_but_what_a_lost_worker_had_not_reported(self) -> None:
        for key, times in self.trained.items():
            assert times == 1 or key in self.unclean

    @invariant()
    def every_position_is_free_or_held_once_or_trained(self) -> None:
        plain = self.leases.persisted_state().get("data")
        if plain is None:
            return
        parts = [plain["free"], *(holder["leased"] for holder in plain["holders"].values())]
        taken = [p for part in parts for begin, end in part for p in range(begin, end)]
        assert len(taken) == len(set(taken))
        for position in set(range(LENGTH)) - set(taken):
            assert self.trained.get((plain["epoch"], position))

    def teardown(self) -> None:
        """The workers that live then finish the epoch, and one that joins: nothing was lost."""
        epoch = self.leases.persisted_state().get("data", {"epoch": 0})["epoch"]
        self.join(9).epoch = epoch
        for _ in range(2 * LENGTH):
            for life in self.live.values():
                if life.epoch <= epoch:
                    self.acquire(life, 9, lost=False)
                    self.train(life, 9)
        assert all(life.epoch > epoch for life in self.live.values())
        assert all(self.trained.get((e, p)) for e in range(epoch + 1) for p in range(LENGTH))

    def _ask(self, life: Life, items: int) -> LeaseAsk:
        life.sequence += 1
        report = spans(life.unreported), life.held_epoch
        life.sent.append(LeaseAsk("data", LENGTH, life.epoch, items, life.sequence, *report, held=spans(life.held)))
        return life.sent[-1]

    def _lose(self, life: Life) -> None:
        del self.live[life.rank]
        self.unclean |= {(life.held_epoch, p) for p in life.unreported}

    def _members(self) -> None:
        self.leases.members({rank: life.incarnation for rank, life in self.live.items()})


Machine.TestCase.settings = examples(150, stateful_step_count=60)
TestMachine = Machine.TestCase
