"""What the policy sees of a job, from its status."""

from __future__ import annotations

from ps_protocol.cluster.job_state import current_members, state_of
from ps_protocol.cluster.scaling import ENDED
from ps_protocol.cluster.view import ClusterStatus, Role
from ps_server.coordinator.elasticity.decisions import JobLook


def look_of(status: ClusterStatus) -> JobLook:
    """The job as it is. A worker or shard that is busy with something else than steps is not judged by its speed."""
    view = status.view
    workers = [(entry, state_of(entry)) for entry in current_members(status, Role.WORKER)]
    shards = [entry for entry in current_members(status, Role.SHARD) if entry.member.index in view.used_shards]
    working = all(state_of(entry) == "live" for entry in shards) and len(shards) == len(view.used_shards)
    lost = frozenset(
        entry.member.index
        for entry, state in workers
        if state in ("lost", "failed", "stopped") and not entry.gone.endswith(ENDED)
    )
    return JobLook(
        training=view.started and not view.finished and working,
        waiting=not view.started and not view.finished and working and bool(lost),
        speeds={
            entry.member.index: entry.stats.steps_per_second for entry, state in workers if state in ("live", "busy")
        },
        traffic={entry.member.index: entry.stats.bytes_per_second for entry in shards},
        queued_pushes={entry.member.index: entry.stats.queued_pushes for entry in shards},
        queued_bytes={entry.member.index: entry.stats.queued_bytes for entry in shards},
        moving=bool(view.moving),
        lost=lost,
        left=sum(state == "left" for _, state in workers),
        wanted=view.wanted_workers,
    )
