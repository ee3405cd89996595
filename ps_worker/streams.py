"""The long-lived Step stream between one worker, one shard and one model."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator

import grpc

from ps_protocol.errors import InternalError
from ps_protocol.frames import STEP_CHUNK_FIELD
from ps_protocol.v1 import shard_pb2 as pb
from ps_worker.replies import Peer, Place, encode_chunks, read_result, read_step_reply, rpc_errors

_METHOD = "/ps_protocol.v1.Shard/Step"


class StepStream:
    """Used by the training thread; gRPC's own thread takes requests from the outbox and encodes them there.

    Sending never waits. At most one encoded chunk is in memory: gRPC asks for the next when the last is on its way.
    When the call ends, for whatever reason, the outbox is closed, so gRPC's thread ends too. Receiving can be
    interrupted by Ctrl-C.
    """

    def __init__(self, channel: grpc.Channel, peer: Peer, on_wait: Callable[[str], None]) -> None:
        self._peer = peer
        self._on_wait = on_wait
        self._outbox: queue.SimpleQueue[Iterator[bytes] | None] = queue.SimpleQueue()
        step: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(_METHOD)
        self._call = step(_drain(self._outbox))
        self._call.add_callback(_closer(self._outbox))

    @property
    def alive(self) -> bool:
        """Whether the call has not ended, as far as this side knows."""
        return bool(self._call.is_active())

    def open(self, request: pb.Open) -> pb.Opened:
        """The first exchange. Raises the PsError the shard answers, or Unavailable."""
        self._send(pb.StepRequest(open=request))
        with rpc_errors(self._peer):
            while (reply := read_step_reply(self._call, self._peer)).WhichOneof("body") == "waiting":
                self._on_wait(reply.waiting.reason)
        if reply.WhichOneof("body") != "opened":
            raise InternalError(f"{self._peer} did not answer Open", shard=str(self._peer.shard))
        return reply.opened

    def push(self, header: pb.PushHeader, payload: list[memoryview]) -> None:
        """Queue one push; ``payload`` must not change until its result has been received."""
        self._send(pb.StepRequest(push=header))
        self._outbox.put(encode_chunks(STEP_CHUNK_FIELD, payload))

    def arrive(self, phase: int) -> None:
        """Queue the news that this worker enters the barrier that ends ``phase``."""
        self._send(pb.StepRequest(arrive=pb.Arrive(phase=phase)))

    def receive(self, place: Place) -> pb.StepResult:
        """The result of the oldest push without one, its payload in place. Raises PsError."""
        with rpc_errors(self._peer):
            return read_result(self._call, place, self._on_wait, self._peer)

    def close(self) -> None:
        """End the call now. Safe to repeat."""
        self._call.cancel()
        self._outbox.put(None)

    def _send(self, message: pb.StepRequest) -> None:
        self._outbox.put(iter((message.SerializeToString(),)))


def _drain(outbox: queue.SimpleQueue[Iterator[bytes] | None]) -> Iterator[bytes]:
    while (messages := outbox.get()) is not None:
        yield from messages


def _closer(outbox: queue.SimpleQueue[Iterator[bytes] | None]) -> Callable[[], None]:
    """Refers to the outbox alone: the call must not keep the stream alive."""
    return lambda: outbox.put(None)
