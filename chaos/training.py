"""The training that goes on under faults: generated images of ten kinds, a small network, and a count of steps."""

from __future__ import annotations

import itertools
import mmap
import os
import struct
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ps_worker
from chaos.readers import NAME

BATCH = 32

PUBLISHED_STEPS = 25
"""Rank 0 publishes the weights after so many steps of its own."""

TRAIN, TEST = 1 << 16, 1 << 12

#: Arguments of torch.optim.SGD.
OPTIMIZER: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "weight_decay": 5e-4}


def network() -> nn.Module:
    """10 thousand parameters."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def images(number: int, seed: int) -> TensorDataset:
    """Images of 8×8: one of ten patterns, under so much noise that no network tells all of them apart."""
    patterns = torch.randn(10, 64, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (number,), generator=generator)
    return TensorDataset(patterns[labels] + 3.0 * torch.randn(number, 64, generator=generator), labels)


@torch.no_grad()
def test_loss(model: nn.Module) -> float:
    """Cross entropy on images that nobody trains on."""
    data, labels = images(TEST, 2).tensors
    return nn.functional.cross_entropy(model(data), labels).item()


class Counter:
    """A number in a file, which a killed process leaves as it was."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(8))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 8)

    def add(self) -> None:
        """One more."""
        struct.pack_into("<q", self._memory, 0, struct.unpack_from("<q", self._memory)[0] + 1)


def read_counter(path: Path) -> int:
    """The number in the file; 0 where nobody has made it yet."""
    try:
        return int(struct.unpack("<q", path.read_bytes())[0])
    except (FileNotFoundError, struct.error):
        return 0


def main() -> None:
    """A worker: trains until SIGTERM. Its arguments: the file of its counter, the seconds a step takes at least, and
    its transport.
    """
    torch.set_num_threads(1)
    counter, step_seconds = Counter(Path(sys.argv[1])), float(sys.argv[2])
    torch.manual_seed(os.getpid())
    with ps_worker.connect(device="cpu", transport=sys.argv[3]) as cluster:
        model = network()
        loader = cluster.shard(DataLoader(images(TRAIN, 1), batch_size=BATCH, shuffle=True))
        optimizer = cluster.optimizer(torch.optim.SGD, model, **OPTIMIZER)
        steps = 0
        for _ in itertools.count():
            for data, labels in loader:
                begun = time.monotonic()
                torch.autograd.backward(nn.functional.cross_entropy(model(data), labels))
                # As if an accelerator computed, and not the cores that the servers need.
                time.sleep(max(0.0, begun + step_seconds - time.monotonic()))
                optimizer.step()
                counter.add()
                steps += 1
                if cluster.rank == 0 and steps % PUBLISHED_STEPS == 0:
                    cluster.publish(NAME, optimizer, step=steps)
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
