"""The files that one step passes through, and how many functions it enters, on worker and shard: ``python -m
benchmarks.step_files [--calls bulk]``.

A model of 100 parameters trains over bulk sockets, with the wire format int8, on a durable shard that runs as a thread
of this process; the coordinator is a process of its own. A file counts when a function of it is entered in every step
that is looked at: what happens now and then (heartbeats, snapshots) is not part of a step. ``--calls``: the functions,
and how often a step enters each, for a model of 10 KB in float32, raw, plain SGD, in memory: the short way. A function
that goes on after it has waited counts again.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

import ps_worker
from benchmarks.cluster import coordinator_process
from ps_server.cli.options.storage import Durability, StorageConfig
from ps_server.shard.config import ShardConfig, SideChannelConfig
from ps_server.shard.process import serve

STEPS = 20
ROOT = Path(__file__).parents[1]
PACKAGES = ("ps_worker", "ps_server", "protos/ps_protocol")


class EnteredFunctions:
    """Counts the functions that are entered, on every thread that starts after ``install``."""

    def __init__(self) -> None:
        self._entered: Counter[CodeType] = Counter()

    def install(self) -> None:
        """Also on the calling thread."""
        threading.setprofile(self._enter)
        sys.setprofile(self._enter)

    def taken(self) -> Counter[CodeType]:
        """What was entered since the last call."""
        taken, self._entered = self._entered, Counter()
        return taken

    def _enter(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            self._entered[frame.f_code] += 1


@contextmanager
def shard_thread(config: ShardConfig) -> Iterator[None]:
    """A shard of this process, until the block ends."""
    loop, stop = asyncio.new_event_loop(), asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(config, stop),), name="shard")
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        # Threads of the loop may still prepare a segment of the log in a folder that is to be removed.
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


def files_of_a_step(steps: int = STEPS, *, wire: str = "int8") -> list[str]:
    """Paths of the project's files, from its root, that every one of ``steps`` steps entered."""
    with _entered(Durability.DURABLE, "bulk", _layers, wire=wire) as (entered, compute, step):
        files = []
        for _ in range(steps):
            compute()
            step()
            files.append({code.co_filename for code in entered.taken()})
    return sorted(str(path) for path in map(_of_the_project, set.intersection(*files)) if path)


def calls_of_a_step(transport: str = "bulk", steps: int = 200) -> dict[str, float]:
    """How often a small step enters each function of the project, as "file:line name"; rare ones are left out."""
    with _entered(Durability.MEMORY, transport, _one_layer) as (entered, _, step):
        for _ in range(steps):
            step()
        calls = entered.taken()
    named = {code: path for code in calls if (path := _of_the_project(code.co_filename))}
    return {
        f"{path}:{code.co_firstlineno} {code.co_qualname}": calls[code] / steps
        for code, path in sorted(named.items(), key=lambda item: (item[1], item[0].co_firstlineno))
        if calls[code] >= steps / 2
    }


def of_packages(calls: Mapping[str, float]) -> dict[str, float]:
    """The sum of ``calls`` in each package."""
    return {package: sum(n for name, n in calls.items() if name.startswith(package)) for package in PACKAGES}


@contextmanager
def _entered(
    durability: Durability, transport: str, model: Callable[[], tuple[nn.Module, int]], **arguments: Any
) -> Iterator[tuple[EnteredFunctions, Callable[[], None], Callable[[], object]]]:
    """A job that has made some steps: what counts functions from now on, what computes gradients, and a step."""
    entered = EnteredFunctions()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ps-step-files-")))
        address = stack.enter_context(coordinator_process(folder, shards=1, workers=1))
        entered.install()
        stack.callback(sys.setprofile, None)
        stack.callback(threading.setprofile, None)
        storage = StorageConfig(durability, folder / "data" if durability is Durability.DURABLE else None)
        sides = SideChannelConfig("127.0.0.1", (0,), shm=transport == "shm")
        config = ShardConfig(shard=0, coordinator=address, threads=1, side_channels=sides, storage=storage)
        stack.enter_context(shard_thread(config))
        compute, step = stack.enter_context(_training(address, transport, model, **arguments))
        for _ in range(10):
            compute()
            step()
        entered.taken()
        yield entered, compute, step


def _layers() -> tuple[nn.Module, int]:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(50))), 8


def _one_layer() -> tuple[nn.Module, int]:
    return nn.Linear(50, 50), 50


@contextmanager
def _training(
    address: str, transport: str, model: Callable[[], tuple[nn.Module, int]], **arguments: Any
) -> Iterator[tuple[Callable[[], None], Callable[[], object]]]:
    with ps_worker.connect(address, rank=0, device="cpu", transport=transport) as cluster:
        module, inputs = model()
        optimizer = cluster.optimizer(torch.optim.SGD, module, lr=0.01, **arguments)

        def compute() -> None:
            optimizer.zero_grad()
            module(torch.ones(2, inputs)).square().mean().backward()

        yield compute, optimizer.step


def _of_the_project(file: str) -> Path | None:
    path = Path(file)
    if not path.is_relative_to(ROOT) or not str(path.relative_to(ROOT)).startswith(PACKAGES):
        return None
    return path.relative_to(ROOT)


def main() -> int:
    """Print the files, or functions, and their number."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--calls", choices=("shm", "bulk", "grpc"), help="functions of a small step over this transport"
    )
    options = parser.parse_args()
    if options.calls:
        calls = calls_of_a_step(options.calls)
        for name, count in calls.items():
            print(f"{count:5.2f} {name}")
        print("  ".join(f"{package} {count:.0f}" for package, count in of_packages(calls).items()))
        return 0
    files = files_of_a_step()
    for file in files:
        print(file)
    print(f"{len(files)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
