"""Decides the state of each member and of the whole job, in words, for every view of a job."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from ps_protocol.cluster.job import DEFAULT_JOB
from ps_protocol.cluster.scaling import ENDED
from ps_protocol.cluster.view import TOOK_OVER, ClusterStatus, Divergence, MemberStatus, Role
from ps_protocol.model.spec import Consistency, Mode
from ps_protocol.text import printable

WAITING, TRAINING, STALLED, FINISHED = "waiting for members", "training", "stalled", "finished"
"""The states of a job."""

NAMED = 3
"""Of more shards than this that training waits for, only the first are named."""


@dataclass(frozen=True, slots=True)
class JobState:
    """What a job does now."""

    #: One of WAITING, TRAINING, STALLED, FINISHED.
    name: str
    #: What a stalled job waits for, without times: the same for as long as it holds.
    why: str = ""
    #: The same with times.
    text: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.text}" if self.text else self.name


def current_members(status: ClusterStatus, role: Role) -> list[MemberStatus]:
    """One entry per place, by index: the live member, else the last one."""
    places: dict[int, MemberStatus] = {}
    for entry in status.members:
        known = places.get(entry.member.index)
        if entry.member.role is role and (known is None or known.member.incarnation < entry.member.incarnation):
            places[entry.member.index] = entry
    return [places[index] for index in sorted(places)]


def state_of(entry: MemberStatus, spare: bool = False) -> str:
    """One of "live", "busy" while it cannot do its usual work yet, "spare", "left" after a clean end, "stopped" after a
    request to stop, or to have fewer workers, "took over" of a standby that has become the shard, "failed", "lost".
    """
    how, _, why = entry.gone.partition(": ")
    if not how:
        return "busy" if entry.stats.activity else "spare" if spare else "live"
    if how != "left":
        return "lost"
    if entry.member.role is Role.STANDBY and why == TOOK_OVER:
        return "took over"
    return {"": "left", "stopped": "stopped", ENDED: "stopped"}.get(why, "failed")


def note_of(entry: MemberStatus) -> str:
    """How a member failed or was lost, when it took over, or what it is busy with; empty for others."""
    if not entry.gone and entry.stats.activity:
        return f"busy: {entry.stats.activity}"
    if (state := state_of(entry)) == "took over":
        return f"took over at {time_text(entry.ended_at)}; no standby now"
    if state not in ("failed", "lost"):
        return ""
    return f"{state}: {entry.gone.removeprefix('left: ')}"


def job_state(status: ClusterStatus) -> JobState:
    """The state of the job. A job is stalled while a shard with slices is missing, or every worker is.

    A job of any number of workers waits for members until its first worker has come, and while it is to have none.
    """
    view = status.view
    if view.finished:
        return JobState(FINISHED)
    if not view.started:
        return JobState(WAITING)
    causes = list(_absent_shards(status))
    if not view.live(Role.WORKER):
        if not causes and (view.wanted_workers == 0 or not current_members(status, Role.WORKER)):
            return JobState(WAITING)
        causes.append(("no worker", "no worker"))
    if not causes:
        return JobState(TRAINING)
    why, text = zip(*causes, strict=True)
    return JobState(STALLED, "; ".join(why), "; ".join(text))


def _absent_shards(status: ClusterStatus) -> Iterator[tuple[str, str]]:
    """Of each shard that training waits for, how it went, without and with the time."""
    live, known = (
        status.view.live(Role.SHARD),
        {each.member.index: each for each in current_members(status, Role.SHARD)},
    )
    absent = [number for number in status.view.used_shards if number not in live]
    for number in absent[:NAMED]:
        entry = known.get(number)
        if entry is None or not entry.gone:
            yield f"shard {number} missing", f"shard {number} missing"
            continue
        state = state_of(entry)
        words = f"{entry.member} {'gone' if state == 'left' else state}"
        yield words, f"{words} for {duration_text(status.at_seconds - entry.ended_at)}"
    if (more := len(absent) - NAMED) > 0:
        words = f"{more} more shard{'s' if more > 1 else ''}"
        yield words, words


def outline(status: ClusterStatus) -> Hashable:
    """What changes seldom of a job: its state and mode, who is a member and in what state, its models, moves, and
    whether it diverges.
    """
    view, state = status.view, job_state(status)
    members = tuple(
        (str(entry.member), entry.member.incarnation, state_of(entry, entry.member.index in view.spare))
        for role in Role
        for entry in current_members(status, role)
    )
    models, moving, diverges = tuple(sorted(view.models)), bool(view.moving), bool(status.divergences)
    return state.name, state.why, mode_text(status), members, models, moving, diverges


def ailments(status: ClusterStatus) -> list[str]:
    """What keeps a job from training, the missing, failed and lost members of one that is not finished, and
    certificates that have expired.

    Empty for a healthy job.
    """
    view = status.view
    if view.finished:
        return []
    state = job_state(status)
    found = [str(state)] if state.name == STALLED else []
    found += [f"shard {number} is missing" for number in view.used_shards if number not in view.live(Role.SHARD)]
    workers = len(view.live(Role.WORKER))
    left = {each.member.index for each in current_members(status, Role.WORKER) if each.gone == "left"}
    if view.expected_workers > workers + len(left):
        found.append(f"{workers} of {view.expected_workers} workers live")
    elif (view.wanted_workers or 0) > workers:  # without those that have left
        found.append(f"{workers} of {view.wanted_workers} workers live")
    entries = (entry for role in Role for entry in current_members(status, role))
    found += [f"{entry.member} {note_of(entry)}" for entry in entries if state_of(entry) in ("failed", "lost")]
    return [*found, expiring(status)] if has_expired(status) else found


def expiring(status: ClusterStatus) -> str:
    """The processes with certificates that expire soon, or have expired, the first to expire first; empty: none."""
    ends = [(each.stats.certificate_ends, str(each.member)) for each in status.members if not each.gone]
    found = sorted(each for each in [(status.certificate_ends, "the coordinator"), *ends] if each[0])
    if not found:
        return ""
    end, names = found[0][0], [name for _, name in found]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    left = end - status.at_seconds
    when = f"in {duration_text(left)}" if left > 0 else f"{duration_text(-left)} ago"
    several = f"; those of {', '.join(names[1:NAMED])}{more} follow" if len(names) > 1 else ""
    return f"the certificate of {names[0]} {'expires' if left > 0 else 'expired'} {when}, {time_text(end)}{several}"


def has_expired(status: ClusterStatus) -> bool:
    """Whether a certificate of the coordinator or of a live member has expired: what loses its connection stays out."""
    ends = [status.certificate_ends, *(each.stats.certificate_ends for each in status.members if not each.gone)]
    return any(0 < end <= status.at_seconds for end in ends)


def mode_text(status: ClusterStatus) -> str:
    """The mode of the job, and where it applies them the rules for stale pushes that models have of their own."""
    consistency, rules = status.view.consistency, status.stale_rules
    shown = [] if consistency.mode.collects else [f"{name}: {rule}" for name, rule in sorted(rules.items())]
    return "; ".join([str(consistency), *shown])


def diverging(status: ClusterStatus) -> str:
    """What has grown far above its own history, the staleness, and the remedy; empty: nothing."""
    if not (found := status.divergences):
        return ""
    first, more = found[0], len(found) - 1
    others = f", and {more} more number{'s' if more > 1 else ''}" if more else ""
    return f"the model diverges: {growth(first)}{others}; {remedy(first, status.view.consistency)}"


def growth(grown: Divergence) -> str:
    """What has grown, with its value and the usual one."""
    if math.isnan(grown.value):
        return f"{grown.member} refused {grown.what} that hold NaN or infinity"
    return f"{grown.what} of {grown.member} is {grown.value:.3g}, at most {grown.usual:.3g} before"


def remedy(grown: Divergence, consistency: Consistency) -> str:
    """The staleness under which a number has grown, and what to do."""
    ssp = "ssp with a smaller bound" if consistency.mode is Mode.SSP else "ssp"
    kept = f"; psctl restore step={grown.step} goes back to before" if grown.checkpoint else ""
    return (
        f"staleness is {grown.staleness:.1f}, of 99 % at most {grown.staleness_p99:.0f}: lower the learning rate or "
        f"momentum, or use psctl mode sync, or {ssp}{kept}"
    )


def headline(status: ClusterStatus) -> str:
    """Name of the job, mode, state, members, models; default names say nothing."""
    view = status.view
    live, used = view.live(Role.SHARD).keys(), view.used_shards
    workers, shards, spare = len(view.live(Role.WORKER)), len(live & set(used)), len(live & view.spare)
    wanted = view.expected_workers if view.wanted_workers is None else view.wanted_workers
    expected = f" of {wanted}" if wanted else ""
    beside = f" and {spare} spare" if spare else ""
    parts = [
        *([] if status.job == DEFAULT_JOB else [f"job {status.job}"]),
        mode_text(status),
        str(job_state(status)),
        f"{shards} of {len(used)} shards{beside}",
        f"{workers}{expected} workers",
    ]
    if view.moving:
        parts.append("moving slices")
    if names := sorted(view.models):
        parts.append("1 model" if names == ["model"] else f"model{'s' if len(names) > 1 else ''} {', '.join(names)}")
    return printable(" · ".join(parts))


def time_text(seconds: float) -> str:
    """Local date and time of day of ``seconds`` since the epoch."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def duration_text(seconds: float) -> str:
    """About how long: in seconds up to two minutes, minutes up to two hours, hours up to two days, else in days."""
    whole = max(0, int(seconds))
    if whole < 120:
        return f"{whole} s"
    if whole < 172800:
        return f"{whole // 60} min" if whole < 7200 else f"{whole // 3600} h"
    return f"{whole // 86400} days"
