"""CPU time that counting adds to a step: ``python -m benchmarks.metrics_cost``.

Runs what a worker and a shard do for the metrics of one step, without the step, in this process: readings of the clock,
histograms, waits. CPU time does not depend on what else runs on the machine as much as the time of a step does.
"""

from __future__ import annotations

import statistics
import time

from ps_protocol.metrics.histogram import Histogram
from ps_worker.session.reporting import WaitReason, WorkerCounters

STEPS = 100_000
BLOCKS = 9


def worker_step(counters: WorkerCounters) -> None:
    """What RemoteModel.step and StepPipeline count."""
    began = time.perf_counter()
    counters.begins(began)
    sent = time.perf_counter()
    counters.answered(time.perf_counter() - sent, 0.0, 0.0, WaitReason.BOUND)
    counters.ends(began, time.perf_counter())


def shard_step(apply: Histogram, reply: Histogram) -> None:
    """What Applier and StepStream count, for a pull that need not wait."""
    began = time.perf_counter()
    apply.observe(time.perf_counter() - began)
    began = time.perf_counter()
    reply.observe(time.perf_counter() - began)


def main() -> None:
    """Print the medians over the blocks, in microseconds per step."""
    counters, apply, reply = WorkerCounters(), Histogram(), Histogram()
    worker, shard = [], []
    for _ in range(BLOCKS):
        begin = time.process_time()
        for _ in range(STEPS):
            worker_step(counters)
        between = time.process_time()
        for _ in range(STEPS):
            shard_step(apply, reply)
        worker.append((between - begin) / STEPS * 1e6)
        shard.append((time.process_time() - between) / STEPS * 1e6)
    print(f"worker {statistics.median(worker):.2f} us a step, shard {statistics.median(shard):.2f} us a step")


if __name__ == "__main__":
    main()
