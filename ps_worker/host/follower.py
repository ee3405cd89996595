"""A worker of a host that another one pushes for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ps_protocol.errors import InvalidRequest
from ps_protocol.wire.shared_memory import SharedMemory
from ps_worker.host.connection import HostConnection
from ps_worker.host.messages import Away, Deposit, HostRefusal, HostWorker, RoundAnswer, Separate

LOOK_SECONDS = 0.2
"""A worker that waits for another one looks at this interval whether there is still something to wait for."""


class Follower:
    """A follower's connection to its leader. Used by the thread that makes exchanges."""

    def __init__(self, connection: HostConnection, leader: HostWorker, exchanges: int) -> None:
        self.leader = leader
        #: Exchanges that the leader had begun when this worker came.
        self.exchanges = exchanges
        self.connection = connection

    @property
    def is_open(self) -> bool:
        """Whether neither end has closed it, as far as this side knows."""
        return not self.connection.is_closed and not self.connection.has_ended()

    def deposit(
        self, deposit: Deposit, segments: Sequence[SharedMemory | None], rows: SharedMemory | None = None
    ) -> None:
        """Wait with a push from now on; ``segments``: by shard that has anything of the model. Raises OSError."""
        lent = [*segments, rows]
        numbers = [0 if segment is None else self.connection.lend(segment) for segment in lent]
        self.connection.lent.used(segment for segment in lent if segment is not None)
        self.connection.send(replace(deposit, segments=tuple(numbers[:-1]), rows=numbers[-1]))

    def wait(self, check: Callable[[], None]) -> RoundAnswer | Separate:
        """What became of the deposit. ``check`` is called again and again; what it raises ends the wait.

        Raises ConnectionError, OSError, InvalidRequest.
        """
        while (message := self.connection.receive(LOOK_SECONDS)) is None:
            check()
        if isinstance(message, HostRefusal):
            raise InvalidRequest(message.why, expected=message.expected, actual=message.actual)
        if not isinstance(message, RoundAnswer | Separate):
            raise InvalidRequest("the leader of this host sent what is no answer", actual=type(message).__name__)
        if isinstance(message, RoundAnswer):
            self.connection.mapped.used(part.segment for part in message.parts if part.segment)
        return message

    def region(self, segment: int, size_bytes: int) -> tuple[SharedMemory, torch.Tensor]:
        """The parameters that came, in the layout of a shard's region. Raises InvalidRequest."""
        found = self.connection.mapped.region(segment, size_bytes)
        if found is None:
            raise InvalidRequest("the leader of this host names memory that it has not lent", actual=str(segment))
        return found

    def away(self, phase: int, clock: int) -> None:
        """No push comes before this position. Raises OSError."""
        self.connection.send(Away(phase, clock))

    def close(self) -> None:
        """Leave the leader; its memory may be written from then on. Safe to repeat."""
        self.connection.close()
