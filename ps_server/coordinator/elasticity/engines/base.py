"""What an engine is: something that starts workers when it is asked."""

from __future__ import annotations

from typing import Protocol


class WorkerEngine(Protocol):
    """Called in a thread of its own, one call at a time; a call may take seconds.

    A class of a user needs no more than these two methods (``--engine package.module:Class``).
    """

    def request(self, wanted: int, ranks: tuple[int, ...]) -> str:
        """Have as many workers run as bring the job to ``wanted``; ``ranks``: places whose workers were lost.

        Returns what was done, in words. The request may come again: an engine that is about to start them does nothing.
        Raises PsError when the workers cannot be had now; they are asked for again later.
        """
        ...

    def describe(self) -> str:
        """Where workers come from, in words."""
        ...
