"""The coordinator's shell in the simulation: the real ClusterState, written down before anything of it is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ps_protocol.errors import PsError, Unavailable
from ps_protocol.leases import LeaseAsk
from ps_protocol.model import Consistency, ModelSpec
from ps_protocol.view import ClusterView, Member, MemberStats, Role
from ps_server.coordinator.applicant import Applicant
from ps_server.coordinator.data_leases import DataLeases
from ps_server.coordinator.driver import BARRIER_WAIT_SECONDS, RECONNECT_SECONDS
from ps_server.coordinator.memento import Memento, changed_rows, from_rows
from ps_server.coordinator.settings import ClusterSettings
from ps_server.coordinator.state import ClusterState, Decision
from simulation.judge import Judge
from simulation.network import Network, Reply
from simulation.scheduler import Process, Scheduler

_STATS = MemberStats()

_ROWS_UP_TO = 50
"""Members up to which the journal is kept as rows; beyond, as a memento that is encoded when it is read."""


class SimJournal:
    """What outlives the coordinator. ``refuses``: the disk takes nothing at present."""

    def __init__(self) -> None:
        self.refuses = False
        self._rows: dict[str, bytes] | None = {}
        self._kept: Memento | None = None

    def write(self, memento: Memento) -> None:
        """Hold all of ``memento``. Raises Unavailable; then nothing changed."""
        if self.refuses:
            raise Unavailable("the journal cannot be written")
        if self._rows is not None and len(memento.places) <= _ROWS_UP_TO:
            for key, row in changed_rows(self._kept, memento).items():
                if row is None:
                    del self._rows[key]
                else:
                    self._rows[key] = row
        else:
            self._rows = None
        self._kept = memento

    def read(self) -> Memento | None:
        """What the rows say."""
        if self._kept is None:
            return None
        rows = self._rows
        if rows is None:
            rows = {key: row for key, row in changed_rows(None, self._kept).items() if row is not None}
        # From here on, what was read is what rows are compared with.
        self._kept = from_rows(rows, "the simulated journal")
        return self._kept


class SeenView:
    """A view, and what a thousand members would each look up in it."""

    def __init__(self, view: ClusterView) -> None:
        self.view = view
        self.revision = view.revision
        #: Rank to incarnation.
        self.workers = {member.index: member.incarnation for member in view.members if member.role is Role.WORKER}
        self.shards = {member.index: member for member in view.members if member.role is Role.SHARD}
        self.incarnations = frozenset(member.incarnation for member in view.members)


@dataclass(slots=True, eq=False)
class Watcher:
    """One member that follows the views."""

    process: Process
    known_revision: int
    deliver: Callable[[SeenView], None]
    under_way: bool = False


@dataclass(slots=True)
class _Waiting:
    """A parked call: tried again at each change, answered at ``deadline`` in any case."""

    attempt: Callable[[bool], bool]
    deadline: float


class SimCoordinator:
    """Holds to the rules of Driver: commit, then tell; while the disk refuses, tell nothing new."""

    def __init__(
        self, scheduler: Scheduler, network: Network, judge: Judge, settings: ClusterSettings, view_seconds: float
    ) -> None:
        self.process = Process("coordinator")
        self.journal = SimJournal()
        self._scheduler = scheduler
        self._network = network
        self._judge = judge
        self._settings = settings
        self._view_seconds = view_seconds
        self._watchers: dict[str, Watcher] = {}
        self._waiting: list[_Waiting] = []
        self.start()

    def start(self) -> None:
        """Begin a life from the journal."""
        self.process.alive = True
        self.process.stopped_until = 0.0
        self._watchers, self._waiting = {}, []
        now, kept = self._scheduler.now, self.journal.read()
        if kept is None:
            self._state, self._data = ClusterState(self._settings), DataLeases()
        else:
            self._state = ClusterState.restore(self._settings, kept, now)
            self._state.extend_leases(RECONNECT_SECONDS)
            self._data = DataLeases.restore(kept.data)
            self._release_lost_leases()
        self._view = SeenView(self._state.view)
        self._untold = False
        self._write_down()
        self._judge.coordinator_started(self._state.view, self._state.phase)
        self._sleep_until_expiry()

    @property
    def finished(self) -> bool:
        """Whether the job is finished, as far as it was told."""
        return self._view.view.finished

    def crash(self) -> None:
        """Die at once."""
        self._scheduler.say("coordinator dies")
        self.process.die()
        self._network.died(self.process)

    # Calls

    def join(self, reply: Reply, ask: Applicant) -> None:
        """See ClusterState.join."""

        def told(value: Any) -> None:
            if not isinstance(value, PsError):
                self._judge.joined(ask, value)
            reply(value)

        self._answer(told, lambda: self._state.join(ask, self._scheduler.now))

    def heartbeat(self, reply: Reply, member: Member, keeps_state: bool) -> None:
        """See ClusterState.heartbeat."""
        try:
            now = self._scheduler.now
            beat = self._state.heartbeat(
                member.role, member.index, member.incarnation, _STATS, now, keeps_state=keeps_state
            )
            if keeps_state:
                self._settle(beat)
        except PsError as error:
            reply(error)
            return
        reply(self._view.revision)

    def leave(self, reply: Reply, member: Member, why: str) -> None:
        """See ClusterState.leave."""
        self._answer(
            reply,
            lambda: self._state.leave(member.role, member.index, member.incarnation, why, self._scheduler.now),
        )

    def declare(self, reply: Reply, member: Member, spec: ModelSpec) -> None:
        """See ClusterState.declare."""

        def told(value: Any) -> None:
            if not isinstance(value, PsError):
                self._judge.placed(value)
            reply(value)

        self._answer(told, lambda: self._state.declare(member.index, member.incarnation, spec))

    def shard_map(self, reply: Reply, model: str) -> None:
        """See ClusterState.shard_map."""
        self._answer(reply, lambda: Decision(self._state.shard_map(model)))

    def set_consistency(self, reply: Reply, consistency: Consistency) -> None:
        """See ClusterState.set_consistency."""
        self._answer(reply, lambda: self._state.set_consistency(consistency))

    def barrier(self, reply: Reply, member: Member, phase: int, wait_seconds: float) -> None:
        """Answered when the barrier opens, or after the time asked for."""

        def attempt(last: bool) -> bool:
            self._judge.arrived_at_coordinator(member, phase)
            try:
                state = self._settle(self._state.arrive(member.index, member.incarnation, phase))
            except PsError as error:
                reply(error)
                return True
            if state.released:
                self._judge.released(phase)
            if state.released or last:
                reply(state)
                return True
            return False

        self._park(attempt, wait_seconds)

    def lease_data(self, reply: Reply, member: Member, ask: LeaseAsk, wait_seconds: float) -> None:
        """See DataLeases.lease; waits while others hold all there is."""

        def attempt(last: bool) -> bool:
            try:
                decision = self._data.lease(member.index, member.incarnation, ask)
                self._judge.reported(ask)
                if not decision.reason and (ask.trained or decision.value.span is not None):
                    self._write_down()
                answer = self._settle(decision)
            except PsError as error:
                reply(error)
                return True
            if answer.span is not None or answer.done or not ask.lease_items or last:
                self._judge.leased(member, ask, answer)
                reply(answer)
                return True
            return False

        self._park(attempt, wait_seconds)

    def watch(self, reply: Reply, process: Process, known_revision: int, deliver: Callable[[SeenView], None]) -> None:
        """From now on ``deliver`` gets the newest view at the watcher, whenever it is another than it has."""
        watcher = Watcher(process, known_revision, deliver)
        self._watchers[process.name] = watcher
        self._send(watcher)

    # Inner workings

    def _answer(self, reply: Reply, decide: Callable[[], Decision[Any]]) -> None:
        try:
            value: Any = self._settle(decide())
        except PsError as error:
            value = error
        reply(value)

    def _settle(self, decision: Decision[Any]) -> Any:
        if decision.reason:
            self._scheduler.say("coordinator:", decision.reason)
            self._release_lost_leases()
            self._untold = True
        self._tell()
        return decision.value

    def _tell(self) -> None:
        if not self._untold:
            return
        self._judge.decided(self._state.view, self._state.phase)
        self._write_down()
        self._untold = False
        self._view = SeenView(self._state.view)
        self._judge.told(self._view.view)
        for watcher in self._watchers.values():
            self._send(watcher)
        if self._waiting:
            self._scheduler.after(0.0, self.process, self._retry)

    def _write_down(self) -> None:
        self.journal.write(replace(self._state.memento(), data=self._data.memento()))

    def _release_lost_leases(self) -> None:
        self._data.members(
            {member.index: member.incarnation for member in self._state.view.members if member.role is Role.WORKER}
        )

    def _park(self, attempt: Callable[[bool], bool], wait_seconds: float) -> None:
        wait_seconds = min(wait_seconds, BARRIER_WAIT_SECONDS)
        if attempt(wait_seconds <= 0):
            return
        waiting = _Waiting(attempt, self._scheduler.now + wait_seconds)
        self._waiting.append(waiting)
        self._scheduler.at(waiting.deadline, self.process, self._expire_wait, waiting)

    def _retry(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._waiting += [each for each in waiting if not each.attempt(False)]

    def _expire_wait(self, waiting: _Waiting) -> None:
        if waiting in self._waiting:
            self._waiting.remove(waiting)
            waiting.attempt(True)

    def _send(self, watcher: Watcher) -> None:
        """The newest view, unless the last one is still on its way; then it follows that."""
        if watcher.under_way or self._view.revision == watcher.known_revision:
            return
        watcher.under_way = True
        view, scheduler = self._view, self._scheduler
        delay = self._view_seconds * scheduler.random.random() + self._network.delay()
        life = self.process.life
        at = scheduler.now + delay

        def arrive() -> None:
            if self._watchers.get(watcher.process.name) is not watcher:
                return
            heals = self._network.heals(self.process.name, watcher.process.name)
            if heals > scheduler.now:
                scheduler.at(heals, watcher.process, arrive)
                return
            watcher.known_revision = view.revision
            watcher.deliver(view)
            if self.process.life == life:
                watcher.under_way = False
                self._send(watcher)

        scheduler.at(at, watcher.process, arrive)

    def _sleep_until_expiry(self) -> None:
        now, expiry = self._scheduler.now, self._state.next_expiry()
        beat = self._settings.heartbeat_seconds
        wait = beat if expiry is None else min(beat, max(0.0, expiry - now))
        self._scheduler.after(max(wait, 0.001), self.process, self._end_leases, now, wait)

    def _end_leases(self, slept_at: float, wait: float) -> None:
        now = self._scheduler.now
        overslept = now - slept_at - wait
        if overslept > self._settings.heartbeat_seconds / 2:
            self._state.extend_leases(overslept)
        try:
            self._settle(self._state.expire(now))
        except Unavailable as error:
            self._scheduler.say("coordinator tells nothing new:", error)
        self._sleep_until_expiry()
