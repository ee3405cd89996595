"""Named points where a test can make a shard fail; empty, and free, in every real process."""

from __future__ import annotations

from collections.abc import Callable

#: Every point there is, in the order a push passes them.
POINTS = ("before_log", "after_log_before_apply", "after_apply_before_reply")


class Failpoints:
    """Armed by tests before or while the shard runs; hit from the shard's loop and its lane."""

    def __init__(self) -> None:
        self._armed: dict[str, Callable[[], None]] = {}

    def arm(self, point: str, action: Callable[[], None]) -> None:
        """Run ``action`` (which may raise, or end the process) whenever ``point`` is passed."""
        if point not in POINTS:
            raise ValueError(f"no failpoint {point!r}; there are {', '.join(POINTS)}")
        self._armed[point] = action

    def disarm(self, point: str) -> None:
        """Pass ``point`` unharmed again."""
        self._armed.pop(point, None)

    def hit(self, point: str) -> None:
        """Called by the code at ``point``."""
        if self._armed and (action := self._armed.get(point)):
            action()
