"""The workers of a job at a glance: how fast each is, what it waits for, and which one the others wait for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from ps_protocol.cluster.history import JobHistory
from ps_protocol.cluster.job_state import TRAINING, current_members, job_state, note_of, state_of
from ps_protocol.cluster.view import MemberStatus, Role
from ps_protocol.model.spec import Consistency, Mode

SILENT_BEATS = 3.0
SILENT_LEASES = 0.25
"""A member is silent when this many heartbeats are missing, and this part of its lease has passed."""

SLOW = 0.7
"""A worker is slow below this part of the median speed."""

WAITS = 0.2
"""Workers that wait for this part of their time wait for a reason."""


@dataclass(frozen=True, slots=True)
class WorkerGlance:
    """One worker, or an evaluator."""

    name: str
    index: int
    evaluator: bool
    #: As ``state_of``, or "silent".
    state: str
    #: How it failed or was lost, or what it is busy with.
    note: str
    phase: int
    clock: int
    steps: int
    #: Steps behind the first worker, about: heartbeats are of different moments.
    behind: int
    steps_per_second: float
    samples_per_second: float
    bytes_per_second: float
    staleness: int
    transport: str
    #: The reason of most of its waiting, for people; empty: it hardly waits.
    waits_for: str
    #: The part of its time that it waits; None: not known.
    wait_share: float | None
    #: The others wait for it.
    straggler: bool
    heard_seconds: float
    reported: Mapping[str, float]
    host: str
    pid: int


def workers_of(history: JobHistory) -> tuple[WorkerGlance, ...]:
    """Workers by rank, then evaluators by number."""
    status = history.status
    entries = current_members(status, Role.WORKER)
    live = [entry for entry in entries if not entry.gone]
    front = max(((entry.stats.phase, clock_now(entry)) for entry in live if has_stepped(entry)), default=(0, 0.0))
    found = [_glance(entry, history, front) for entry in entries]
    # Nobody waits for a worker that waits for a shard itself.
    running = [worker for worker in found if worker.state == "live" and not _is_cut_off(worker.index, history)]
    trains = job_state(status).name == TRAINING
    straggler = straggler_of(running, status.view.consistency, history.wait_shares) if trains else None
    name = f"worker {straggler}" if straggler is not None else ""
    scripts = tuple(
        replace(
            worker,
            straggler=worker.index == straggler,
            waits_for=_wait_words(worker, history, "" if worker.index == straggler else name),
        )
        for worker in found
    )
    evaluators = (_glance(entry, history, None) for entry in current_members(status, Role.EVALUATOR))
    return (*scripts, *evaluators)


def is_silent(entry: MemberStatus, history: JobHistory) -> bool:
    """Whether a live member has not sent a heartbeat for long."""
    limit = max(SILENT_BEATS * history.heartbeat_seconds, SILENT_LEASES * history.lease_seconds)
    return not entry.gone and entry.seconds_since_heartbeat > limit


def _is_cut_off(rank: int, history: JobHistory) -> bool:
    """Whether a worker has spent its last seconds waiting for a connection to a shard."""
    return history.wait_shares.get(rank, {}).get("reconnect", 0.0) >= WAITS


def has_stepped(entry: MemberStatus) -> bool:
    """Whether a worker has reported a position. It has none before its first push, and is not behind then."""
    return (entry.stats.phase, entry.stats.clock) != (0, 0)


def clock_now(entry: MemberStatus) -> float:
    """About where a live worker is now, in steps of its phase: it has gone on since its last heartbeat."""
    return entry.stats.clock + entry.stats.steps_per_second * entry.seconds_since_heartbeat


def straggler_of(
    workers: Sequence[WorkerGlance], consistency: Consistency, shares: Mapping[int, Mapping[str, float]]
) -> int | None:
    """The rank that the others wait for, or that is much slower than they are; None: there is none.

    ``shares``: the part of its time that each rank waits, by reason.
    """
    if len(workers) < 2:
        return None
    if consistency.mode is not Mode.ASYNC:
        held = _least_waiting([worker.index for worker in workers if worker.index in shares], shares)
        if held is not None or consistency.mode is Mode.SYNC:
            return held
    # One that has just joined has no speed yet.
    workers = [worker for worker in workers if worker.steps_per_second or (worker.phase, worker.clock) != (0, 0)]
    if len(workers) < 2:
        return None
    slowest = min(workers, key=lambda worker: (worker.steps_per_second, worker.index))
    others = median(worker.steps_per_second for worker in workers if worker is not slowest)
    return slowest.index if slowest.steps_per_second < SLOW * others else None


def _least_waiting(ranks: Sequence[int], shares: Mapping[int, Mapping[str, float]]) -> int | None:
    """Of workers that the mode makes wait for each other, the one that does not wait while the others do."""
    if len(ranks) < 2:
        return None
    held = {rank: sum(shares[rank].get(reason, 0.0) for reason in _FOR_OTHERS) for rank in ranks}
    least = min(ranks, key=lambda rank: (held[rank], rank))
    others = median(share for rank, share in held.items() if rank != least)
    return least if others >= WAITS and held[least] < others / 2 else None


def _glance(entry: MemberStatus, history: JobHistory, front: tuple[int, float] | None) -> WorkerGlance:
    stats, member = entry.stats, entry.member
    behind = 0
    if front and not entry.gone and has_stepped(entry):
        behind = round(front[1] - clock_now(entry) if stats.phase == front[0] else front[1])
    shares = history.wait_shares.get(member.index) if front and not entry.gone else None
    return WorkerGlance(
        name=str(member),
        index=member.index,
        evaluator=member.role is Role.EVALUATOR,
        state="silent" if is_silent(entry, history) else state_of(entry),
        note=note_of(entry),
        phase=stats.phase,
        clock=stats.clock,
        steps=stats.steps,
        behind=behind,
        steps_per_second=stats.steps_per_second,
        samples_per_second=stats.samples_per_second,
        bytes_per_second=stats.bytes_per_second,
        staleness=stats.staleness,
        transport=stats.transport,
        waits_for="",
        wait_share=min(1.0, math.fsum(shares.values())) if shares else None,
        straggler=False,
        heard_seconds=entry.seconds_since_heartbeat,
        reported=dict(stats.metrics),
        host=entry.host,
        pid=entry.pid,
    )


_FOR_OTHERS = ("round", "bound")
"""Reasons of waits that end when another worker has made its step."""

_REASONS = {
    "pull": "parameters",
    "round": "the round",
    "bound": "the staleness bound",
    "reconnect": "a lost connection",
    "barrier": "the barrier",
    "data": "data",
}


def _wait_words(worker: WorkerGlance, history: JobHistory, straggler: str) -> str:
    shares = history.wait_shares.get(worker.index, {})
    if worker.state != "live" or not shares:
        return ""
    reason = max(shares, key=lambda each: shares[each])
    if shares[reason] < WAITS / 4:
        return ""
    words = _REASONS.get(reason, reason)
    return f"{words}: {straggler}" if straggler and reason in (*_FOR_OTHERS, "barrier") else words
