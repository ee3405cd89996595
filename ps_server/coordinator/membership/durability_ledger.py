"""The incarnation of each shard that wrote the newest state on disk, and the directories that hold it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ps_protocol.cluster.view import JoinRequest, Member, SyncWord
from ps_server.coordinator.membership.admission import StateCopies, check_state


class DurabilityLedger:
    """Part of MembershipState: the persisted state of shards as they reported it, by shard number."""

    def __init__(
        self, newest: Mapping[int, int] | None = None, copies: Mapping[int, StateCopies] | None = None
    ) -> None:
        self._newest = dict(newest or {})
        self._copies = dict(copies or {})

    @property
    def newest(self) -> dict[int, int]:
        """The incarnation that wrote the newest state known to be on a disk."""
        return dict(self._newest)

    @property
    def copies(self) -> dict[int, StateCopies]:
        """The directories that hold that state."""
        return dict(self._copies)

    def check(self, ask: JoinRequest, index: int) -> None:
        """Raises Fenced or NotReady when ``ask`` must not serve shard ``index`` with its state."""
        check_state(ask, self._newest.get(index, 0), self._copies.get(index, StateCopies()))

    def take_over(self, ask: JoinRequest, index: int) -> None:
        """``ask`` serves shard ``index`` from now on. Raises what ``check`` does."""
        self.check(ask, index)
        newest = self._newest.get(index, 0)
        if ask.data_incarnation and ask.data_incarnation != newest:
            self._newest[index] = ask.data_incarnation
            self._copies[index] = StateCopies(ask.directory)

    def says(self, shard: Member, directory: str, sync: SyncWord | None) -> Iterator[str]:
        """Note a report of ``shard``: state in ``directory``, and the standby in ``sync``; yields what is new."""
        index, incarnation = shard.index, shard.incarnation
        if self._newest.get(index) != incarnation:
            self._newest[index] = incarnation
            self._copies[index] = StateCopies(directory)
            yield f"{shard} keeps its state as incarnation {incarnation}"
        copies = self._copies.get(index, StateCopies())
        if sync and sync.number > copies.word:
            self._copies[index] = replace(copies, word=sync.number, standby=sync.directory)
            said = "has everything it acknowledges" if sync.directory else "does not have all it acknowledges"
            yield f"{shard} says that its standby {said}"
