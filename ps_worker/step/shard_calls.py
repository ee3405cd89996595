"""The calls to a shard that are not part of the step stream: status, pull, load, save, and rows of tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
import torch
from google.protobuf.message import DecodeError

from ps_protocol import times
from ps_protocol.cluster.answers import Answer, RowsAnswer, StepAnswer
from ps_protocol.cluster.model_status import ModelStatus
from ps_protocol.errors import InternalError
from ps_protocol.interruptible import result_of
from ps_protocol.model.payload_headers import StateHeader
from ps_protocol.model.spec import DType
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire.chunks import LOAD_REQUESTS, LOAD_ROWS_REQUESTS, SAVE_REPLIES
from ps_protocol.wire.convert.shard import STATE_HEADER, model_status_from_pb
from ps_worker.model.optimizer_state import StateEntry, tensor_bytes
from ps_worker.transport.base import GrpcReplies, Peer, read_answer, read_message, read_payload, rpc_errors
from ps_worker.transport.call_messages import CallMessages

_SERVICE = "/ps_protocol.v1.Shard/"


@dataclass(frozen=True, slots=True)
class Writer:
    """The worker that writes. Shards refuse workers that are not live members."""

    rank: int
    incarnation: int
    #: A view of the cluster that includes it.
    revision: int

    @property
    def id(self) -> pb.WorkerId:
        """As messages name it."""
        return pb.WorkerId(rank=self.rank, incarnation=self.incarnation)


@dataclass(frozen=True, slots=True)
class ShardClient:
    """One model on one shard. Used from any thread; each call has a deadline and raises PsError."""

    channel: grpc.Channel
    peer: Peer
    model: str
    #: Epoch of the shard map in use.
    epoch: int

    def status(self) -> ModelStatus:
        """The state of the model on this shard. Safe to repeat."""
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self.channel.unary_unary(_SERVICE + "GetModel")
        with rpc_errors(self.peer):
            data = call(pb.GetModelRequest(model=self.model).SerializeToString(), timeout=times.SHARD_CALL_SECONDS)
        return model_status_from_pb(pb.ModelStatus.FromString(data))

    def pull(self, place: Callable[[StepAnswer], Sequence[memoryview]], region_bytes: int) -> int:
        """Receive parameters and buffers into ``place``; returns their version. Safe to repeat."""

        def place_result(answer: Answer) -> Sequence[memoryview]:
            return place(answer) if isinstance(answer, StepAnswer) else ()

        request = pb.PullRequest(model=self.model, epoch=self.epoch).SerializeToString()
        with rpc_errors(self.peer), self._stream("Pull", request, region_bytes) as replies:
            result = read_answer(GrpcReplies(replies, self.peer), place_result, _ignore, self.peer)
        if not isinstance(result, StepAnswer):
            raise InternalError(f"{self.peer} did not answer a pull with a result", shard=str(self.peer.shard))
        return result.version

    def get_rows(self, table: int, ids: Sequence[memoryview], rows: Sequence[memoryview]) -> None:
        """Read rows of table number ``table`` into ``rows``; at most 3 MB of ids. Safe to repeat."""
        request = pb.GetRowsRequest(model=self.model, epoch=self.epoch, table=table, ids=b"".join(ids))
        expected_bytes = sum(map(len, rows))
        with (
            rpc_errors(self.peer),
            self._stream("GetRows", request.SerializeToString(), expected_bytes) as replies,
        ):
            answer = read_answer(GrpcReplies(replies, self.peer), lambda _: rows, _ignore, self.peer)
        if not isinstance(answer, RowsAnswer):
            raise InternalError(f"{self.peer} did not answer GetRows with rows", shard=str(self.peer.shard))

    def load_rows(self, writer: Writer, table: int, rows: int, pieces: Sequence[memoryview]) -> int:
        """Write rows that are not there yet: the bytes of all ids, then of all rows; returns how many were written.

        Safe to repeat.
        """
        header = pb.LoadRowsHeader(
            model=self.model,
            epoch=self.epoch,
            table=table,
            rows=rows,
            only_new=True,
            worker=writer.id,
            membership_revision=writer.revision,
        )

        def requests() -> Iterator[bytes]:
            yield pb.LoadRowsRequest(header=header).SerializeToString()
            yield from LOAD_ROWS_REQUESTS.chunks(pieces)

        return pb.LoadRowsReply.FromString(self._send("LoadRows", requests(), sum(map(len, pieces)))).written

    def load_region(self, writer: Writer, pieces: Sequence[memoryview], state: Sequence[StateEntry] = ()) -> bool:
        """Upload the whole region unless the shard holds values already; returns whether it took them.

        ``state``: optimizer state that the shard takes with them, or not at all.
        """
        header = self._header(writer)
        header.only_if_uninitialised = header.with_region = True
        return self._load(header, [*pieces, *_state_pieces(header, state)] if state else pieces).written

    def assign(
        self, writer: Writer, slices: Sequence[int], pieces: Sequence[memoryview], checksums: Sequence[int]
    ) -> None:
        """Write values of some slices over those the shard has. Safe to repeat. ``checksums``: of each, or none."""
        header = self._header(writer)
        header.with_region = True
        header.slices.extend(slices)
        header.checksums.extend(checksums)
        self._load(header, pieces)

    def load_state(self, writer: Writer, entries: Sequence[StateEntry]) -> None:
        """Replace all optimizer state of this shard. Safe to repeat."""
        header = self._header(writer)
        self._load(header, _state_pieces(header, entries))

    def save(self, region_bytes: int, slices: Sequence[int] = ()) -> list[StateEntry]:
        """The optimizer state of one version, of ``slices`` or of all. Safe to repeat."""
        request = pb.SaveRequest(model=self.model, epoch=self.epoch, slices=slices).SerializeToString()
        # No torch optimizer keeps more than four tensors of a variable's size.
        with rpc_errors(self.peer), self._stream("Save", request, 5 * region_bytes) as replies:
            header = self._save_header(read_message(replies, self.peer))
            entries = [_allocate(state) for state in STATE_HEADER.all_from_pb(header.state)]
            # The payload starts with the parameters and buffers of the same version; they are not asked for here.
            state = [tensor_bytes(entry.tensor) for entry in entries]
            values = memoryview(bytearray(header.payload_bytes - sum(map(len, state))))
            read_payload(replies, SAVE_REPLIES, [values, *state], self.peer)
        return entries

    def _save_header(self, data: bytes) -> pb.SaveHeader:
        try:
            reply = pb.SaveReply.FromString(data)
        except DecodeError:
            reply = pb.SaveReply()
        if reply.WhichOneof("body") != "header":
            raise InternalError(f"{self.peer} did not answer Save with a header", shard=str(self.peer.shard))
        return reply.header

    def _header(self, writer: Writer) -> pb.LoadHeader:
        revision = writer.revision
        return pb.LoadHeader(model=self.model, epoch=self.epoch, worker=writer.id, membership_revision=revision)

    def _load(self, header: pb.LoadHeader, pieces: Sequence[memoryview]) -> pb.LoadReply:
        def requests() -> Iterator[bytes]:
            yield pb.LoadRequest(header=header).SerializeToString()
            yield from LOAD_REQUESTS.chunks(pieces)

        return pb.LoadReply.FromString(self._send("Load", requests(), sum(map(len, pieces))))

    def _send(self, method: str, requests: Iterator[bytes], size_bytes: int) -> bytes:
        call: grpc.StreamUnaryMultiCallable[bytes, bytes] = self.channel.stream_unary(_SERVICE + method)
        with rpc_errors(self.peer):
            future = call.future(requests, timeout=_seconds(size_bytes))
            try:
                reply: bytes = result_of(future)
                return reply
            finally:
                future.cancel()

    @contextmanager
    def _stream(self, method: str, request: bytes, expected_bytes: int) -> Iterator[Iterator[bytes]]:
        """The replies to ``request``. The call ends with the block, also after Ctrl-C."""
        call: grpc.UnaryStreamMultiCallable[bytes, bytes] = self.channel.unary_stream(_SERVICE + method)
        replies = call(request, timeout=_seconds(expected_bytes))
        try:
            yield CallMessages(replies)
        finally:
            replies.cancel()


def _state_pieces(header: pb.LoadHeader, entries: Sequence[StateEntry]) -> list[memoryview]:
    """The bytes of ``entries``, announced in ``header``."""
    header.with_state = True
    header.state.extend(
        STATE_HEADER.all_to_pb(
            StateHeader(each.slice_index, each.name, _dtype(each.tensor), tuple(each.tensor.shape)) for each in entries
        )
    )
    return [tensor_bytes(entry.tensor) for entry in entries]


def _seconds(transfer_bytes: int) -> float:
    return times.SHARD_CALL_SECONDS + transfer_bytes / times.SLOWEST_BYTES_PER_SECOND


def _ignore(_: str) -> None:
    """A pull outside of the step stream is answered at once and reports no waiting."""


def _dtype(tensor: torch.Tensor) -> DType:
    return DType(str(tensor.dtype).removeprefix("torch."))


def _allocate(state: StateHeader) -> StateEntry:
    dtype = getattr(torch, state.dtype.value)
    return StateEntry(state.slice_index, state.name, torch.empty(state.shape, dtype=dtype))
