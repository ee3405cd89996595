"""Decides which ids get a row, and which rows are removed. Pure; the time is an argument."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from ps_protocol.model.ids import mix
from ps_protocol.model.kernels import kernel
from ps_protocol.model.tables import Eviction, Ids, RowLife
from ps_server.tables.memory import IDS
from ps_server.tables.store import RowStore


@kernel(types.boolean[::1](IDS, types.uint64, types.int64, types.float64), allocates=True)
def chosen(ids: Any, seed: Any, update: Any, probability: Any) -> Any:
    """Whether each id is, in this update, with this probability; bool [n]."""
    found = np.empty(ids.size, np.bool_)
    start = mix(np.int64(mix(np.int64(seed)) + np.uint64(update)))
    for i in range(ids.size):
        bits = mix(np.int64(mix(ids[i]) ^ start))
        found[i] = np.float64(bits >> np.uint64(11)) * (1.0 / (1 << 53)) < probability
    return found


#: The most rows that are removed at once.
LOT_ROWS = 8192
#: The most rows scanned in one piece, which takes a few milliseconds.
WINDOW_ROWS = 1 << 18
#: Pieces scanned in one call while nothing is found.
_WINDOWS = 16
_SAMPLES = 64
_NEVER = np.iinfo(np.int64).max
Rows = npt.NDArray[np.int64]


def admitted(life: RowLife, seed: int, ids: Ids, uses: npt.NDArray[np.uint32], updates: int) -> npt.NDArray[np.bool_]:
    """Which ids without a row get one at their present use, in update ``updates``, before which they had ``uses``.

    Chance is a function of seed, id and update, so a replay decides alike.
    """
    if life.admit_after > 1:
        return np.asarray(uses + np.uint64(1) >= life.admit_after)
    if 0 < life.admit_probability < 1:
        return np.asarray(chosen(ids, np.uint64(seed), updates, life.admit_probability))
    return np.ones(ids.size, np.bool_)


class Calendar:
    """Converts seconds to updates of a table. Owned by one ShardTable.

    It knows the times since the process began; rows from before count as used at that moment.
    """

    def __init__(self, life: RowLife) -> None:
        self._updates = life.expire_after_updates
        self._seconds = life.expire_after_seconds
        self._samples: deque[tuple[float, int]] = deque()

    def expired_through(self, now_seconds: float, updates: int) -> int:
        """Rows last used in this update or before have expired; -1: none. ``updates``: the table's so far."""
        by_updates = updates - self._updates if self._updates else -1
        return max(by_updates, self._by_seconds(now_seconds, updates) if self._seconds else -1)

    def _by_seconds(self, now: float, updates: int) -> int:
        samples = self._samples
        if not samples or now - samples[-1][0] >= self._seconds / _SAMPLES:
            samples.append((now, updates))
        while len(samples) > 1 and samples[1][0] <= now - self._seconds:
            samples.popleft()
        seconds, known = samples[0]
        return known if seconds <= now - self._seconds else -1


class Sweep:
    """Scans the rows of one store and selects rows to remove, a bounded piece at a time. Owned by one ShardTable."""

    def __init__(self, store: RowStore, eviction: Eviction) -> None:
        self._store = store
        self._by_uses = eviction is Eviction.LFU and bool(store.uses.size)
        self._next = 0

    def expired(self, through: int, keep: Rows) -> Rows:
        """Rows last used in update ``through`` or before, none of ``keep``, at most LOT_ROWS."""
        if through >= 0:
            for begin, end in self._windows():
                rows = begin + np.flatnonzero(self._store.touched[begin:end] <= through)
                if (rows := rows[~np.isin(rows, keep)]).size:
                    return self._lot(rows, begin)
        return np.empty(0, np.int64)

    def evicted(self, most: int, keep: Rows) -> Rows:
        """When there are more than ``most`` rows, some, so that a 64th of that becomes free, none of ``keep``.

        The least recently or least frequently used ones, at most LOT_ROWS; of more rows than are looked at in one
        piece, those of the piece below a threshold that a sample of all gives.
        """
        count = self._store.count
        others = count - keep.size
        excess = min(others, count - most + most // 64)
        if count <= most or not others:
            return np.empty(0, np.int64)
        if count <= WINDOW_ROWS:
            wanted = min(LOT_ROWS, excess)
            return np.argpartition(self._keys(0, count, keep), wanted - 1)[:wanted]
        sample = self._keys(0, count, keep, -(-count // WINDOW_ROWS))
        sample = sample[sample < _NEVER]
        place = min(sample.size - 1, excess * sample.size // others)
        threshold = np.partition(sample, place)[place] if sample.size else _NEVER - 1
        for begin, end in self._windows():
            rows = begin + np.flatnonzero(self._keys(begin, end, keep) <= threshold)
            if rows.size:
                return self._lot(rows, begin)
        return np.empty(0, np.int64)

    def _windows(self) -> Iterator[tuple[int, int]]:
        """The next pieces to look at, each row once; a row that moves meanwhile is scanned in the next round."""
        count = self._store.count
        if count <= WINDOW_ROWS:
            yield 0, count
            return
        for _ in range(min(_WINDOWS, -(-count // WINDOW_ROWS))):
            begin = self._next if self._next < count else 0
            self._next = min(count, begin + WINDOW_ROWS)
            yield begin, self._next

    def _lot(self, rows: Rows, begin: int) -> Rows:
        if rows.size > LOT_ROWS:
            self._next = begin
        return rows[:LOT_ROWS]

    def _keys(self, begin: int, end: int, keep: Rows, stride: int = 1) -> npt.NDArray[np.int64]:
        """The key of every ``stride``-th row: rows with the lowest keys are removed first."""
        keys = self._store.touched[begin:end:stride].copy()
        if self._by_uses:
            uses = np.minimum(self._store.uses[begin:end:stride], (1 << 23) - 1).astype(np.int64)
            keys = uses << 40 | keys & (1 << 40) - 1
        keep = keep[(keep >= begin) & (keep < end)] - begin
        keys[keep[keep % stride == 0] // stride] = _NEVER
        return keys
