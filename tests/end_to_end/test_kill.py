"""kill -9 over each transport, with real processes: what was half done is nothing, and nothing is left behind."""

from __future__ import annotations

import gc
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
import torch

import ps_worker
from ps_server.coordinator.settings import ClusterSettings
from tests.support.coordinators import running_coordinator
from tests.support.interpreters import Interpreter
from tests.support.length import few
from tests.support.shards import wait_until
from tests.transports.support import shared_mappings

ELEMENTS = 8 << 20
"""32 MB: more than the sockets between two processes hold."""

WORKER = f"""
import sys
import torch
import ps_worker
from ps_worker.transport.socket_stream import SocketClientTransport

push = SocketClientTransport.push

def told(carrier, *message):
    push(carrier, *message)
    print("pushed", flush=True)

address, transport = sys.argv[1:]
with ps_worker.connect(address, transport=transport, device="cpu") as cluster:
    parameter = torch.nn.Parameter(torch.zeros({ELEMENTS}))
    optimizer = cluster.optimizer(torch.optim.SGD, [parameter], lr=1.0, name=transport)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    print("ready", flush=True)
    sys.stdin.readline()
    SocketClientTransport.push = told
    optimizer.step()
"""


class Shard:
    """``ps-server`` in a process of its own, and what can be seen of it from outside."""

    def __init__(self, coordinator: str, folder: Path) -> None:
        ready = folder / "ready"
        arguments = ("--shard", "0", "--coordinator", coordinator, "--port", "0", "--ready-file", str(ready))
        self.process = Interpreter("-m", "ps_server.shard.main", *arguments, TF_CONFIG="")
        self._seen = psutil.Process(self.process.pid)
        wait_until(lambda: ready.exists() or self.process.poll() is not None)

    @property
    def sockets(self) -> int:
        return len(self._seen.net_connections("all"))

    @property
    def segments(self) -> int:
        """How many segments it maps."""
        return sum("memfd:torch-ps" in line for line in self._proc("maps").read_text().splitlines())

    @property
    def segment_descriptors(self) -> int:
        return sum("memfd:torch-ps" in path for path in self.open_files)

    @property
    def resident_bytes(self) -> int:
        return int(self._seen.memory_info().rss)

    @property
    def open_files(self) -> list[str]:
        links = []
        for link in self._proc("fd").iterdir():
            try:
                links.append(str(link.readlink()))
            except FileNotFoundError:
                continue
        return links

    def footprint(self) -> tuple[int, int, int]:
        return self.sockets, self.segments, self.segment_descriptors

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """It does nothing in the block, not even read."""
        self.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: self._seen.status() == psutil.STATUS_STOPPED)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.process.close()

    def _proc(self, name: str) -> Path:
        return Path("/proc", str(self.process.pid), name)


@pytest.fixture
def address() -> Iterator[str]:
    with running_coordinator(ClusterSettings(heartbeat_seconds=0.2)) as coordinator:
        yield coordinator.address


@pytest.fixture
def shard(address: str, tmp_path: Path) -> Iterator[Shard]:
    running = Shard(address, tmp_path)
    yield running
    running.close()


def train_once(address: str, transport: str) -> float:
    """One step with gradients of 1 and a learning rate of 1; what every parameter then is."""
    with ps_worker.connect(address, transport=transport, device="cpu") as cluster:
        parameter = torch.nn.Parameter(torch.zeros(ELEMENTS))
        optimizer = cluster.optimizer(torch.optim.SGD, [parameter], lr=1.0, name=transport)
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert parameter.eq(parameter[0]).all()
        return parameter[0].item()


def nothing_named_is_left(*files: str) -> None:
    assert [path for path in Path("/dev/shm").iterdir() if "torch-ps" in path.name and path.is_file()] == []
    ordinary = tempfile.gettempdir()
    assert [path for path in files if path.startswith("/dev/shm") and not path.startswith(ordinary)] == []


@pytest.mark.parametrize("transport", few(["shm", "bulk"]))
def test_a_worker_killed_in_the_middle_of_a_large_push_leaves_nothing_in_the_shard(address, shard, transport):
    assert train_once(address, transport) == -1.0
    before, resident = shard.footprint(), shard.resident_bytes
    worker = Interpreter("-c", WORKER, address, transport)
    try:
        assert worker.stdout.readline() == "ready\n"
        with shard.stopped():
            worker.stdin.write("\n")
            worker.stdin.flush()
            assert worker.stdout.readline() == "pushed\n"
            worker.kill()
            worker.wait()
    finally:
        worker.close()
    wait_until(lambda: all(now <= then for now, then in zip(shard.footprint(), before, strict=True)))
    wait_until(lambda: shard.resident_bytes <= resident + (24 << 20))
    nothing_named_is_left(*shard.open_files)
    # Over a socket half a push is nothing; in shared memory it was whole with its header.
    assert train_once(address, transport) == (-4.0 if transport == "shm" else -3.0)


def test_a_killed_shard_is_named_by_its_workers_and_leaves_nothing_with_them(address, shard):
    mapped = shared_mappings()
    with ExitStack() as clusters:
        optimizers = []
        for transport in ("shm", "bulk", "grpc"):
            cluster = ps_worker.connect(address, transport=transport, device="cpu")
            clusters.callback(cluster.close)
            parameter = torch.nn.Parameter(torch.zeros(1 << 20))
            optimizers.append(cluster.optimizer(torch.optim.SGD, [parameter], lr=1.0))
            parameter.grad = torch.ones_like(parameter)
            optimizers[-1].step()
            # From now on: what went before may take its time.
            optimizers[-1]._model.pipeline.reconnect_timeout_seconds = 0.3
        assert shard.segments > 0
        shard.close()
        for optimizer in optimizers:
            with pytest.raises(ps_worker.Unavailable, match="shard 0 at "):
                optimizer.step()
    del cluster, clusters, optimizer, optimizers, parameter
    nothing_named_is_left()
    wait_until(lambda: gc.collect() >= 0 and shared_mappings() <= mapped)
