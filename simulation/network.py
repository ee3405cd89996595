"""Decides what becomes of every message: how long it takes, whether it is lost, comes twice, or never gets through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ps_protocol.errors import PsError, Unavailable
from simulation.scheduler import Process, Scheduler

CALL_SECONDS = 0.5
"""After which a call whose answer is lost is given up."""

Reply = Callable[[Any], None]
"""Takes the answer of a call: a value, or the PsError to raise."""


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
    """Calls may be lost, late, repeated and out of order. Streams keep their order until they break, as TCP does."""

    def __init__(self, scheduler: Scheduler, *, calls_lost: float, calls_repeated: float, delay_seconds: float) -> None:
        self._scheduler = scheduler
        self._random = scheduler.random
        self.calls_lost = calls_lost
        self.calls_repeated = calls_repeated
        self._delay = delay_seconds
        self.partitions: list[Partition] = []
        #: By process: calls it has taken and not answered.
        self._parked: dict[str, dict[int, Reply]] = {}
        self._calls = 0

    def died(self, server: Process) -> None:
        """Whoever waits for an answer of ``server`` hears that it is gone."""
        for answer in list(self._parked.pop(server.name, {}).values()):
            answer(Unavailable(f"{server.name} is gone"))

    def delay(self) -> float:
        """How long a message takes: mostly little, now and then twenty times that."""
        draw = self._random.random()
        return self._delay * (0.2 + draw if draw < 0.98 else 20 * self._random.random())

    def heals(self, a: str, b: str) -> float:
        """When ``a`` and ``b`` can reach each other (again)."""
        now, heals = self._scheduler.now, self._scheduler.now
        for partition in self.partitions:
            if partition.until > now and partition.parts(a, b):
                heals = max(heals, partition.until)
        return heals

    def call(self, client: Process, server: Process, handler: Callable[..., None], reply: Reply, *asked: Any) -> None:
        """Call ``handler(answer, *asked)`` at the server; ``reply`` gets its answer, or Unavailable, at the client."""
        random = self._random
        if random.random() < self.calls_repeated:
            self._request(client, server, handler, _nowhere, asked, random.random() * 3)
        self._request(client, server, handler, reply, asked, 0.0)

    def _request(
        self, client: Process, server: Process, handler: Callable[..., None], reply: Reply, asked: Any, late: float
    ) -> None:
        scheduler = self._scheduler
        if self._lost(client, server):
            scheduler.after(CALL_SECONDS, client, reply, Unavailable("no answer"))
            return
        client_life = client.life
        self._calls += 1
        number = self._calls

        def answer(value: Any) -> None:
            self._parked.get(server.name, {}).pop(number, None)
            if client.life != client_life:
                return
            if self._lost(client, server):
                scheduler.after(CALL_SECONDS, client, reply, Unavailable("no answer"))
            else:
                scheduler.after(self.delay(), client, reply, value)

        def arrive() -> None:
            if not server.alive:
                answer(Unavailable(f"{server.name} is not there"))
            elif server.stopped_until > scheduler.now:
                # The client gives up; the request is served when the process goes on.
                if client.life == client_life:
                    scheduler.after(CALL_SECONDS, client, reply, Unavailable("no answer"))
                scheduler.at(server.stopped_until, server, handler, _nowhere, *asked)
            else:
                self._parked.setdefault(server.name, {})[number] = answer
                handler(answer, *asked)

        scheduler.after(self.delay() + late, None, arrive)

    def _lost(self, client: Process, server: Process) -> bool:
        if self.partitions and self.heals(client.name, server.name) > self._scheduler.now:
            return True
        return self.calls_lost > 0 and self._random.random() < self.calls_lost


def _nowhere(value: Any) -> None:
    """Takes an answer that nobody waits for."""


class Stream:
    """One step stream between a worker's lane and a shard's life. Either side sees it end at a time of its own."""

    __slots__ = (
        "_down_at",
        "_down_cut",
        "_network",
        "_scheduler",
        "_up_at",
        "_up_cut",
        "lane",
        "pending",
        "rank",
        "server_open",
        "shard",
        "worker",
        "worker_key",
    )

    def __init__(self, network: Network, scheduler: Scheduler, worker: Process, shard: Any, lane: Any) -> None:
        self._network = network
        self._scheduler = scheduler
        self.worker = worker
        self.shard = shard
        #: The worker's end; a reply counts while ``lane.stream`` is this.
        self.lane = lane
        self._up_at = self._down_at = 0.0
        self._up_cut = self._down_cut = float("inf")
        #: What the shard has still to answer.
        self.pending: Any = None
        #: Set by the shard once it is open there.
        self.worker_key: Any = None
        self.server_open = True

    def up(self, handler: Callable[..., None], *message: Any) -> None:
        """Send ``message`` to the shard, behind all before it."""
        at = self._up_at = self._arrives(self._up_at)
        if at < self._up_cut:
            self._scheduler.at(at, self.shard.process, self._receive_up, handler, message)

    def down(self, handler: Callable[..., None], *message: Any) -> None:
        """Send ``message`` to the worker."""
        at = self._down_at = self._arrives(self._down_at)
        if at < self._down_cut:
            self._scheduler.at(at, self.worker, self._receive_down, handler, message)

    def close(self) -> None:
        """The worker ends the stream; what it sent before still arrives."""
        at = self._up_at = self._arrives(self._up_at)
        self._scheduler.at(at, self.shard.process, self.shard.stream_ended, self)

    def break_off(self) -> None:
        """Lose what is under way from some moment on, in each direction another; both sides notice later."""
        now, draw = self._scheduler.now, self._scheduler.random.random
        self._up_cut = min(self._up_cut, now + draw() * 0.01)
        self._down_cut = min(self._down_cut, now + draw() * 0.01)
        self._scheduler.after(draw() * 1.5, self.worker, self.lane.broken, self)
        self._scheduler.after(draw() * 1.5, self.shard.process, self.shard.stream_ended, self)

    def _arrives(self, behind: float) -> float:
        network = self._network
        at = self._scheduler.now + network.delay()
        if network.partitions:
            at = max(at, network.heals(self.worker.name, self.shard.process.name))
        return max(at, behind)

    def _receive_up(self, handler: Callable[..., None], message: Any) -> None:
        if self._scheduler.now < self._up_cut:
            handler(self, *message)

    def _receive_down(self, handler: Callable[..., None], message: Any) -> None:
        if self._scheduler.now < self._down_cut:
            handler(self, *message)


def raised(value: Any) -> Any:
    """``value``, or the error that it is."""
    if isinstance(value, PsError):
        raise value
    return value
