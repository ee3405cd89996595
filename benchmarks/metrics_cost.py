"""CPU time that counting adds to a step: ``python -m benchmarks.metrics_cost``.

Runs what a worker and a shard do for the metrics of one step, without the step, in this process: readings of the clock,
histograms, waits. Between blocks of it a worker and a shard make steps that count, as they always do. A row has both
CPU times and the median of their ratios, with its quartiles, for each size and transport.
"""

from __future__ import annotations

import time

from benchmarks.step_share import Cost, shares
from ps_protocol.metrics.histogram import Histogram
from ps_worker.session.reporting import WaitReason, WorkerCounters

STEPS = 10_000


def worker_step(counters: WorkerCounters) -> None:
    """What RemoteModel.step and StepPipeline count."""
    began = time.perf_counter()
    sent = time.perf_counter()
    counters.answered(time.perf_counter() - sent, 0.0, 0.0, WaitReason.BOUND)
    counters.stepped(began, time.perf_counter())


def shard_step(apply: Histogram, reply: Histogram) -> None:
    """What Applier and StepStream count, for a pull that need not wait."""
    began = time.perf_counter()
    apply.observe(time.perf_counter() - began)
    began = time.perf_counter()
    reply.observe(time.perf_counter() - began)


def measured(steps: int = STEPS) -> Cost:
    """CPU time of counting, over ``steps`` steps."""
    counters, apply, reply = WorkerCounters(), Histogram(), Histogram()
    begin = time.thread_time()
    for _ in range(steps):
        worker_step(counters)
    between = time.thread_time()
    for _ in range(steps):
        shard_step(apply, reply)
    return Cost((between - begin) / steps, (time.thread_time() - between) / steps)


def main() -> None:
    """Print a row for each size and transport."""
    for row in shares(measured):
        print(row, flush=True)


if __name__ == "__main__":
    main()
