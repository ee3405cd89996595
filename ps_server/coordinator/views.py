"""Owns the journal and the newest view: views are sent once they are on disk, and not too often."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from copy import copy
from dataclasses import replace
from typing import TypeVar

from ps_protocol.cluster.view import ClusterView, Member, Role
from ps_protocol.errors import DamagedData, Unavailable
from ps_protocol.logs import EventLogger
from ps_protocol.wire.convert import cluster as convert
from ps_server.coordinator import times
from ps_server.coordinator.beginning import Beginning
from ps_server.coordinator.persistence.cluster_records import changed_rows
from ps_server.coordinator.persistence.journal import Journal
from ps_server.tasks import Conditions

logger = EventLogger(__name__)

MOST_CHANGES = 16
"""Watchers have so many different views before the newest one; slower ones are sent the whole newest view."""


class ViewEncoder:
    """Owned by the service. Caches the encoded bytes of the newest view and of its members."""

    def __init__(self) -> None:
        self._view = ClusterView()
        self._whole = b""
        #: By the revision of the earlier view.
        self._changes: dict[int, bytes] = {}
        #: By incarnation, which is unique to a member: the bytes of a view with that member alone.
        self._members: dict[int, bytes] = {}

    def encode(self, view: ClusterView, before: ClusterView | None = None) -> bytes:
        """Encode ``view`` for a watcher that has ``before``; None: it has no view, or does not accept changes."""
        if view is not self._view:
            self._view, self._whole, self._changes = view, b"", {}
        if before is not None:
            if before.revision not in self._changes and len(self._changes) < MOST_CHANGES:
                self._changes[before.revision] = convert.changed_view_to_pb(view, before).SerializeToString()
            if (changes := self._changes.get(before.revision)) is not None:
                return changes
        self._whole = self._whole or self._encode(view)
        return self._whole

    def _encode(self, view: ClusterView) -> bytes:
        known = self._members
        if len(known) > 2 * len(view.members):
            known.clear()
        for member in view.members:
            if member.incarnation not in known:
                known[member.incarnation] = convert.encoded_member(member)
        # Concatenated encoded messages are one message, with the members of all.
        rest = convert.VIEW.to_pb(replace(view, members=())).SerializeToString()
        return rest + b"".join([known[member.incarnation] for member in view.members])


UNBOUND_WATCHERS = 50
"""So many watchers receive every view at once."""

SECONDS_PER_WATCHER = 2e-4
"""One watcher takes about a third of this: views take a part of the coordinator's time, never all of it."""


def is_urgent(sent: ClusterView, now: ClusterView) -> bool:
    """Whether ``now`` must be sent at once to watchers that have ``sent``.

    Changes of workers, evaluators and standbys may wait, and so may changes of shards before the job has started, when
    there are no steps. All others are urgent: the mode, models, moves, the start and the end of the job, and shards
    once it has started.
    """
    if replace(sent, revision=0, members=(), journal_mark=b"") != replace(
        now, revision=0, members=(), journal_mark=b""
    ):
        return True
    return now.started and _shards(sent) != _shards(now)


def _shards(view: ClusterView) -> list[Member]:
    return [member for member in view.members if member.role is Role.SHARD]


class ViewPace:
    """Decides when watchers receive the next view. Owned by the publisher; times are seconds of any steady clock."""

    def __init__(self) -> None:
        self._last = -math.inf

    def wait(self, now: float, watchers: int, *, urgent: bool) -> float:
        """Seconds from ``now`` until ``watchers`` receive a new view; 0: at once."""
        if urgent or watchers <= UNBOUND_WATCHERS:
            return 0.0
        interval = min(times.VIEW_SECONDS, watchers * SECONDS_PER_WATCHER)
        return min(interval, max(0.0, self._last + interval - now))

    def sent(self, now: float) -> None:
        """Note that watchers receive a view now."""
        self._last = now


T = TypeVar("T")


class Publisher:
    """Used by the driver, on its event loop; a commit of the journal blocks the loop."""

    def __init__(self, begun: Beginning, journal: Journal | None, clock: Callable[[], float]) -> None:
        """Publish ``begun``. Raises Unavailable if ``journal`` cannot be written."""
        self._state = begun.state
        self._data = begun.data
        self._exchanges = begun.exchanges
        self._journal = journal
        self._clock = clock
        self._saved = begun.records
        #: Whether a decision is not on disk yet, or not in ``view``.
        self._pending = False
        #: The state.
        self._changes = Conditions()
        self._closing = False
        self._failure: DamagedData | None = None
        #: Set when the journal turned out to be an older one.
        self.failed = asyncio.Event()
        self.write()
        #: The newest view that is on disk; watchers see no other.
        self.view = self._marked_view()
        #: The view that watchers have received, or are receiving; ``view`` is newer while they wait.
        self._sent = self.view
        self._pace = ViewPace()
        self._watchers = 0
        #: What watchers receive.
        self._sendings = Conditions()
        #: Sends watchers the newest view when their waiting time is over.
        self._later: asyncio.TimerHandle | None = None

    @property
    def journal_mark(self) -> bytes:
        """Proves the last commit to a later coordinator; empty without a journal."""
        return self._journal.mark if self._journal else b""

    def publish(self, *, changed: bool = False) -> None:
        """Write and publish the decisions since the last call.

        Raises Unavailable when it cannot be written; the next call tries again.
        """
        self._pending = self._pending or changed
        self.check_failed()
        if self._pending:
            self.write()
            self._pending = False
            self.view = self._marked_view()
            self._changes.wake()
            self._send()

    def write(self) -> None:
        """Commit what has changed since the last commit. Raises Unavailable."""
        if self._journal is None:
            return
        now = replace(
            self._state.persisted_state(),
            data=self._data.persisted_state(),
            exchanges=self._exchanges.persisted_state(),
        )
        if rows := changed_rows(self._saved, now):
            self._journal.write(rows)
            self._saved = now

    def check_journal(self, known: bytes) -> None:
        """Raises DamagedData when the mark ``known``, which a member has received, proves that this journal is older.

        Then nothing more is sent, and ``failed`` is set: the process has to end.
        """
        self.check_failed()
        if self._journal is None:
            return
        try:
            self._journal.check_mark(known)
        except DamagedData as error:
            logger.failure(error)
            self._failure = error
            self.failed.set()
            self._changes.wake()
            self._send_now()
            raise

    def check_failed(self) -> None:
        """Raises DamagedData when the journal turned out to be an older one."""
        if self._failure is not None:
            raise copy(self._failure)

    def check_open(self) -> None:
        """Raises Unavailable once ``close`` was called, and the errors of ``check_failed``."""
        self.check_failed()
        if self._closing:
            raise Unavailable("the coordinator is stopping")

    def close(self) -> None:
        """End every watch stream and wake every parked call."""
        self._closing = True
        self._changes.wake()
        self._send_now()

    async def wait_for_change(self, seconds: float) -> None:
        """Return at the next change of the state, or after ``seconds``."""
        await self._changes.changed(seconds)

    async def repeat(self, attempt: Callable[[], T], answered: Callable[[T], bool], wait_seconds: float) -> T:
        """Call ``attempt`` now and after every change until its result is ``answered`` or time is up; returns the last
        result.

        The time limit is ``wait_seconds``, at most 30 s. Raises the errors of ``attempt`` and ``check_open``.
        """
        deadline = self._clock() + min(wait_seconds, times.PARKED_SECONDS)
        while True:
            self.check_open()
            answer = attempt()
            left = deadline - self._clock()
            if answered(answer) or left <= 0:
                return answer
            await self.wait_for_change(left)

    async def views(self, known_revision: int, journal_mark: bytes = b"") -> AsyncIterator[ClusterView]:
        """Yield the current view unless it is ``known_revision``, then newer ones after changes; see ViewPace.

        A slow reader skips views; they do not queue. The last of several changes is always sent. ``journal_mark``: as
        in ``check_journal``. Raises Unavailable when the coordinator stops.
        """
        self.check_journal(journal_mark)
        self.check_open()
        self._watchers += 1
        try:
            view = self.view
            # An older revision is sent as well: it comes from a restarted coordinator.
            if view.revision != known_revision:
                yield view
            while True:
                self.check_open()
                if self._sent.revision > view.revision:
                    view = self._sent
                    yield view
                else:
                    await self._sendings.changed()
        finally:
            self._watchers -= 1

    def _send(self) -> None:
        """Send watchers the newest view, now or a little later."""
        urgent, now = self._watchers > 0 and is_urgent(self._sent, self.view), self._clock()
        wait = self._pace.wait(now, self._watchers, urgent=urgent)
        if wait == 0.0:
            self._send_now()
        elif self._later is None:
            self._later = asyncio.get_running_loop().call_later(wait, self._send_now)

    def _send_now(self) -> None:
        if self._later is not None:
            self._later.cancel()
            self._later = None
        self._sent = self.view
        self._pace.sent(self._clock())
        self._sendings.wake()

    def _marked_view(self) -> ClusterView:
        view = self._state.view
        return replace(view, journal_mark=self._journal.mark) if self._journal else view
