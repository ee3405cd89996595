"""A condition that counts once it has held for a while, and is over once its opposite has: hysteresis in time."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Holding(Generic[K]):
    """Called by the policy, with rising times in seconds."""

    def __init__(self, seconds: float, part: float = 0.0, longest_seconds: float = 0.0) -> None:
        """``seconds``: for how long a condition has to hold, and to be over.

        ``part``: for so much of the time at least that the state lasted before, but for no longer than
        ``longest_seconds``. What noise brings about now and then does not count in the end.
        """
        self._seconds = seconds
        self._part, self._longest = part, longest_seconds
        self._on: set[K] = set()
        #: Since when the state is what it is.
        self._entered: dict[K, float] = {}
        #: Since when the other state holds.
        self._since: dict[K, float] = {}

    def __contains__(self, key: K) -> bool:
        return key in self._on

    def forget(self, keys: Collection[K]) -> None:
        """Keep only these."""
        self._on &= set(keys)
        self._since = {key: since for key, since in self._since.items() if key in keys}
        self._entered = {key: since for key, since in self._entered.items() if key in keys}

    def changed(self, key: K, *, on: bool, off: bool, now: float) -> bool:
        """Whether the state of ``key`` changes now. ``on``: the condition holds; ``off``: it is over for certain.

        Between the two, where neither is so, the state stays.
        """
        entered = self._entered.setdefault(key, now)
        if not (off if key in self._on else on):
            self._since.pop(key, None)
            return False
        since = self._since.setdefault(key, now)
        if now - since < max(self._seconds, min(self._part * (since - entered), self._longest)):
            return False
        del self._since[key]
        self._on ^= {key}
        self._entered[key] = now
        return True
