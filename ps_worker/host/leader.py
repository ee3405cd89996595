"""The worker of a host that pushes for the others: the thread that hears them, and the exchanges that wait for them."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ps_protocol.cluster.requests import Contribution
from ps_protocol.errors import InvalidRequest, PsError
from ps_protocol.logs import EventLogger
from ps_protocol.model.layout import Range
from ps_protocol.wire.unix_peer import check_peer
from ps_worker.host.connection import HostConnection
from ps_worker.host.core import Command, HostRounds, Lead, Tell
from ps_worker.host.folder import HostFolder, prepare
from ps_worker.host.memory import HostMean
from ps_worker.host.messages import (
    Away,
    Deposit,
    HostHello,
    HostRefusal,
    HostWelcome,
    HostWorker,
    Message,
    Position,
    RoundAnswer,
)

logger = EventLogger("ps_worker")

LOOK_SECONDS = 0.2
"""The leader looks at this interval who is still a member."""


@dataclass(frozen=True, slots=True)
class LiveWorkers:
    """Who is a member, as the leader's view of the cluster says."""

    #: Rank to incarnation.
    live: Mapping[int, int]
    revision: int
    #: In the mode in force answers may wait for other workers.
    bounded: bool


@dataclass(frozen=True, slots=True)
class TakenDeposit:
    """A push of another worker that is in the leader's round."""

    worker: HostWorker
    deposit: Deposit
    connection: HostConnection


@dataclass(frozen=True, slots=True)
class CombinedPush:
    """The mean of a host in place of a worker's own gradients, and who has a part in it besides the worker."""

    mean: HostMean
    taken: Sequence[TakenDeposit]
    #: By shard, its place among those that have anything of the model.
    places: dict[int, int]

    def contributions(self, shard: int) -> list[Contribution]:
        """The other workers' pushes, for the header of that to ``shard``."""
        place = self.places[shard]
        return [
            Contribution(
                (each.worker.rank, each.worker.incarnation),
                each.deposit.sequence,
                each.deposit.phase,
                each.deposit.clock,
                each.deposit.versions[place],
                each.deposit.skipped,
            )
            for each in self.taken
        ]

    def region(self, shard: int) -> torch.Tensor:
        """All bytes of the shard's region."""
        return self.mean.region(shard)

    def pieces(self, shard: int, ranges: Sequence[Range]) -> list[memoryview]:
        """Bytes of the shard's region, to be sent."""
        return self.mean.pieces(shard, ranges)


class Leaders:
    """What the leaders of all models of one process know of each other. They have one lock."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.all: list[Leader] = []


class Leader:
    """Made by the thread that makes exchanges, which uses it; a daemon thread of its own hears followers.

    Both use the rounds under one lock. A follower's connection is closed before memory that it may read is written.
    """

    def __init__(
        self,
        hello: HostHello,
        folder: HostFolder,
        leaders: Leaders,
        members: Callable[[], LiveWorkers],
    ) -> None:
        """``hello``: what this worker would say as a follower. ``folder``: this process leads in it. Raises OSError."""
        self._own, self._folder, self._members = hello, folder, members
        self._descriptors, self._listener = folder.descriptors, folder.listen(hello.model)
        self._leaders, self._changed = leaders, leaders.changed
        self._rounds = HostRounds()
        self._connections: dict[HostWorker, HostConnection] = {}
        #: Connections that have not said who they are.
        self._strangers: set[HostConnection] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wakes, self._woken = socket.socketpair()
        for end in (self._wakes, self._woken):
            self._descriptors.add(end)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._ended = False
        self._thread = threading.Thread(target=self._serve, name="ps-host-leader", daemon=True)
        with self._changed:
            leaders.all.append(self)
        self._thread.start()

    # -- the thread that makes exchanges

    def gather(
        self, lead: Lead, expected: Callable[[], set[HostWorker]] | None, check: Callable[[list[HostWorker]], None]
    ) -> list[TakenDeposit]:
        """Begin an exchange: the pushes of other workers that are in its round, by rank. ``ended`` comes afterwards.

        ``expected``: gives the workers of the host, which are waited for although they have not connected. ``check`` is
        called again and again with those that are waited for; followers are heard meanwhile, and what it raises ends
        the exchange.
        """
        with self._changed:
            self._rounds.expected = expected() - self._connections.keys() if expected else set()
            self._do(self._rounds.lead(lead, time.monotonic()))
        try:
            while True:
                with self._changed:
                    if self._rounds.is_complete:
                        taken = self._rounds.taken.items()
                        return [TakenDeposit(worker, deposit, self._connections[worker]) for worker, deposit in taken]
                    self._changed.wait(LOOK_SECONDS)
                    waits_for = self._rounds.waits_for
                check(waits_for)
                with self._changed:
                    self._release_blocked(lead)
                    if expected:
                        self._rounds.expected &= expected()
                    self._tick()
        except BaseException:
            with self._changed:
                self._do(self._rounds.dissolve("the leader's step has failed"))
                self._rounds.ended()
            raise

    def leave_out(self, workers: Iterable[HostWorker]) -> None:
        """These are in the round no more: their connections have ended."""
        with self._changed:
            gone = list(workers)
            self._rounds.without(gone)
            for worker in gone:
                self._drop(worker)

    def refuse(self, worker: HostWorker, error: InvalidRequest) -> None:
        """The deposit of ``worker`` cannot be taken: it is told why, and its connection ends."""
        with self._changed:
            logger.warning("model.options", "%s of this host pushes by itself: %s", worker, error)
            self._send(worker, HostRefusal(error.message, error.expected, error.actual))
            self._rounds.without([worker])
            self._drop(worker)

    def dissolve(self, why: str) -> None:
        """The workers of the round push by themselves. The exchange goes on."""
        with self._changed:
            self._do(self._rounds.dissolve(why))

    def ended(self, answer: Callable[[HostConnection], RoundAnswer] | None = None) -> None:
        """The exchange has ended; ``answer`` makes that to the workers of its round, for the connection of each."""
        with self._changed:
            if answer is not None:
                for worker in list(self._rounds.taken):
                    self._answer(worker, answer)
            self._rounds.ended()

    def leave_until(self, position: Position) -> None:
        """No push comes before ``position``, or not for others, until the next exchange."""
        with self._changed:
            self._do(self._rounds.leave_until(position))

    def close(self) -> None:
        """Lead no more: connections end, and another worker may lead. Safe to repeat."""
        with self._changed:
            if self._ended:
                return
            self._ended = True
            self._leaders.all.remove(self)
        self._wakes.send(b"x")
        self._thread.join()
        for connection in (*self._connections.values(), *self._strangers):
            connection.close()
        self._selector.close()
        self._folder.end_listening(self._own.model, self._listener)
        for end in (self._wakes, self._woken):
            self._descriptors.close(end)

    # -- under the lock

    def _tick(self) -> None:
        members = self._members()
        self._do(self._rounds.tick(time.monotonic(), members.live, members.revision, bounded=members.bounded))
        if any(each is not self and each._rounds.may_wait for each in self._leaders.all):
            self._do(self._rounds.release(time.monotonic()))

    def _release_blocked(self, lead: Lead) -> None:
        """A worker that is waited for here may wait for this one with another model: it pushes that by itself."""
        for other in self._leaders.all:
            if other is not self:
                for worker in set(self._rounds.waits_for) & set(other._rounds.pending):
                    other._do(other._rounds.separate(worker, "the leader waits for it in another model"))
                    self._do(self._rounds.blocked(worker) if lead.bounded else ())

    def _do(self, commands: Iterable[Command]) -> None:
        for command in commands:
            if isinstance(command, Tell):
                self._send(command.worker, command.message)
                continue
            if command.why:
                logger.warning("model.options", "%s of this host pushes by itself: %s", command.worker, command.why)
            self._drop(command.worker)
        if self._rounds.is_complete:
            self._changed.notify_all()

    def _send(self, worker: HostWorker, message: Message) -> None:
        if (connection := self._connections.get(worker)) is not None:
            try:
                connection.send(message)
            except OSError as error:
                self._lost(worker, error)

    def _answer(self, worker: HostWorker, answer: Callable[[HostConnection], RoundAnswer]) -> None:
        if (connection := self._connections.get(worker)) is not None:
            try:
                connection.send(answer(connection))
            except OSError as error:
                self._lost(worker, error)

    def _lost(self, worker: HostWorker, error: Exception) -> None:
        logger.debug("the connection to %s of this host has ended: %s", worker, error)
        self._drop(worker)
        self._do(self._rounds.gone(worker))

    def _drop(self, worker: HostWorker) -> None:
        if (connection := self._connections.pop(worker, None)) is not None:
            self._forget(connection)

    def _forget(self, connection: HostConnection) -> None:
        self._selector.unregister(connection.socket)
        connection.close()

    # -- the thread that hears followers

    def _serve(self) -> None:
        while True:
            ready = self._selector.select(LOOK_SECONDS)
            with self._changed:
                if self._ended:
                    return
                for key, _ in ready:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.data, HostConnection) and not key.data.is_closed:
                        self._hear(key.data)
                if not ready:
                    self._tick()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            logger.debug("no connection of a worker of this host: %s", error)
            return
        self._descriptors.add(sock)
        connection = HostConnection(sock, self._descriptors)
        try:
            check_peer(sock, None)
            prepare(sock)
        except (OSError, PsError) as error:
            logger.warning("model.options", "a process of this host is not taken: %s", error)
            connection.close()
            return
        self._strangers.add(connection)
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def _hear(self, connection: HostConnection) -> None:
        worker = next((key for key, each in self._connections.items() if each is connection), None)
        try:
            while (message := connection.receive(0.0)) is not None:
                if worker is None:
                    worker = self._welcome(connection, message)
                elif isinstance(message, Deposit):
                    connection.mapped.used((*message.segments, message.rows))
                    self._do(self._rounds.deposit(worker, message, time.monotonic()))
                elif isinstance(message, Away):
                    self._do(self._rounds.away(worker, (message.phase, message.clock)))
                else:
                    raise InvalidRequest("a worker of this host sent what is not for its leader")
                if connection.is_closed:
                    return
        except (OSError, InvalidRequest) as error:
            if isinstance(error, InvalidRequest):
                logger.warning(
                    "model.options", "%s of this host is not heard any more: %s", worker or "a worker", error
                )
            if worker is not None:
                self._lost(worker, error)
            elif connection in self._strangers:
                self._strangers.discard(connection)
                self._forget(connection)

    def _welcome(self, connection: HostConnection, message: Message) -> HostWorker:
        """Take a follower that has said who it is. Raises InvalidRequest, OSError."""
        own = self._own
        if not isinstance(message, HostHello) or (message.seed, message.model) != (own.seed, own.model):
            raise InvalidRequest("a process of this host is no worker of this model")
        if message.style != own.style:
            connection.send(
                HostRefusal("the workers of this host do not push alike", expected=own.style, actual=message.style)
            )
            raise InvalidRequest(f"{message.key} pushes otherwise", expected=own.style, actual=message.style)
        connection.send(HostWelcome(own.rank, own.incarnation, self._rounds.exchanges))
        self._strangers.discard(connection)
        worker = message.key
        self._do(self._rounds.join(worker, message.revision))
        self._connections[worker] = connection
        return worker
