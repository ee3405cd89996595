"""Real coordinator and shard processes for a measurement, and workers in the measuring process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from torch import nn

import ps_worker

START_SECONDS = 60.0


@dataclass
class BenchCluster:
    """One coordinator and its shards, each a process; ended by pid when the context ends."""

    address: str
    shards: list[psutil.Process] = field(default_factory=list)

    def resident_bytes(self) -> int:
        """Resident memory of all shards."""
        return sum(shard.memory_info().rss for shard in self.shards)


def _program(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, "--log-level", "warning", *arguments]


def _ready(file: Path, process: subprocess.Popen[bytes]) -> str:
    pause = threading.Event()
    for _ in range(int(START_SECONDS / 0.02)):
        if file.exists():
            return file.read_text().strip()
        if process.poll() is not None:
            raise SystemExit(f"{' '.join(map(str, process.args))} ended with code {process.returncode}")
        pause.wait(0.02)
    raise SystemExit(f"{file.name} was not ready within {START_SECONDS:g} s")


@contextmanager
def running_cluster(shards: int = 1, workers: int = 1, mode: str = "async", threads: int = 1) -> Iterator[BenchCluster]:
    """Coordinator and shards on free ports of 127.0.0.1."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ps-bench-")))

        def start(name: str, command: list[str]) -> tuple[str, int]:
            ready = folder / name
            process = subprocess.Popen([*command, "--ready-file", str(ready)], env=dict(os.environ))
            stack.callback(_end, process)
            return _ready(ready, process), process.pid

        sizes = ("--shards", str(shards), "--workers", str(workers), "--mode", mode)
        address, _ = start("coordinator", _program("ps_server.coordinator.main", "--port", "0", *sizes))
        cluster = BenchCluster(address)
        for index in range(shards):
            place = ("--shard", str(index), "--coordinator", address, "--threads", str(threads))
            _, pid = start(f"shard-{index}", _program("ps_server.shard.main", *place))
            cluster.shards.append(psutil.Process(pid))
        yield cluster


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Flat(nn.Module):
    """``tensors`` parameters of together ``nbytes`` bytes of float32, with gradients that are there already."""

    def __init__(self, nbytes: int, tensors: int) -> None:
        super().__init__()
        elements = nbytes // 4 // tensors
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(elements)) for _ in range(tensors))

    def set_gradients(self) -> None:
        """Ones everywhere: what is measured is the step, not a backward pass."""
        for weight in self.weights:
            weight.grad = torch.ones_like(weight)


@contextmanager
def worker(cluster: BenchCluster, model: Flat, rank: int = 0, **arguments: float) -> Iterator[ps_worker.Optimizer]:
    """A connected worker whose optimizer is SGD."""
    with ps_worker.connect(cluster.address, rank=rank, device="cpu") as connection:
        optimizer = connection.optimizer(torch.optim.SGD, model, **({"lr": 1e-6} | arguments))
        model.set_gradients()
        yield optimizer
