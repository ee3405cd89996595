"""Decides the wanted workers and shards of a scaled job, and what it waits for until it has them. Does no I/O.

``Scaling`` keeps the decision, as a part of the cluster's state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from itertools import count

from ps_protocol.cluster.scaling import MOST_RANKS, ScaleAsk, named
from ps_protocol.cluster.view import ClusterView, Role
from ps_protocol.errors import InvalidRequest, NotReady
from ps_server.coordinator.membership.admission import MOST_SHARDS


@dataclass(frozen=True, slots=True)
class WantedSize:
    """The wanted size of a job. Immutable."""

    #: Rises with every change; 0: the job was never scaled.
    number: int = 0
    #: Ranks of the workers; None: the initial ones. A worker that ends after training is removed.
    ranks: frozenset[int] | None = None
    #: Ranks of workers that should end and have not yet.
    ending: frozenset[int] = frozenset()
    #: Numbers of the shards; None: the current ones.
    shards: frozenset[int] | None = None
    #: Requested shards that replace no existing one: they have to be started.
    added: frozenset[int] = frozenset()
    #: Whether only the number of ranks counts: another program, such as Kubernetes, chooses them.
    by_count: bool = False
    #: Ranks of workers that have left after training. Their processes may continue, and end by themselves.
    done: frozenset[int] = frozenset()


def scaled(before: WantedSize, ask: ScaleAsk, view: ClusterView, most_workers: int, *, by_count: bool) -> WantedSize:
    """The wanted size after ``ask``; ``before`` if nothing changes. ``most_workers``: 0 for any number.

    The workers and shards with the highest numbers end first; new ones get the lowest free numbers. Raises
    InvalidRequest for a number that this job cannot have, NotReady for a job that is finished.
    """
    if ask.workers is None and ask.shards is None:
        raise InvalidRequest("nothing is to be scaled", expected="a number of workers, of shards, or both")
    if view.finished:
        raise NotReady("the job is finished", remedy="start it again; it begins with as many as it is started with")
    after = before
    if ask.workers is not None:
        _check_workers(ask.workers, view, most_workers or MOST_RANKS)
        if not view.expected_workers:
            after = _with_workers(after, ask.workers, view, by_count)
    if ask.shards is not None:
        if not 0 < ask.shards <= MOST_SHARDS:
            raise InvalidRequest(
                "a job cannot have as many shards", expected=f"1 to {MOST_SHARDS}", actual=str(ask.shards)
            )
        after = _with_shards(after, ask.shards, view)
    return before if after == before else replace(after, number=before.number + 1)


def _check_workers(workers: int, view: ClusterView, most: int) -> None:
    if view.expected_workers:
        if workers != view.expected_workers:
            raise InvalidRequest(
                "the number of workers of this job is fixed: its data is split by rank",
                expected=str(view.expected_workers),
                actual=str(workers),
                remedy=f"begin a job with --workers MIN:MAX, such as --workers {view.expected_workers}:"
                f"{max(workers, view.expected_workers + 1)}",
            )
    elif not view.least_workers <= workers <= most:
        bounded = most < MOST_RANKS
        raise InvalidRequest(
            f"this job cannot have {workers} workers",
            expected=f"{view.least_workers} to {most}",
            actual=str(workers),
            remedy="choose a number in that range" + (", or begin a job with another --workers MIN:MAX" * bounded),
        )


def _with_workers(before: WantedSize, workers: int, view: ClusterView, by_count: bool) -> WantedSize:
    live = frozenset(view.live(Role.WORKER))
    begun = frozenset(range(view.least_workers)) if before.ranks is None else before.ranks
    if not view.started or before.ranks is not None:
        live |= begun
    # The process of a worker that is done may continue, so a new worker gets another rank.
    ranks = lowest(live, workers, but=before.done)
    return replace(before, ranks=ranks, ending=(before.ending | live) - ranks, by_count=by_count)


def _with_shards(before: WantedSize, shards: int, view: ClusterView) -> WantedSize:
    held = frozenset(view.used_shards) | (before.shards or frozenset())
    wanted = lowest(held, shards)
    added = (before.added | (wanted - frozenset(range(view.expected_shards)))) | (wanted & view.spare)
    return replace(before, shards=wanted, added=added)


def lowest(present: Collection[int], number: int, but: Collection[int] = ()) -> frozenset[int]:
    """``number`` numbers: the lowest ``present`` ones, then the lowest free ones that are not in ``but``."""
    kept = sorted(present)[:number]
    free = (each for each in count() if each not in present and each not in but)
    return frozenset([*kept, *(next(free) for _ in range(number - len(kept)))])


def awaited(wanted: WantedSize, view: ClusterView) -> str:
    """Describes what the job waits for until it has the ``wanted`` size; empty once it has."""
    return "; ".join([*_awaited_shards(wanted, view), *_awaited_workers(wanted, view)])


def _awaited_workers(wanted: WantedSize, view: ClusterView) -> Iterable[str]:
    if wanted.ranks is None:
        return
    live = frozenset(view.live(Role.WORKER))
    if wanted.by_count:
        if len(live) != len(wanted.ranks):
            yield f"{len(live)} workers are there, {len(wanted.ranks)} are wanted"
        return
    if missing := wanted.ranks - live:
        yield f"{named('worker', missing)} {'has' if len(missing) == 1 else 'have'} to join"
    if over := wanted.ending & live:
        yield f"{named('worker', over)} {'has' if len(over) == 1 else 'have'} to end"


def _awaited_shards(wanted: WantedSize, view: ClusterView) -> Iterable[str]:
    if wanted.shards is None:
        return
    live, used = frozenset(view.live(Role.SHARD)), frozenset(view.used_shards)
    if missing := wanted.shards - live:
        yield f"{named('shard', missing)} {'has' if len(missing) == 1 else 'have'} to start"
    elif adding := wanted.shards - used:
        yield f"slices have to move to {named('shard', adding)}"
    if draining := used - wanted.shards:
        yield f"slices have to leave {named('shard', draining)}"
    elif over := live - wanted.shards:
        yield f"{named('shard', over)} {'has' if len(over) == 1 else 'have'} to end"


class Scaling:
    """Part of ClusterState, shared with MembershipState, which reports workers that leave."""

    def __init__(self, wanted: WantedSize | None = None) -> None:
        self.wanted = wanted or WantedSize()

    @property
    def workers(self) -> int | None:
        """The number of wanted workers; None: the initial ones."""
        return None if self.wanted.ranks is None else len(self.wanted.ranks)

    def finish(self) -> None:
        """Note that the job is finished: another run begins with its own workers, on the same number of shards."""
        self.wanted = replace(self.wanted, ranks=None, ending=frozenset(), done=frozenset())

    def joined(self, rank: int) -> None:
        """Note that a worker has joined."""
        if rank in self.wanted.done:
            self.wanted = replace(self.wanted, done=self.wanted.done - {rank})

    def left(self, rank: int) -> None:
        """Note that a worker has left after training: it needs no replacement."""
        self.wanted = wanted = replace(self.wanted, done=self.wanted.done | {rank})
        if wanted.ranks is not None and rank in wanted.ranks:
            self.wanted = replace(wanted, ranks=wanted.ranks - {rank})
        elif wanted.ranks and wanted.by_count:
            self.wanted = replace(wanted, ranks=wanted.ranks - {max(wanted.ranks)})

    def ends(self, rank: int, live: Collection[int]) -> bool:
        """Whether a worker that has ended otherwise needs no replacement. ``live``: the other workers."""
        wanted = self.wanted
        if wanted.by_count:
            return wanted.ranks is not None and len(live) >= len(wanted.ranks)
        if rank not in wanted.ending:
            return False
        self.wanted = replace(wanted, ending=wanted.ending - {rank})
        return True
