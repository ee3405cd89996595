"""Follows the versions of one name: asks the coordinator for the newest, and receives it from the shards."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, Protocol, TypeVar

from ps_protocol import times
from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.cluster.weights import FollowAnswer, FollowAsk, WeightsVersion
from ps_protocol.errors import DamagedData, PsError, Retryable, Unavailable, UnknownVersion, VersionGone
from ps_protocol.model.spec import DType
from ps_protocol.retry import SHARD, Attempts
from ps_protocol.weights.memory import VersionMemory
from ps_protocol.weights.pieces import PieceSource, Received, receive
from ps_protocol.weights.version import WholeVersion

__all__ = ["Reading", "VersionFollower", "VersionReader", "WholeVersion"]

Source = Callable[[int], PieceSource]
"""The shard of a number. Raises Unavailable."""

WAIT_SECONDS = 30.0
"""One question for a newer version waits so long for it."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What is read, and how."""

    name: str
    #: Floating-point values are converted to it by the shards; None: they are as they are.
    dtype: DType | None = None
    #: How long to wait for shards and a coordinator that do not answer.
    patience_seconds: float = times.PATIENCE_SECONDS
    #: Wait for newer versions until the job is finished; else end after the one that is the newest now.
    follow: bool = True
    #: Large payloads come over a side channel where that works.
    bulk: bool = True
    #: Versions that a process of this host has in shared memory are mapped.
    maps: bool = True


class Numbered(Protocol):
    """A version that was received."""

    @property
    def number(self) -> int:
        """From 1."""
        ...

    @property
    def job_id(self) -> str:
        """Of the job that made it; empty: it has none."""
        ...


M = TypeVar("M", bound=Numbered)


class VersionFollower(ABC, Generic[M]):
    """Used by one thread; no member of the job. It has one whole version, or none, at every moment."""

    def __init__(
        self,
        client: CoordinatorClient,
        what: Reading,
        *,
        have: int = 0,
        job_id: str = "",
        base: M | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """``have``: the number of the version that the caller has, ``job_id``: that of the job that made it; ``base``:
        that version, where deltas can build on it. ``say`` is called with what the reader waits for.
        """
        self._client = client
        self._what = what
        self._have = have
        self._job_id = base.job_id if base else job_id
        self._base = base
        self._say_to = say
        self._said = -times.HINT_SECONDS
        #: Threads that receive pieces may say at once that memory is not shared.
        self._lock = threading.Lock()
        self._said_unmapped = False
        #: Whether the coordinator has answered.
        self.has_heard = False
        #: It was to have the newest version, and has it.
        self._is_done = False
        #: A version that turned out to be gone: a newer one is waited for.
        self._gone = 0
        self._id = secrets.token_hex(8)
        self._sources: dict[str, PieceSource] = {}
        #: Of all versions so far.
        self.received = Received()

    def close(self) -> None:
        """Tell the coordinator that this reader ends, where it answers, and close the connections to shards."""
        with suppress(PsError, ValueError):
            self._ask(0, 0.0, leaves=True, timeout_seconds=times.BRIEF_CALL_SECONDS)
        self._drop_channels()

    def restart(self) -> None:
        """Receive the next version whole: what this reader has is not built on."""
        self._base = None

    def forget(self) -> None:
        """Have no version, and receive the newest, whatever its number."""
        self._have, self._gone, self._job_id, self._base = 0, 0, "", None

    def check(self, seconds: float) -> None:
        """Ask whether the version that this reader has is one of the job.

        Raises UnknownVersion where it is not, Unavailable where the coordinator does not answer in so many seconds.
        """
        self._ask(0, 0.0, timeout_seconds=seconds)

    def next(self) -> M | None:
        """The newest version above the one this reader has, once there is one; None: there will be none.

        Raises UnknownVersion where the job has never had the version that this reader has, Unavailable for servers that
        do not answer, DamagedData where a version that came whole is not as it was committed. The reader keeps its own.
        """
        attempts: Attempts | None = None
        while not self._is_done:
            # The first question waits for no version: a coordinator that is not there is found out in its own time.
            answer = self._ask(0, WAIT_SECONDS if self._what.follow and self.has_heard else 0.0)
            self.has_heard = True
            if answer.version is None:
                if answer.finished or not self._what.follow:
                    return None
                self._say(f"waiting for version {max(answer.newest, self._gone) + 1} of '{self._what.name}'")
                continue
            try:
                taken = self._take(answer.version, answer)
                self._is_done = not self._what.follow
                return taken
            except VersionGone as error:
                self._gone = answer.version.number
                self._say(f"waiting for the next version of '{self._what.name}': {error.message}")
                if not self._what.follow:
                    raise
            except Retryable as error:
                attempts = attempts or Attempts(SHARD.within(self._what.patience_seconds))
                self._say(f"waiting: {error.message}")
                self._drop_channels()
                attempts.sleep_after(error)
        return None

    def fetch(self, number: int) -> M:
        """The version of this number, which becomes the one this reader has.

        Raises VersionGone for one that was removed, and as ``next``.
        """
        attempts = Attempts(SHARD.within(self._what.patience_seconds))
        while True:
            answer = self._ask(number, 0.0)
            if answer.version is None:
                raise UnknownVersion(f"'{self._what.name}' has no version {number}")
            try:
                return self._take(answer.version, answer)
            except Retryable as error:
                self._drop_channels()
                attempts.sleep_after(error)

    def _take(self, version: WeightsVersion, answer: FollowAnswer) -> M:
        base = self._base if self._base is not None and self._base.number < version.number else None
        try:
            made, received = self._receive(version, answer, base)
        except DamagedData as error:
            if base is None:
                raise
            self._say(f"version {version.number} of '{self._what.name}' is received whole: {error.message}")
            made, received = self._receive(version, answer, None)
        self.received.delta_bytes += received.delta_bytes
        self.received.full_bytes += received.full_bytes
        self.received.saved_bytes += received.saved_bytes
        self._have, self._job_id, self._base = made.number, made.job_id, made
        return made

    def _receive(self, version: WeightsVersion, answer: FollowAnswer, base: M | None) -> tuple[M, Received]:
        # Another thread that closes this reader closes them, and forgets them.
        sources = {address: self._source(address) for address in set(answer.addresses.values()) if address}

        def source(shard: int) -> PieceSource:
            address = answer.addresses.get(shard, "")
            if not address:
                raise Unavailable(f"shard {shard} is not there", shard=str(shard), remedy="start it again")
            return sources[address]

        seconds = times.SHARD_CALL_SECONDS + version.size_bytes / times.SLOWEST_BYTES_PER_SECOND
        return self._received(version, source, base, seconds)

    def _source(self, address: str) -> PieceSource:
        if (found := self._sources.get(address)) is None:
            channel, what = self._client.open_shard(address), self._what
            found = PieceSource(channel, address, self._client.security, what.bulk, what.maps, self._say_unmapped)
            self._sources[address] = found
        return found

    @abstractmethod
    def _received(self, version: WeightsVersion, source: Source, base: M | None, seconds: float) -> tuple[M, Received]:
        """See ``receive``."""

    def _readers(self) -> int:
        """How many others read what this one has received."""
        return 0

    def _ask(
        self, number: int, wait_seconds: float, *, leaves: bool = False, timeout_seconds: float | None = None
    ) -> FollowAnswer:
        ask = FollowAsk(
            self._what.name,
            max(self._have, self._gone),
            number,
            self._id,
            socket.gethostname(),
            os.getpid(),
            self.received.delta_bytes,
            self.received.full_bytes,
            leaves,
            max(0, self.received.saved_bytes),
            self._job_id,
            0 if leaves else self._readers(),
        )
        if timeout_seconds is not None:
            return self._client.follow_weights(ask, wait_seconds, timeout_seconds)
        patience, is_first = self._what.patience_seconds, not self.has_heard
        return self._client.follow_weights(ask, wait_seconds, patience, self._say, is_first=is_first)

    def _drop_channels(self) -> None:
        """A shard that was started again may have another address, or none yet."""
        while self._sources:
            self._sources.popitem()[1].channel.close()

    def _say_unmapped(self, text: str) -> None:
        with self._lock:
            first, self._said_unmapped = not self._said_unmapped, True
        if first:
            self._say_to(text)

    def _say(self, text: str) -> None:
        now = time.monotonic()
        if now - self._said >= times.HINT_SECONDS:
            self._said = now
            self._say_to(text)


class VersionReader(VersionFollower[WholeVersion]):
    """Follows the versions of one name as a reader has them: by variable. The memory of a version to which nothing
    refers any more is used for a later one.
    """

    @cached_property
    def _memory(self) -> VersionMemory:
        return VersionMemory()

    def _received(
        self, version: WeightsVersion, source: Source, base: WholeVersion | None, seconds: float
    ) -> tuple[WholeVersion, Received]:
        return receive(self._what.name, version, source, self._what.dtype, base, seconds, self._memory)
