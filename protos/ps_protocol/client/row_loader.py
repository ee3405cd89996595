"""Writes rows to a table of a running job, each to the shard of its bucket."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from ps_protocol import times
from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.client.membership import Membership
from ps_protocol.cluster.view import JoinRequest, Role
from ps_protocol.errors import InvalidRequest, ModelMoved, PsError, Retryable, Unavailable
from ps_protocol.model.ids import split
from ps_protocol.model.spec import ShardMap
from ps_protocol.model.tables import Ids, TableSpec
from ps_protocol.retry import SHARD, Attempts
from ps_protocol.rpc.client_errors import translate
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire.chunks import LOAD_ROWS_REQUESTS

PIECE_BYTES = 8 << 20
"""Size of one write: one record in the log of each shard, between two updates."""


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
                remedy="correct the name of the table, or give the right model",
            )
        self._table = known.index(table)
        self._membership = exits.enter_context(Membership.join(client, JoinRequest(Role.EVALUATOR), times.CALL_SECONDS))

    @property
    def spec(self) -> TableSpec:
        """The declaration of the table."""
        return self._map.spec.tables[self._table]

    @property
    def piece_rows(self) -> int:
        """How many rows to write at once: PIECE_BYTES with their state, one record in the log of each shard."""
        return max(1, PIECE_BYTES // (8 + 4 * self.spec.width))

    def check(self, ids: npt.NDArray[Any], values: npt.NDArray[Any]) -> None:
        """Raise InvalidRequest for rows that do not fit the table, or have NaN or infinity; nothing is written then."""
        spec, rows = self.spec, ids.shape[0] if ids.ndim else 0
        shapes = [(rows, spec.dim), (rows, spec.width)]
        if ids.ndim != 1 or ids.dtype != np.int64:
            raise self._wrong("ids", "int64 [n]", f"{ids.dtype} {list(ids.shape)}")
        if values.shape not in shapes or values.dtype != np.float32:
            expected = " or ".join(f"float32 {list(shape)}" for shape in dict.fromkeys(shapes))
            raise self._wrong("values", expected, f"{values.dtype} {list(values.shape)}")
        finite = np.isfinite(values).all(1)
        if not finite.all():
            raise self._wrong("values", "finite numbers", f"NaN or infinity in the row of id {ids[~finite][0]}")

    def write(self, ids: Ids, values: npt.NDArray[np.float32], *, only_new: bool = False) -> None:
        """Write rows that ``check`` has accepted, in one piece: ``piece_rows`` of them at most.

        ``only_new``: existing rows are not changed. Raises Fenced; the errors of the shards, Unavailable, NotReady and
        StorageFull only after a minute.
        """
        attempts = Attempts(SHARD.within(60.0))
        while True:
            try:
                return self._send(ids, values, only_new=only_new)
            except (Retryable, ModelMoved) as error:
                if (pause := attempts.pause_after(error)) is None:
                    raise
                time.sleep(pause)
                if isinstance(error, ModelMoved | Unavailable):
                    self._look()

    def _wrong(self, what: str, expected: str, actual: str) -> InvalidRequest:
        return InvalidRequest(
            f"the {what} do not fit table '{self.spec.name}'; nothing was written",
            variable=self.spec.name,
            expected=expected,
            actual=actual,
            remedy="give int64 ids [n] and float32 rows [n, dim], with or without the state of the row optimizer",
        )

    def _look(self) -> ShardMap:
        """Fetch the shard map, and the addresses of the shards."""
        self._map = self._client.get_shard_map(self._model)
        self._members = self._client.get_status().view.live(Role.SHARD)
        return self._map

    def _send(self, ids: Ids, values: npt.NDArray[np.float32], *, only_new: bool) -> None:
        """Send each shard its rows, all at once. Raises the first error after all have answered."""
        places = np.array(self._map.tables[self._table], np.int32)
        order, counts = split(ids, places, int(places.max()) + 1)
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
                with_state=values.shape[1] != self.spec.dim,
                only_new=only_new,
            )
            address = self._address(shard)
            arrays = ids[mine], values[mine]
            requests = _requests(header, [memoryview(a.reshape(-1).view(np.uint8).data) for a in arrays])
            call = self._stub(address).future(requests, timeout=times.PATIENCE_SECONDS)
            calls.append((f"shard {shard} at {address}", call))
        errors = [error for peer, call in calls if (error := _failure(peer, call))]
        if errors:
            raise errors[0]

    def _address(self, shard: int) -> str:
        if shard not in self._members:
            raise Unavailable(f"shard {shard} is missing", shard=str(shard), remedy="start it, then try again")
        return self._members[shard].address

    def _stub(self, address: str) -> Any:
        if address not in self._stubs:
            channel = self._exits.enter_context(closing(self._membership.open_shard(address)))
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
