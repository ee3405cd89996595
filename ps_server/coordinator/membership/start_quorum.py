"""Decides when a job starts: when all expected members have joined once; and when it waits for all of them again."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ps_protocol.cluster.view import Role
from ps_server.coordinator.membership.members import Key


class StartQuorum:
    """Part of MembershipState. Before the start it notes who has joined; after it, which workers are done."""

    def __init__(self, expected_workers: int, seen: Iterable[Key] = (), least_workers: int = 0) -> None:
        """``expected_workers``: 0 if workers join and leave at any time; the start waits for ``least_workers`` then."""
        self._expected_workers = expected_workers
        self._awaited = expected_workers or least_workers
        self._seen = set(seen)

    @property
    def seen(self) -> frozenset[Key]:
        """Places that were held before the start; after it, those of workers that ended cleanly."""
        return frozenset(self._seen)

    def comes(self, place: Key, *, started: bool) -> None:
        """A member takes ``place``."""
        if started:
            self._seen.discard(place)
        else:
            self._seen.add(place)

    def is_done(self, rank: int) -> None:
        """A worker ended cleanly, and is not waited for again."""
        if rank < self._expected_workers:
            self._seen.add((Role.WORKER, rank))

    def finish(self) -> None:
        """The job is finished: in the next run nobody has joined yet."""
        self._seen.clear()

    def complete(self, shards: Iterable[int], live: Collection[Key]) -> bool:
        """Whether a job that has not started does so now: these ``shards`` and all expected workers have joined.

        At a new start after all workers were lost, those that had ended cleanly before count as well.
        """
        workers = sum(role is Role.WORKER for role, _ in self._seen)
        if workers < self._awaited or not self._seen.issuperset((Role.SHARD, number) for number in shards):
            return False
        self._seen = {key for key in self._seen if key[0] is Role.WORKER and key not in live}
        return True

    def begin_again(self, shards: int) -> bool:
        """The last live worker was lost: whether all that are not done are waited for again, but no shard."""
        if self._expected_workers:
            self._seen |= {(Role.SHARD, number) for number in range(shards)}
        return self._expected_workers > 0

    @property
    def missing(self) -> set[int]:
        """Before the start: the expected ranks that have not joined."""
        return {rank for rank in range(self._awaited) if (Role.WORKER, rank) not in self._seen}
