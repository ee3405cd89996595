"""Sends rows from files to the shards of a running job, each to the shard of its bucket."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import grpc
import numpy as np

from ps_protocol.client.coordinator import CoordinatorClient, JoinSpec
from ps_protocol.client.membership import Membership
from ps_protocol.cluster.view import Role
from ps_protocol.errors import InvalidRequest, ModelMoved, PsError, Retryable, Unavailable
from ps_protocol.model.ids import split
from ps_protocol.model.spec import ShardMap
from ps_protocol.model.tables import TableSpec
from ps_protocol.retry import SHARD, Attempts
from ps_protocol.rpc.client_errors import translate
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire.chunks import LOAD_ROWS_REQUESTS
from ps_server.checkpoint.export.row_files import RowFile, Rows

PIECE_BYTES = 8 << 20
"""Size of one write: one record in the log of each shard, between two updates."""

JOIN_SECONDS = 10.0
CALL_SECONDS = 60.0

_METHOD = "/ps_protocol.v1.Shard/LoadRows"


class RowLoader:
    """Writes to one table of a running job, in one thread. Of rows with the same id the last one counts."""

    def __init__(self, client: CoordinatorClient, model: str, table: str, exits: ExitStack) -> None:
        """Join the job as an evaluator, until ``exits`` close: shards accept rows from members only.

        Raises UnknownModel, InvalidRequest for a table it does not have, Unavailable.
        """
        self._client = client
        self._model = model
        self._exits = exits
        self._stubs: dict[str, grpc.StreamUnaryMultiCallable[bytes, pb.LoadRowsReply]] = {}
        known = [spec.name for spec in self._look().spec.tables]
        if table not in known:
            raise InvalidRequest(
                f"model '{model}' has no table '{table}'" if known else f"model '{model}' has no tables at all",
                expected=", ".join(known) or "a model with tables",
                actual=table,
                remedy="correct --table, or give the right --model",
            )
        self._table = known.index(table)
        self._membership = exits.enter_context(Membership.join(client, JoinSpec(Role.EVALUATOR), JOIN_SECONDS))

    @property
    def spec(self) -> TableSpec:
        """The table as it was declared."""
        return self._map.spec.tables[self._table]

    def load(self, files: Sequence[RowFile], progress: Callable[[int], None], *, only_new: bool = False) -> int:
        """Write the rows of ``files``; returns how many. ``progress`` is called with the number of rows of each write.

        ``only_new``: existing rows are not changed. All files are read once before the first write. Raises
        InvalidRequest for NaN or infinity, Fenced; the errors of the shards, Unavailable, NotReady and StorageFull only
        after a minute. Rows that were written remain; call it again to continue.
        """
        for file in files:
            file.check_values()
        written = 0
        for file in files:
            width = self.spec.width if file.with_state else self.spec.dim
            for piece in file.pieces(max(1, PIECE_BYTES // (8 + 4 * width))):
                self._persistently(piece, with_state=file.with_state, only_new=only_new)
                written += piece.ids.size
                progress(piece.ids.size)
        return written

    def _persistently(self, piece: Rows, **how: bool) -> None:
        attempts = Attempts(SHARD.within(60.0))
        while True:
            try:
                return self._send(piece, **how)
            except (Retryable, ModelMoved) as error:
                if (pause := attempts.pause_after(error)) is None:
                    raise
                time.sleep(pause)
                if isinstance(error, ModelMoved | Unavailable):
                    self._look()

    def _look(self) -> ShardMap:
        """Fetch the shard map, and the addresses of the shards."""
        self._map = self._client.get_shard_map(self._model)
        self._members = self._client.get_status().view.live(Role.SHARD)
        return self._map

    def _send(self, piece: Rows, *, with_state: bool, only_new: bool) -> None:
        """Send each shard its rows, all at once. Raises the first error after all have answered."""
        places = np.array(self._map.tables[self._table], np.int32)
        order, counts = split(piece.ids, places, int(places.max()) + 1)
        self._membership.check()
        member = self._membership.member
        calls, begin = [], 0
        for shard, count in enumerate(counts.tolist()):
            mine = order[begin : begin + count]
            begin += count
            if not count:
                continue
            header = pb.LoadRowsHeader(
                worker=pb.WorkerId(rank=member.index, incarnation=member.incarnation),
                membership_revision=self._membership.view.revision,
                model=self._model,
                epoch=self._map.epoch,
                table=self._table,
                rows=count,
                with_state=with_state,
                only_new=only_new,
            )
            address = self._address(shard)
            arrays = piece.ids[mine], piece.values[mine]
            requests = _requests(header, [memoryview(a.reshape(-1).view(np.uint8).data) for a in arrays])
            calls.append((f"shard {shard} at {address}", self._stub(address).future(requests, timeout=CALL_SECONDS)))
        errors = [error for peer, call in calls if (error := _failure(peer, call))]
        if errors:
            raise errors[0]

    def _address(self, shard: int) -> str:
        if shard not in self._members:
            raise Unavailable(f"shard {shard} is missing", shard=str(shard), remedy="start it, then try again")
        return self._members[shard].address

    def _stub(self, address: str) -> Any:
        if address not in self._stubs:
            channel = self._exits.enter_context(self._membership.open_shard(address))
            self._stubs[address] = channel.stream_unary(_METHOD, response_deserializer=pb.LoadRowsReply.FromString)
        return self._stubs[address]


def _requests(header: pb.LoadRowsHeader, pieces: Sequence[memoryview]) -> Iterator[bytes]:
    yield pb.LoadRowsRequest(header=header).SerializeToString()
    yield from LOAD_ROWS_REQUESTS.chunks(pieces)


def _failure(peer: str, call: Any) -> PsError | None:
    try:
        call.result()
    except grpc.RpcError as error:
        return translate(error, peer)
    return None
