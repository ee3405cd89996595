"""A condition that counts once it has held for a while, and is over once its opposite has: hysteresis in time."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

HOLD_SECONDS = 30.0
"""For how long something has to be so before it counts, and to be over."""


class Holding(Generic[K]):
    """Called by the policy, with rising times in seconds."""

    def __init__(self, seconds: float) -> None:
        """``seconds``: for how long a condition has to hold, and to be over."""
        self._seconds = seconds
        self._on: set[K] = set()
        #: Since when the other state holds.
        self._since: dict[K, float] = {}

    def __contains__(self, key: K) -> bool:
        return key in self._on

    def forget(self, keys: Collection[K]) -> None:
        """Keep only these."""
        self._on &= set(keys)
        self._since = {key: since for key, since in self._since.items() if key in keys}

    def changed(self, key: K, *, on: bool, off: bool, now: float) -> bool:
        """Whether the state of ``key`` changes now. ``on``: the condition holds; ``off``: it is over for certain.

        Between the two, where neither is so, the state stays.
        """
        if not (off if key in self._on else on):
            self._since.pop(key, None)
            return False
        if now - self._since.setdefault(key, now) < self._seconds:
            return False
        del self._since[key]
        self._on ^= {key}
        return True
