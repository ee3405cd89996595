"""The membership of a process: joins, renews its lease, and has the newest view of the cluster."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from copy import copy
from types import TracebackType
from typing import Self, TypeVar

import grpc

from ps_protocol import times
from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.client.coordinator_streams import ViewStream
from ps_protocol.client.lease import MemberLease
from ps_protocol.cluster.view import ClusterView, Joined, JoinRequest, Member, MemberStats, Role, StandbyReport
from ps_protocol.errors import Fenced, NotReady, PsError, Unavailable
from ps_protocol.logs import EventLogger

logger = EventLogger(__name__)


T = TypeVar("T")

OnView = Callable[[ClusterView], None]
OnFenced = Callable[[Fenced], None]


def log_waiting(text: str) -> None:
    """Log for what a process waits at its start."""
    logger.warning("waiting", "%s", text)


class Membership:
    """One membership of this process. Any thread may use it.

    Owns the lease with its threads, and a daemon thread that receives the views. When the coordinator does not answer,
    the last view stays, and the threads try again until it answers. When the place is lost, ``fenced`` has the reason
    and the threads end. A view without this member is not published: it only causes the next heartbeat at once.
    """

    def __init__(self, client: CoordinatorClient, joined: Joined, token: str = "") -> None:
        """Take up the place ``joined`` with ``token``; ``Membership.join`` is the usual way."""
        self._client = client
        #: The token of the join request; known only to this process and the coordinator.
        self.token = token
        self._joined = joined
        self._lease = MemberLease(client, joined, self._lose_place)
        #: Held while the fields below are written; notified when any of them changes. Readers take them as they are.
        self._changed = threading.Condition()
        #: The newest view of the cluster.
        self.view = ClusterView()
        #: Why this process lost its place; None while it has it.
        self.fenced: Fenced | None = None
        #: Held while callbacks run: they see views one at a time, in order.
        self._delivery = threading.RLock()
        self._on_view: list[OnView] = []
        self._on_fenced: list[OnFenced] = []
        self._closed = threading.Event()
        self._stream: ViewStream | None = None
        name = f"{joined.member.role.value}-{joined.member.index}"
        self._threads = (
            *self._lease.threads,
            threading.Thread(target=self._follow_views, name=f"ps-watch-{name}", daemon=True),
        )

    @classmethod
    def join(
        cls,
        client: CoordinatorClient,
        spec: JoinRequest,
        timeout_seconds: float = times.PATIENCE_SECONDS,
        on_wait: Callable[[str], None] = log_waiting,
    ) -> Membership:
        """Join as ``spec`` and return once the first view is here.

        Waits for a coordinator that has not started and calls ``on_wait`` every few seconds. Raises Unavailable, with
        address and remedy, after ``timeout_seconds``, and what CoordinatorClient.join raises.
        """
        deadline = time.monotonic() + timeout_seconds
        client.wait_until_reachable(timeout_seconds, on_wait)
        token = secrets.token_hex(16)
        membership = cls(client, client.join(spec, token, max(1.0, deadline - time.monotonic())), token)
        for thread in membership._threads:
            thread.start()
        try:
            membership.wait_for(
                lambda view: True, max(1.0, deadline - time.monotonic()), "the first view of the cluster"
            )
        except BaseException:
            membership.close()
            raise
        return membership

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.leave("" if error is None else f"{type(error).__name__}: {error}")

    @property
    def member(self) -> Member:
        """Place and incarnation of this process."""
        return self._joined.member

    def open_shard(self, address: str) -> grpc.Channel:
        """A channel to the shard at ``address``, for calls by this member."""
        return self._client.open_shard(address, self.member)

    @property
    def job(self) -> str:
        """Name of the job; empty: its coordinator sends none."""
        return self._joined.job

    @property
    def seed(self) -> int:
        """Common seed of the job."""
        return self._joined.seed

    @property
    def phase_at_join(self) -> int:
        """Barriers the job had passed when this process joined."""
        return self._joined.phase

    @property
    def lease_seconds(self) -> float:
        """How long a silent member is kept."""
        return self._joined.lease_seconds

    def check(self) -> None:
        """Raises Fenced when this process has lost its place."""
        if (error := self.fenced) is not None:
            raise copy(error)  # one object raised by several threads mixes their tracebacks

    def wait_for(
        self, predicate: Callable[[ClusterView], bool], timeout_seconds: float, what: str = "the awaited state"
    ) -> ClusterView:
        """The first view for which ``predicate`` is true, the current one included.

        Raises NotReady, naming ``what``, after ``timeout_seconds``, and Fenced when the place is lost meanwhile.
        """

        def settled() -> bool:
            known = self.view.revision >= self._joined.revision
            return self.fenced is not None or self._closed.is_set() or (known and predicate(self.view))

        with self._changed:
            in_time = self._changed.wait_for(settled, timeout_seconds)
            view = self.view
        self.check()
        if not in_time:
            raise NotReady(
                f"{what} did not come within {timeout_seconds:g} s",
                actual=_summary(view),
                remedy="see whether all processes run: psctl status",
            )
        if self._closed.is_set():
            raise Unavailable(f"the membership of {self.member} was closed while it waited for {what}")
        return view

    def subscribe(self, on_view: OnView, on_fenced: OnFenced = lambda error: None) -> None:
        """Call ``on_view`` now, in this thread, with the present view, then from the watch thread with each new one.

        ``on_fenced`` is called once, from the heartbeat thread, when the place is lost (now, if it already is).
        Calls come one at a time and in order; a callback must not block.
        """
        with self._delivery:
            self._on_view.append(on_view)
            self._on_fenced.append(on_fenced)
            on_view(self.view)
            if (error := self.fenced) is not None:
                on_fenced(error)

    def set_stats(self, stats: Callable[[], MemberStats]) -> None:
        """Send ``stats()`` with the heartbeats; it is called from a thread of its own, as often as they are sent.

        A slow call, such as a metric on a busy GPU, delays no heartbeat: the numbers are older then.
        """
        self._lease.set_stats(stats)

    def announce_state(self, timeout_seconds: float = times.PATIENCE_SECONDS) -> None:
        """Return once the coordinator knows that this shard's state is on disk under its own incarnation.

        Called once the state is on disk and before the first push is acknowledged: from then on a process with older
        state is refused. Waits for a coordinator that does not answer. Raises Fenced, or Unavailable after
        ``timeout_seconds``.
        """
        self._client.announce_state(self.member, self._lease.read_stats(), timeout_seconds)
        self._lease.keeps_state = True

    def report_standby(self, report: StandbyReport, timeout_seconds: float) -> None:
        """Return once the coordinator knows which directory may take this shard's place if it is lost.

        Called after ``announce_state``, from one thread at a time. Raises Fenced, or Unavailable after
        ``timeout_seconds``; the coordinator may know nevertheless.
        """
        self._client.report_standby(self.member, self._lease.read_stats(), report, timeout_seconds)
        self._lease.sync = report

    def leave(self, reason: str = "", finished_seconds: float = times.FAREWELL_SECONDS) -> None:
        """Give up the place now and close; ``reason`` is empty at a clean end. Raises nothing.

        Where the coordinator does not answer, it tries for 2 seconds; a worker that ends cleanly for
        ``finished_seconds``, which it logs. An exception from a signal handler, as of Ctrl-C, ends that at once.
        """
        if self._closed.is_set():
            return
        self.close()
        if self.fenced is None:
            try:
                self._report_leaving(reason, finished_seconds)
            except PsError as error:
                level = logging.WARNING if self._waits_to_leave(reason) else logging.INFO
                logger.log(level, "coordinator.silent", "%s could not report that it leaves: %s", self.member, error)

    def _waits_to_leave(self, reason: str) -> bool:
        """Whether others wait for this process until its lease ends, if the coordinator does not learn how it ended."""
        return not reason and self.member.role is Role.WORKER

    def _report_leaving(self, reason: str, finished_seconds: float) -> None:
        if not self._waits_to_leave(reason):
            # A heartbeat first: the numbers of the last one are some steps old.
            self._client.heartbeat(self.member, self._lease.read_stats(), times.BRIEF_CALL_SECONDS)
            self._client.leave(self.member, reason, times.BRIEF_CALL_SECONDS)
            return
        deadline = time.monotonic() + max(times.BRIEF_CALL_SECONDS, finished_seconds)
        try:
            self._client.heartbeat(self.member, self._lease.read_stats(), times.BRIEF_CALL_SECONDS)
        except Unavailable as error:
            logger.warning(
                "coordinator.silent",
                "%s has finished, and waits up to %.0f s for the coordinator, which would take it for lost: %s",
                self.member,
                deadline - time.monotonic(),
                error,
            )
        # The lease of a member does not end before a coordinator that was away has had the time to receive a heartbeat.
        self._client.leave(self.member, reason, max(times.BRIEF_CALL_SECONDS, deadline - time.monotonic()), once=False)

    def close(self) -> None:
        """End the threads without leaving: the cluster sees a process that died. Safe to repeat."""
        self._end()
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                # Ctrl-C in the main thread inside gRPC may leave the channel's lock held. A thread that waits for it
                # ends only when the channel is closed, after this.
                thread.join(times.BRIEF_CALL_SECONDS)

    def _end(self) -> None:
        self._closed.set()
        self._lease.end()
        with self._changed:
            stream = self._stream
            self._changed.notify_all()
        if stream is not None:
            stream.cancel()

    def _lose_place(self, error: Fenced) -> None:
        logger.failure(error)
        with self._changed:
            self.fenced = error
        self._end()
        with self._delivery:
            for callback in self._on_fenced:
                _guarded(callback, error)

    def _follow_views(self) -> None:
        while not self._closed.is_set():
            try:
                stream = self._client.watch(self.view.revision, self._lease.journal_mark, self.member)
                with self._changed:
                    self._stream = stream
                # Cancelled here if close() came before it could see this stream.
                if self._closed.is_set():
                    stream.cancel()
                for view in stream:
                    self._deliver(view)
            except PsError as error:
                logger.debug("the views of %s broke off: %s", self.member, error)
            self._closed.wait(times.REWATCH_SECONDS)

    def _deliver(self, view: ClusterView) -> None:
        self._lease.journal_mark = view.journal_mark or self._lease.journal_mark
        if self.member not in view.members:
            self._lease.beat_now()
            return
        with self._delivery:
            with self._changed:
                self.view = view
                self._changed.notify_all()
            for callback in self._on_view:
                _guarded(callback, view)


def _guarded(callback: Callable[[T], None], value: T) -> None:
    try:
        callback(value)
    except Exception:
        # an error in one subscriber must not keep the view from others
        logger.exception("request.failed", "a subscriber failed")


def _summary(view: ClusterView) -> str:
    shards, workers = len(view.live(Role.SHARD).keys() & set(view.used_shards)), len(view.live(Role.WORKER))
    expected = f" of {view.expected_workers}" if view.expected_workers else ""
    return f"{shards} of {len(view.used_shards)} shards and {workers}{expected} workers live"
