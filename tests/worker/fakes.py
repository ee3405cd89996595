"""A session without a coordinator, and shards in this process that speak the protocol and misbehave when told to."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import numpy as np
import torch

from ps_protocol.cluster.transport import Transport
from ps_protocol.errors import ERROR_TRAILER, ModelMoved, PsError
from ps_protocol.model.ids import buckets_of
from ps_protocol.model.layout import Layout, aligned
from ps_protocol.model.spec import ALIGNMENT_BYTES, Consistency, Kind, Mode, ModelSpec, ShardMap, Slice
from ps_protocol.rpc.channel import open_channel
from ps_protocol.security.security import OFF
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire.convert import model as convert_model
from ps_protocol.wire.convert.errors import to_detail
from ps_protocol.wire.convert.options import options_from_pb, row_options_from_pb
from ps_worker.session.instruments import Instruments
from ps_worker.session.reporting import WorkerCounters

CHUNK_BYTES = 1000


def place(spec: ModelSpec, shards: int, split_rows: int = 8) -> ShardMap:
    """Whole variables in turn; one with ``split_rows`` rows or more goes to all shards, after the whole ones."""
    whole, split = [], []
    for number, variable in enumerate(spec.variables):
        if variable.rows >= split_rows and shards > 1 and not spec.unsplit:
            borders = [variable.rows * i // shards for i in range(shards + 1)]
            split += [Slice(number, borders[i], borders[i + 1], i) for i in range(shards)]
        else:
            whole.append(Slice(number, 0, variable.rows, number % shards))
    tables = tuple(tuple(bucket % shards for bucket in range(table.buckets)) for table in spec.tables)
    return ShardMap(1, spec, shards, (*whole, *split), tables=tables)


def first_row(row: int, dim: int) -> np.ndarray:
    """What a fake table's row begins with."""
    return np.sin(np.arange(1, dim + 1) * (row % 1000 + 1)).astype(np.float32)


@dataclass
class Faults:
    """What to do to the next pushes; each entry is used up by one push."""

    #: Applied, but the stream breaks before the answer.
    lose_reply: int = 0
    #: The stream breaks before the push is applied.
    lose_push: int = 0
    #: Say these while the pull is parked.
    waiting: list[str] = field(default_factory=list)
    refuse: list[PsError] = field(default_factory=list)
    #: Its step raises with this, and is skipped: the version and the clock move, nothing else.
    step_raises: list[PsError] = field(default_factory=list)
    #: Answer LATE with this clock.
    late: list[int] = field(default_factory=list)
    #: Called when a push has arrived; the answer waits until ``release`` is put.
    on_push: list[Callable[[], None]] = field(default_factory=list)
    release: queue.SimpleQueue[None] = field(default_factory=queue.SimpleQueue)
    #: Called before a push is answered, once ``waiting`` has been said.
    on_answer: list[Callable[[], Any]] = field(default_factory=list)
    #: Called when a lookup has arrived, before it is answered; an error returned is the answer.
    on_lookup: list[Callable[[], PsError | None]] = field(default_factory=list)
    #: The stream breaks before the lookup is answered.
    lose_lookup: int = 0
    #: As in sync: a lookup for a push behind the next one waits, and what comes behind it.
    hold_ahead: bool = False
    #: Called whenever a stream is opened.
    on_open: Callable[[], None] = lambda: None
    #: Answers to the next streams, the last one first, in the place of opening them.
    refuse_open: list[PsError] = field(default_factory=list)


class FakeShard:
    """Applies every push at once with the torch class itself, one tensor per slice; rows of tables by plain SGD."""

    def __init__(self, shard_map: ShardMap, number: int) -> None:
        self.layout = Layout.of(shard_map, number)
        self.faults = Faults()
        self.opens: list[pb.Open] = []
        self.pushes: list[pb.PushHeader] = []
        self.lookups: list[pb.Lookup] = []
        self.arrivals: list[int] = []
        self.loads = 0
        self.stand = (0, 0)
        self.torch_version = torch.__version__
        self.table_options: dict[int, float] = {}
        self.forget()
        self._server: grpc.Server | None = None
        #: The push that ``on_push`` was called for.
        self.under_way: tuple[pb.PushHeader, list[torch.Tensor], bytes] | None = None
        self.address = "127.0.0.1:0"
        self.serve()

    def forget(self) -> None:
        """As a shard without durability comes back."""
        self.initialised = False
        #: What it says of workers' positions, and how often values were replaced.
        self.clocks: dict[int, tuple[int, int]] = {}
        self.assigned = 0
        self.assigned_checksums: dict[int, int] = {}
        self.version = 0
        #: By table and id.
        self.rows: list[dict[int, np.ndarray]] = [{} for _ in self.layout.shard_map.spec.tables]
        self.last_sequence: dict[tuple[int, int], int] = {}
        self.tensors = [
            torch.zeros(span.shape, dtype=getattr(torch, span.variable.dtype.value)) for span in self.layout.slices
        ]
        spec = self.layout.shard_map.spec
        parameters = [
            t for t, s in zip(self.tensors, self.layout.slices, strict=True) if s.variable.kind is Kind.PARAMETER
        ]
        groups = [
            {
                "params": [p for p, s in zip(parameters, self.layout.slices, strict=False) if s.variable.group == i],
                **options,
            }
            for i, options in enumerate(spec.group_options)
        ]
        torch_class = getattr(torch.optim, spec.optimizer.rsplit(".", 1)[1])
        self.parameters = parameters
        self.optimizer = torch_class([_tuples(group) for group in groups if group["params"]]) if parameters else None

    def lay_out(
        self, shard_map: ShardMap, values: Mapping[Slice, torch.Tensor], rows: Sequence[Mapping[int, np.ndarray]] = ()
    ) -> None:
        """Hold other slices and rows from now on; what is known of pushes stays."""
        self.layout = Layout.of(shard_map, self.layout.shard)
        known = self.version, self.last_sequence
        self.forget()
        self.initialised = True
        self.version, self.last_sequence = known
        for tensor, span in zip(self.tensors, self.layout.slices, strict=True):
            tensor.copy_(values[replace(span.slice, shard=0)])
        for number, table in enumerate(rows):
            self.rows[number] = {row: value.copy() for row, value in table.items() if self._owns(number, row)}

    def _owns(self, table: int, row: int) -> bool:
        owners = self.layout.shard_map.tables[table]
        bucket = buckets_of(np.array([row], np.int64), len(owners))[0]
        return owners[bucket] == self.layout.shard

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

    def _step(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        worker = (-1, -1)
        for data in requests:
            request = pb.StepRequest.FromString(data)
            match request.WhichOneof("body"):
                case "open":
                    self.opens.append(request.open)
                    self.faults.on_open()
                    if self.faults.refuse_open:
                        _refuse(context, self.faults.refuse_open.pop())
                    epoch = request.open.epoch
                    self._check_epoch(epoch, context)
                    worker = (request.open.worker.rank, request.open.worker.incarnation)
                    opened = pb.Opened(
                        version=self.version,
                        phase=self.stand[0],
                        clock=self.stand[1],
                        last_sequence=self.last_sequence.get(worker, 0),
                        initialised=self.initialised,
                        torch_version=self.torch_version,
                    )
                    yield pb.StepReply(opened=opened).SerializeToString()
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

    def _exchange(
        self, header: pb.PushHeader, worker: tuple[int, int], requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        absent = set(header.absent)
        wanted = (
            []
            if header.skipped
            else [
                t
                for i, (t, s) in enumerate(zip(self.tensors, self.layout.slices, strict=True))
                if i not in absent and (s.variable.kind is Kind.PARAMETER or header.with_buffers)
            ]
        )
        rows_bytes = sum(each.rows * (8 + 4 * self._dim(each.table)) for each in header.tables)
        payload = header.payload or _receive(requests, sum(aligned(t.nbytes) for t in wanted) + rows_bytes)
        self.pushes.append(header)
        if self.faults.on_push:
            self.under_way, layout = (header, wanted, payload), self.layout
            self.faults.on_push.pop()()
            self.faults.release.get()
            if layout is not self.layout:
                _refuse(context, ModelMoved("slices have moved"))
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
        if header.sequence <= self.last_sequence.get(worker, 0):
            result.outcome = pb.OUTCOME_DUPLICATE
        elif self.faults.late:
            result.outcome, result.clock = pb.OUTCOME_LATE, self.faults.late.pop()
        elif self.faults.step_raises:
            result.outcome, self.version = pb.OUTCOME_SKIPPED, self.version + 1
            result.error.CopyFrom(to_detail(self.faults.step_raises.pop()))
        elif header.skipped:
            result.outcome = pb.OUTCOME_SKIPPED
        else:
            result.outcome, result.staleness = pb.OUTCOME_APPLIED, self.version - header.pulled_version
            self._apply(header, wanted, payload)
        self.last_sequence[worker] = header.sequence
        self.stand = (header.phase, result.clock)
        if self.faults.lose_reply:
            self.faults.lose_reply -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "lost after it was applied")
        yield from self._answer(result, with_buffers=False)

    def _apply(self, header: pb.PushHeader, wanted: list[torch.Tensor], payload: bytes) -> None:
        at = 0
        for tensor in wanted:
            value = (
                torch.frombuffer(bytearray(payload[at : at + tensor.nbytes]), dtype=tensor.dtype)
                if tensor.nbytes
                else tensor
            )
            at += aligned(tensor.nbytes)
            if any(tensor is p for p in self.parameters):
                tensor.grad = value.reshape(tensor.shape).clone()
            else:
                tensor.copy_(value.reshape(tensor.shape))
        if self.optimizer is not None:
            present = {s.variable.group for s in self.layout.slices if s.variable.kind is Kind.PARAMETER}
            for group, number in zip(self.optimizer.param_groups, sorted(present), strict=True):
                if header.groups:
                    declared = self.layout.shard_map.spec.group_options[number]
                    group.update(_tuples({**declared, **options_from_pb(header.groups[number])}))
            self.optimizer.step()
            self.optimizer.zero_grad()
        self._apply_rows(header, payload[at:])
        self.version += 1

    def _dim(self, table: int) -> int:
        return self.layout.shard_map.spec.tables[table].dim

    def _apply_rows(self, header: pb.PushHeader, payload: bytes) -> None:
        for number, options in enumerate(header.table_arguments):
            declared = self.layout.shard_map.spec.tables[number].options
            self.table_options[number] = {**declared, **row_options_from_pb(options)}["lr"]
        ids, at = [], 0
        for each in header.tables:
            ids.append(np.frombuffer(payload, np.int64, each.rows, at).tolist())
            at += 8 * each.rows
        for each, own in zip(header.tables, ids, strict=True):
            assert len(set(own)) == len(own)
            for row in own:
                assert self._owns(each.table, row)
                gradient = np.frombuffer(payload, np.float32, self._dim(each.table), at)
                at += gradient.nbytes
                lr = self.table_options.get(each.table, self.layout.shard_map.spec.tables[each.table].options["lr"])
                self.rows[each.table][row] = self._row(each.table, row) - np.float32(lr) * gradient
        assert at == len(payload)

    def _row(self, table: int, row: int) -> np.ndarray:
        return self.rows[table].get(row, first_row(row, self._dim(table)))

    def _look_up(self, lookup: pb.Lookup, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        ids = np.frombuffer(
            lookup.payload or _receive(requests, 8 * sum(each.rows for each in lookup.tables)), np.int64
        )
        self.lookups.append(lookup)
        if self.faults.lose_lookup:
            self.faults.lose_lookup -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "lost before it was answered")
        while self.faults.hold_ahead and lookup.clock > self.stand[1] + 1 and context.is_active():
            yield pb.StepReply(waiting=pb.Waiting(reason="ahead")).SerializeToString()
            time.sleep(0.01)
        error = self.faults.on_lookup.pop()() if self.faults.on_lookup else None
        rows = pb.Rows(number=lookup.number, version=self.version)
        if error is not None:
            rows.error.CopyFrom(to_detail(error))
            yield pb.StepReply(rows=rows).SerializeToString()
            return
        tables = [each.table for each in lookup.tables for _ in range(each.rows)]
        yield from self._send_rows(rows, list(zip(tables, ids.tolist(), strict=True)))

    def _send_rows(self, rows: pb.Rows, wanted: list[tuple[int, int]]) -> Iterator[bytes]:
        for table, row in wanted:
            assert self._owns(table, row)
        payload = b"".join(self._row(table, row).tobytes() for table, row in wanted)
        rows.payload_bytes = len(payload)
        yield pb.StepReply(rows=rows).SerializeToString()
        for position, piece in _cut(payload):
            yield pb.StepReply(chunk=pb.Chunk(position=position, payload=piece)).SerializeToString()

    def _get_rows(self, data: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        request = pb.GetRowsRequest.FromString(data)
        self._check_epoch(request.epoch, context)
        ids = np.frombuffer(request.ids, np.int64).tolist()
        yield from self._send_rows(pb.Rows(version=self.version), [(request.table, row) for row in ids])

    def _load_rows(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        header = pb.LoadRowsRequest.FromString(next(requests)).header
        assert header.only_new
        assert not self.initialised
        payload = b"".join(pb.LoadRowsRequest.FromString(data).chunk.payload for data in requests)
        ids = np.frombuffer(payload, np.int64, header.rows)
        rows = np.frombuffer(payload, np.float32, offset=ids.nbytes).reshape(header.rows, -1)
        for row, values in zip(ids.tolist(), rows, strict=True):
            assert self._owns(header.table, row)
            self.rows[header.table].setdefault(row, values)
        return pb.LoadRowsReply(written=header.rows).SerializeToString()

    def _answer(self, result: pb.StepResult, *, with_buffers: bool) -> Iterator[bytes]:
        chosen = [
            t
            for t, s in zip(self.tensors, self.layout.slices, strict=True)
            if with_buffers or s.variable.kind is Kind.PARAMETER
        ]
        payload = _join(chosen, ALIGNMENT_BYTES)
        result.version, result.payload_bytes, result.with_buffers = self.version, len(payload), with_buffers
        yield pb.StepReply(result=result).SerializeToString()
        for position, piece in _cut(payload):
            yield pb.StepReply(chunk=pb.Chunk(position=position, payload=piece)).SerializeToString()

    def take(self, worker: tuple[int, int]) -> None:
        """Apply the push under way, whose answer will not come."""
        assert self.under_way is not None
        self._apply(*self.under_way)
        self.last_sequence[worker] = self.under_way[0].sequence

    def _check_epoch(self, epoch: int, context: grpc.ServicerContext) -> None:
        if epoch != self.layout.shard_map.epoch:
            _refuse(context, ModelMoved("slices have moved"))

    def _pull(self, data: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        self._check_epoch(pb.PullRequest.FromString(data).epoch, context)
        yield from self._answer(pb.StepResult(outcome=pb.OUTCOME_APPLIED), with_buffers=True)

    def _load(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        header = pb.LoadRequest.FromString(next(requests)).header
        payload = b"".join(pb.LoadRequest.FromString(data).chunk.payload for data in requests)
        if header.only_if_uninitialised and self.initialised:
            return pb.LoadReply(version=self.version, written=False).SerializeToString()
        self.loads += 1
        if header.slices:
            self.assigned += 1
            self.assigned_checksums.update(zip(header.slices, header.checksums, strict=False))
            for index in header.slices:
                payload = _take(self.tensors[index], payload)
        elif header.with_region:
            for tensor in self.tensors:
                payload = _take(tensor, payload, ALIGNMENT_BYTES)
            self.initialised = True
        if header.with_state and self.optimizer is not None:
            self.optimizer.state.clear()
            for state in header.state:
                dtype = getattr(torch, convert_model.dtype_from_pb(state.dtype).value)
                value = torch.zeros(tuple(state.shape), dtype=dtype)
                payload = _take(value, payload)
                self.optimizer.state[self.tensors[state.slice]][state.name] = value
        assert payload == b""
        return pb.LoadReply(version=self.version, written=True).SerializeToString()

    def _save(self, _: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        entries = [
            (i, name, value)
            for i, t in enumerate(self.parameters)
            for name, value in (self.optimizer.state.get(t, {}) if self.optimizer else {}).items()
            if value is not None
        ]
        payload = _join(self.tensors, ALIGNMENT_BYTES) + _join([value for _, _, value in entries])
        described = [
            pb.StateTensor(slice=i, name=name, dtype=f"DTYPE_{str(v.dtype)[6:].upper()}", shape=v.shape)
            for i, name, v in entries
        ]
        header = pb.SaveHeader(version=self.version, state=described, payload_bytes=len(payload))
        yield pb.SaveReply(header=header).SerializeToString()
        for position, piece in _cut(payload):
            yield pb.SaveReply(chunk=pb.Chunk(position=position, payload=piece)).SerializeToString()

    def _get_model(self, _: bytes, context: grpc.ServicerContext) -> bytes:
        clocks = [pb.WorkerClock(rank=r, phase=phase, clock=clock) for r, (phase, clock) in self.clocks.items()]
        return pb.ModelStatus(
            version=self.version,
            initialised=self.initialised,
            clocks=clocks,
            assigned=self.assigned,
            assigned_checksums=self.assigned_checksums,
        ).SerializeToString()


def _refuse(context: grpc.ServicerContext, error: PsError) -> None:
    context.set_trailing_metadata(((ERROR_TRAILER, to_detail(error).SerializeToString()),))
    context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.message)


def _receive(requests: Iterator[bytes], size: int) -> bytes:
    payload = b""
    while len(payload) < size:
        chunk = pb.StepRequest.FromString(next(requests)).chunk
        assert chunk.position == len(payload)
        payload += chunk.payload
    assert len(payload) == size
    return payload


def _take(tensor: torch.Tensor, payload: bytes, alignment_bytes: int = 1) -> bytes:
    if tensor.nbytes:
        values = torch.frombuffer(bytearray(payload[: tensor.nbytes]), dtype=tensor.dtype)
        tensor.copy_(values.reshape(tensor.shape))
    return payload[aligned(tensor.nbytes, alignment_bytes) :]


def _join(tensors: Sequence[torch.Tensor], alignment_bytes: int = 1) -> bytes:
    values = (t.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors)
    return b"".join(each.ljust(aligned(len(each), alignment_bytes), b"\0") for each in values)


def _cut(payload: bytes) -> Iterator[tuple[int, bytes]]:
    for position in range(0, len(payload), CHUNK_BYTES):
        yield position, payload[position : position + CHUNK_BYTES]


def _tuples(options: Any) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) and k != "params" else v for k, v in options.items()}


class FakeSession:
    """A place in a cluster of fake shards, which appear when the first model is declared."""

    def __init__(self, shards: int = 2, rank: int = 0, incarnation: int = 1) -> None:
        self.shard_count = shards
        self.rank = rank
        self.incarnation = incarnation
        self.phase = 0
        self.seed = 11
        self.revision = 1
        self.device = torch.device("cpu")
        self.security = OFF
        self.lowest = rank == 0
        self.lookahead = 0
        self.instruments = Instruments()
        self.counters = WorkerCounters()
        self.consistency = Consistency(Mode.SYNC)
        self.workers = [rank]
        self.transports: tuple[Transport, ...] = ()
        self.fenced: PsError | None = None
        self.shards: list[FakeShard] = []
        self.hints: list[str] = []
        self.on_hint: Callable[[], None] = lambda: None
        self.steps: list[tuple[int | None, int, int]] = []
        self._channels: list[grpc.Channel] = []
        self.watchers: list[Callable[[], None]] = []

    def join(self, rank: int, incarnation: int = 1) -> FakeSession:
        """Another worker of the same job."""
        other = FakeSession(self.shard_count, rank, incarnation)
        other.shards = self.shards
        return other

    def declare(self, spec: ModelSpec) -> ShardMap:
        shard_map = self._map = place(spec, self.shard_count)
        if not self.shards:
            self.shards += [FakeShard(shard_map, i) for i in range(self.shard_count)]
        return shard_map

    def epoch(self, model: str) -> int:
        return self._map.epoch

    def shard_map(self, model: str) -> ShardMap:
        return self._map

    def move(self, to: Mapping[int, int], *, taking: bool = False, buckets: Sequence[Sequence[int]] = ()) -> None:
        """Move slices by their numbers in the map; ``taking``: pushes under way are applied by all before.

        ``buckets``: per table, the shard of each from then on.
        """
        slices = tuple(replace(s, shard=to.get(i, s.shard)) for i, s in enumerate(self._map.slices))
        tables = tuple(map(tuple, buckets)) or self._map.tables
        count = max(self._map.shards, 1 + max([*to.values(), *(shard for owners in tables for shard in owners)]))
        if taking:
            for shard in self.shards:
                shard.take((self.rank, self.incarnation))
        values = {
            replace(span.slice, shard=0): tensor.detach().clone()
            for shard in self.shards
            for span, tensor in zip(shard.layout.slices, shard.tensors, strict=True)
        }
        rows: list[dict[int, np.ndarray]] = [
            {row: value for shard in self.shards for row, value in shard.rows[table].items()}
            for table in range(len(tables))
        ]
        known = self.shards[0]
        self._map = replace(self._map, epoch=self._map.epoch + 1, shards=count, slices=slices, tables=tables)
        for number in range(len(self.shards), count):
            self.shards.append(FakeShard(self._map, number))
            self.shards[-1].version, self.shards[-1].last_sequence = known.version, dict(known.last_sequence)
        for shard in self.shards:
            shard.lay_out(self._map, values, rows)

    def shard_address(self, shard: int) -> str:
        return self.shards[shard].address

    def shard_incarnation(self, shard: int) -> int:
        return 1

    def on_shards(self, callback: Callable[[], None]) -> None:
        self.watchers.append(callback)

    def forget(self, callback: Callable[[], None]) -> None:
        if callback in self.watchers:
            self.watchers.remove(callback)

    def shard_channel(self, shard: int) -> grpc.Channel:
        for new in self.shards[len(self._channels) :]:
            self._channels.append(open_channel(new.address))
        return self._channels[shard]

    def check(self) -> None:
        if self.fenced is not None:
            raise self.fenced

    def initialiser(self) -> bool:
        return self.lowest

    def record_step(self, samples: int | None, staleness: int, bytes: int, clock: int = 0) -> None:
        self.steps.append((samples, staleness, bytes))

    def record_transport(self, by_shard: Mapping[int, str]) -> None:
        self.transports_used = dict(by_shard)

    def wait_hint(self, text: str) -> None:
        self.hints.append(text)
        self.on_hint()

    def close(self) -> None:
        for channel in self._channels:
            channel.close()


@contextmanager
def job(shards: int = 2) -> Iterator[FakeSession]:
    """The session of rank 0; its shards end with the block."""
    session = FakeSession(shards)
    try:
        yield session
    finally:
        for shard in session.shards:
            shard.faults.release.put(None)
            shard.stop()
        session.close()
