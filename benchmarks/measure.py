"""The measurements, each a function that returns named figures."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import torch

from benchmarks.cluster import BenchCluster, Flat, running_cluster, worker

Figures = dict[str, float]
MB = 1_000_000


def _step_seconds(step: Callable[[], object], count: int, warm_up: int = 3) -> list[float]:
    for _ in range(warm_up):
        step()
    seconds = []
    for _ in range(count):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    return seconds


def small_step(steps: int) -> Figures:
    """Whole step (push, apply, pull) of a 10 KB model, one shard, loopback: what a worker pays per step."""
    model = Flat(10_000, 10)
    with running_cluster() as cluster, worker(cluster, model) as optimizer:
        seconds = _step_seconds(optimizer.step, steps, warm_up=steps // 10)
    percentiles = statistics.quantiles(seconds, n=100)
    return {"p50_us": percentiles[49] * 1e6, "p99_us": percentiles[98] * 1e6, "steps": steps}


def thousand_tensors(nbytes: int, steps: int, repeats: int = 5) -> Figures:
    """A step of 1,000 tensors against a step of one tensor of the same bytes, in turn, on one running shard."""
    one, many = Flat(nbytes, 1), Flat(nbytes, 1000)
    ratios, times_one, times_many = [], [], []
    with ExitStack() as stack:
        optimizers = [
            stack.enter_context(worker(stack.enter_context(running_cluster()), model)) for model in (one, many)
        ]
        for _ in range(repeats):
            first, second = (statistics.median(_step_seconds(o.step, steps)) for o in optimizers)
            times_one.append(first)
            times_many.append(second)
            ratios.append(second / first)
    return {
        "one_tensor_ms": statistics.median(times_one) * 1e3,
        "thousand_tensors_ms": statistics.median(times_many) * 1e3,
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }


def large_step(nbytes: int, steps: int) -> Figures:
    """Whole step of one large tensor: rate of gradients up plus parameters down."""
    model = Flat(nbytes, 1)
    with running_cluster() as cluster, worker(cluster, model) as optimizer:
        seconds = statistics.median(_step_seconds(optimizer.step, steps))
    return {"step_ms": seconds * 1e3, "both_ways_MB_per_s": 2 * nbytes / seconds / MB}


def memory(nbytes: int, pushers: int, steps: int) -> Figures:
    """Resident memory of one shard under ``pushers`` concurrent workers, against what it has to hold.

    Held: an idle shard, parameters and momentum times 1.1, and one gradient per pusher.
    """
    with running_cluster() as idle_cluster:
        idle = _settled(idle_cluster)
    with running_cluster(workers=pushers) as cluster:
        peak = 0

        def train(rank: int) -> None:
            nonlocal peak
            model = Flat(nbytes, 1)
            with worker(cluster, model, rank, momentum=0.9) as optimizer:
                for _ in range(steps):
                    optimizer.step()
                    peak = max(peak, cluster.resident_bytes())

        with ThreadPoolExecutor(pushers) as pool:
            list(pool.map(train, range(pushers)))
    bound = idle + 1.1 * 2 * nbytes + pushers * nbytes
    return {"idle_MB": idle / MB, "peak_MB": peak / MB, "bound_MB": bound / MB, "ratio_to_bound": peak / bound}


def _settled(cluster: BenchCluster) -> int:
    """Memory of a shard that holds one tiny model: everything is loaded, nothing is large."""
    with worker(cluster, Flat(4, 1), momentum=0.9) as optimizer:
        optimizer.step()
        return cluster.resident_bytes()


def all_rows(quick: bool) -> dict[str, Callable[[], Figures]]:
    """Every row of the table by name; ``quick`` for a look, in seconds."""
    torch.set_num_threads(1)
    few, many = (5, 200) if quick else (30, 5000)
    size = 10 * MB if quick else 100 * MB
    return {
        "step, 10 KB model": lambda: small_step(many),
        "1,000 tensors against 1, 4 MB": lambda: thousand_tensors(4 * MB, few * 2),
        f"1,000 tensors against 1, {size // MB} MB": lambda: thousand_tensors(size, few // 3 + 1),
        f"step, {size // MB} MB": lambda: large_step(size, few),
        f"shard memory, {size // MB} MB, momentum, 1 pusher": lambda: memory(size, 1, few // 2),
        f"shard memory, {size // MB} MB, momentum, 2 pushers": lambda: memory(size, 2, few // 2),
    }
