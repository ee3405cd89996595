"""Knows which rows have been asked for on one stream and are to come."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ps_protocol.errors import InternalError, from_detail
from ps_protocol.v1 import shard_pb2 as pb
from ps_worker.replies import Peer
from ps_worker.tables.lookup import Part, Position


class Asked:
    """Used by the lane of one stream. A shard answers in the order it was asked."""

    def __init__(self) -> None:
        self._parts: deque[tuple[int, Part]] = deque()
        self._number = 0

    def __contains__(self, part: Part) -> bool:
        return any(asked is part for _, asked in self._parts)

    def ask(self, part: Part, position: Position, *, now: bool) -> pb.Lookup:
        """The question, which then counts as sent."""
        self._number += 1
        self._parts.append((self._number, part))
        if now:
            return pb.Lookup(number=self._number, tables=part.tables, now=True)
        return pb.Lookup(number=self._number, tables=part.tables, phase=position[0], clock=position[1])

    def place(self, rows: pb.Rows, peer: Peer) -> Sequence[memoryview]:
        """Where the payload of ``rows`` goes. Raises InternalError when these rows are not due."""
        return self._due(rows, peer).pieces

    def settle(self, rows: pb.Rows, peer: Peer) -> None:
        """The payload of ``rows`` is in its place. Raises as ``place``."""
        part = self._due(rows, peer)
        self._parts.popleft()
        if rows.HasField("error"):
            part.error = from_detail(rows.error)
        part.arrived = True

    def forget(self) -> None:
        """The stream has ended: nothing comes any more."""
        self._parts.clear()

    def _due(self, rows: pb.Rows, peer: Peer) -> Part:
        if not self._parts or self._parts[0][0] != rows.number:
            raise InternalError(
                f"{peer} sent rows that are not due",
                shard=str(peer.shard),
                expected=f"those of lookup {self._parts[0][0]}" if self._parts else "none",
                actual=f"those of lookup {rows.number}",
            )
        return self._parts[0][1]
