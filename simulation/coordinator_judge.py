"""Judges what the coordinator decides and tells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import NoReturn

from ps_protocol.cluster.leases import LeaseAnswer, LeaseAsk
from ps_protocol.cluster.view import ClusterView, Joined, JoinRequest, Member, Role
from ps_protocol.model.spec import ShardMap
from simulation.leased_items import LeasedItems


class CoordinatorJudge:
    """Part of the judge: what was told, over all processes of the coordinator. Every method raises Violation."""

    def __init__(self, fail: Callable[[str], NoReturn], acknowledged_by: Callable[[int], int], phase: int = 0) -> None:
        """``acknowledged_by``: as of what incarnation a shard last acknowledged. The job begins in ``phase``."""
        self._fail = fail
        self._acknowledged_by = acknowledged_by
        self._placed: dict[str, ShardMap] = {}
        self._told_incarnations: dict[int, str] = {}
        self._revision = -1
        #: By revision, each view that was told.
        self._told: dict[int, ClusterView] = {}
        self._phase = self._decided_phase = phase
        self._view = ClusterView()
        self._at_barrier: set[tuple[int, int, int]] = set()
        self._items = LeasedItems()
        #: The job, as far as the coordinator has told.
        self.finished = False

    def began_with(self, trained: Mapping[int, Iterable[int]]) -> None:
        """The job begins with a checkpoint in which these items, by epoch, are trained."""
        for epoch, items in trained.items():
            self._items.began_with(epoch, items)

    def started(self, view: ClusterView, phase: int) -> None:
        """It must not have forgotten anything that was told."""
        if view.revision < self._revision:
            self._fail(f"the coordinator restarted at revision {view.revision}, it had told {self._revision}")
        if phase < self._phase:
            self._fail(f"the coordinator restarted in phase {phase}, it had told {self._phase}")
        self._view, self._decided_phase = view, phase

    def joined(self, ask: JoinRequest, joined: Joined) -> None:
        """No incarnation is given to two processes; old state is not let in where newer was acknowledged."""
        member = joined.member
        token = self._told_incarnations.setdefault(member.incarnation, ask.token)
        if token != ask.token:
            self._fail(f"incarnation {member.incarnation} was given to '{token}' and to '{ask.token}'")
        if member.role is Role.SHARD:
            newest = self._acknowledged_by(member.index)
            if 0 < ask.data_incarnation < newest < member.incarnation:
                self._fail(
                    f"shard {member.index} was let in with state of incarnation {ask.data_incarnation}, "
                    f"but {newest} has acknowledged pushes"
                )

    def placed(self, shard_map: ShardMap) -> None:
        """One placement for each epoch, with every row on exactly one shard."""
        known = self._placed.get(shard_map.spec.name)
        if known is None or known.epoch < shard_map.epoch:
            self._placed[shard_map.spec.name] = shard_map
            rows = Counter(
                (piece.variable, row) for piece in shard_map.slices for row in range(piece.row_begin, piece.row_end)
            )
            wanted = [(v, row) for v, variable in enumerate(shard_map.spec.variables) for row in range(variable.rows)]
            if sorted(rows) != wanted or max(rows.values()) > 1:
                self._fail("a row lies on no shard, or on two")
        elif shard_map != known:
            self._fail("a model was placed twice, differently")

    def shard_map(self, model: str) -> ShardMap | None:
        """The newest placement of ``model`` that was told; None: there is none."""
        return self._placed.get(model)

    @property
    def shard_maps(self) -> list[ShardMap]:
        """The newest placement of each model that was told, also of those that were released since."""
        return list(self._placed.values())

    def decided(self, view: ClusterView, phase: int) -> None:
        """A barrier opens only when every live worker has come to it."""
        if phase > self._decided_phase:
            for member in view.live(Role.WORKER).values():
                if (member.index, member.incarnation, phase - 1) not in self._at_barrier:
                    self._fail(f"the barrier of phase {phase - 1} opened without {member}")
        self._decided_phase = phase
        self._view = view

    def told(self, view: ClusterView) -> None:
        """Revisions only rise."""
        if view.revision < self._revision:
            self._fail(f"revision {view.revision} was told after {self._revision}")
        self._revision = view.revision
        self._told[view.revision] = replace(view, journal_mark=b"")
        self.finished = view.finished

    def received(self, view: ClusterView) -> None:
        """A process has a view: one that was told, though it may have been sent what had changed."""
        # A mark may be newer, in a view that is told again.
        if replace(view, journal_mark=b"") != self._told.get(view.revision):
            self._fail(f"revision {view.revision} was received as {view}")

    def arrived(self, member: Member, phase: int) -> None:
        """A worker has called for the barrier."""
        self._at_barrier.add((member.index, member.incarnation, phase))

    def released(self, phase: int) -> None:
        """A worker was told that ``phase`` has ended."""
        self._phase = max(self._phase, phase + 1)

    def reported(self, rank: int, incarnation: int, ask: LeaseAsk) -> None:
        """The coordinator has heard that items were trained; nobody was told that it has."""
        self._items.reported((rank, incarnation), ask)

    def leased(self, member: Member, ask: LeaseAsk, answer: LeaseAnswer) -> None:
        """No position belongs to two live workers; the end is told when all were trained."""
        live = {(m.index, m.incarnation) for m in self._view.members if m.role is Role.WORKER}
        if found := self._items.leased((member.index, member.incarnation), live, ask, answer):
            self._fail(found)
