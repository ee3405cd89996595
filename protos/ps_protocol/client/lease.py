"""The lease of one member, and the threads that renew it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from ps_protocol import times
from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.cluster.view import HeartbeatAnswer, Joined, MemberStats, StandbyReport
from ps_protocol.errors import Fenced, PermissionDenied, PsError, Unauthenticated
from ps_protocol.logs import EventLogger
from ps_protocol.security.expiry import ExpiryWatch

logger = EventLogger(__name__)


def pause_seconds(joined: Joined, answer: HeartbeatAnswer) -> float:
    """How long a member whose heartbeat was answered waits before the next one."""
    usual, longest = joined.heartbeat_seconds, joined.lease_seconds / times.BEATS_PER_LEASE
    # Not true of a NaN.
    return max(usual, min(answer.next_seconds, longest)) if answer.next_seconds > usual else usual


class MemberLease:
    """Renews a lease with heartbeats, which carry statistics and repeat what the coordinator must not forget.

    Owns two daemon threads: one renews the lease and does nothing else, one reads the statistics that go with it. When
    the coordinator does not answer, the log says so once, and heartbeats go on until it does.
    """

    def __init__(self, client: CoordinatorClient, joined: Joined, on_lost: Callable[[Fenced], None]) -> None:
        """``on_lost`` is called once, from the thread that renews the lease, when the place is lost."""
        self._client = client
        self._joined = joined
        self._on_lost = on_lost
        self._stats: Callable[[], MemberStats] = MemberStats
        self._expiry = ExpiryWatch(client.security)
        self._last_stats = MemberStats()
        #: The coordinator knows that this shard's state is on disk, and what directory may take its place.
        self.keeps_state = False
        self.sync: StandbyReport | None = None
        #: The newest mark from the coordinator: its journal must contain it after a restart.
        self.journal_mark = b""
        #: When the coordinator answered last.
        self._answered = time.monotonic()
        self._ended = threading.Event()
        self._beat_now = threading.Event()
        name = f"{joined.member.role.value}-{joined.member.index}"
        #: Started and joined by the membership.
        self.threads = (
            threading.Thread(target=self._renew, name=f"ps-heartbeat-{name}", daemon=True),
            threading.Thread(target=self._gather_stats, name=f"ps-stats-{name}", daemon=True),
        )

    @property
    def ends(self) -> float:
        """When the lease ends unless the coordinator answers again, on the monotonic clock."""
        return self._answered + self._joined.lease_seconds

    def beat_now(self) -> None:
        """Send the next heartbeat at once."""
        self._beat_now.set()

    def end(self) -> None:
        """Let the threads end; nothing is sent any more."""
        self._ended.set()
        self._beat_now.set()

    def set_stats(self, stats: Callable[[], MemberStats]) -> None:
        """Send ``stats()`` with the heartbeats."""
        self._stats = stats

    def read_stats(self) -> MemberStats:
        """The current statistics; empty ones, and a log record, when they cannot be read."""
        try:
            stats = self._stats()
        except Exception:
            # an error in a caller's function must not end the lease
            logger.exception("request.failed", "the statistics of %s could not be read", self._joined.member)
            stats = MemberStats()
        ends = self._expiry.ends()
        return replace(stats, certificate_ends=ends) if ends else stats

    def _gather_stats(self) -> None:
        while not self._ended.wait(self._joined.heartbeat_seconds):
            self._last_stats = self.read_stats()

    def _renew(self) -> None:
        member = self._joined.member
        silent, refused_since = False, math.inf
        pause = self._joined.heartbeat_seconds
        while True:
            self._beat_now.wait(pause)
            self._beat_now.clear()
            if self._ended.is_set():
                return
            pause = self._joined.heartbeat_seconds
            try:
                answer = self._client.heartbeat(
                    member,
                    self._last_stats,
                    self._joined.lease_seconds / 2,
                    # Repeated for a coordinator that was restored from an old copy of its journal.
                    keeps_state=self.keeps_state,
                    sync=self.sync,
                    journal_mark=self.journal_mark,
                )
                self.journal_mark = answer.journal_mark or self.journal_mark
                self._answered = time.monotonic()
                pause = pause_seconds(self._joined, answer)
            except Fenced as error:
                self._on_lost(error)
                return
            except PsError as error:
                if not silent and not self._ended.is_set():
                    logger.warning("coordinator.silent", "%s keeps the last view of the cluster: %s", member, error)
                silent = True
                if not isinstance(error, Unauthenticated | PermissionDenied):
                    continue
                refused_since = min(refused_since, time.monotonic())
                if time.monotonic() - refused_since >= self._joined.lease_seconds:
                    self._on_lost(Fenced(f"{member} is not a member any more: {error}", remedy=error.remedy))
                    return
            else:
                if silent:
                    logger.warning(
                        "coordinator.silent", "the coordinator at %s answers %s again", self._client.address, member
                    )
                silent, refused_since = False, math.inf
