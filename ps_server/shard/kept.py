"""Decides which slices an answer may leave out, because the worker has kept them from an earlier one.

Frozen parameters, and those without a gradient in a step, travel once and again when they change.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ps_protocol.layout import Layout, Range

_CACHED_PATTERNS = 64
"""Steps show few patterns of slices that are left out, mostly one."""


class LastChanges:
    """When each parameter slice of a model was changed last, in changes counted from 1.

    Called on the shard's event loop, in the order in which changes are decided. Where every slice changes, as is usual,
    neither recording nor asking costs anything per slice.
    """

    def __init__(self, layout: Layout) -> None:
        #: Changes recorded so far.
        self.number = 0
        #: The last one that changed all slices, and of each slice the last that did not.
        self._all = 0
        self._some = np.zeros(layout.parameter_slices, np.int64)
        self._ranges = lru_cache(_CACHED_PATTERNS)(lambda absent, buffers: layout.ranges(absent, buffers=buffers))

    def record(self, untouched: frozenset[int] | None) -> None:
        """One change of all slices but ``untouched``; None: of no slice."""
        if untouched is None:
            return
        self.number += 1
        if not untouched:
            self._all = self.number
            return
        changed = np.ones(len(self._some), bool)
        changed[np.fromiter(untouched, np.int64, len(untouched))] = False
        self._some[changed] = self.number

    def unchanged_since(self, number: int) -> tuple[int, ...]:
        """Slices that no change after ``number`` has changed, rising."""
        if self._all > number:
            return ()
        return tuple(np.flatnonzero(self._some <= number).tolist())

    def ranges(self, absent: tuple[int, ...], *, buffers: bool) -> list[Range]:
        """Where the slices that are not ``absent`` lie in the region."""
        return self._ranges(absent, buffers)


class Kept:
    """What the worker of one stream holds. Used by the stream's writer, on the event loop."""

    def __init__(self, changes: LastChanges, *, keeps: bool, differences: bool) -> None:
        """``keeps``: the worker keeps anything. ``differences``: its wire format brings a slice bit by bit, so that
        one is whole only when it came raw.
        """
        self._changes = changes
        self._keeps = keeps
        self._differences = differences
        #: The worker holds every slice as it was after this change; None: it need not hold anything.
        self._number: int | None = None

    def unchanged(self) -> tuple[int, ...]:
        """Slices that need not be sent."""
        return () if self._number is None else self._changes.unchanged_since(self._number)

    def sent(self, number: int, *, raw: bool) -> None:
        """An answer went out with all changes up to ``number``; ``raw``: whole, in place of the wire format."""
        if self._keeps and (raw or not self._differences):
            self._number = number
