"""Which virtual worker runs: one at a time, in the order of a virtual clock."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable

from ps_protocol.errors import NotReady

GRACE_SECONDS = 5.0
"""Where all workers wait, they ask again for so long, in real time: servers may not have come to all they were sent."""

_ASK_AGAIN_SECONDS = 0.005
_PROBE_SECONDS = 0.0005


class TurnState(enum.Enum):
    """What a virtual worker does."""

    #: It waits for its turn, which comes at a virtual time.
    READY = "ready"
    #: It has the turn.
    RUNS = "runs"
    #: It has pushed, and has no answer yet.
    EXCHANGES = "exchanges"
    #: It waits for others, and asks again after each turn that has changed something.
    ASKS = "asks"
    ENDED = "ended"


class Place:
    """One worker's place among the others. Its methods are called in that worker's thread."""

    def __init__(self, turns: Turns, rank: int) -> None:
        self._turns = turns
        #: Notified when its turn has come.
        self.granted = threading.Condition(turns.lock)
        self.rank = rank
        self.state = TurnState.READY
        #: When its turn comes, in virtual seconds; while it runs, now.
        self.seconds = 0.0
        #: For what it waits, for people.
        self.reason = "its first turn"
        #: How many turns had changed something when it asked last.
        self.asked = -1
        #: In this turn it has done something that others may wait for.
        self.changed = False

    def wait_until(self, seconds: float, reason: str) -> None:
        """Pass the turn; return when the virtual time is ``seconds`` and it is this worker's turn."""
        self.seconds = seconds
        self._turns.passes(self, TurnState.READY, reason)

    def ask_later(self, reason: str) -> None:
        """Pass the turn; return at the same virtual time, if possible, when another worker has changed something."""
        self._turns.passes(self, TurnState.ASKS, reason)

    def begin_exchange(self, reason: str) -> None:
        """The worker is about to push; until ``end_exchange`` it may wait for others."""
        self.changed = True
        self._turns.exchanges(self, reason)

    def end_exchange(self) -> None:
        """The answer is here. Returns when it is this worker's turn again."""
        if self.state is TurnState.EXCHANGES:
            self._turns.passes(self, TurnState.READY, "its turn", now=True)

    def end(self) -> None:
        """The worker has ended."""
        self._turns.ends(self)


class Turns:
    """``run`` is called in the main thread, ``stop`` in any, the rest through ``Place`` in threads of the workers.

    A turn goes on until its worker waits for a virtual time, asks others, or has pushed and the shards either answer or
    wait for others. Which of the two is known exactly: of the workers without an answer, as many are waited for as the
    shards hold answers back. Until that is so, nobody else has the turn.
    """

    def __init__(self, workers: int, held_back: Callable[[], int] | None) -> None:
        """``held_back`` asks the shards how many answers wait for other workers; None: no answer ever does."""
        self.lock = threading.Lock()
        #: A worker has passed its turn, or has its answer.
        self._passed = threading.Condition(self.lock)
        self._held_back = held_back
        self._stopped = False
        #: Turns that have changed something.
        self._changes = 0
        #: Virtual seconds.
        self.now = 0.0
        self.places = [Place(self, rank) for rank in range(workers)]

    def run(self) -> None:
        """Give turns until all workers have ended, or ``stop``. Raises NotReady when they wait for each other."""
        quiet_since = 0.0
        while not self._stopped and any(place.state is not TurnState.ENDED for place in self.places):
            place = self._next()
            if place is None:
                quiet_since = quiet_since or time.monotonic()
                self._ask_again(quiet_since)
                continue
            self.now = max(self.now, self._due(place))
            place.seconds = self.now
            place.changed = place.state is not TurnState.ASKS
            self._give(place)
            if place.changed or place.state is not TurnState.ASKS:
                self._changes += 1
                quiet_since = 0.0
            place.asked = self._changes

    def stop(self) -> None:
        """Have ``run`` return. No worker goes on."""
        with self.lock:
            self._stopped = True
            self._passed.notify()

    def _due(self, place: Place) -> float:
        return self.now if place.state is TurnState.ASKS else place.seconds

    def _next(self) -> Place | None:
        with self.lock:
            due = [
                place
                for place in self.places
                if place.state is TurnState.READY or (place.state is TurnState.ASKS and place.asked < self._changes)
            ]
        return min(due, key=lambda place: (self._due(place), place.rank), default=None)

    def _ask_again(self, quiet_since: float) -> None:
        if time.monotonic() - quiet_since > GRACE_SECONDS:
            waiting = [place for place in self.places if place.state is not TurnState.ENDED]
            raise NotReady(
                "the workers wait for each other",
                actual="; ".join(f"worker {place.rank}: {place.reason}" for place in waiting),
                remedy="have every worker make the same steps, barriers and collective calls in the same order",
            )
        time.sleep(_ASK_AGAIN_SECONDS)
        for place in self.places:
            place.asked = -1

    def _give(self, place: Place) -> None:
        with self.lock:
            place.state = TurnState.RUNS
            place.granted.notify()
            self._passed.wait_for(lambda: place.state is not TurnState.RUNS or self._stopped)
        while True:
            with self.lock:
                if self._held_back is None:
                    self._passed.wait_for(lambda: not self._without_answer() or self._stopped)
                without_answer = self._without_answer()
            # In this order: those without an answer now are all whose answers shards can hold back later.
            if not without_answer or self._stopped or self._held_back is None or self._held_back() == without_answer:
                return
            with self.lock:
                self._passed.wait(_PROBE_SECONDS)

    def _without_answer(self) -> int:
        return sum(place.state is TurnState.EXCHANGES for place in self.places)

    # -- of places

    def passes(self, place: Place, state: TurnState, reason: str, *, now: bool = False) -> None:
        """See Place. A worker that is stopped does not return."""
        with self.lock:
            place.state, place.reason = state, reason
            if now:
                place.seconds = self.now
            self._passed.notify()
            place.granted.wait_for(lambda: place.state is TurnState.RUNS and not self._stopped)

    def exchanges(self, place: Place, reason: str) -> None:
        """See Place."""
        with self.lock:
            place.state, place.reason = TurnState.EXCHANGES, reason
            self._passed.notify()

    def ends(self, place: Place) -> None:
        """See Place."""
        with self.lock:
            place.state = TurnState.ENDED
            self._passed.notify()
