"""Follows the names that a relay serves, each in a thread, and puts what was received before the relay's readers."""

from __future__ import annotations

import asyncio
import enum
import secrets
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from functools import partial

from ps_protocol import retry, times
from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.cluster.weights import NAME, FollowAnswer, FollowAsk, WeightsPiece, WeightsVersion
from ps_protocol.errors import PsError, Retryable, UnknownVersion, VersionGone
from ps_protocol.logs import LogEvent
from ps_protocol.metrics.call_on_loop import call_on_loop
from ps_protocol.model.spec import DType
from ps_protocol.retry import Attempts
from ps_protocol.security.security import Security
from ps_protocol.weights.memory import VersionMemory
from ps_protocol.weights.pieces import Received, ReceivedPiece, receive_pieces
from ps_protocol.weights.reader import Reading, Source, VersionFollower
from ps_server.relay.held import PieceRoom, RelayedVersion, RelayedWeights

CONFIRMING = 4
"""Questions to the job at a time, about versions that readers name and that are not here."""


Say = Callable[[LogEvent, str], None]
"""Shows what happens, for people and programs."""

_ANYTHING = FollowAsk("_", 0, 0, "", leaves=True)
"""Whose answer says whether the job is finished."""


class RelayStep(enum.Enum):
    """What a relay does after an error of the job."""

    #: The job is away: what is here is served, and it is asked again.
    WAIT = enum.auto()
    #: It refuses, or what it sent is damaged: what is here is served, and it is asked again, less and less often.
    TRY_AGAIN = enum.auto()
    #: It is another job than the one of the version that is here: that goes.
    BEGIN_AGAIN = enum.auto()
    #: It has refused this relay from the beginning.
    END = enum.auto()


def after(error: PsError, *, is_first: bool) -> RelayStep:
    """What follows ``error``, which the job gave for a name. ``is_first``: it has never answered for it otherwise."""
    if isinstance(error, Retryable):
        return RelayStep.WAIT
    if is_first:
        return RelayStep.END
    return RelayStep.BEGIN_AGAIN if isinstance(error, UnknownVersion) else RelayStep.TRY_AGAIN


def denies(error: PsError) -> bool:
    """Whether the job says with ``error`` that it does not have the version that a reader names.

    Else it does not answer, or does not answer this relay: that is no fault of the reader, and says nothing of it.
    """
    return isinstance(error, UnknownVersion | VersionGone)


class RelayReader(VersionFollower[RelayedVersion]):
    """Follows one name, and has each version as the pieces that it came as."""

    def __init__(
        self, client: CoordinatorClient, what: Reading, count: Callable[[], int], say: Say, *, shared: bool
    ) -> None:
        """``count``: how many read what this relay has received. ``shared``: those of this host map it."""
        super().__init__(client, what, say=partial(say, "relay.waits"))
        self._count = count
        self._tell = say
        #: Of the pieces of each shard.
        self._memory: defaultdict[int, VersionMemory] = defaultdict(partial(VersionMemory, shared=shared))
        #: It was said that the job is away.
        self.said_away = False

    def _ask(
        self, number: int, wait_seconds: float, *, leaves: bool = False, timeout_seconds: float | None = None
    ) -> FollowAnswer:
        # A question that waits for a version would be answered with it only.
        wait_seconds = 0.0 if self.said_away else wait_seconds
        answer = super()._ask(number, wait_seconds, leaves=leaves, timeout_seconds=timeout_seconds)
        if self.said_away:
            self.said_away = False
            self._tell("relay", f"the job of '{self._what.name}' answers again")
        return answer

    def _received(
        self, version: WeightsVersion, source: Source, base: RelayedVersion | None, seconds: float
    ) -> tuple[RelayedVersion, Received]:
        rooms: dict[int, PieceRoom] = {}

        def own(piece: WeightsPiece) -> ReceivedPiece | None:
            return base.pieces[piece.shard][0] if base and piece.shard in base.pieces else None

        def room(piece: WeightsPiece, size: int) -> PieceRoom:
            made = rooms[piece.shard] = PieceRoom(self._memory[piece.shard].take(size))
            return made

        pieces, received = receive_pieces(self._what.name, version, source, self._what.dtype, own, room, seconds)
        whole = {shard: (piece, rooms[shard]) for shard, piece in pieces.items()}
        return RelayedVersion(version, whole), received

    def _readers(self) -> int:
        return self._count()


class JobFollower:
    """The connection to the job, and a thread for each name. Made on the relay's event loop."""

    def __init__(
        self,
        coordinator: str,
        security: Security,
        names: Collection[str],
        *,
        dtype: DType | None = None,
        bulk: bool,
        patience_seconds: float,
        on_version: Callable[[str, RelayedVersion, Received], None],
        say: Say,
    ) -> None:
        """``names``: none: everything that is published. ``dtype``: of what is received; None: as trained. ``bulk``:
        large payloads come over a side channel. ``on_version`` and ``say`` are called in the threads.
        """
        self._client = CoordinatorClient(coordinator, security)
        self._names = tuple(names)
        self._dtype = dtype
        self._bulk = bulk
        self._patience_seconds = patience_seconds
        self._on_version = on_version
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._stopped = threading.Event()
        self._asking = asyncio.Semaphore(CONFIRMING)
        self._threads: dict[str, threading.Thread] = {}
        self._readers: dict[str, RelayReader] = {}
        #: Names of which no version follows.
        self._finished: set[str] = set()
        #: The job is finished and has published nothing.
        self._has_ended_empty = False
        #: By name and what was done about it, how often no version could be received.
        self.failures = Counter[tuple[str, RelayStep]]()
        #: What ends this relay, once something does.
        self.failed: asyncio.Future[None] = self._loop.create_future()

    @property
    def finished(self) -> bool:
        """Whether the job is finished, as far as it is followed."""
        return self._has_ended_empty or (bool(self._threads) and self._finished >= self._threads.keys())

    @property
    def received(self) -> dict[str, Received]:
        """By name, what was received."""
        return {name: reader.received for name, reader in self._readers.copy().items()}

    @property
    def reconnects(self) -> int:
        """Calls to the job that broke off and were made again."""
        return self._client.repeated

    def begin(self, held: RelayedWeights) -> None:
        """Follow the names."""
        if self._names:
            for name in self._names:
                self._begin(name, held)
        else:
            threading.Thread(target=self._guarded, args=(self._look, held), name="ps-relay", daemon=True).start()

    async def stop(self) -> None:
        """Follow no more, and say so to the job where it answers."""
        self._stopped.set()
        await asyncio.to_thread(self._leave)

    def _leave(self) -> None:
        deadline = time.monotonic() + times.END_SECONDS
        for reader in self._readers.copy().values():
            if time.monotonic() < deadline:  # else the job does not answer
                reader.close()
        self._client.close()
        for thread in self._threads.copy().values():
            thread.join(max(0.0, deadline - time.monotonic()))

    async def confirm(self, ask: FollowAsk) -> None:
        """See Confirm. Returns, too, where the job does not answer, or refuses this relay."""
        asked = replace(ask, reader=secrets.token_hex(8))
        async with self._asking:
            try:
                await asyncio.to_thread(self._client.follow_weights, asked, 0.0, times.BRIEF_CALL_SECONDS)
                leaves = replace(asked, leaves=True)
                await asyncio.to_thread(self._client.follow_weights, leaves, 0.0, times.BRIEF_CALL_SECONDS)
            except PsError as error:
                if denies(error):
                    raise

    def _begin(self, name: str, held: RelayedWeights) -> None:
        thread = threading.Thread(
            target=self._guarded, args=(partial(self._follow, name), held), name=f"ps-relay-{name}", daemon=True
        )
        self._threads[name] = thread
        thread.start()

    def _guarded(self, work: Callable[[RelayedWeights], None], held: RelayedWeights) -> None:
        """``work``, whose error ends the relay."""
        try:
            work(held)
        except Exception as error:  # noqa: BLE001 -- it ends the process
            if not self._stopped.is_set():
                self._on_loop(self._fail, error)

    def _fail(self, error: Exception) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)

    def _on_loop(self, do: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(do, *arguments)

    def _look(self, held: RelayedWeights) -> None:
        """Follow all names that there are, and that come."""
        is_first, attempts = True, None
        while not self._stopped.is_set():
            try:
                # Before the names: what is published in between is followed.
                is_finished = self._client.follow_weights(
                    _ANYTHING, 0.0, self._patience_seconds, partial(self._say, "relay.waits"), is_first=is_first
                ).finished
                states = self._client.get_weights(self._patience_seconds)
                is_first, attempts, pause = False, None, times.ASK_SECONDS
                self._has_ended_empty = is_finished and not states
                self._on_loop(held.ended_empty, self._has_ended_empty)
                for state in states:
                    if state.name not in self._threads and NAME.fullmatch(state.name):
                        self._begin(state.name, held)
            except PsError as error:
                if after(error, is_first=is_first) is RelayStep.END:
                    raise
                self._say("relay.waits", f"waiting for what is published: {error.message}")
                attempts = attempts or Attempts(retry.RELAY)
                pause = attempts.pause_after(error) or 0.0
            self._stopped.wait(pause)

    def _follow(self, name: str, held: RelayedWeights) -> None:
        what = Reading(name, self._dtype, self._patience_seconds, bulk=self._bulk, maps=False)
        counted = call_on_loop(self._loop, lambda: (held.readers(name),))
        waits = partial(self._say, "relay.waits")
        reader = self._readers[name] = RelayReader(
            self._client, what, lambda: counted()[0], self._say, shared=held.shares_memory
        )
        attempts: Attempts | None = None
        while not self._stopped.is_set():
            before = replace(reader.received)
            try:
                received = reader.next()
                attempts = None
            except PsError as error:
                # A name that the job itself has told was answered for.
                step = after(error, is_first=bool(self._names) and not reader.has_heard)
                if step is RelayStep.END:
                    raise
                self.failures[name, step] += 1
                if step is RelayStep.WAIT:
                    if not self._stopped.wait(times.REWATCH_SECONDS):
                        reader.said_away = True
                        waits(f"waiting for versions of '{name}', what is here is served: {error.message}")
                    continue
                if step is RelayStep.BEGIN_AGAIN:
                    self._say("relay.begins", f"'{name}' is of another job now, and begins again: {error.message}")
                    reader.forget()
                    self._on_loop(held.forget, name)
                else:
                    waits(f"no version of '{name}' can be received, what is here is served: {error.message}")
                attempts = attempts or Attempts(retry.RELAY)
                self._stopped.wait(attempts.pause_after(error))
                continue
            if received is None:
                self._finished.add(name)
                self._on_loop(held.finish, name)
                reader.close()
                break
            self._on_loop(held.put, name, received)
            now = reader.received
            self._on_version(
                name,
                received,
                Received(
                    now.delta_bytes - before.delta_bytes,
                    now.full_bytes - before.full_bytes,
                    now.saved_bytes - before.saved_bytes,
                ),
            )
