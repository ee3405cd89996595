"""Alerts: members that are missing, lost, failed or silent, models that diverge, and reported numbers that are not
finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ps_protocol.cluster.history import JobHistory
from ps_protocol.cluster.job_state import diverging, expiring, has_expired
from ps_protocol.cluster.view import Role
from ps_server.glance.shards import ShardGlance
from ps_server.glance.workers import WorkerGlance

NAMED = 3
"""More workers than this with the same problem share one alert."""


@dataclass(frozen=True, slots=True)
class Alert:
    """Something that is wrong now."""

    #: Names the condition; the same while it lasts.
    key: str
    text: str


def alerts_of(history: JobHistory, workers: Sequence[WorkerGlance], shards: Sequence[ShardGlance]) -> tuple[Alert, ...]:
    """The alerts of a job that is not finished, shards first; those of members once it has started."""
    view = history.status.view
    if view.finished:
        return ()
    certificates = _of_certificates(history)
    if not view.started:
        return tuple(certificates)
    grown = [Alert("divergence", text)] if (text := diverging(history.status)) else []
    return (*_of_shards(shards), *grown, *_of_workers(history, workers), *certificates)


def _of_certificates(history: JobHistory) -> Iterator[Alert]:
    if text := expiring(history.status):
        yield Alert("certificates expired" if has_expired(history.status) else "certificates", text)


def _of_shards(shards: Sequence[ShardGlance]) -> Iterator[Alert]:
    for shard in shards:
        if shard.state in ("lost", "failed"):
            yield Alert(f"{shard.name} lost", f"{shard.name} is {shard.note}")
        elif shard.state in ("missing", "left", "stopped"):
            yield Alert(f"{shard.name} missing", f"{shard.name} is missing")
        elif shard.state == "silent":
            yield Alert(f"{shard.name} silent", f"{shard.name} has sent no heartbeat for {shard.heard_seconds:.0f} s")


def _of_state(workers: Sequence[WorkerGlance], key: str, words: str, one: Callable[[WorkerGlance], str]) -> list[Alert]:
    """An alert for each of ``workers``, or one for all when there are many."""
    if len(workers) <= NAMED:
        return [Alert(f"{worker.name} {key}", one(worker)) for worker in workers]
    names = ", ".join(worker.name for worker in workers[:NAMED])
    return [Alert(f"workers {key}", f"{len(workers)} workers {words}: {names} and others")]


def _silence(worker: WorkerGlance) -> str:
    return f"{worker.name} has sent no heartbeat for {worker.heard_seconds:.0f} s"


def _of_workers(history: JobHistory, workers: Sequence[WorkerGlance]) -> Iterator[Alert]:
    view = history.status.view
    ended = [worker for worker in workers if worker.state in ("lost", "failed")]
    silent = [worker for worker in workers if worker.state == "silent"]
    yield from _of_state(ended, "lost", "are lost or failed", lambda worker: f"{worker.name} is {worker.note}")
    yield from _of_state(silent, "silent", "have sent no heartbeat for long", _silence)
    for worker in workers:
        for name, value in worker.reported.items():
            if worker.state == "live" and not math.isfinite(value):
                yield Alert(f"{worker.name} {name}", f"{worker.name} reports {name} = {value}")
    ranks = [worker for worker in workers if not worker.evaluator]
    there = sum(worker.state in ("live", "busy", "silent", "left") for worker in ranks)
    named = sum(worker.state in ("lost", "failed") for worker in ranks)
    if view.expected_workers > there + named:
        yield Alert("workers missing", f"{there} of {view.expected_workers} workers are there")
    elif not view.expected_workers and ranks and not named and not view.live(Role.WORKER):
        yield Alert("no worker", "no worker is there")
