"""The lookups of one stream that have not been answered."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ps_protocol.cluster.answers import RowsAnswer
from ps_protocol.cluster.requests import LookupHeader
from ps_protocol.errors import InternalError
from ps_worker.tables.lookup import Position, ShardLookup
from ps_worker.transport.replies import Peer


class PendingLookups:
    """Used by one shard's stream. A shard answers in the order of the requests."""

    def __init__(self) -> None:
        self._parts: deque[tuple[int, ShardLookup]] = deque()
        self._number = 0

    def __contains__(self, part: ShardLookup) -> bool:
        return any(asked is part for _, asked in self._parts)

    def ask(self, part: ShardLookup, position: Position, *, now: bool) -> LookupHeader:
        """The request for ``part``, which counts as sent from now on."""
        self._number += 1
        self._parts.append((self._number, part))
        return LookupHeader(self._number, part.tables, None if now else position)

    def place(self, rows: RowsAnswer, peer: Peer) -> Sequence[memoryview]:
        """The memory for the payload of ``rows``. Raises InternalError when these rows are not due."""
        return self._due(rows, peer).pieces

    def complete(self, rows: RowsAnswer, peer: Peer) -> None:
        """The payload of ``rows`` has been received. Raises as ``place``."""
        part = self._due(rows, peer)
        self._parts.popleft()
        part.error = rows.error
        part.arrived = True

    def forget(self) -> None:
        """Forget all lookups: the stream has ended."""
        self._parts.clear()

    def _due(self, rows: RowsAnswer, peer: Peer) -> ShardLookup:
        if not self._parts or self._parts[0][0] != rows.number:
            raise InternalError(
                f"{peer} sent rows that are not due",
                shard=str(peer.shard),
                expected=f"those of lookup {self._parts[0][0]}" if self._parts else "none",
                actual=f"those of lookup {rows.number}",
            )
        return self._parts[0][1]
