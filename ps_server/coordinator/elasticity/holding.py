"""A condition that counts once it has held for a while, and is over once its opposite has: hysteresis in time."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

HOLD_SECONDS = 30.0
"""For how long something has to be so before it counts, and to be over."""


class Holding(Generic[K]):
    """Called by the policy, with rising times in seconds."""

    def __init__(self, seconds: float, calm_part: float = 0.0, longest_seconds: float = 0.0) -> None:
        """``seconds``: for how long a condition has to hold, and to be over.

        ``calm_part``: it has to hold for so much of the time at least that it did not count before, and for no longer
        than ``longest_seconds``. What noise brings about now and then does not count in the end.
        """
        self._seconds = seconds
        self._calm_part, self._longest = calm_part, longest_seconds
        self._on: set[K] = set()
        #: Since when it has not counted.
        self._calm: dict[K, float] = {}
        #: Since when the other state holds.
        self._since: dict[K, float] = {}

    def __contains__(self, key: K) -> bool:
        return key in self._on

    def forget(self, keys: Collection[K]) -> None:
        """Keep only these."""
        self._on &= set(keys)
        self._since = {key: since for key, since in self._since.items() if key in keys}
        self._calm = {key: since for key, since in self._calm.items() if key in keys}

    def changed(self, key: K, *, on: bool, off: bool, now: float) -> bool:
        """Whether the state of ``key`` changes now. ``on``: the condition holds; ``off``: it is over for certain.

        Between the two, where neither is so, the state stays.
        """
        calm_since = self._calm.setdefault(key, now)
        if not (off if key in self._on else on):
            self._since.pop(key, None)
            return False
        since, wanted = self._since.setdefault(key, now), self._seconds
        if key not in self._on:
            wanted = max(wanted, min(self._calm_part * (since - calm_since), self._longest))
        if now - since < wanted:
            return False
        del self._since[key]
        self._on ^= {key}
        self._calm[key] = now
        return True
