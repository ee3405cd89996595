"""What an engine is: something that starts workers when it is asked, and perhaps ends processes, too."""

from __future__ import annotations

from typing import Protocol

from ps_protocol.cluster.scaling import ScaleOrder

WORKERS, SHARDS = "workers", "shards"
"""What an engine may be able to start and end."""


class WorkerEngine(Protocol):
    """Called in a thread of its own, one call at a time; a call may take seconds.

    A class of a user needs no more than these two methods (``--engine package.module:Class``). One that can start and
    end as many as ``psctl scale`` asks for has the two of ``ScalingEngine``, too.
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


class ScalingEngine(WorkerEngine, Protocol):
    """An engine that starts and ends processes until as many run as it is asked for."""

    #: WORKERS, SHARDS, or both.
    scales: frozenset[str]
    #: It starts so many workers, and which ranks they take, and which of them end, is chosen elsewhere.
    by_count: bool

    def scale(self, order: ScaleOrder) -> str:
        """Have the workers and shards of ``order`` run, and no others; returns what was done, in words.

        It may come again. Before a shard is left out of ``order.shards`` all that it held has moved. Raises PsError
        when that cannot be done; then nothing is wanted.
        """
        ...
