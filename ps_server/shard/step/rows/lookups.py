"""Rows of tables that a worker asks for on its step stream: takes the ids, and answers when the mode allows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from ps_protocol.cluster.answers import RowsAnswer
from ps_protocol.cluster.requests import LookupHeader
from ps_protocol.errors import InvalidRequest
from ps_server.consistency import Position, WorkerKey
from ps_server.shard.byte_budget import ByteBudget
from ps_server.shard.counters import Counters
from ps_server.shard.step.model import ShardModel
from ps_server.shard.step.push_reader import PushReader
from ps_server.shard.step.rows.pushed_rows import RequestedLookup, wanted
from ps_server.shard.transport.base import ServerTransport


class StreamLookups:
    """Belongs to one StepStream: its reading task takes lookups, its writing task answers them."""

    def __init__(
        self,
        transport: ServerTransport,
        model: ShardModel,
        worker: WorkerKey,
        counters: Counters,
        reader: PushReader,
        answers: ByteBudget,
        wait_for_mode: Callable[[Position], Awaitable[object]],
    ) -> None:
        """``answers`` limits the bytes on their way; ``wait_for_mode`` returns when a pull at a position may go."""
        self._transport = transport
        self._model = model
        self._worker = worker
        self._counters = counters
        self._reader = reader
        self._answers = answers
        self._wait_for_mode = wait_for_mode

    async def take(self, lookup: LookupHeader) -> RequestedLookup:
        """Take the ids of a lookup. Raises InvalidRequest, ConnectionError, StateLost."""
        self._model.values.require()
        asked = wanted(lookup.tables, self._model.layout)
        await self._reader.receive(lookup.payload, [asked.buffer])
        if lookup.position is None:
            return RequestedLookup(lookup.number, asked, None)
        phase, clock = lookup.position
        if clock < 1:
            raise InvalidRequest(
                "a lookup does not name the push it is for", expected="a clock from 1", actual=str(clock)
            )
        return RequestedLookup(lookup.number, asked, Position(phase, clock - 1))

    async def answer(self, asked: RequestedLookup) -> None:
        """Send the rows, or why there are none. Raises what stopped the model, ConnectionError."""
        if asked.position is not None:
            await self._wait_for_mode(asked.position)
        room = self._transport.room(asked.wanted.rows_bytes)
        # Not before the mode lets it be answered: a waiting worker would hold what the others need.
        async with self._answers.taken(self._worker, 0 if room is not None else asked.wanted.rows_bytes):
            try:
                version, rows = await self._model.rows.look_up(asked.wanted, room, for_push=asked.position is not None)
            except InvalidRequest as error:
                await self._transport.send_payload(RowsAnswer(asked.number, error=error), [])
                return
            await self._transport.send_rows(RowsAnswer(asked.number, version), rows, in_room=room is not None)
        self._counters.traffic[self._transport.kind].sent += len(rows)
