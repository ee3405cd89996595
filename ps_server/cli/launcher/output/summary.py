"""The summary of ps-run after a job: work done, failures, and the places of remaining state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ps_protocol.cluster.job_state import current_members
from ps_protocol.cluster.view import ClusterStatus, Role
from ps_server.cli.status.text import elapsed_text

REMEMBERED = 32
"""With this many former members, the coordinator may have forgotten workers."""


@dataclass(frozen=True, slots=True)
class Folders:
    """What a job leaves on disk, and where; None: nothing."""

    #: The newest checkpoint.
    checkpoint: Path | None = None
    #: There should be a newer one.
    unsaved: bool = False
    state: Path | None = None
    logs: Path | None = None


def summary(
    code: int,
    elapsed_seconds: float,
    status: ClusterStatus | None,
    failures: Sequence[str],
    folders: Folders,
) -> list[str]:
    """The lines of the summary. ``status``: the last known one; None without any."""
    how = "finished in" if code == 0 else f"ended with exit code {code} after"
    lines = [f"{how} {elapsed_text(elapsed_seconds)}{_work(status)}"]
    if failures:
        counted = Counter(failures)
        lines.append(
            "failures: " + "; ".join(f"{what}{f' ({n} times)' if n > 1 else ''}" for what, n in counted.items())
        )
    if folders.unsaved:
        newest = f"the newest one is older: {folders.checkpoint}" if folders.checkpoint else "there is none"
        lines.append(f"the last checkpoint was not written; {newest}")
    elif folders.checkpoint:
        lines.append(f"checkpoint: {folders.checkpoint}")
    if folders.state:
        lines.append(f"state: {folders.state}; the same command continues from it")
    if folders.logs:
        lines.append(f"logs: {folders.logs}")
    return lines


def _work(status: ClusterStatus | None) -> str:
    workers = current_members(status, Role.WORKER) if status else []
    if not workers:
        return ""
    steps, samples = (sum(getattr(each.stats, what) for each in workers) for what in ("steps", "samples"))
    who = f"{len(workers)} worker{'s' if len(workers) > 1 else ''}"
    return f": {steps} steps by {who}" + (f", {samples} samples" if samples else "")


def silent_workers(status: ClusterStatus | None, workers: int) -> list[str]:
    """What is to be said of workers that ended well and were never seen by the coordinator.

    Of a job whose status is not known nothing is said, nor of one with more workers than are remembered.
    """
    if status is None:
        return []
    seen = {entry.member.index for entry in status.members if entry.member.role is Role.WORKER}
    unseen = sorted(set(range(workers)) - seen)
    if not unseen or len(seen) >= REMEMBERED:
        return []
    names = ", ".join(f"worker {rank}" for rank in unseen)
    return [f"{names} ended without having connected: does the script call ps_worker.connect()?"]
