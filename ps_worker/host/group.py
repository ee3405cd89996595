"""Finds the other workers of a model on this host, and says whether this worker leads them or follows."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from ps_protocol.errors import PermissionDenied, PsError
from ps_protocol.logs import EventLogger
from ps_worker.host.connection import HostConnection
from ps_worker.host.folder import HostFolder
from ps_worker.host.follower import Follower
from ps_worker.host.leader import Leader, Leaders, LiveWorkers
from ps_worker.host.messages import HostHello, HostRefusal, HostWelcome, HostWorker, Position

logger = EventLogger("ps_worker")

CONNECT_SECONDS = 5.0
"""A worker waits so long for the answer of a leader that has its lock, and pushes by itself then."""

_PAUSE_SECONDS = 0.005


class HostGroup:
    """One model on one host, as one worker takes part in it. Used by the thread that makes exchanges."""

    def __init__(
        self, folder: HostFolder, leaders: Leaders, hello: Callable[[], HostHello], members: Callable[[], LiveWorkers]
    ) -> None:
        """``leaders``: of all models of this worker."""
        self._folder, self._leaders, self._hello, self._members = folder, leaders, hello, members
        folder.models += 1
        self._is_closed = False
        self._leader: Leader | None = None
        self._follower: Follower | None = None
        #: The leader that was given up, and how many exchanges it had begun when it was asked again: until it begins
        #: another, this worker pushes by itself.
        self._late: tuple[HostWorker, int | None] | None = None
        #: What has been said once.
        self._said: set[str] = set()
        #: Whether this worker has room for what a leader lends.
        self._may_lead = True
        #: The leader, by number, that did not listen for this model when it was looked for.
        self._silent = -1

    @property
    def is_sole(self) -> bool:
        """Whether this worker steps no other model: it waits in no step of another one."""
        return self._folder.models == 1

    def enter(self) -> Leader | Follower | None:
        """What this worker is in its next exchange; None: it pushes by itself."""
        if self._leader is not None:
            return self._leader
        if self._follower is not None:
            if self._follower.is_open:
                return self._follower
            self.leave()
        try:
            return self._found()
        except (OSError, PsError) as error:
            self.say(f"this worker pushes by itself, apart from the others of its host: {error}")
            return None

    def give_up(self, why: str) -> None:
        """The leader is not waited for any more."""
        if (follower := self._follower) is not None:
            logger.warning(
                "model.options", "%s, which pushes for this host, is not waited for: %s", follower.leader, why
            )
            self._late = follower.leader, None
            self.leave()

    def leave(self) -> None:
        """End the connection to the leader."""
        if self._follower is not None:
            self._follower.close()
            self._follower = None

    def away(self, until: Position) -> None:
        """No push comes before ``until``, or it is made by this worker itself."""
        self.apart(until)
        if self._leader is not None:
            self._leader.leave_until(until)
        elif self._follower is not None:
            try:
                self._follower.away(*until)
            except OSError:
                self.leave()

    def apart(self, until: Position) -> None:
        """No leader that begins waits for a push of this worker before ``until``."""
        self._folder.away(until)

    def resign(self) -> None:
        """Lead this model no more."""
        self._may_lead = False
        if self._leader is not None:
            self._leader.close()
            self._leader = None

    def hand_over(self) -> None:
        """Take part no more for now: others neither follow this worker nor wait for it, and one of them may lead."""
        self.leave()
        self.resign()
        if self.is_sole:
            self._folder.resign()

    def wait_for_names(self) -> None:
        """Until the processes of this host that are about to join the job have done so; for a moment."""
        deadline = time.monotonic() + CONNECT_SECONDS
        while self._folder.has_nameless() and time.monotonic() < deadline:
            time.sleep(_PAUSE_SECONDS)

    def others(self, position: Position, reached: Position) -> set[HostWorker]:
        """The other workers of this host that may push at ``position`` with others; ``reached``: as in ``Lead``."""
        return self._folder.others(position, reached)

    def say(self, text: str) -> None:
        """Log ``text`` once."""
        if text not in self._said:
            self._said.add(text)
            logger.warning("model.options", "model '%s': %s", self._hello().model, text)

    def close(self) -> None:
        """End it. Safe to repeat."""
        self.leave()
        self.resign()
        if not self._is_closed:
            self._is_closed = True
            self._folder.end_model()

    def start(self) -> None:
        """Have others find this worker where it leads."""
        with suppress(OSError):
            self._led()

    def _led(self) -> Leader | None:
        hello = self._hello()
        if self._leader is None and self._may_lead and self._folder.lead(hello.key, hello.revision):
            self._leader = Leader(hello, self._folder, self._leaders, self._members)
        return self._leader

    def _found(self) -> Leader | Follower | None:
        """Lead, or connect to who leads; one that is no member any more is passed over."""
        hello, folder, deadline = self._hello(), self._folder, time.monotonic() + CONNECT_SECONDS
        while True:
            if (leader := self._led()) is not None:
                return leader
            if self._is_dead(holder := folder.holder()):
                folder.pass_over()
                continue
            if (follower := self._connected(hello, deadline)) is not None:
                if self._late in ((follower.leader, None), (follower.leader, follower.exchanges)):
                    self._late = follower.leader, follower.exchanges
                    follower.close()
                    return None
                self._late, self._follower = None, follower
                return follower
            if self._silent == folder.number or time.monotonic() >= deadline or holder == (hello.key, hello.revision):
                self._silent = folder.number
                return None
            time.sleep(_PAUSE_SECONDS)

    def _is_dead(self, holder: tuple[HostWorker, int] | None) -> bool:
        """Whether the holder of a lock is no member any more: it is frozen, or about to learn it."""
        if holder is None:
            return False
        (worker, revision), members = holder, self._members()
        return members.revision >= revision and members.live.get(worker.rank) != worker.incarnation

    def _connected(self, hello: HostHello, deadline: float) -> Follower | None:
        """None: nobody listens yet, or no answer came in time. Raises PsError, OSError."""
        try:
            connection = HostConnection(self._folder.connect(hello.model), self._folder.descriptors)
        except PermissionDenied:
            raise
        except OSError:
            return None
        try:
            connection.send(hello)
            answer = connection.receive(max(0.0, deadline - time.monotonic()))
        except OSError:
            connection.close()
            return None
        except BaseException:
            connection.close()  # the leader would wait for a worker that has been interrupted
            raise
        if isinstance(answer, HostWelcome):
            return Follower(connection, answer.key, answer.exchanges)
        connection.close()
        if isinstance(answer, HostRefusal):
            raise PsError(answer.why, expected=answer.expected, actual=answer.actual)
        return None
