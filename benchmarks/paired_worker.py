"""The worker of ``benchmarks.paired``: makes as many steps as each line of its input says, and prints their median."""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn

import ps_worker


def main(address: str, transport: str, nbytes: int, *, overlap: bool) -> None:
    """Train one tensor of ``nbytes`` bytes until the input ends.

    ``overlap``: after twice the time of an exchange, gradients are zeroed in place, as before a backward pass, and
    pushed. That is what is timed: what the thread that computes spends, while no exchange is under way.
    """
    torch.set_num_threads(1)
    with ps_worker.connect(address, device="cpu", transport=transport) as cluster:
        before = memory("VmRSS")
        model = nn.Module()
        model.weight = nn.Parameter(torch.zeros(nbytes // 4))
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=1e-6, overlap=overlap)
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.zero_grad(set_to_none=False)
        model.weight.grad.fill_(1.0)
        exchanges = []
        for _ in range(5):
            begin = time.perf_counter()
            optimizer.step()
            optimizer.finish()
            exchanges.append(time.perf_counter() - begin)
        wait = 2 * statistics.median(exchanges) if overlap else 0.0
        print("ready", flush=True)
        for line in sys.stdin:
            seconds = []
            for _ in range(int(line)):
                if overlap:
                    time.sleep(wait)
                begin = time.perf_counter()
                if overlap:
                    optimizer.zero_grad(set_to_none=False)
                optimizer.step()
                seconds.append(time.perf_counter() - begin)
            peak = memory("VmHWM") - before
            print(json.dumps({"median": statistics.median(seconds or [0.0]), "peak": peak}), flush=True)


def memory(field: str) -> int:
    """Bytes of this process, as ``/proc/self/status`` has them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), overlap=sys.argv[4:] == ["overlap"])
