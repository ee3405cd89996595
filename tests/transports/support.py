"""One worker's line to a real shard over a chosen transport, and what tests look at when it has ended."""

from __future__ import annotations

import gc
import math
import os
import select
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
import uvloop

from ps_protocol.cluster.answers import StepAnswer
from ps_protocol.cluster.requests import OpenRequest, PushHeader
from ps_protocol.cluster.transport import Transport
from ps_protocol.rpc.channel import open_channel
from ps_protocol.security.security import OFF, Security
from ps_protocol.v1 import common_pb2
from ps_protocol.wire.frames import pieces_of
from ps_server.shard.step.model import ShardModel
from ps_worker.transport.base import Link, Peer
from ps_worker.transport.negotiate import open_stream
from tests.support import shards
from tests.support.loops import LoopThread
from tests.support.shards import TestShard, flat, load, simple_spec, unflat, wait_until, whole_map

TRANSPORTS = {
    "grpc": common_pb2.TRANSPORT_GRPC,
    "bulk": common_pb2.TRANSPORT_BULK,
    "shm": common_pb2.TRANSPORT_SHM,
}

LARGE = ((701, 513), (3,), (127, 1031))
"""About 2 MB in variables of odd sizes."""

BLOCKING = ((6 << 20,),)
"""24 MB: more than gRPC's window of 16 MB and the sockets between two processes hold, so sending it takes a reader."""

_DRAWN = 1_000_003

Tensors = Sequence[torch.Tensor | None]


class UvloopThread(LoopThread):
    """What shard processes run on; it makes the descriptors that it watches non-blocking."""

    def __init__(self) -> None:
        super().__init__()
        self.loop.close()
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="test-uvloop", daemon=True)


@contextmanager
def running_shard(*arguments: Any, **named: Any) -> Iterator[TestShard]:
    """A shard that ends in order also after a test that failed, which then ends at all."""
    with ExitStack() as stack:
        inner = ExitStack()
        stack.callback(inner.close)
        yield inner.enter_context(shards.running_shard(*arguments, **named))


def begin(
    shard: TestShard, *shapes: tuple[int, ...], name: str = "model", **arguments: Any
) -> tuple[ShardModel, list[torch.Tensor]]:
    """Place a model with whole numbers as its values and 0.5 as its learning rate, so that all results are exact."""
    model = shard.place(whole_map(simple_spec(*shapes, name=name, **({"lr": 0.5} | arguments))))
    initial = whole_numbers(model, 0, with_buffers=True)
    assert load(shard, model, region_of(model, initial)).written
    return model, initial


def region_of(model: ShardModel, tensors: Sequence[torch.Tensor]) -> bytes:
    """The payload of a Load that holds every slice."""
    return flat(model.layout, *tensors)


def whole_numbers(model: ShardModel, seed: int, *, with_buffers: bool = False) -> list[torch.Tensor]:
    """A small whole number for each element of each parameter, and of each buffer when they are wanted."""
    generator = torch.Generator().manual_seed(seed)
    spans = model.layout.slices if with_buffers else model.layout.slices[: model.layout.parameter_slices]
    return [_drawn(span.shape, generator) for span in spans]


def _drawn(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Of many elements the first are drawn, and repeated; no part of a message has as many."""
    count = math.prod(shape)
    drawn = torch.randint(-99, 99, (min(count, _DRAWN),), generator=generator).float()
    return drawn.repeat(-(-count // _DRAWN))[:count].reshape(shape)


def trained(initial: Sequence[torch.Tensor], *steps: Tensors) -> list[torch.Tensor]:
    """What plain SGD with a learning rate of 0.5 makes of ``steps``, exactly."""
    values = [value.clone() for value in initial]
    for step in steps:
        for value, gradient in zip(values, step, strict=False):
            if gradient is not None:
                value -= 0.5 * gradient
    return values


class Line:
    """A carrier of a worker, and the memory that it pushes from and receives into."""

    def __init__(
        self,
        shard: TestShard,
        model: ShardModel,
        *transports: str,
        rank: int = 0,
        incarnation: int = 1,
        phase: int = 0,
        security: Security | None = None,
    ) -> None:
        self.layout = model.layout
        self.waits: list[str] = []
        self.on_wait: Callable[[], None] = lambda: None
        self._channel = open_channel(shard.address)
        request = OpenRequest(
            model=model.name,
            worker=(rank, incarnation),
            membership_revision=shard.view.revision,
            phase=phase,
            transports=[Transport(name) for name in transports if name != "grpc"],
        )
        link = Link(Peer(0, shard.address), model.layout, self._waited, security or OFF)
        try:
            self.opened, self.carrier = open_stream(self._channel, link, request)
        except BaseException:
            self._channel.close()
            raise
        self.sequence = self.opened.last_sequence
        self.phase, self.clock, self.version = self.opened.phase, self.opened.clock, self.opened.version
        gradients = self.carrier.gradients
        self._gradients = gradients[0].bytes if gradients else memoryview(bytearray(self.layout.region_bytes))
        self._received = memoryview(bytearray(self.layout.region_bytes))

    @property
    def transport(self) -> str:
        return self.carrier.transport.value

    def push(self, gradients: Tensors, **header: Any) -> None:
        """Send the next push; None is an absent slice, and ``header`` overrides its fields."""
        absent = [number for number, gradient in enumerate(gradients) if gradient is None]
        for span, gradient in zip(self.layout.slices, gradients, strict=False):
            if gradient is not None:
                self._gradients[span.begin : span.end] = memoryview(gradient.contiguous().numpy()).cast("B")
        if "sequence" not in header:
            self.sequence, self.clock = self.sequence + 1, self.clock + 1
        fields: dict[str, Any] = {
            "sequence": self.sequence,
            "phase": self.phase,
            "clock": self.clock,
            "pulled_version": self.version,
            "absent": absent,
        }
        message = PushHeader(**(fields | header))
        ranges = [] if message.skipped else self.layout.ranges(absent, buffers=message.with_buffers)
        self.carrier.push(message, pieces_of(self._gradients, ranges))

    def receive(self) -> StepAnswer:
        while (result := self.carrier.receive(self._place)) is None:
            pass
        self.version = result.version
        return result

    def exchange(self, gradients: Tensors, **header: Any) -> StepAnswer:
        self.push(gradients, **header)
        return self.receive()

    @property
    def values(self) -> list[torch.Tensor]:
        """The parameters received last."""
        parts = [bytes(self._received[begin:end]) for begin, end in self.layout.ranges()]
        return unflat(self.layout, b"".join(parts))[: self.layout.parameter_slices]

    def forget(self) -> None:
        """Overwrite what was received, so that a test sees what comes next."""
        self._received[:] = b"\xff" * len(self._received)

    def close(self) -> None:
        """End the stream; may be repeated."""
        self.carrier.close()
        self._channel.close()

    def release(self) -> None:
        """Give up all memory that is shared with the shard."""
        self._gradients = memoryview(b"")
        del self.carrier

    def _place(self, result: StepAnswer) -> list[memoryview]:
        return pieces_of(self._received, self.layout.ranges(result.absent, buffers=result.with_buffers))

    def _waited(self, reason: str) -> None:
        self.waits.append(reason)
        self.on_wait()


@contextmanager
def line(shard: TestShard, model: ShardModel, *transports: str, **arguments: Any) -> Iterator[Line]:
    """A line that is closed with the block; it travels as the first of ``transports`` says."""
    opened = Line(shard, model, *transports, **arguments)
    try:
        assert opened.transport == transports[0]
        yield opened
    finally:
        opened.close()
        opened.release()


def assert_same(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    """Bitwise."""
    for one, other in zip(found, wanted, strict=False):
        assert torch.equal(one, other)


def has_come(worker: Line) -> bool:
    """Whether there is something to read on the side channel of ``worker``."""
    return bool(select.select([worker.carrier._carrier.fileno()], [], [], 0)[0])


def is_idle(model: ShardModel) -> bool:
    """No memory of a push or a reply is in use, and none is kept for streams that are gone."""
    return (model.pool.in_use, model.pool.spare) == (0, 0)


def open_files() -> Counter[str]:
    """What the descriptors of this process refer to, but for those that event loops and gRPC keep for themselves."""
    found: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208 -- the folder changes while it is read
        try:
            target = os.readlink(f"/proc/self/fd/{number}")  # noqa: PTH115
        except OSError:
            continue
        found[target.split(":[")[0]] += not target.startswith("anon_inode:")
    return found


def shared_mappings() -> int:
    """How many segments of ours this process maps."""
    with open("/proc/self/maps") as maps:  # noqa: PTH123
        return sum("memfd:torch-ps" in each for each in maps)


@contextmanager
def leaves_no_descriptors() -> Iterator[None]:
    """The block closes every descriptor and unmaps every segment that it opened, be it a little later."""
    gc.collect()
    gc.freeze()  # what torch has made so far is never garbage: without it, a collection takes no time
    files, mappings = open_files(), shared_mappings()

    def as_before() -> bool:
        gc.collect()  # errors refer to what they passed through
        return open_files().total() <= files.total() and shared_mappings() <= mappings

    yield
    try:
        wait_until(as_before)
    except AssertionError as error:
        left = f"left open: {open_files() - files}; mapped: {shared_mappings()}, not {mappings}"
        raise AssertionError(f"{error}; {left}") from error


def hold_loop(loop: LoopThread) -> Callable[[], None]:
    """Keep an event loop from doing anything; returns what lets it go on."""
    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        go.wait(60)

    loop.loop.call_soon_threadsafe(hold)
    assert held.wait(60)
    return go.set


@contextmanager
def interrupted(inside: str, true: Callable[[], bool]) -> Iterator[None]:
    """Ctrl-C in the block, once it is in a function of the name ``inside`` and ``true``; it has to end the block.

    It must not wait inside gRPC then, whose locks do not survive that.
    """
    main = threading.main_thread().ident
    files: set[str] = set()

    def ready() -> bool:
        if not true():
            return False
        frame = sys._current_frames().get(main or 0)
        names = set()
        files.clear()
        while frame is not None:
            names.add(frame.f_code.co_name)
            files.add(frame.f_code.co_filename)
            frame = frame.f_back
        return inside in names

    def interrupt() -> None:
        try:
            wait_until(ready)
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 -- it comes at any moment
        interrupting.start()
        yield
    interrupting.join()
    assert not [file for file in files if "/site-packages/grpc/" in file]
