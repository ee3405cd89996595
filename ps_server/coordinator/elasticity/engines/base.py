"""The interface of engines, which start workers on request and may also end processes."""

from __future__ import annotations

from typing import Protocol

from ps_protocol.cluster.scaling import ScaleOrder

WORKERS, SHARDS = "workers", "shards"
"""What an engine may be able to start and end."""


class WorkerEngine(Protocol):
    """Called in a thread of its own, one call at a time; a call may take seconds.

    A user's class (``--engine package.module:Class``) needs only these two methods. One that supports ``psctl scale``
    also has those of ``ScalingEngine``.
    """

    def request(self, wanted: int, ranks: tuple[int, ...]) -> str:
        """Start as many workers as bring the job to ``wanted``. ``ranks``: those whose workers were lost.

        Returns a description of what was done. A request may be repeated: an engine that is already starting the
        workers does nothing. Raises PsError if it cannot start them now; the request is repeated later.
        """
        ...

    def describe(self) -> str:
        """Describes where workers come from."""
        ...


class ScalingEngine(WorkerEngine, Protocol):
    """An engine that starts and ends processes until the requested number runs."""

    #: WORKERS, SHARDS, or both.
    scales: frozenset[str]
    #: Whether it only sets a number of workers; which ranks come and go is decided elsewhere.
    by_count: bool

    def scale(self, order: ScaleOrder) -> str:
        """Run exactly the workers and shards of ``order``; returns a description of what was done.

        An order may be repeated. A shard is left out of ``order.shards`` only once it is empty. Raises PsError if the
        order cannot be carried out; the wanted size then does not change.
        """
        ...
