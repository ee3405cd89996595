"""The whole job at a glance."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ps_protocol.cluster.history import CheckpointFacts, JobHistory, PlacedVariable
from ps_protocol.cluster.job import DEFAULT_JOB
from ps_protocol.cluster.job_state import headline, job_state, mode_text
from ps_protocol.cluster.view import JobEvent, Role
from ps_server.glance.alerts import Alert, alerts_of
from ps_server.glance.publications import PublicationGlance, ReaderGlance, publications_of, readers_of
from ps_server.glance.shards import ShardGlance, TableGlance, shards_of, tables_of
from ps_server.glance.workers import WorkerGlance, workers_of

_INCARNATION = re.compile(r" as incarnation \d+|; incarnation \d+ is fenced")


@dataclass(frozen=True, slots=True)
class JobGlance:
    """The state of a job at one moment, as people see it."""

    #: Seconds since 1970, and since this coordinator began.
    at_seconds: float
    elapsed_seconds: float
    #: Name of the job; empty for the default name.
    job: str
    headline: str
    mode: str
    #: As ``job_state``; of a stalled job with what it waits for, and since when.
    state: str
    models: tuple[str, ...]
    moving: bool
    steps_per_second: float
    samples_per_second: float
    bytes_per_second: float
    #: The worker that the others wait for; empty: none.
    straggler: str
    live_workers: int
    expected_workers: int
    live_shards: int
    expected_shards: int
    #: By name, the mean over the live workers that report it.
    reported: Mapping[str, float]
    workers: tuple[WorkerGlance, ...]
    shards: tuple[ShardGlance, ...]
    tables: tuple[TableGlance, ...]
    checkpoints: tuple[CheckpointFacts, ...]
    placement: tuple[PlacedVariable, ...]
    publications: tuple[PublicationGlance, ...]
    #: Of published weights; those that are furthest behind.
    readers: tuple[ReaderGlance, ...]
    events: tuple[JobEvent, ...]
    alerts: tuple[Alert, ...]
    configuration: Mapping[str, str]


def glance_of(history: JobHistory) -> JobGlance:
    """The glance at the job of ``history``."""
    view = history.status.view
    workers, shards = workers_of(history), shards_of(history)
    live = [worker for worker in workers if worker.state in ("live", "busy", "silent") and not worker.evaluator]
    return JobGlance(
        at_seconds=history.at_seconds,
        elapsed_seconds=max(0.0, history.at_seconds - history.began_seconds),
        job="" if history.status.job == DEFAULT_JOB else history.status.job,
        headline=headline(history.status),
        mode=mode_text(history.status),
        state=str(job_state(history.status)),
        models=tuple(sorted(view.models)),
        moving=bool(view.moving),
        steps_per_second=sum(worker.steps_per_second for worker in live),
        samples_per_second=sum(worker.samples_per_second for worker in live),
        bytes_per_second=sum(shard.bytes_per_second for shard in shards),
        straggler=next((worker.name for worker in workers if worker.straggler), ""),
        live_workers=len(view.live(Role.WORKER)),
        expected_workers=view.expected_workers,
        live_shards=len(view.live(Role.SHARD).keys() & set(view.used_shards)),
        expected_shards=len(view.used_shards),
        reported=_means(live),
        workers=workers,
        shards=shards,
        tables=tables_of(history),
        checkpoints=history.checkpoints,
        placement=history.placement,
        publications=publications_of(history),
        readers=readers_of(history),
        events=tuple(map(_in_words, history.events)),
        alerts=alerts_of(history, workers, shards),
        configuration=dict(history.configuration),
    )


def _in_words(event: JobEvent) -> JobEvent:
    """``event`` without incarnations, where its text names the member."""
    return replace(event, text=_INCARNATION.sub("", event.text))


def _means(workers: list[WorkerGlance]) -> dict[str, float]:
    values_of: dict[str, list[float]] = {}
    for worker in workers:
        for name, value in worker.reported.items():
            values_of.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in values_of.items()}
