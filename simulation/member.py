"""What shard and worker share in the simulation: a place in the cluster, kept by heartbeats, and the newest view."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ps_protocol.errors import Fenced, PsError, Unavailable
from ps_protocol.view import ClusterView, Joined, Member
from ps_server.coordinator.applicant import Applicant
from simulation.coordinator import SeenView, SimCoordinator
from simulation.network import Network
from simulation.scheduler import Process, Scheduler

_RETRY_SECONDS = 0.3
_REWATCH_SECONDS = 1.0


class SimMembership:
    """The rules of client.Membership. Everything it calls back runs in the process it was made for."""

    def __init__(
        self,
        scheduler: Scheduler,
        network: Network,
        coordinator: SimCoordinator,
        process: Process,
        on_view: Callable[[SeenView], None],
        on_fenced: Callable[[Fenced], None],
    ) -> None:
        self._scheduler = scheduler
        self._network = network
        self._coordinator = coordinator
        self._process = process
        self._on_view = on_view
        self._on_fenced = on_fenced
        self.joined: Joined | None = None
        self.view = SeenView(ClusterView())
        self.keeps_state = False
        #: Left, or thrown out.
        self._out = False
        self._coordinator_life = 0

    @property
    def member(self) -> Member:
        """Place and incarnation. Only after ``joined``."""
        if self.joined is None:
            raise Unavailable("not a member yet")
        return self.joined.member

    def join(self, ask: Applicant, then: Callable[[], None]) -> None:
        """Ask until there is an answer; ``then`` follows. A refusal ends in ``on_out``."""

        def answered(value: Any) -> None:
            if self.joined is not None or self._out:
                return
            if isinstance(value, Unavailable):
                self._scheduler.after(_RETRY_SECONDS, self._process, self.join, ask, then)
            elif isinstance(value, PsError):
                self._lose(Fenced(str(value)))
            else:
                self.joined = value
                self._scheduler.after(value.heartbeat_seconds, self._process, self._beat)
                self._watch()
                then()

        self._call(self._coordinator.join, answered, ask)

    def announce_state(self, then: Callable[[], None]) -> None:
        """``then`` follows once the coordinator knows that this shard's state is on disk."""

        def answered(value: Any) -> None:
            if self.keeps_state or self._out:
                return
            if isinstance(value, Fenced):
                self._lose(value)
            elif isinstance(value, PsError):
                self._scheduler.after(_RETRY_SECONDS, self._process, self.announce_state, then)
            else:
                self.keeps_state = True
                then()

        self._call(self._coordinator.heartbeat, answered, self.member, True)

    def leave(self, why: str, then: Callable[[], None]) -> None:
        """Try once, as a process does that has two seconds for it; ``then`` follows in any case."""
        self._out = True
        self._call(self._coordinator.leave, lambda _: then(), self.member, why)

    def _beat(self) -> None:
        if self._out or self.joined is None:
            return
        self._scheduler.after(self.joined.heartbeat_seconds, self._process, self._beat)
        self._call(self._coordinator.heartbeat, self._heard, self.member, self.keeps_state)

    def _heard(self, value: Any) -> None:
        if isinstance(value, Fenced):
            self._lose(value)

    def _lose(self, error: Fenced) -> None:
        if not self._out:
            self._out = True
            self._on_fenced(error)

    def _watch(self) -> None:
        """Have a watch at the coordinator's present life; looked after as often as a real one is opened again."""
        coordinator = self._coordinator.process
        if self._out:
            return
        self._scheduler.after(_REWATCH_SECONDS, self._process, self._watch)
        if coordinator.alive and coordinator.life != self._coordinator_life:
            self._coordinator_life = coordinator.life

            def broke(value: Any) -> None:
                self._coordinator_life = 0

            self._call(self._coordinator.watch, broke, self._process, self.view.revision, self._deliver)

    def _deliver(self, view: SeenView) -> None:
        if self._out:
            return
        if self.member.incarnation not in view.incarnations:
            self._call(self._coordinator.heartbeat, self._heard, self.member, self.keeps_state)
            return
        self.view = view
        self._on_view(view)

    def _call(self, handler: Callable[..., None], reply: Callable[[Any], None], *asked: Any) -> None:
        self._network.call(self._process, self._coordinator.process, handler, reply, *asked)
