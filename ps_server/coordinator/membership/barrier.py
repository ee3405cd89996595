"""Decides when the barrier of a phase opens: when all awaited workers have arrived."""

from __future__ import annotations

from collections.abc import Iterator, Set

from ps_protocol.cluster.view import BarrierState, Member
from ps_protocol.errors import InvalidRequest


class Barrier:
    """Part of MembershipState. One barrier ends each phase; ``phase`` rises when it opens, and never falls."""

    def __init__(self, phase: int = 0) -> None:
        self.phase = phase
        #: Ranks that wait at the barrier of this phase.
        self._arrived: set[int] = set()

    def arrive(self, member: Member, phase: int) -> bool:
        """Note a worker at the barrier that ends ``phase``; returns whether that is open already.

        Raises InvalidRequest for a phase that has not begun.
        """
        if phase > self.phase:
            raise InvalidRequest(
                f"{member} is at the barrier of a phase that has not begun",
                expected=f"phase {self.phase}",
                actual=f"phase {phase}",
            )
        if phase == self.phase:
            self._arrived.add(member.index)
        return phase < self.phase

    def forget(self, rank: int) -> None:
        """The worker has left or was lost."""
        self._arrived.discard(rank)

    def state(self, phase: int, awaited: Set[int]) -> BarrierState:
        """Whether the barrier that ends ``phase`` is open, and which of the ``awaited`` ranks are missing if not."""
        released = phase < self.phase
        return BarrierState(released, () if released else self._missing(awaited))

    def open(self, awaited: Set[int]) -> Iterator[str]:
        """Open the barrier if a worker is there and no ``awaited`` one is missing; yields the reason."""
        if not self._arrived or self._missing(awaited):
            return
        yield f"barrier of phase {self.phase} opens for {len(self._arrived)} workers"
        self.phase += 1
        self._arrived.clear()

    def _missing(self, awaited: Set[int]) -> tuple[int, ...]:
        return tuple(sorted(awaited - self._arrived))
