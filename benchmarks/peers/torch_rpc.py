"""The parameter server one writes by hand on ``torch.distributed.rpc``: push with fused SGD behind it, and pull."""

from __future__ import annotations

import os
import tempfile
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed import rpc

from benchmarks.crew import Crew, Crowd
from benchmarks.processes import Child
from benchmarks.rows import Key, Subject
from benchmarks.timing import Loop

STEP, FRESH, ONE_CALL, PULL = "step", "step, gradients fresh", "step, one call", "pull"
TCP, SHM = "torch RPC, TCP", "torch RPC, shared memory"

ROUTES = {TCP: (("uv",), ("basic",)), SHM: (("shm", "uv"), ("cma", "basic"))}
"""TensorPipe's transports and channels by the system's name. The second is what it picks on one host by itself."""

CALL_SECONDS = 300

_SERVER = "server"


def subject(
    system: str,
    nbytes: int,
    tensors: int = 1,
    workers: int = 1,
    operations: tuple[str, ...] = (STEP, FRESH, ONE_CALL, PULL),
    seconds: float = 0.0,
) -> Subject:
    """``system`` is a name of ``ROUTES``. Pulled tensors are taken as they arrive; nothing copies them into a model.

    ``seconds``: how long a visit of a ``Crowd`` is; 0: a ``Crew``.
    """

    @contextmanager
    def opened() -> Iterator[Crew]:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ps-bench-")))
            place = Place(*ROUTES[system], f"file://{folder / 'store'}", workers + 1)
            children = [stack.enter_context(Child(server, place, nbytes, tensors))]
            children += [stack.enter_context(Child(worker, place, rank, nbytes, tensors)) for rank in range(workers)]
            for child in children:
                child.ready()
            server_pid, own = [children[0].pid], children[1:]
            yield Crowd(own, server_pid, seconds, rests=children) if seconds else Crew(own, server_pid, rests=children)

    return Subject(tuple(Key(system, operation, nbytes, tensors, workers) for operation in operations), opened)


@dataclass(frozen=True)
class Place:
    """How the processes of one job find each other."""

    transports: tuple[str, ...]
    channels: tuple[str, ...]
    store: str
    world_size: int

    @contextmanager
    def joined(self, name: str, rank: int) -> Iterator[None]:
        """Be a member for the length of the block. At its end the others are not waited for: all of them end."""
        os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed")
        options = rpc.TensorPipeRpcBackendOptions(
            init_method=self.store,
            _transports=list(self.transports),
            _channels=list(self.channels),
            rpc_timeout=CALL_SECONDS,
        )
        rpc.init_rpc(  # type: ignore[no-untyped-call]
            name, rank=rank, world_size=self.world_size, rpc_backend_options=options
        )
        yield
        os._exit(0)  # a graceful shutdown is a barrier, and the plain one can hang in TensorPipe


class _Parameters:
    """What the server holds. Called from threads of the RPC pool."""

    def __init__(self, nbytes: int, tensors: int) -> None:
        self.flat = list(torch.zeros(nbytes // 4).chunk(tensors))
        self._parameters = [torch.nn.Parameter(values) for values in self.flat]
        self._optimizer = torch.optim.SGD(self._parameters, lr=1e-6, fused=True)
        self._lock = threading.Lock()

    def apply(self, gradients: Sequence[torch.Tensor]) -> None:
        """SGD straight from the tensors that arrived."""
        with self._lock:
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient
            self._optimizer.step()


_held: dict[str, _Parameters] = {}
"""RPC calls functions by name, so what they work on is the module's. Set once in the server, before it joins."""


def push(gradients: list[torch.Tensor]) -> None:
    """Runs in the server."""
    _held[_SERVER].apply(gradients)


def pull() -> list[torch.Tensor]:
    """Runs in the server."""
    return _held[_SERVER].flat


def step(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Runs in the server."""
    _held[_SERVER].apply(gradients)
    return _held[_SERVER].flat


@contextmanager
def server(place: Place, nbytes: int, tensors: int) -> Iterator[object]:
    """The role of the process that holds the parameters."""
    _held[_SERVER] = _Parameters(nbytes, tensors)
    with place.joined(_SERVER, 0):
        yield object()


@contextmanager
def worker(place: Place, rank: int, nbytes: int, tensors: int) -> Iterator[Loop]:
    """The role of a process that is timed."""
    gradients = list(torch.ones(nbytes // 4).chunk(tensors))
    kept: list[Any] = [None]

    def push_and_pull() -> None:
        rpc.rpc_sync(_SERVER, push, (gradients,))
        kept[0] = rpc.rpc_sync(_SERVER, pull)

    def one_call() -> None:
        kept[0] = rpc.rpc_sync(_SERVER, step, (gradients,))

    def pull_only() -> None:
        kept[0] = rpc.rpc_sync(_SERVER, pull)

    def fill() -> None:
        for gradient in gradients:
            gradient.fill_(1.0)

    with place.joined(f"worker-{rank}", rank + 1):
        operations = {STEP: push_and_pull, FRESH: push_and_pull, ONE_CALL: one_call, PULL: pull_only}
        yield Loop(operations, {FRESH: fill})
