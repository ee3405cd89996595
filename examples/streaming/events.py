"""A stream of clicks by window of time: every event is a function of (seed, window, position). NumPy alone.

In every window users and items leave, and new ones come; what is popular and what is liked drifts. Each event has the
items that its user has been shown last, which are functions of the same kind: nothing is remembered.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from clicks.hashing import Bits, key, mix, uniforms

NUMBERS = 2
NONE = 0
"""The item of a place in a history that is empty."""

_key = cache(key)

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

_SHOWN, _TASTE, _TOPIC, _ITEM, _USER, _NUMBERS, _LUCK, _TREND, _DRIFT = range(9)
_FAVOURITES = 3
_OF_FAVOURITES = 0.7
_COUNTERS = 8
_BIAS, _LIKED, _QUALITY, _TRENDS, _ACTIVE, _OF_NUMBERS = -1.6, 1.5, 0.8, 0.6, 0.5, (0.4, -0.3)


class Events(NamedTuple):
    """Events in the order of time."""

    #: float32 [n, 2], uniform with mean 0 and variance 1.
    numbers: Floats
    #: int64 [n], from 0.
    users: Ids
    #: int64 [n, 1 + history]: the item shown, then those that its user was shown before, the last one first.
    items: Ids
    #: float32 [n], 1 for a click.
    labels: Floats
    #: float32 [n]: log(p / (1 - p)) of a click. No model can rank better.
    truth: Floats


@dataclass(frozen=True, slots=True)
class Stream:
    """The endless stream of ``seed``. The same in every process; nothing is kept in memory."""

    seed: int = 0
    #: Events of a window.
    events: int = 500_000
    #: Visits of a user in a window.
    visits: int = 10
    #: Windows in which a user comes, and in which an item is shown.
    life: int = 4
    topics: int = 64
    #: Items of a topic in one window.
    items: int = 2000
    #: Last items of a user.
    history: int = 10
    #: Of the power law of items in a topic, not 1.
    exponent: float = 1.05

    @property
    def live_users(self) -> int:
        """Users of one window."""
        return -(-self.events // self.visits)

    def users_until(self, window: int) -> int:
        """All numbers of users up to and with ``window`` are below this."""
        return self.live_users * ((window + self.life) // self.life + 2)

    def items_until(self, window: int) -> int:
        """All numbers of items up to and with ``window`` are below this."""
        return 1 + self.topics * self.items * ((window + self.life) // self.life + 2)

    def topic_of(self, items: Any) -> Any:
        """For an array or a tensor: 0 to ``topics`` - 1; that of ``NONE`` is the last."""
        return (items - 1) % self.topics

    def draw(self, window: int, first: int, count: int) -> Events:
        """``count`` events of ``window``, from position ``first`` on; of the last ones as many as there are."""
        positions = np.arange(first, max(first, min(first + count, self.events)), dtype=np.int64)
        # Histories reach back before the first window.
        now = window + self.life
        visit, seat = np.divmod(positions, self.live_users)
        turn = seat % self.life
        generation = (now + turn) // self.life
        users = seat + self.live_users * generation
        #: The number of the user's visit; the first is 0.
        visit += (now - (generation * self.life - turn)) * self.visits
        visits = visit[:, None] - np.arange(1 + self.history)
        windows = now - (visit // self.visits)[:, None] + visits // self.visits
        items = self._shown(users, visits, windows)
        items[visits < 0] = NONE
        counters = (np.uint64(now * self.events) + positions.astype(np.uint64)) * np.uint64(_COUNTERS)
        numbers = _centred(self._bits(_NUMBERS, counters[:, None] + np.arange(NUMBERS, dtype=np.uint64)))
        truth = self._truth(now, users, items[:, 0], numbers)
        clicks = uniforms(self._bits(_LUCK, counters)) < 1.0 / (1.0 + np.exp(-truth.astype(np.float64)))
        return Events(numbers, users, items, clicks.astype(np.float32), truth)

    def _shown(self, users: Ids, visits: Ids, windows: Ids) -> Ids:
        """Mostly an item of a topic that the user likes; few items of a topic are shown most."""
        bits = self._bits(_SHOWN, mix(users.view(np.uint64))[:, None] + visits.view(np.uint64))
        chances = (bits >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
        choice = (bits & np.uint64(0xFFFF)).astype(np.int64)
        topics = np.where(
            (bits & np.uint64(0xFFFFFF0000)) < np.uint64(_OF_FAVOURITES * 2.0**40),
            np.take_along_axis(self._favourites(users), (choice * _FAVOURITES) >> 16, axis=1),
            (choice * self.topics) >> 16,
        )
        # The inverse of a bounded Pareto distribution: ranks 1 to ``items``.
        power = 1.0 - self.exponent
        spread = np.float32((self.items + 1.0) ** power - 1.0)
        ranks = ((chances * spread + np.float32(1)) ** np.float32(1 / power)).astype(np.int64)
        ranks = np.clip(ranks, 1, self.items)
        # Popularity drifts: in each window the ranks between two powers of two are in another order.
        octaves = np.left_shift(1, np.frexp(ranks.astype(np.float32))[1] - 1)
        every = np.arange(windows.max(initial=0) + 1, dtype=np.uint64)
        orders = (self._bits(_DRIFT, every) >> np.uint64(20)).astype(np.int64)[windows]
        swapped = ranks ^ (orders & (octaves - 1))
        places = topics + self.topics * (np.where(swapped > self.items, ranks, swapped) - 1)
        # Not all in the same window: by Fibonacci hashing.
        turns = ((((places * 0x9E3779B1) >> 16) & 0xFFFF) * self.life) >> 16
        return 1 + places + self.topics * self.items * ((windows + turns) // self.life)

    def _favourites(self, users: Ids) -> Ids:
        counters = users.view(np.uint64)[:, None] * np.uint64(_FAVOURITES) + np.arange(_FAVOURITES, dtype=np.uint64)
        return (self._bits(_TASTE, counters) % np.uint64(self.topics)).astype(np.int64)

    def _truth(self, now: int, users: Ids, items: Ids, numbers: Floats) -> Floats:
        topics = self.topic_of(items)
        likes = (self._favourites(users) == topics[:, None]).any(axis=1)
        every = np.arange(self.topics, dtype=np.uint64)
        phases, speeds = (uniforms(self._bits(_TREND, 2 * every + np.uint64(which))) for which in (0, 1))
        trends = np.sin(2 * np.pi * (phases + (0.05 + 0.1 * speeds) * now)).astype(np.float32)
        return (
            np.float32(_BIAS)
            + np.float32(_LIKED) * likes.astype(np.float32)
            + np.float32(_QUALITY) * _centred(self._bits(_ITEM, items.view(np.uint64)))
            + np.float32(_ACTIVE) * _centred(self._bits(_USER, users.view(np.uint64)))
            + np.float32(_TRENDS) * trends[topics]
            + numbers @ np.array(_OF_NUMBERS, np.float32)
        )

    def _bits(self, what: int, counters: Bits) -> Bits:
        return mix(counters ^ _key(self.seed, what))


def _centred(bits: Bits) -> Floats:
    """Uniform numbers with mean 0 and variance 1."""
    return ((uniforms(bits) - 0.5) * 12**0.5).astype(np.float32)
