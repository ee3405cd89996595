"""Knows who holds which place of the cluster, since when it was silent, and how those went who held one before."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ps_protocol.errors import Fenced
from ps_protocol.view import Member, MemberStats, MemberStatus, Role
from ps_server.coordinator.memento import Key, Place

GONE_KEPT = 32
"""How many members that went are remembered, for status and for telling a returning one what happened."""


@dataclass(slots=True)
class Life:
    """One member, from its join to its end."""

    place: Place
    last_heartbeat: float
    stats: MemberStats = field(default_factory=MemberStats)

    @property
    def member(self) -> Member:
        """Place and incarnation."""
        return self.place.joined.member

    @property
    def lease_end(self) -> float:
        """By the lease the member was told, which an earlier start of the coordinator may have chosen."""
        return self.last_heartbeat + self.place.joined.lease_seconds

    def status(self, now: float, gone: str = "") -> MemberStatus:
        """As people look at it."""
        who = self.place.applicant
        # Never below 0: a lease may have been extended.
        heard = max(0.0, now - self.last_heartbeat)
        # What has ended makes no steps: its totals stay, its rates do not.
        stats = replace(self.stats, steps_per_second=0.0, bytes_per_second=0.0, samples_per_second=0.0)
        return MemberStatus(self.member, heard, stats if gone else self.stats, who.host, who.pid, gone)


class Lives:
    """Part of ClusterState, which tells of every change in the view. Times are seconds of any steady clock."""

    def __init__(self) -> None:
        self._lives: dict[Key, Life] = {}
        self._by_token: dict[str, Life] = {}
        self._gone: deque[MemberStatus] = deque(maxlen=GONE_KEPT)

    def __contains__(self, place: object) -> bool:
        return place in self._lives

    def __iter__(self) -> Iterator[Key]:
        return iter(self._lives)

    def __len__(self) -> int:
        return len(self._lives)

    @property
    def members(self) -> tuple[Member, ...]:
        """By role and number."""
        return tuple(self._lives[key].member for key in sorted(self._lives, key=lambda k: (k[0].value, k[1])))

    @property
    def places(self) -> dict[Key, Place]:
        """What each member asked and was told."""
        return {key: life.place for key, life in self._lives.items()}

    @property
    def gone(self) -> tuple[MemberStatus, ...]:
        """The last that went, oldest first."""
        return tuple(self._gone)

    @property
    def ranks(self) -> set[int]:
        """Of the live workers."""
        return {index for role, index in self._lives if role is Role.WORKER}

    def begin(self, place: Place, now: float) -> None:
        """A process takes a place that nobody holds."""
        member = place.joined.member
        life = Life(place, now)
        self._lives[member.role, member.index] = self._by_token[place.applicant.token] = life

    def end(self, life: Life, how: str, now: float) -> None:
        """The place is free again."""
        member = life.member
        del self._lives[member.role, member.index], self._by_token[life.place.applicant.token]
        self._gone.append(life.status(now, how))

    def remember(self, gone: tuple[MemberStatus, ...]) -> None:
        """These went before."""
        self._gone.extend(gone)

    def by_token(self, token: str) -> Life | None:
        """The member that joined with ``token``."""
        return self._by_token.get(token)

    def holder(self, role: Role, index: int) -> Life | None:
        """Whoever holds this place."""
        return self._lives.get((role, index))

    def find(self, role: Role, index: int, incarnation: int) -> Life:
        """The member of this place and incarnation. Raises Fenced, saying how it went, when it is none."""
        life = self._lives.get((role, index))
        if life is not None and life.member.incarnation == incarnation:
            return life
        fate = self.fate(role, index, incarnation) or "this coordinator does not know it; was it started anew?"
        holder = f"incarnation {life.member.incarnation}" if life else "nobody"
        raise Fenced(
            f"{role.value} {index} is not a member any more: {fate}",
            expected=f"the place is held by {holder}",
            actual=f"incarnation {incarnation}",
            remedy="start this process again; it joins as a new incarnation",
        )

    def fate(self, role: Role, index: int, incarnation: int) -> str:
        """How this incarnation went; empty when it lives or is not remembered."""
        for status in self._gone:
            m = status.member
            if (m.role, m.index, m.incarnation) == (role, index, incarnation):
                return status.gone
        return ""

    def lowest_free(self, role: Role) -> int:
        """The lowest number of ``role`` that nobody has."""
        index = 0
        while (role, index) in self._lives:
            index += 1
        return index

    def ended(self, now: float) -> list[Life]:
        """Those whose leases have ended by ``now``."""
        return [life for life in self._lives.values() if now >= life.lease_end]

    def next_expiry(self) -> float | None:
        """When the first lease ends if no heartbeat comes; None without members."""
        return min((life.lease_end for life in self._lives.values()), default=None)

    def extend(self, seconds: float) -> None:
        """Give every lease ``seconds`` more."""
        for life in self._lives.values():
            life.last_heartbeat += seconds

    def statuses(self, now: float) -> tuple[MemberStatus, ...]:
        """Live members first, then the last ones that went."""
        return (*(life.status(now) for life in self._lives.values()), *self._gone)
