"""Decides what becomes of what processes send each other: how long it takes, and whether it arrives at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from simulation.runtime.kernel import Kernel, Killed, Process

if TYPE_CHECKING:
    from simulation.runtime.calls import Call
    from simulation.runtime.servers import Server

KEEPALIVE_SECONDS = 15.0
"""After which a connection on which nothing arrives is given up by either side."""

_CUT_SECONDS = 0.01
_NOTICE_SECONDS = 1.5


@dataclass(slots=True, eq=False)
class Partition:
    """Nothing passes between two sets of processes, by name."""

    one: frozenset[str]
    other: frozenset[str]
    until: float

    def parts(self, a: str, b: str) -> bool:
        """Whether ``a`` and ``b`` are on different sides."""
        return (a in self.one and b in self.other) or (b in self.one and a in self.other)


class Network:
    """Carries the calls between processes. A call keeps the order of its messages until it breaks."""

    def __init__(self, kernel: Kernel, *, delay_seconds: float, calls_lost: float, calls_late: float) -> None:
        self.kernel = kernel
        #: How often a call breaks, and how often its request then arrives later.
        self.calls_lost, self.calls_late = calls_lost, calls_late
        self.servers: dict[str, Server] = {}
        self._random = kernel.random
        self._delay = delay_seconds
        self._partitions: list[Partition] = []
        #: Those under way, by each of the two processes.
        self._calls: dict[Process, dict[Call, None]] = {}

    def delay(self) -> float:
        """How long a message takes: mostly little, now and then twenty times that."""
        draw = self._random.random()
        return self._delay * (0.2 + draw if draw < 0.98 else 20 * self._random.random())

    def heals(self, a: Process, b: Process) -> float:
        """When ``a`` and ``b`` can reach each other (again)."""
        heals = now = self.kernel.now
        if not self._partitions:
            return now
        for partition in self._partitions:
            if partition.until > now and partition.parts(a.name, b.name):
                heals = max(heals, partition.until)
        return heals

    def begin(self, call: Call, server: Process) -> None:
        """``call`` is under way between its client and ``server``."""
        for process in (call.client, server):
            self._calls.setdefault(process, {})[call] = None

    def end(self, call: Call, server: Process) -> None:
        """It is under way no longer."""
        for process in (call.client, server):
            self._calls.get(process, {}).pop(call, None)

    def calls_of(self, process: Process) -> list[Call]:
        """Those that ``process`` takes part in."""
        return list(self._calls.get(process, {}))

    def part(self, partition: Partition) -> None:
        """Let nothing pass there. Connections that are cut for long are given up."""
        now = self.kernel.now
        self._partitions = [each for each in self._partitions if each.until > now] + [partition]
        for calls in list(self._calls.values()):
            for call in calls:
                if partition.parts(call.client.name, call.server_name) and not call.is_watched:
                    call.is_watched = True
                    self.kernel.schedule(
                        KEEPALIVE_SECONDS * (0.7 + 0.3 * self._random.random()), None, self._look, call
                    )

    def _look(self, call: Call) -> None:
        call.is_watched = False
        server = call.server_process
        if server is not None and self.heals(call.client, server) > self.kernel.now:
            self.break_off(call)

    def heal(self) -> None:
        """From now on everything arrives."""
        self._partitions.clear()
        self.calls_lost = self.calls_late = 0.0

    def died(self, process: Process) -> None:
        """Its connections end; the other sides notice soon, or later where they are parted from it."""
        for address, server in list(self.servers.items()):
            if server.process is process:
                del self.servers[address]
        for call in list(self._calls.pop(process, {})):
            self.break_off(call)

    def break_off(self, call: Call) -> None:
        """Lose what is under way from some moment on, in each direction another; both sides notice later."""
        now, draw = self.kernel.now, self._random.random
        call.up.cut = min(call.up.cut, now + draw() * _CUT_SECONDS)
        call.down.cut = min(call.down.cut, now + draw() * _CUT_SECONDS)
        server = call.server_process
        heals = now if server is None else min(self.heals(call.client, server), now + KEEPALIVE_SECONDS)
        self.kernel.schedule(heals - now + draw() * _NOTICE_SECONDS, call.client, call.client_lost)
        if server is not None:
            self.kernel.schedule(heals - now + draw() * _NOTICE_SECONDS, server, call.server_lost)


class Pipe:
    """One direction of a call: messages arrive in order, until it is cut."""

    __slots__ = ("_arrived", "_network", "cut")

    def __init__(self, network: Network) -> None:
        self._network = network
        self._arrived = 0.0
        #: From when on nothing arrives.
        self.cut = float("inf")

    def hold(self, until: float) -> None:
        """Nothing arrives before ``until``."""
        self._arrived = max(self._arrived, until)

    def send(self, sender: Process, receiver: Process, deliver: Callable[..., None], *message: Any) -> None:
        """Have ``deliver(*message)`` called in ``receiver``, behind all before it."""
        network = self._network
        if not sender.alive:
            raise Killed
        kernel = network.kernel
        now = kernel.now
        at = max(now + network.delay(), network.heals(sender, receiver), self._arrived)
        self._arrived = at
        if at < self.cut:
            kernel.schedule(at - now, receiver, self._deliver, deliver, message)

    def _deliver(self, deliver: Callable[..., None], message: tuple[Any, ...]) -> None:
        if self._network.kernel.now < self.cut:
            deliver(*message)
