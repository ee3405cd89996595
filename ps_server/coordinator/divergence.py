"""Decides when a number that members report has grown far above its own history: the model diverges. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ps_protocol.cluster.view import Divergence, Member, MemberStats, Role, UpdateCounts
from ps_protocol.model.spec import Mode
from ps_server.coordinator import times

POINTS = 64
"""A history keeps so many; when they are full, neighbours become one."""

RECENT_PART, RECENT = 0.25, 8
"""The last part of a history, and at least so many numbers, are not yet what was usual: growth takes time."""


@dataclass(frozen=True, slots=True)
class Far:
    """How far above its history a number has to be."""

    #: Of the lowest and the highest number before: the distance above the highest.
    margin: Callable[[float, float], float]
    #: So many numbers come first. After as many as that the margin counts twice, after many once.
    least: int

    def limit(self, low: float, high: float, count: int) -> float:
        """What is above this is far above, after ``count`` numbers between ``low`` and ``high``."""
        return high + self.margin(low, high) * (1 + self.least / count)


NORM = Far(lambda low, high: math.log(10.0), 5)
"""Of logarithms of norms: ten times the highest one before."""

LOSS = Far(lambda low, high: 10.0 * max(high - low, 0.1 * max(abs(low), abs(high)), 0.01), 20)
"""Ten times the difference between the highest and the lowest one before, which counts as a tenth of their size, and as
0.01, at least. A loss may be negative or close to 0, and single batches are far from the mean.
"""


class History:
    """One number over time, in constant size. Times are those of the caller, and rise."""

    def __init__(self, far: Far, now: float) -> None:
        self._far = far
        #: The lowest and the highest of ``_width`` numbers each, oldest first; the last may be of fewer.
        self._points: list[tuple[float, float]] = []
        self._width, self._filled = 1, 0
        self._count = 0
        #: Whether it is far above its history, or was so ``times.HOLD_SECONDS`` ago at most.
        self.has_grown = False
        #: When it was last no higher than before.
        self.ordinary_at = now
        #: When it was last far above.
        self._far_at = now
        #: The last number, and the highest before.
        self.value = self.usual = 0.0

    def take(self, value: float, now: float) -> None:
        """Add the next number; one that is not finite is above everything. One alone that is far above is noise."""
        before, self.value = self.value, value if math.isfinite(value) else math.inf
        self._count += 1
        if self._count > self._far.least and self._points:
            self._judge(min(before, self.value), now)
        else:
            self.ordinary_at = now
        # What is far above does not become usual.
        if not self.has_grown and math.isfinite(self.value):
            self._keep(self.value)

    def _judge(self, lower: float, now: float) -> None:
        """``lower``: of the last two numbers."""
        low, self.usual = self._range()
        if self.value <= self.usual:
            self.ordinary_at = now
        if lower > self._far.limit(low, self.usual, self._count):
            self.has_grown, self._far_at = True, now
        elif now - self._far_at >= times.HOLD_SECONDS:
            self.has_grown = False

    def _keep(self, value: float) -> None:
        if self._points and self._filled < self._width:
            low, high = self._points.pop()
            self._points.append((min(low, value), max(high, value)))
            self._filled += 1
            return
        if len(self._points) == POINTS:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [(min(one[0], two[0]), max(one[1], two[1])) for one, two in pairs]
            self._width *= 2
        self._points.append((value, value))
        self._filled = 1

    def _range(self) -> tuple[float, float]:
        """The lowest and the highest number, without the last ones."""
        recent = max(-(-RECENT // self._width), round(RECENT_PART * len(self._points)))
        points = self._points[: max(1, len(self._points) - recent)]
        return min(low for low, _ in points), max(high for _, high in points)


MOST = 8
"""So many numbers that have grown are shown; all of a model's grow together."""

LOSS_NAMES = 4
"""So many losses of a worker are watched."""

REFUSED = "gradients"
"""What has grown where a step was refused because of NaN or infinity."""

_LARGEST = 700.0
"""A logarithm of about the largest number."""

_LOSS = re.compile(r"(?<![a-z])loss(?![a-z])")

#: Role and number of a member, and what it reports.
Key = tuple[Role, int, str]


@dataclass(slots=True)
class _Watched:
    history: History
    #: Of the model's shard map: other slices have other norms.
    epoch: int
    heard_at: float

    def hears(self, now: float, seconds: float) -> bool:
        """Whether a number has come within the last ``seconds``."""
        return now - self.heard_at < seconds


@dataclass(frozen=True, slots=True)
class Protection:
    """A growth that begins: the newest checkpoint from before it should stay."""

    #: Who reports it. Workers are not believed as shards are.
    role: Role
    #: When the number was last as usual, in seconds since 1970.
    since_seconds: float
    #: What has grown, for people.
    text: str


class DivergenceWatch:
    """Watches the norms of gradients that shards report, the losses of workers, and refused steps, in async and ssp.

    Called by the driver with each heartbeat. Times are seconds since 1970, and rise.
    """

    def __init__(self, mode: Mode) -> None:
        self._mode = mode
        self._watched: dict[Key, _Watched] = {}
        self._grown: dict[Key, Divergence] = {}
        #: When the last step was refused, of members for which that counts as growth.
        self._refused_at: dict[Key, float] = {}
        #: By role and number: incarnation, steps, refused steps and time of the last heartbeat.
        self._last: dict[tuple[Role, int], tuple[int, int, int, float]] = {}
        #: By shard: the last updates.
        self._updates: dict[int, tuple[UpdateCounts, ...]] = {}
        #: By role, for which a checkpoint has not been chosen.
        self._unprotected: dict[Role, Protection] = {}

    def joined(self, member: Member, now: float) -> None:
        """A process has joined: it has refused nothing yet."""
        if self._last.get((member.role, member.index), (0,))[0] != member.incarnation:
            self._last[member.role, member.index] = member.incarnation, 0, 0, now

    def restart(self, mode: Mode) -> None:
        """Begin again without history, in ``mode``: it has changed, or values were restored."""
        self._mode = mode
        for known in (self._watched, self._grown, self._refused_at, self._updates, self._unprotected):
            known.clear()

    def take(self, member: Member, stats: MemberStats, epochs: Mapping[str, int], now: float) -> list[Divergence]:
        """Take over one heartbeat; returns what is found to have grown by it. ``epochs``: of the shard maps."""
        place = member.role, member.index
        incarnation, steps, refused, before = self._last.get(place, (member.incarnation, 0, stats.nonfinite, now))
        if incarnation != member.incarnation:
            steps = refused = 0
        self._last[place] = member.incarnation, stats.steps, stats.nonfinite, now
        if self._mode is Mode.SYNC:
            return []
        found = []
        updates = stats.updates if member.role is Role.SHARD else ()
        if updates:
            self._updates[member.index] = updates
        for counts in updates:
            if counts.gradient_norm > 0:
                what, epoch = f"gradient norm of model '{counts.model}'", epochs.get(counts.model, 0)
                found.append(self._number(member, what, NORM, math.log(counts.gradient_norm), now, epoch))
        if member.role is Role.WORKER and stats.steps > steps:
            losses = sorted(name for name in stats.metrics if _LOSS.search(name.lower()))
            found += [self._number(member, name, LOSS, stats.metrics[name], now) for name in losses[:LOSS_NAMES]]
        if member.role is Role.WORKER and stats.nonfinite > refused:
            self._refused_at[*place, REFUSED] = now
            found.append(self._grow((*place, REFUSED), member, math.nan, 0.0, self._ordinary_at(before, now)))
        return [each for each in found if each is not None]

    def divergences(self, now: float) -> tuple[Divergence, ...]:
        """What has grown, shards first; ``MOST`` at most."""
        for key in [key for key in self._grown if not self._lasts(key, now)]:
            del self._grown[key]
        updates = [counts for of_shard in self._updates.values() for counts in of_shard]
        staleness = max((counts.staleness for counts in updates), default=0.0)
        p99 = max((counts.staleness_p99 for counts in updates), default=0.0)
        shown = sorted(self._grown.items(), key=lambda item: (item[0][0] is not Role.SHARD, item[1].since_seconds))
        return tuple(replace(grown, staleness=staleness, staleness_p99=p99) for _, grown in shown[:MOST])

    def acknowledge(self, now: float) -> tuple[Divergence, ...]:
        """Take what has grown for usual: its history begins again. Returns ``divergences`` of before."""
        found = self.divergences(now)
        for key in self._grown:
            self._watched.pop(key, None)
            self._refused_at.pop(key, None)
        self._grown.clear()
        self._unprotected.clear()
        return found

    @property
    def unprotected(self) -> list[Protection]:
        """The growths for which ``protected`` has not been called, one for each role at most."""
        return list(self._unprotected.values())

    def protected(self, asked: Protection, folder: str = "", step: int = 0) -> None:
        """Note the checkpoint that is kept for what was asked; empty: there is none to keep."""
        role = asked.role
        if self._unprotected.get(role) == asked:
            del self._unprotected[role]
        for key, grown in self._grown.items():
            if key[0] is role and not grown.checkpoint:
                self._grown[key] = replace(grown, checkpoint=folder, step=step)

    def _number(
        self, member: Member, what: str, far: Far, value: float, now: float, epoch: int = 0
    ) -> Divergence | None:
        key = member.role, member.index, what
        watched = self._watched.get(key)
        if watched is None or watched.epoch != epoch:
            self._forget(now)
            watched = self._watched[key] = _Watched(History(far, now), epoch, now)
        history = watched.history
        if far is LOSS and value == history.value:
            return None  # reported once, sent again
        watched.heard_at = now
        had = history.has_grown
        history.take(value, now)
        if not history.has_grown:
            return None
        value, usual = history.value, history.usual
        if far is NORM:
            value, usual = math.exp(min(value, _LARGEST)), math.exp(usual)
        if had and key in self._grown:
            self._grown[key] = replace(self._grown[key], value=value)
            return None
        return self._grow(key, member, value, usual, history.ordinary_at)

    def _grow(self, key: Key, member: Member, value: float, usual: float, since: float) -> Divergence | None:
        """Note a growth. None for one that is known, or that is like that of another member."""
        alike = any(other[0] is key[0] and other[2] == key[2] for other in self._grown)
        if key in self._grown:
            return None
        grown = self._grown[key] = Divergence(member, key[2], value, usual, since)
        known = self._unprotected.get(key[0])
        since = min(since, known.since_seconds) if known else since
        self._unprotected[key[0]] = Protection(key[0], since, key[2])
        return None if alike else grown

    def _ordinary_at(self, before: float, now: float) -> float:
        """When the norms of all shards were last as usual; ``before`` where no shard has sampled any."""
        norms = [each for (role, _, _), each in self._watched.items() if role is Role.SHARD]
        return min((each.history.ordinary_at for each in norms if each.hears(now, times.HOLD_SECONDS)), default=before)

    def _lasts(self, key: Key, now: float) -> bool:
        if (refused_at := self._refused_at.get(key)) is not None:
            return now - refused_at < times.SILENT_SECONDS
        watched = self._watched.get(key)
        return watched is not None and watched.history.has_grown and watched.hears(now, times.SILENT_SECONDS)

    def _forget(self, now: float) -> None:
        """Drop numbers that are not reported any more."""
        self._watched = {
            key: watched for key, watched in self._watched.items() if watched.hears(now, times.SILENT_SECONDS)
        }
