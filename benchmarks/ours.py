"""torch-ps itself: real coordinator, shards and worker processes, over a chosen transport."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

import ps_worker
from benchmarks.cluster import running_cluster
from benchmarks.crew import Crew, Crowd
from benchmarks.processes import Child
from benchmarks.rows import Key, Subject
from benchmarks.timing import Loop

STEP, PULL, COPYING, FRESH = "step", "pull", "step, gradients copied", "step, gradients fresh"
BESIDE, SLOW, SLOW_SECONDS = "step beside slow workers", "step of a slow worker", 0.05
"""A slow worker waits so long before each step, as if computing took it."""
SHM, BULK, GRPC = "shm", "bulk", "grpc"
TRANSPORTS = (SHM, BULK, GRPC)

_STARTING = "waiting for the initial values"
"""In the one warning that is no fault: another worker of the job starts later."""


def system(transport: str) -> str:
    """The system's name in keys."""
    return f"ours, {transport}"


def subject(transport: str, key: Key, *operations: str, seconds: float = 0.0, slow: int = 0) -> Subject:
    """``operations`` on the sizes of ``key``, whose own operation and system do not matter.

    A step is push, apply and pull of the whole model with plain SGD, through the optimizer that users hold. Gradients
    are given, where ``zero_grad(set_to_none=False)`` keeps them. "gradients copied": as ``zero_grad()`` leaves them to
    backward. "gradients fresh": filled before each step, untimed, so that they are in the cache of the worker's core.
    The shard's optimizer has one thread. ``seconds``: how long a visit of a ``Crowd`` is; 0: a ``Crew``. ``slow``: so
    many slow workers beside one.
    """
    keys = tuple(
        Key(system(transport), operation, key.nbytes, key.tensors, key.workers, key.shards) for operation in operations
    )

    @contextmanager
    def opened() -> Iterator[Crew]:
        with ExitStack() as stack:
            workers, shards = stack.enter_context(job(transport, replace(key, workers=key.workers + slow)))
            beside = SLOW if slow else ""
            yield Crowd(workers, shards, seconds, beside=beside) if seconds else Crew(workers, shards)

    return Subject(keys, opened)


@contextmanager
def job(transport: str, key: Key, **arguments: Any) -> Iterator[tuple[list[Child], list[int]]]:
    """A running cluster with workers of role ``worker`` that are ready, and the processes of its shards."""
    with ExitStack() as stack:
        cluster = stack.enter_context(running_cluster(key.shards, key.workers))
        sizes = (cluster.address, transport, key.nbytes, key.tensors, arguments)
        workers = [stack.enter_context(Child(worker, rank, *sizes)) for rank in range(key.workers)]
        for child in workers:
            child.ready()
        yield workers, cluster.shards


class Flat(nn.Module):
    """``tensors`` parameters of together ``nbytes`` bytes of float32."""

    def __init__(self, nbytes: int, tensors: int) -> None:
        super().__init__()
        elements = nbytes // 4 // tensors
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(elements)) for _ in range(tensors))

    def set_gradients(self) -> None:
        """Ones everywhere, where gradients are or as new tensors: a step is measured, not a backward pass."""
        for weight in self.weights:
            if weight.grad is None:
                weight.grad = torch.ones_like(weight)
            else:
                weight.grad.fill_(1.0)

    def use(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Make these the gradients."""
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.grad = gradient


@contextmanager
def connected(address: str, rank: int, transport: str | None) -> Iterator[ps_worker.Cluster]:
    """A member of the job. ``transport`` None: what the SDK takes by itself."""
    chosen: dict[str, Any] = {} if transport is None else {"transport": transport}
    if chosen and "transport" not in inspect.signature(ps_worker.connect).parameters:
        chosen = {}
    with ps_worker.connect(address, rank=rank, device="cpu", **chosen) as connection:
        yield connection


@contextmanager
def undisturbed() -> Iterator[Callable[[], None]]:
    """Gives a check that raises ``Disturbed`` when the SDK has warned: its figures are not those of the row.

    The SDK warns when steps do not travel as asked for, and when a stream broke and is opened again.
    """
    warned: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]

    def check() -> None:
        for text in warned:
            if _STARTING not in text:
                raise Disturbed(text)

    logger = logging.getLogger("ps_worker")
    logger.addHandler(handler)
    try:
        yield check
    finally:
        logger.removeHandler(handler)


class Disturbed(Exception):
    """What was measured is not what the row says."""


@contextmanager
def worker(
    rank: int, address: str, transport: str | None, nbytes: int, tensors: int, arguments: dict[str, Any]
) -> Iterator[Loop]:
    """The role of a process that is timed. ``arguments`` go to ``connection.optimizer``; "optimizer": not SGD."""
    arguments = {"lr": 1e-6} | arguments
    kind = arguments.pop("optimizer", torch.optim.SGD)
    with connected(address, rank, transport) as connection, undisturbed() as check:
        model = Flat(nbytes, tensors)
        optimizer = connection.optimizer(kind, model, **arguments)
        model.set_gradients()
        own = [weight.grad for weight in model.weights]
        optimizer.zero_grad(set_to_none=False)
        model.set_gradients()
        kept = [weight.grad for weight in model.weights]

        def copying() -> None:
            model.use(own)
            optimizer.step()
            model.use(kept)

        def checked(operation: Callable[[], object]) -> Callable[[], None]:
            def run() -> None:
                operation()
                check()

            return run

        step = checked(optimizer.step)
        operations = {STEP: step, FRESH: step, PULL: checked(optimizer.pull), COPYING: checked(copying)}
        operations |= {BESIDE: step, SLOW: step}
        yield Loop(operations, {FRESH: model.set_gradients, SLOW: partial(time.sleep, SLOW_SECONDS)})


def transports() -> tuple[str, ...]:
    """Those this version of the SDK can be told to use."""
    return TRANSPORTS if "transport" in inspect.signature(ps_worker.connect).parameters else (GRPC,)
