"""What people should look at: members that are missing, lost, failed or silent, numbers that are not finite."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ps_protocol.cluster.history import JobHistory
from ps_server.glance.shards import ShardGlance
from ps_server.glance.workers import WorkerGlance


@dataclass(frozen=True, slots=True)
class Alert:
    """Something that is wrong now."""

    #: Names the condition; the same for as long as it holds.
    key: str
    text: str


def alerts_of(history: JobHistory, workers: Sequence[WorkerGlance], shards: Sequence[ShardGlance]) -> tuple[Alert, ...]:
    """Those of a job that has begun and is not finished; shards first."""
    view = history.status.view
    if view.finished or not view.started:
        return ()
    return (*_of_shards(shards), *_of_workers(history, workers))


def _of_shards(shards: Sequence[ShardGlance]) -> Iterator[Alert]:
    for shard in shards:
        if shard.state in ("lost", "failed"):
            yield Alert(f"{shard.name} lost", f"{shard.name} is {shard.note}")
        elif shard.state in ("missing", "left", "stopped"):
            yield Alert(f"{shard.name} missing", f"{shard.name} is missing")
        elif shard.state == "silent":
            yield Alert(f"{shard.name} silent", f"{shard.name} has not been heard of for {shard.heard_seconds:.0f} s")


def _of_workers(history: JobHistory, workers: Sequence[WorkerGlance]) -> Iterator[Alert]:
    view = history.status.view
    for worker in workers:
        if worker.state in ("lost", "failed"):
            yield Alert(f"{worker.name} lost", f"{worker.name} is {worker.note}")
        elif worker.state == "silent":
            yield Alert(
                f"{worker.name} silent", f"{worker.name} has not been heard of for {worker.heard_seconds:.0f} s"
            )
        for name, value in worker.reported.items():
            if worker.state == "live" and not math.isfinite(value):
                yield Alert(f"{worker.name} {name}", f"{worker.name} reports {name} = {value}")
    ranks = [worker for worker in workers if not worker.evaluator]
    there = sum(worker.state in ("live", "busy", "silent", "left") for worker in ranks)
    named = sum(worker.state in ("lost", "failed") for worker in ranks)
    if view.expected_workers > there + named:
        yield Alert("workers missing", f"{there} of {view.expected_workers} workers are there")
