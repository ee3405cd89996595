"""The calls of a fake shard: answered at once, or as its faults say."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import torch

from ps_protocol.errors import ModelMoved
from ps_protocol.model.spec import ShardMap
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire.convert.errors import to_detail
from tests.worker.fakes.faults import Faults
from tests.worker.fakes.model import FakeModel
from tests.worker.fakes.payloads import cut, in_replies, receive, refuse


class FakeShard:
    """A gRPC server with one model; what it was asked for can be looked at."""

    def __init__(self, shard_map: ShardMap, number: int) -> None:
        self.model = FakeModel(shard_map, number)
        self.faults = Faults()
        self.opens: list[pb.Open] = []
        self.pushes: list[pb.PushHeader] = []
        self.lookups: list[pb.Lookup] = []
        self.arrivals: list[int] = []
        self.loads = 0
        self.stand = (0, 0)
        self.torch_version = torch.__version__
        self._server: grpc.Server | None = None
        #: The push that ``on_push`` was called for.
        self._under_way: tuple[pb.PushHeader, list[torch.Tensor], bytes] | None = None
        self.address = "127.0.0.1:0"
        #: Keeps the port while the server is stopped, so that nobody else gets it before it starts again.
        self._place = socket.socket()
        self._place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self.serve()
        self._place.bind(("127.0.0.1", int(self.address.rpartition(":")[2])))

    def serve(self) -> None:
        """Start, at the address of before if there was one."""
        raw = {
            "Step": grpc.stream_stream_rpc_method_handler(self._step),
            "Pull": grpc.unary_stream_rpc_method_handler(self._pull),
            "Load": grpc.stream_unary_rpc_method_handler(self._load),
            "Save": grpc.unary_stream_rpc_method_handler(self._save),
            "GetRows": grpc.unary_stream_rpc_method_handler(self._get_rows),
            "LoadRows": grpc.stream_unary_rpc_method_handler(self._load_rows),
            "GetModel": grpc.unary_unary_rpc_method_handler(self._get_model),
        }
        self._server = grpc.server(ThreadPoolExecutor(8))
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("ps_protocol.v1.Shard", raw),))
        port = self._server.add_insecure_port(self.address)
        self.address = f"127.0.0.1:{port}"
        self._server.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(None).wait()
            self._server = None

    def close(self) -> None:
        """Stop, and give the port back."""
        self.stop()
        self._place.close()

    def take_under_way(self, worker: tuple[int, int]) -> None:
        """Apply the push under way, whose answer will not come."""
        assert self._under_way is not None
        self.model.apply(*self._under_way)
        self.model.last_sequence[worker] = self._under_way[0].sequence

    def _step(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        worker, epoch = (-1, -1), 0
        for data in requests:
            request = pb.StepRequest.FromString(data)
            match request.WhichOneof("body"):
                case "open":
                    self.opens.append(request.open)
                    self.faults.on_open()
                    if self.faults.refuse_open:
                        refuse(context, self.faults.refuse_open.pop())
                    epoch = request.open.epoch
                    self._check_epoch(epoch, context)
                    worker = (request.open.worker.rank, request.open.worker.incarnation)
                    if request.open.HasField("clock"):
                        self.stand = max(self.stand, (request.open.phase, request.open.clock))
                    yield pb.StepReply(opened=self._opened(worker)).SerializeToString()
                case "fetch":
                    yield from self._answer(pb.StepResult(outcome=pb.OUTCOME_APPLIED), with_buffers=True)
                case "arrive":
                    self.arrivals.append(request.arrive.phase)
                case "lookup":
                    self._check_epoch(epoch, context)
                    yield from self._look_up(request.lookup, requests, context)
                case "push":
                    self._check_epoch(epoch, context)
                    for data in self._exchange(request.push, worker, requests, context):
                        self._check_epoch(epoch, context)
                        yield data

    def _opened(self, worker: tuple[int, int]) -> pb.Opened:
        return pb.Opened(
            version=self.model.version,
            phase=self.stand[0],
            clock=self.stand[1],
            last_sequence=self.model.last_sequence.get(worker, 0),
            initialised=self.model.initialised,
            torch_version=self.torch_version,
        )

    def _exchange(
        self, header: pb.PushHeader, worker: tuple[int, int], requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        wanted = self.model.pushed(header)
        payload = header.payload or receive(requests, self.model.payload_bytes(header))
        self.pushes.append(header)
        if self.faults.on_push:
            self._under_way, layout = (header, wanted, payload), self.model.layout
            self.faults.on_push.pop()()
            self.faults.release.get()
            if layout is not self.model.layout:
                refuse(context, ModelMoved("slices have moved"))
        if self.faults.lose_push:
            self.faults.lose_push -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "lost before it was applied")
        for reason in self.faults.waiting:
            yield pb.StepReply(waiting=pb.Waiting(reason=reason)).SerializeToString()
        self.faults.waiting = []
        if self.faults.on_answer:
            self.faults.on_answer.pop()()
        result = pb.StepResult(sequence=header.sequence, clock=header.clock)
        if self.faults.refuse:
            result.outcome = pb.OUTCOME_REFUSED
            result.error.CopyFrom(to_detail(self.faults.refuse.pop()))
            yield pb.StepReply(result=result).SerializeToString()
            return
        self._decide(header, worker, result, wanted, payload)
        self.model.last_sequence[worker] = header.sequence
        self.stand = (header.phase, result.clock)
        if self.faults.lose_reply:
            self.faults.lose_reply -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "lost after it was applied")
        yield from self._answer(result, with_buffers=False)

    def _decide(
        self,
        header: pb.PushHeader,
        worker: tuple[int, int],
        result: pb.StepResult,
        wanted: list[torch.Tensor],
        payload: bytes,
    ) -> None:
        """Apply the push, or not, and write into ``result`` what became of it."""
        if header.sequence <= self.model.last_sequence.get(worker, 0):
            result.outcome = pb.OUTCOME_DUPLICATE
        elif self.faults.late:
            result.outcome, result.clock = pb.OUTCOME_LATE, self.faults.late.pop()
        elif self.faults.step_raises:
            result.outcome, self.model.version = pb.OUTCOME_SKIPPED, self.model.version + 1
            result.error.CopyFrom(to_detail(self.faults.step_raises.pop()))
        elif header.skipped:
            result.outcome = pb.OUTCOME_SKIPPED
        else:
            result.outcome, result.staleness = pb.OUTCOME_APPLIED, self.model.version - header.pulled_version
            self.model.apply(header, wanted, payload)

    def _answer(self, result: pb.StepResult, *, with_buffers: bool) -> Iterator[bytes]:
        payload = self.model.values(with_buffers=with_buffers)
        result.version, result.payload_bytes, result.with_buffers = self.model.version, len(payload), with_buffers
        yield pb.StepReply(result=result).SerializeToString()
        yield from in_replies(payload)

    def _look_up(self, lookup: pb.Lookup, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        ids = np.frombuffer(lookup.payload or receive(requests, 8 * sum(t.rows for t in lookup.tables)), np.int64)
        self.lookups.append(lookup)
        if self.faults.lose_lookup:
            self.faults.lose_lookup -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "lost before it was answered")
        while self.faults.hold_ahead and lookup.clock > self.stand[1] + 1 and context.is_active():
            yield pb.StepReply(waiting=pb.Waiting(reason="ahead")).SerializeToString()
            time.sleep(0.01)
        error = self.faults.on_lookup.pop()() if self.faults.on_lookup else None
        rows = pb.Rows(number=lookup.number, version=self.model.version)
        if error is not None:
            rows.error.CopyFrom(to_detail(error))
            yield pb.StepReply(rows=rows).SerializeToString()
            return
        tables = [each.table for each in lookup.tables for _ in range(each.rows)]
        yield from self._send_rows(rows, list(zip(tables, ids.tolist(), strict=True)))

    def _send_rows(self, rows: pb.Rows, wanted: list[tuple[int, int]]) -> Iterator[bytes]:
        payload = self.model.tables.read(wanted)
        rows.payload_bytes = len(payload)
        yield pb.StepReply(rows=rows).SerializeToString()
        yield from in_replies(payload)

    def _get_rows(self, data: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        request = pb.GetRowsRequest.FromString(data)
        self._check_epoch(request.epoch, context)
        ids = np.frombuffer(request.ids, np.int64).tolist()
        yield from self._send_rows(pb.Rows(version=self.model.version), [(request.table, row) for row in ids])

    def _load_rows(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        header = pb.LoadRowsRequest.FromString(next(requests)).header
        assert header.only_new
        assert not self.model.initialised
        self.model.tables.load(header, b"".join(pb.LoadRowsRequest.FromString(d).chunk.payload for d in requests))
        return pb.LoadRowsReply(written=header.rows).SerializeToString()

    def _pull(self, data: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        self._check_epoch(pb.PullRequest.FromString(data).epoch, context)
        yield from self._answer(pb.StepResult(outcome=pb.OUTCOME_APPLIED), with_buffers=True)

    def _load(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        header = pb.LoadRequest.FromString(next(requests)).header
        payload = b"".join(pb.LoadRequest.FromString(data).chunk.payload for data in requests)
        written = not (header.only_if_uninitialised and self.model.initialised)
        if written:
            self.loads += 1
            self.model.load(header, payload)
        return pb.LoadReply(version=self.model.version, written=written).SerializeToString()

    def _save(self, _: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        header, payload = self.model.save()
        yield pb.SaveReply(header=header).SerializeToString()
        for chunk in cut(payload):
            yield pb.SaveReply(chunk=chunk).SerializeToString()

    def _get_model(self, _: bytes, context: grpc.ServicerContext) -> bytes:
        return self.model.status().SerializeToString()

    def _check_epoch(self, epoch: int, context: grpc.ServicerContext) -> None:
        if epoch != self.model.layout.shard_map.epoch:
            refuse(context, ModelMoved("slices have moved"))
