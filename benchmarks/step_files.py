"""The files that one step passes through, on worker and shard: ``python -m benchmarks.step_files``.

A model of 100 parameters trains over bulk sockets, with the wire format int8, on a durable shard that runs as a thread
of this process; the coordinator is a process of its own. A file counts when a function of it is entered in every step
that is looked at: what happens now and then (heartbeats, snapshots) is not part of a step.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

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


class EnteredFiles:
    """Collects the files whose functions are entered, on every thread that starts after ``install``."""

    def __init__(self) -> None:
        self._entered: set[str] = set()

    def install(self) -> None:
        """Also on the calling thread."""
        threading.setprofile(self._enter)
        sys.setprofile(self._enter)

    def taken(self) -> set[str]:
        """What was entered since the last call."""
        taken, self._entered = self._entered, set()
        return taken

    def _enter(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            self._entered.add(frame.f_code.co_filename)


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
    files = EnteredFiles()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ps-step-files-")))
        address = stack.enter_context(coordinator_process(folder, shards=1, workers=1))
        files.install()
        stack.callback(sys.setprofile, None)
        stack.callback(threading.setprofile, None)
        storage = StorageConfig(Durability.DURABLE, folder / "data")
        sides = SideChannelConfig("127.0.0.1", (0,), shm=False)
        config = ShardConfig(shard=0, coordinator=address, threads=1, side_channels=sides, storage=storage)
        stack.enter_context(shard_thread(config))
        step = stack.enter_context(_training(address, wire))
        for _ in range(3):
            step()
        files.taken()
        entered = []
        for _ in range(steps):
            step()
            entered.append(files.taken())
    return sorted(_of_the_project(set.intersection(*entered)))


@contextmanager
def _training(address: str, wire: str) -> Iterator[Callable[[], None]]:
    with ps_worker.connect(address, rank=0, device="cpu", transport="bulk") as cluster:
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(50)))
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.01, wire=wire)

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(2, 8)).square().mean().backward()
            optimizer.step()

        yield step


def _of_the_project(files: set[str]) -> Iterator[str]:
    for file in files:
        path = Path(file)
        if path.is_relative_to(ROOT) and str(path.relative_to(ROOT)).startswith(PACKAGES):
            yield str(path.relative_to(ROOT))


def main() -> int:
    """Print the files and their number."""
    files = files_of_a_step()
    for file in files:
        print(file)
    print(f"{len(files)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
