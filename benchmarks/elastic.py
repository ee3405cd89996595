"""How evenly an epoch of leased data ends when one of four workers is 4 times slower, in async.

``python -m benchmarks.elastic [BATCHES] [EPOCHS] [STEP_MS] [--whole]``. A step is a wait of STEP_MS, of the slow worker
4 times as long, and a real push and pull of a small model. A busy machine makes steps longer, so the speed of each
worker is what it measures itself. Shown are, for each epoch after the first, the part of the summed speed that was
reached, and by how much the first worker ended before the last. With ``--whole`` workers get all they ask for, however
slow they are, as before leases were sized by speed.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from typing import Any

from benchmarks.cluster import running_cluster
from benchmarks.forked import answers, forked

WORKERS, SLOW = 4, 4
BATCH = 8


def train(address: str, rank: int, batches: int, epochs: int, step_seconds: float, *, whole: bool) -> dict[str, Any]:
    """One worker: for each epoch when it began and ended its last step, its steps, and the time they took."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import ps_worker
    from ps_worker.session.session import Session

    torch.set_num_threads(1)
    if whole:
        lease_data = Session.lease_data
        Session.lease_data = lambda self, ask, *rest: lease_data(  # type: ignore[method-assign]
            self, replace(ask, batch_items=0), *rest
        )
    data = TensorDataset(torch.zeros(batches * BATCH, 4), torch.zeros(batches * BATCH, 1))
    own_seconds = step_seconds * (SLOW if rank == WORKERS - 1 else 1)
    told: list[dict[str, float]] = []
    with ps_worker.connect(address, rank=rank) as cluster:
        model = torch.nn.Linear(4, 1)
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.01)
        loader = cluster.shard(DataLoader(data, batch_size=BATCH), lease=True)
        for _ in range(epochs):
            cluster.barrier()
            begun, last, steps, busy = time.monotonic(), 0.0, 0, 0.0
            for x, y in loader:
                at = time.monotonic()
                time.sleep(own_seconds)
                torch.nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                last = time.monotonic()
                steps, busy = steps + 1, busy + last - at
            told.append({"begun": begun, "last": last, "steps": steps, "busy": busy})
    return {"rank": rank, "epochs": told}


def shown(told: list[dict[str, Any]], epoch: int, batches: int) -> str:
    """One line on one epoch."""
    workers = [each["epochs"][epoch] for each in told if each["epochs"][epoch]["steps"]]
    speed = sum(worker["steps"] / worker["busy"] for worker in workers)
    seconds = max(worker["last"] for worker in workers) - max(worker["begun"] for worker in workers)
    ends = [worker["last"] for worker in workers]
    slowest = max(worker["busy"] / worker["steps"] for worker in workers)
    steps = ", ".join(f"{worker['steps']}" for worker in workers)
    return (
        f"epoch {epoch}: {batches / seconds:.1f} steps/s, {batches / seconds / speed:.1%} of the sum of {speed:.1f}; "
        f"the first worker ends {(max(ends) - min(ends)) / slowest:.2f} steps of the slowest before the last; "
        f"steps: {steps}"
    )


def main() -> None:
    """Entry point."""
    words = sys.argv[1:]
    whole = "--whole" in words
    numbers = [float(each) for each in words if each != "--whole"]
    batches, epochs, step_ms = (*numbers, *(400.0, 4.0, 50.0)[len(numbers) :])
    # gRPC does not outlive a fork: workers are forked before anything here makes a call.
    with running_cluster(shards=1, workers=WORKERS) as cluster:
        children = [
            forked(train, cluster.address, rank, int(batches), int(epochs), step_ms / 1e3, whole=whole)
            for rank in range(WORKERS)
        ]
        told = answers(children)
    print(f"{os.getloadavg()[0]:.1f} processes on {os.cpu_count()} cores; leases {'whole' if whole else 'by speed'}")
    for epoch in range(1, int(epochs)):
        print(shown(told, epoch, int(batches)))


if __name__ == "__main__":
    main()
