"""Follows the versions of one name: asks the coordinator for the newest, and receives it from the shards."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from ps_protocol import times
from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.cluster.weights import FollowAnswer, FollowAsk, WeightsVersion
from ps_protocol.errors import DamagedData, InvalidRequest, PsError, Retryable, Unavailable, VersionGone
from ps_protocol.model.spec import DType
from ps_protocol.retry import SHARD, Attempts
from ps_protocol.weights.pieces import PieceSource, Received, receive
from ps_protocol.weights.version import WholeVersion

__all__ = ["Reading", "VersionReader", "WholeVersion"]

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
    #: Wait for newer versions until the job is finished; else end with the newest.
    follow: bool = True
    #: Large payloads come over a side channel where that works.
    bulk: bool = True


class VersionReader:
    """Used by one thread; no member of the job. It has one whole version, or none, at every moment."""

    def __init__(
        self,
        client: CoordinatorClient,
        what: Reading,
        *,
        have: int = 0,
        base: WholeVersion | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """``have``: the number of the version that the caller has; ``base``: that version, where deltas can build on
        it. ``say`` is called with what the reader waits for.
        """
        self._client = client
        self._what = what
        self._have = have
        self._base = base
        self._say_to = say
        self._said = -times.HINT_SECONDS
        #: Whether the coordinator has answered.
        self._has_heard = False
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
        self._have, self._base = 0, None

    def next(self) -> WholeVersion | None:
        """The newest version above the one this reader has, once there is one; None: there will be none.

        Raises InvalidRequest for a version that the job has never had, Unavailable for servers that do not answer,
        DamagedData where a version that came whole is not as it was committed. The reader keeps what it has.
        """
        attempts: Attempts | None = None
        while True:
            # The first question waits for no version: a coordinator that is not there is found out in its own time.
            answer = self._ask(0, WAIT_SECONDS if self._what.follow and self._has_heard else 0.0)
            self._has_heard = True
            if answer.version is None:
                if answer.finished or not self._what.follow:
                    return None
                self._say(f"waiting for version {max(answer.newest, self._gone) + 1} of '{self._what.name}'")
                continue
            try:
                return self._take(answer.version, answer)
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

    def fetch(self, number: int) -> WholeVersion:
        """The version of this number, which becomes the one this reader has.

        Raises VersionGone for one that was removed, and as ``next``.
        """
        attempts = Attempts(SHARD.within(self._what.patience_seconds))
        while True:
            answer = self._ask(number, 0.0)
            if answer.version is None:
                raise InvalidRequest(f"'{self._what.name}' has no version {number}")
            try:
                return self._take(answer.version, answer)
            except Retryable as error:
                self._drop_channels()
                attempts.sleep_after(error)

    def _take(self, version: WeightsVersion, answer: FollowAnswer) -> WholeVersion:
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
        self._have, self._base = made.number, made
        return made

    def _receive(
        self, version: WeightsVersion, answer: FollowAnswer, base: WholeVersion | None
    ) -> tuple[WholeVersion, Received]:
        def source(shard: int) -> PieceSource:
            address = answer.addresses.get(shard, "")
            if not address:
                raise Unavailable(f"shard {shard} is not there", shard=str(shard), remedy="start it again")
            return self._sources[address]

        for address in set(answer.addresses.values()) - self._sources.keys():
            if address:
                channel = self._client.open_shard(address)
                self._sources[address] = PieceSource(channel, address, self._client.security, self._what.bulk)
        seconds = times.SHARD_CALL_SECONDS + version.size_bytes / times.SLOWEST_BYTES_PER_SECOND
        return receive(self._what.name, version, source, self._what.dtype, base, seconds)

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
        )
        patience = self._what.patience_seconds if timeout_seconds is None else timeout_seconds
        return self._client.follow_weights(ask, wait_seconds, patience)

    def _drop_channels(self) -> None:
        """A shard that was started again may have another address, or none yet."""
        while self._sources:
            self._sources.popitem()[1].channel.close()

    def _say(self, text: str) -> None:
        now = time.monotonic()
        if now - self._said >= times.HINT_SECONDS:
            self._said = now
            self._say_to(text)
