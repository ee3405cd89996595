"""Knows which incarnation of a shard wrote the newest state on a disk, and which directories hold it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ps_protocol.view import Member, SyncWord
from ps_server.coordinator.applicant import Applicant, Copies, check_state


class KeptState:
    """Part of ClusterState: what shards have said of their disks, by shard number."""

    def __init__(self, newest: Mapping[int, int] | None = None, copies: Mapping[int, Copies] | None = None) -> None:
        self._newest = dict(newest or {})
        self._copies = dict(copies or {})

    @property
    def newest(self) -> dict[int, int]:
        """The incarnation that wrote the newest state known to be on a disk."""
        return dict(self._newest)

    @property
    def copies(self) -> dict[int, Copies]:
        """The directories that hold that state."""
        return dict(self._copies)

    def check(self, ask: Applicant, index: int) -> None:
        """Raises Fenced or NotReady when ``ask`` must not go on as shard ``index`` with what it brings."""
        check_state(ask, self._newest.get(index, 0), self._copies.get(index, Copies()))

    def take_over(self, ask: Applicant, index: int) -> None:
        """``ask`` goes on as shard ``index``. Raises what ``check`` does."""
        self.check(ask, index)
        newest = self._newest.get(index, 0)
        if ask.data_incarnation and ask.data_incarnation != newest:
            self._newest[index] = ask.data_incarnation
            self._copies[index] = Copies(ask.directory)

    def says(self, shard: Member, directory: str, sync: SyncWord | None) -> Iterator[str]:
        """``shard`` has its state in ``directory``, and its standby what ``sync`` says; yields what is new of that."""
        index, incarnation = shard.index, shard.incarnation
        if self._newest.get(index) != incarnation:
            self._newest[index] = incarnation
            self._copies[index] = Copies(directory)
            yield f"{shard} keeps its state as incarnation {incarnation}"
        copies = self._copies.get(index, Copies())
        if sync and sync.number > copies.word:
            self._copies[index] = replace(copies, word=sync.number, standby=sync.directory)
            said = "has everything it acknowledges" if sync.directory else "does not have all it acknowledges"
            yield f"{shard} says that its standby {said}"
