"""Knows who holds which place of the cluster, since when it was silent, and how those went who held one before."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ps_protocol.errors import Fenced
from ps_protocol.view import Member, MemberStats, MemberStatus, Role
from ps_server.coordinator.memento import Key, Place

GONE_KEPT = 32
"""How many members that went are remembered for status, and in the journal."""

FATES_KEPT = 128
"""How many are told what happened when they return."""

DISCONNECTED_SECONDS = 5.0
"""How long a member is kept whose connection has ended, as it does when a process dies, if its lease is no shorter."""


@dataclass(slots=True)
class Life:
    """One member, from its join to its end."""

    place: Place
    last_heartbeat: float
    #: When its connection ended, if no heartbeat has come since.
    disconnected_at: float | None = None
    stats: MemberStats = field(default_factory=MemberStats)
    #: When it joined, or this coordinator started.
    since: float = 0.0
    #: How often it was heard of since.
    beats: int = 0

    @property
    def member(self) -> Member:
        """Place and incarnation."""
        return self.place.joined.member

    @property
    def lease_end(self) -> float:
        """By the lease the member was told, which an earlier start of the coordinator may have chosen."""
        whole = self.last_heartbeat + self.place.joined.lease_seconds
        return whole if self.disconnected_at is None else min(whole, self.disconnected_at + DISCONNECTED_SECONDS)

    @property
    def how_expired(self) -> str:
        """Why its lease has ended, in words."""
        if self.disconnected_at is not None:
            return "its connection ended, and no heartbeat came"
        return f"its lease of {self.place.joined.lease_seconds:g} s ended"

    def held(self, now: float) -> str:
        """Since when it has its place, and when it was heard of, in words."""
        heard = max(0.0, now - self.last_heartbeat)
        left = max(0.0, self.lease_end - now)
        return (
            f"held for {now - self.since:.0f} s, last heard of {heard:.1f} s ago; its lease ends in {left:.1f} s "
            "unless it is heard of again"
        )

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
        #: How members went, by place and incarnation, oldest first.
        self._fates: OrderedDict[tuple[Role, int, int], str] = OrderedDict()
        #: The first and the last incarnation known to have been a member.
        self._incarnations = range(0)

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
        life = Life(place, now, since=now)
        self._lives[member.role, member.index] = self._by_token[place.applicant.token] = life
        self._know(member)

    def end(self, life: Life, how: str, now: float) -> None:
        """The place is free again."""
        member = life.member
        del self._lives[member.role, member.index], self._by_token[life.place.applicant.token]
        self._gone.append(life.status(now, how))
        self._keep_fate(member, how)

    def heard(self, life: Life, now: float) -> None:
        """Its whole lease begins again."""
        life.last_heartbeat, life.disconnected_at = now, None
        life.beats += 1

    def disconnected(self, role: Role, index: int, incarnation: int, now: float) -> None:
        """The connection of this member has ended; of one that is none: nothing."""
        life = self._lives.get((role, index))
        if life is not None and life.member.incarnation == incarnation:
            life.disconnected_at = now

    def remember(self, gone: tuple[MemberStatus, ...]) -> None:
        """These went before."""
        self._gone.extend(gone)
        for status in gone:
            self._know(status.member)
            self._keep_fate(status.member, status.gone)

    def _know(self, member: Member) -> None:
        """Incarnations rise: all between the first and the last that this coordinator knows are its own."""
        number, known = member.incarnation, self._incarnations
        first, last = (min(known[0], number), max(known[-1], number)) if known else (number, number)
        self._incarnations = range(first, last + 1)

    def _keep_fate(self, member: Member, how: str) -> None:
        self._fates[member.role, member.index, member.incarnation] = how
        while len(self._fates) > FATES_KEPT:
            self._fates.popitem(last=False)

    def by_token(self, token: str) -> Life | None:
        """The member that joined with ``token``."""
        return self._by_token.get(token)

    def holder(self, role: Role, index: int) -> Life | None:
        """Whoever holds this place."""
        return self._lives.get((role, index))

    def beats(self, role: Role) -> dict[tuple[int, int], int]:
        """How often each member of ``role`` was heard of, by number and incarnation."""
        return {
            (index, life.member.incarnation): life.beats for (held, index), life in self._lives.items() if held is role
        }

    def find(self, role: Role, index: int, incarnation: int) -> Life:
        """The member of this place and incarnation. Raises Fenced, saying how it went, when it is none."""
        life = self._lives.get((role, index))
        if life is not None and life.member.incarnation == incarnation:
            return life
        fate = self.fate(role, index, incarnation) or self._unknown(incarnation)
        holder, remedy = "nobody", "start this process again; it joins as a new incarnation"
        if life is not None:
            who = life.place.applicant
            holder = f"incarnation {life.member.incarnation}: {who.host or 'an unknown host'}, process {who.pid}"
            remedy = "leave the place to that process, or end it and start this one again"
        raise Fenced(
            f"{role.value} {index} is not a member any more: {fate}",
            expected=f"the place is held by {holder}",
            actual=f"incarnation {incarnation}",
            remedy=remedy,
        )

    def fate(self, role: Role, index: int, incarnation: int) -> str:
        """How this incarnation went; empty when it lives or is not remembered."""
        return self._fates.get((role, index, incarnation), "")

    def _unknown(self, incarnation: int) -> str:
        """What is told to one of whose end nothing is known."""
        if incarnation in self._incarnations:
            return "it went so long ago that how is not known any more"
        return "this coordinator does not know it, and was perhaps started again without its journal"

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
            if life.disconnected_at is not None:
                life.disconnected_at += seconds

    def statuses(self, now: float) -> tuple[MemberStatus, ...]:
        """Live members first, then the last ones that went."""
        return (*(life.status(now) for life in self._lives.values()), *self._gone)
