"""A real shard in this process, its cluster view set by the test, and a client made of generated stubs only."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc
import pytest
import torch

from ps_protocol import PROTOCOL_VERSION
from ps_protocol.cluster.view import ClusterView, Member, Role
from ps_protocol.errors import ERROR_TRAILER, PsError
from ps_protocol.model.layout import Layout, aligned
from ps_protocol.model.spec import Consistency, DType, Kind, ModelSpec, NonFinite, ShardMap, Slice, Variable
from ps_protocol.rpc.channel import SHARD_KEY
from ps_protocol.security.security import OFF, Security
from ps_protocol.v1 import common_pb2, shard_pb2, shard_pb2_grpc
from ps_protocol.wire.convert.errors import from_detail
from ps_server.checkpoint.directory import CheckpointRoots
from ps_server.cli.options.storage import StorageConfig
from ps_server.failpoints import Failpoints
from ps_server.limits import LimitCounts, ShardLimits
from ps_server.log.entries import AppliedUpdate, Entry, MemoryLog, UpdateLog
from ps_server.serving import grpc_server
from ps_server.shard.access import Fence
from ps_server.shard.byte_budget import ByteBudgets
from ps_server.shard.config import SideChannelConfig
from ps_server.shard.context import ShardContext
from ps_server.shard.counters import Counters
from ps_server.shard.durability.storage import Storage
from ps_server.shard.execution.executor import ShardExecutor
from ps_server.shard.registry import Registry
from ps_server.shard.service import SERVICE, ShardService
from ps_server.shard.step.model import ShardModel
from ps_server.shard.step.published import Published
from ps_server.shard.transport.side_channels import SideChannels
from tests.support.loops import LoopThread

PATIENCE_SECONDS = 90.0
"""How long a test waits for a state."""

TOKEN = "what only the coordinator knows"
"""With which shards of tests have joined."""


class _Keyed(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):  # type: ignore[misc]
    def __init__(self, key: shard_pb2.ShardKey) -> None:
        self._metadata = [(SHARD_KEY, key.SerializeToString())]

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        keyed = grpc.ClientCallDetails()
        keyed.method, keyed.timeout, keyed.credentials = details.method, details.timeout, details.credentials
        keyed.metadata = [*(details.metadata or ()), *self._metadata]
        return continuation(keyed, request)

    intercept_unary_stream = intercept_unary_unary


def coordinator_stub(channel: grpc.Channel, incarnation: int, token: str = TOKEN) -> shard_pb2_grpc.ShardStub:
    """A stub whose calls a shard of this incarnation takes for its coordinator's."""
    key = shard_pb2.ShardKey(incarnation=incarnation, token=token)
    return shard_pb2_grpc.ShardStub(grpc.intercept_channel(channel, _Keyed(key)))


def simple_spec(
    *shapes: tuple[int, ...], optimizer: str = "torch.optim.SGD", name: str = "model", **arguments: Any
) -> ModelSpec:
    """A float32 model with variables v0, v1, … and one group."""
    nonfinite = arguments.pop("nonfinite", NonFinite.REFUSE)
    buffers = arguments.pop("buffer_shapes", ())
    options = {"lr": 0.1} | arguments
    variables = [Variable(f"v{i}", shape, DType.FLOAT32) for i, shape in enumerate(shapes or ((4, 3), (5,)))]
    variables += [Variable(f"b{i}", shape, DType.FLOAT32, Kind.BUFFER) for i, shape in enumerate(buffers)]
    return ModelSpec(name, optimizer, tuple(variables), (options,), nonfinite=nonfinite)


def whole_map(spec: ModelSpec) -> ShardMap:
    """Everything on shard 0."""
    slices = tuple(Slice(i, 0, v.rows, 0) for i, v in enumerate(spec.variables))
    return ShardMap(1, spec, 1, slices)


class RecordingLog(MemoryLog):
    """Keeps every update with a copy of its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.updates: list[tuple[AppliedUpdate, torch.Tensor]] = []

    def append(self, entry: Entry) -> int:
        if isinstance(entry, AppliedUpdate):
            self.updates.append((entry, entry.step.gradients.data.clone()))
        return super().append(entry)


@dataclass
class TestShard:
    """A shard on a loop of its own; the test plays the coordinator."""

    __test__ = False

    loop: LoopThread
    registry: Registry
    failpoints: Failpoints
    counters: Counters
    storage: Storage | None = None
    service: ShardService | None = None
    address: str = ""
    channel: grpc.Channel = field(init=False)
    view: ClusterView = field(default_factory=ClusterView)
    #: Members beside the workers.
    others: tuple[Member, ...] = ()

    def set_view(
        self,
        live: dict[int, int],
        consistency: Consistency | None = None,
        models: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Show the shard these live workers (rank to incarnation), this mode, and models by epoch."""
        self.view = ClusterView(
            revision=self.view.revision + 1,
            members=(*(Member(Role.WORKER, rank, incarnation) for rank, incarnation in live.items()), *self.others),
            consistency=consistency or self.view.consistency,
            started=True,
            models=dict(models),
        )

        async def show() -> None:
            self.registry.on_view(self.view)

        self.loop.run(show())

    def place(self, shard_map: ShardMap) -> ShardModel:
        async def place() -> ShardModel:
            return await self.registry.place(shard_map)

        return self.loop.run(place())

    def take(self, model: ShardModel, *, quick: bool = False) -> tuple[Published, Callable[[], None]]:
        """The newest published, and how to give it back."""
        published = self.loop.run(model.take_published(quick=quick))

        async def give_back() -> None:
            published.give_back(quick=quick)

        return published, lambda: self.loop.run(give_back())

    def model(self, name: str = "model") -> ShardModel:
        return self.loop.run(self.registry.model(name))


@contextmanager
def running_shard(
    live: dict[int, int] | None = None,
    consistency: Consistency | None = None,
    log: UpdateLog | None = None,
    side_channel_config: SideChannelConfig | None = None,
    storage_config: StorageConfig | None = None,
    incarnation: int = 100,
    *,
    joined: bool = True,
    checkpoints: CheckpointRoots | None = None,
    fetch: Callable[[str], Awaitable[ShardMap]] | None = None,
    doors: Security | None = None,
    limits: ShardLimits | None = None,
    upload_bytes: int = 0,
    answer_bytes: int = 0,
) -> Iterator[TestShard]:
    """Serve shard 0 on a free port of 127.0.0.1. ``storage_config``: what it keeps on disk, in the place of ``log``.

    ``checkpoints``: where they may be; everywhere unless given. ``joined``: it holds its place, having joined with
    TOKEN. ``fetch``: where it gets the maps of models that a view names. ``doors``: the security of its side channels.
    ``limits``: of its clients; ``upload_bytes``, ``answer_bytes``: what they may have under way.
    """

    async def listening(config: SideChannelConfig) -> SideChannels:
        return SideChannels(config, doors or OFF, context.limit_counts)

    async def no_map(name: str) -> ShardMap:
        raise AssertionError(f"the test places its models itself, not {name}")

    with LoopThread() as loop, ExitStack() as closing:
        executor, counters, failpoints = ShardExecutor(1), Counters(), Failpoints()
        closing.callback(executor.close)
        storage = loop.run(Storage.open(0, storage_config or StorageConfig(), executor))
        closing.callback(lambda: loop.run(storage.close()))
        counts = LimitCounts()
        everywhere = CheckpointRoots.of([Path("/")])
        context = ShardContext(
            0,
            executor,
            fetch or no_map,
            log or storage.log,
            failpoints,
            promises=lambda: storage.promised,
            row_memory=storage.row_memory,
            checkpoints=checkpoints or everywhere,
            limits=limits or ShardLimits(),
            limit_counts=counts,
            budgets=ByteBudgets.of(answer_bytes, upload_bytes, counts),
        )
        registry = Registry(context, storage.recovered)
        closing.callback(lambda: loop.run(registry.peers.close()))
        shard = TestShard(loop, registry, failpoints, counters, storage)

        async def begin() -> None:
            storage.begin(incarnation, lambda: registry.kept)

        loop.run(begin())
        side_channels = loop.run(listening(side_channel_config or SideChannelConfig()))
        closing.callback(lambda: loop.run(side_channels.close()))
        fence = Fence(0, registry)
        if joined:
            fence.begin(incarnation, TOKEN)
        service = shard.service = ShardService(0, registry, counters, side_channels, fence=fence)
        server = loop.run(grpc_server.start("127.0.0.1", 0, [(SERVICE, service.register)]))
        closing.callback(lambda: loop.run(server.stop(0.2)))
        shard.address = server.address
        shard.set_view(live or {0: 1}, consistency or Consistency())
        with grpc.insecure_channel(server.address) as shard.channel:
            yield shard


def error_of(call: grpc.RpcError) -> PsError:
    """The typed error in the trailers."""
    for key, value in call.trailing_metadata():
        if key == ERROR_TRAILER:
            return from_detail(common_pb2.ErrorDetail.FromString(value))
    raise AssertionError(f"no typed error in {call}")


@contextmanager
def refused_as(kind: type[PsError], text: str = "") -> Iterator[None]:
    """The call inside the block ends with a typed error of this kind, whose words contain ``text``."""
    with pytest.raises(grpc.RpcError) as caught:
        yield
    error = error_of(caught.value)
    assert isinstance(error, kind)
    assert text in str(error)


class StubStream:
    """One step stream spoken with the generated classes alone, as any gRPC client would."""

    def __init__(self, shard: TestShard, rank: int = 0, incarnation: int = 1, name: str = "model", **open_fields: Any):
        self._requests: queue.SimpleQueue[shard_pb2.StepRequest | None] = queue.SimpleQueue()
        stub = shard_pb2_grpc.ShardStub(shard.channel)
        self.replies = stub.Step(iter(self._requests.get, None))
        if not self.replies.add_callback(partial(self._requests.put, None)):  # gRPC's thread reads requests until then
            self._requests.put(None)
        fields = {"membership_revision": shard.view.revision, "protocol_version": PROTOCOL_VERSION} | open_fields
        worker = shard_pb2.WorkerId(rank=rank, incarnation=incarnation)
        self.send(open=shard_pb2.Open(model=name, worker=worker, **fields))
        self.opened = next(self.replies).opened
        self.sequence = self.opened.last_sequence
        self.phase, self.clock, self.version = self.opened.phase, self.opened.clock, self.opened.version

    def send(self, **body: Any) -> None:
        self._requests.put(shard_pb2.StepRequest(**body))

    def push(self, payload: bytes, **header: Any) -> None:
        """Send the next push; ``header`` overrides its fields."""
        if "sequence" not in header:
            self.sequence, self.clock = self.sequence + 1, self.clock + 1
        fields = {"sequence": self.sequence, "phase": self.phase, "clock": self.clock, "pulled_version": self.version}
        self.send(push=shard_pb2.PushHeader(**(fields | header)))
        size = max(7, len(payload) // 5 | 1)  # an odd number of bytes: nothing may depend on it
        for position in range(0, len(payload), size):
            piece = payload[position : position + size]
            self.send(chunk=shard_pb2.Chunk(position=position, payload=piece))

    def result(self) -> tuple[shard_pb2.StepResult, bytes]:
        """The next result and its payload; signs of life are passed over."""
        while (reply := next(self.replies)).WhichOneof("body") == "waiting":
            pass
        result, payload = reply.result, reply.result.payload
        while len(payload) < result.payload_bytes:
            chunk = next(self.replies).chunk
            assert chunk.position == len(payload)
            payload += chunk.payload
        if payload:
            self.version = result.version
        return result, payload

    def exchange(self, payload: bytes, **header: Any) -> tuple[shard_pb2.StepResult, bytes]:
        self.push(payload, **header)
        return self.result()

    def end(self) -> None:
        """Half-close, then wait for the shard to end the stream."""
        self._requests.put(None)
        for _ in self.replies:
            pass

    def cancel(self) -> None:
        self.replies.cancel()


def writer(shard: TestShard) -> shard_pb2.WorkerId:
    """The lowest live worker."""
    live = shard.registry.view.live(Role.WORKER)
    rank = min(live)
    return shard_pb2.WorkerId(rank=rank, incarnation=live[rank].incarnation)


def load(shard: TestShard, model: ShardModel, values: bytes, **header: Any) -> shard_pb2.LoadReply:
    """Write a whole region through Load, as the lowest live worker."""
    stub = shard_pb2_grpc.ShardStub(shard.channel)
    head = shard_pb2.LoadHeader(model=model.name, with_region=True, **({"worker": writer(shard)} | header))
    chunk = shard_pb2.Chunk(position=0, payload=values)
    return stub.Load(iter([shard_pb2.LoadRequest(header=head), shard_pb2.LoadRequest(chunk=chunk)]))


def in_slices(tensors: Iterable[torch.Tensor]) -> bytes:
    """The bytes of ``tensors``, each a whole slice, each with its padding."""
    values = (t.contiguous().numpy().tobytes() for t in tensors)
    return b"".join(each.ljust(aligned(len(each)), b"\0") for each in values)


def flat(layout: Layout, *tensors: torch.Tensor) -> bytes:
    """The payload that holds ``tensors``, the slices in order, each with its padding."""
    assert [tuple(t.shape) for t in tensors] == [span.shape for span in layout.slices[: len(tensors)]]
    spans = zip(tensors, layout.slices, strict=False)
    return b"".join(tensor.numpy().tobytes() + bytes(span.padded_end - span.end) for tensor, span in spans)


def unflat(layout: Layout, payload: bytes, count: int | None = None) -> list[torch.Tensor]:
    """The float32 slices of a payload."""
    values, tensors = torch.frombuffer(bytearray(payload), dtype=torch.float32), []
    for span in layout.slices[:count]:
        size = (span.end - span.begin) // 4
        tensors.append(values[:size].reshape(span.shape))
        values = values[(span.padded_end - span.begin) // 4 :]
    return tensors


def start(shard: TestShard, *shapes: tuple[int, ...], **arguments: Any) -> tuple[ShardModel, list[torch.Tensor]]:
    """Place a simple model and give it random initial values."""
    model = shard.place(whole_map(simple_spec(*shapes, **arguments)))
    generator = torch.Generator().manual_seed(0)
    initial = [torch.randn(span.shape, generator=generator) for span in model.layout.slices]
    assert load(shard, model, flat(model.layout, *initial)).written
    return model, initial


def gradients(model: ShardModel, seed: int) -> list[torch.Tensor]:
    """Random gradients of every parameter."""
    generator = torch.Generator().manual_seed(seed)
    spans = model.layout.slices[: model.layout.parameter_slices]
    return [torch.randn(span.shape, generator=generator) for span in spans]


def reference(
    initial: list[torch.Tensor],
    steps: list[list[torch.Tensor | None]],
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
    **arguments: Any,
) -> list[torch.Tensor]:
    """What torch makes of the same gradients in one process."""
    parameters = [torch.nn.Parameter(t.clone()) for t in initial]
    torch_optimizer = optimizer(parameters, **({"lr": 0.1} | arguments))
    for grads in steps:
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = None if grad is None else grad.clone()
        torch_optimizer.step()
    return [p.detach() for p in parameters]


def assert_equal(payload: bytes, model: ShardModel, expected: list[torch.Tensor]) -> None:
    """The payload holds ``expected``, within 1e-6."""
    for found, wanted in zip(unflat(model.layout, payload, model.layout.parameter_slices), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def wait_until(true: Callable[[], bool]) -> None:
    """Wait for a state, asking less often the longer it takes; the test fails when it does not come."""
    pause = threading.Event()
    began = time.monotonic()
    while (waited := time.monotonic() - began) < PATIENCE_SECONDS:
        if true():
            return
        # At most a twentieth too late: what asks a process costs the processor of both.
        pause.wait(min(0.1, max(0.01, waited / 20)))
    raise AssertionError(f"the awaited state did not come within {PATIENCE_SECONDS:g} s")
