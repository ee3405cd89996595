"""A worker whose parameters and rows are known after every step; it ends with exit code 3 when they are not those."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

import ps_worker
from chaos.training import Counter

SIZE, IDS, DIM = 1000, 16, 4


def main() -> None:
    """Train until SIGTERM. Arguments: the file of its counter, its transport."""
    torch.set_num_threads(1)
    counter, transport = Counter(Path(sys.argv[1])), sys.argv[2]
    with ps_worker.connect(device="cpu", transport=transport) as cluster:
        rows = cluster.embedding(
            DIM, name="rows", init=ps_worker.rows.Constant(0.0), optimizer=ps_worker.rows.SGD(lr=1.0)
        )
        model = torch.nn.ModuleDict({"dense": torch.nn.Linear(SIZE, 1, bias=False), "rows": rows})
        torch.nn.init.zeros_(model["dense"].weight)
        optimizer = cluster.optimizer(torch.optim.SGD, model, name="canary", lr=1.0)
        ids = torch.arange(IDS)
        # Whole numbers below 2**24: float32 adds them without rounding, in any order.
        for step in range(1, 1 << 24):
            (model["dense"].weight.sum() + rows(ids).sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                right = bool((model["dense"].weight == -step).all()) and bool((rows(ids) == -step).all())
            if not right:
                print(f"after {step} steps: {model['dense'].weight.unique()}, rows {rows(ids).unique()}", flush=True)
                sys.exit(3)
            counter.add()
            # The cores are for the servers under attack.
            time.sleep(0.02)


if __name__ == "__main__":
    main()
