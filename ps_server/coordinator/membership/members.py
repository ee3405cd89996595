"""The members by role and number, with their leases, and how former members ended."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ps_protocol.cluster.view import Joined, JoinRequest, Member, MemberStats, MemberStatus, Role
from ps_protocol.errors import Fenced
from ps_server.coordinator import times

GONE_KEPT = 32
"""How many former members are remembered for status, and in the journal."""

FATES_KEPT = 128
"""How many former members are remembered, to be answered why they are members no more."""


_EXPIRED = ("its connection ended, ", "its lease of ")
"""How ``how_expired`` begins."""

MANY = 50
"""Among fewer members, half of them may well be dead at the same time."""


Key = tuple[Role, int]
"""A place in the cluster: role and number."""


@dataclass(frozen=True, slots=True)
class SavedMember:
    """The persisted part of a live member: its request and the answer. Never changes."""

    application: JoinRequest
    joined: Joined


@dataclass(slots=True)
class MemberRecord:
    """One member, from its join to its end."""

    place: SavedMember
    last_heartbeat: float
    #: When its connection ended, unless a heartbeat or a stream has arrived since.
    disconnected_at: float | None = None
    stats: MemberStats = field(default_factory=MemberStats)
    #: When it joined, or this coordinator started.
    since: float = 0.0
    #: The number of heartbeats received since.
    beats: int = 0
    #: Streams on which it follows the cluster.
    streams: int = 0
    #: The extension of its lease while most members are late.
    spared_seconds: float = 0.0

    @property
    def member(self) -> Member:
        """Place and incarnation."""
        return self.place.joined.member

    @property
    def lease_end(self) -> float:
        """The end of the lease that the member received, perhaps from an earlier start of the coordinator."""
        whole = self.last_heartbeat + self.place.joined.lease_seconds
        end = whole if self.disconnected_at is None else min(whole, self.disconnected_at + times.DISCONNECTED_SECONDS)
        return end + self.spared_seconds

    @property
    def how_expired(self) -> str:
        """Describes why its lease has ended."""
        if self.disconnected_at is not None:
            return "its connection ended, and no heartbeat came"
        return f"its lease of {self.place.joined.lease_seconds:g} s ended"

    def held(self, now: float) -> str:
        """Describes how long it has been a member, and its last heartbeat."""
        heard = max(0.0, now - self.last_heartbeat)
        left = max(0.0, self.lease_end - now)
        return (
            f"held for {now - self.since:.0f} s, last heartbeat {heard:.1f} s ago; its lease ends in {left:.1f} s "
            "unless a heartbeat arrives"
        )

    def status(self, now: float, gone: str = "", ended_at: float = 0.0) -> MemberStatus:
        """The status of the member. ``ended_at``: the end of a former member, in seconds since 1970."""
        who = self.place.application
        # Never below 0: a lease may have been extended.
        heard = max(0.0, now - self.last_heartbeat)
        stats = self.stats
        if gone:
            # A former member makes no steps and has no slices.
            stats = replace(stats, steps_per_second=0.0, bytes_per_second=0.0, samples_per_second=0.0)
            stats = replace(stats, queued_pushes=0.0, queued_bytes=0.0)
            stats = replace(stats, streams={}, held_bytes=0, log=None, tables=(), updates=())
        return MemberStatus(self.member, heard, stats, who.host, who.pid, gone, ended_at)


class Members:
    """Part of MembershipState, which updates the view. Times are seconds of any steady clock."""

    def __init__(self, clock_began: float = 0.0) -> None:
        """``clock_began``: the time at which the clock read 0, in seconds since 1970."""
        self._clock_began = clock_began
        self._records: dict[Key, MemberRecord] = {}
        self._by_token: dict[str, MemberRecord] = {}
        #: The places in the order of the view, and their members.
        self._order: list[tuple[str, int]] = []
        self._in_order: list[Member] = []
        self._gone: deque[MemberStatus] = deque(maxlen=GONE_KEPT)
        #: By place, the last shard or standby whose lease ended, unless its process has joined again.
        self._lost_servers: dict[Key, MemberStatus] = {}
        #: How former members ended, by place and incarnation, oldest first.
        self._fates: OrderedDict[tuple[Role, int, int], str] = OrderedDict()
        #: The first and the last incarnation known to have been a member.
        self._incarnations = range(0)
        #: How often ``find`` has refused.
        self.fenced_calls = 0

    def __contains__(self, place: object) -> bool:
        return place in self._records

    def __iter__(self) -> Iterator[Key]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    @property
    def members(self) -> tuple[Member, ...]:
        """By role and number."""
        return tuple(self._in_order)

    @property
    def places(self) -> dict[Key, SavedMember]:
        """Each member's request and its answer."""
        return {key: record.place for key, record in self._records.items()}

    @property
    def gone(self) -> tuple[MemberStatus, ...]:
        """The last former members, oldest first."""
        return tuple(self._gone)

    @property
    def lost_servers(self) -> tuple[MemberStatus, ...]:
        """The last lost shard or standby of each place, unless it has returned."""
        return tuple(self._lost_servers.values())

    @property
    def ranks(self) -> set[int]:
        """The ranks of the live workers."""
        return {index for role, index in self._records if role is Role.WORKER}

    def begin(self, place: SavedMember, now: float) -> None:
        """Add a member in a vacant place."""
        member = place.joined.member
        record = MemberRecord(place, now, since=now)
        self._records[member.role, member.index] = self._by_token[place.application.token] = record
        at = bisect_left(self._order, key := (member.role.value, member.index))
        self._order.insert(at, key)
        self._in_order.insert(at, member)
        self._know(member)
        process = place.application.host, place.application.pid
        self._lost_servers = {
            key: lost for key, lost in self._lost_servers.items() if not lost.pid or (lost.host, lost.pid) != process
        }

    def expire(self, record: MemberRecord, now: float) -> None:
        """Remove a member whose lease has ended; its place becomes vacant."""
        self.end(record, record.how_expired, now)
        self._lose(self._gone[-1])

    def _lose(self, status: MemberStatus) -> None:
        if status.member.role in (Role.SHARD, Role.STANDBY):
            self._lost_servers[status.member.role, status.member.index] = status

    def end(self, record: MemberRecord, how: str, now: float) -> None:
        """Remove a member; its place becomes vacant."""
        member = record.member
        del self._records[member.role, member.index], self._by_token[record.place.application.token]
        at = bisect_left(self._order, (member.role.value, member.index))
        del self._order[at], self._in_order[at]
        self._gone.append(record.status(now, how, self._clock_began + now))
        self._keep_fate(member, how)

    def renew(self, record: MemberRecord, now: float) -> None:
        """Renew the whole lease."""
        record.last_heartbeat, record.disconnected_at, record.spared_seconds = now, None, 0.0
        record.beats += 1

    def connected(self, role: Role, index: int, incarnation: int) -> None:
        """Note one more watch stream of a member. No effect for a process that is not a member."""
        record = self._records.get((role, index))
        if record is not None and record.member.incarnation == incarnation:
            record.streams, record.disconnected_at = record.streams + 1, None

    def disconnected(self, role: Role, index: int, incarnation: int, now: float) -> None:
        """Note the end of a member's watch stream; when the last one ends, so does its connection."""
        record = self._records.get((role, index))
        if record is not None and record.member.incarnation == incarnation:
            record.streams = max(0, record.streams - 1)
            if not record.streams:
                record.disconnected_at = now

    def remember(self, gone: tuple[MemberStatus, ...]) -> None:
        """Restore former members from a journal."""
        self._gone.extend(gone)
        live = {(record.place.application.host, record.place.application.pid) for record in self._records.values()}
        for status in gone:
            self._know(status.member)
            self._keep_fate(status.member, status.gone)
            if status.gone.startswith(_EXPIRED) and (status.host, status.pid) not in live:
                self._lose(status)

    def _know(self, member: Member) -> None:
        """Incarnations rise, so this coordinator assigned all between the first and the last that it knows."""
        number, known = member.incarnation, self._incarnations
        first, last = (min(known[0], number), max(known[-1], number)) if known else (number, number)
        self._incarnations = range(first, last + 1)

    def _keep_fate(self, member: Member, how: str) -> None:
        self._fates[member.role, member.index, member.incarnation] = how
        while len(self._fates) > FATES_KEPT:
            self._fates.popitem(last=False)

    def by_token(self, token: str) -> MemberRecord | None:
        """The member that joined with ``token``."""
        return self._by_token.get(token)

    def holder(self, role: Role, index: int) -> MemberRecord | None:
        """The member in this place."""
        return self._records.get((role, index))

    def beats(self, role: Role) -> dict[tuple[int, int], int]:
        """The number of heartbeats from each member of ``role``, by number and incarnation."""
        return {
            (index, record.member.incarnation): record.beats
            for (held, index), record in self._records.items()
            if held is role
        }

    def find(self, role: Role, index: int, incarnation: int) -> MemberRecord:
        """The member of this place and incarnation. If there is none, raises Fenced, which describes how it ended."""
        record = self._records.get((role, index))
        if record is not None and record.member.incarnation == incarnation:
            return record
        self.fenced_calls += 1
        fate = self.fate(role, index, incarnation) or self._unknown(incarnation)
        holder, remedy = "nobody", "start this process again; it joins as a new incarnation"
        if record is not None:
            who = record.place.application
            holder = f"incarnation {record.member.incarnation}: {who.host or 'an unknown host'}, process {who.pid}"
            remedy = "leave the place to that process, or end it and start this one again"
        raise Fenced(
            f"{role.value} {index} is not a member any more: {fate}",
            expected=f"the place is held by {holder}",
            actual=f"incarnation {incarnation}",
            remedy=remedy,
        )

    def fate(self, role: Role, index: int, incarnation: int) -> str:
        """Describes how this incarnation ended; empty if it is live or not remembered."""
        return self._fates.get((role, index, incarnation), "")

    def _unknown(self, incarnation: int) -> str:
        """The explanation for an incarnation whose end is not remembered."""
        if incarnation in self._incarnations:
            return "it ended so long ago that the reason is no longer known"
        return "this coordinator does not know it; perhaps it was restarted without its journal"

    def lowest_free(self, role: Role) -> int:
        """The lowest free number of ``role``."""
        index = 0
        while (role, index) in self._records:
            index += 1
        return index

    def ended(self, now: float) -> list[MemberRecord]:
        """The members whose leases have ended by ``now``."""
        return [record for record in self._records.values() if now >= record.lease_end]

    def mostly_late(self, now: float, late_seconds: float) -> bool:
        """Whether half of many members have been silent for this long: then the coordinator is late, not the
        members.
        """
        late = sum(now - record.last_heartbeat > late_seconds for record in self._records.values())
        return len(self._records) >= MANY and 2 * late >= len(self._records)

    def spare(self, ended: list[MemberRecord], seconds: float) -> list[MemberRecord]:
        """The members in ``ended`` that have had twice their lease; extends the other leases by ``seconds``."""
        over = [record for record in ended if record.spared_seconds >= record.place.joined.lease_seconds]
        for record in ended:
            record.spared_seconds += seconds
        return over

    def next_expiry(self) -> float | None:
        """When the first lease ends if no heartbeat arrives; None without members."""
        return min((record.lease_end for record in self._records.values()), default=None)

    def extend(self, seconds: float) -> None:
        """Extend every lease by ``seconds``."""
        for record in self._records.values():
            record.last_heartbeat += seconds
            if record.disconnected_at is not None:
                record.disconnected_at += seconds

    def statuses(self, now: float) -> tuple[MemberStatus, ...]:
        """Live members first, then the last former ones."""
        return (*(record.status(now) for record in self._records.values()), *self._gone)
