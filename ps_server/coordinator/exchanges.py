"""Decides when an exchange among workers is complete, and which results are kept."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ps_protocol.cluster.exchange import MAX_PAYLOAD_BYTES, ExchangeKey, ExchangeState
from ps_protocol.errors import InvalidRequest
from ps_server.limits import MAX_NAME_BYTES

_OVERHEAD_BYTES = 64


@dataclass(frozen=True, slots=True)
class CompleteExchange:
    """The payloads of one exchange. Never changes."""

    #: The order of completion: it rises from one complete exchange to the next.
    number: int
    #: Payloads with their ranks, in ascending order.
    payloads: tuple[tuple[int, bytes], ...]

    @property
    def nbytes(self) -> int:
        """About the bytes that keeping it takes."""
        return _OVERHEAD_BYTES + sum(len(payload) for _, payload in self.payloads)


@dataclass(frozen=True, slots=True)
class ExchangeRecords:
    """Made by ``Exchanges.persisted_state`` for ``Exchanges.restore``. Open exchanges are not persisted."""

    complete: Mapping[ExchangeKey, CompleteExchange] = field(default_factory=dict)
    #: By name, the highest number whose result was dropped.
    dropped: Mapping[str, int] = field(default_factory=dict)
    #: The incarnation of each live rank.
    live: Mapping[int, int] = field(default_factory=dict)
    #: Incarnations that joined after an exchange was complete and have not joined an open one.
    late: frozenset[int] = frozenset()


_HIGHEST_ORDINAL = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class ExchangeLimits:
    """Limits on the memory and journal space of exchanges."""

    payload_bytes: int = MAX_PAYLOAD_BYTES
    #: All payloads of one exchange.
    exchange_bytes: int = 4 << 20
    #: Complete exchanges whose results are kept, and their bytes.
    kept: int = 4096
    kept_bytes: int = 8 << 20
    #: Different names.
    names: int = 256


class Exchanges:
    """The exchanges of a job as one state machine. Called by the driver, from its loop; does no I/O, reads no clock.

    An exchange is complete when each awaited worker has sent a payload. It awaits live workers, except those that have
    gone on to a later exchange of the same name, and late ones: workers that joined after an exchange was complete and
    have not joined an open one. The result of a complete exchange never changes. A restarted worker gets the kept
    results of exchanges that others have passed. When no worker is live, all exchanges are dropped. An event that
    raises has changed nothing.
    """

    def __init__(self, limits: ExchangeLimits | None = None) -> None:
        self._limits = limits or ExchangeLimits()
        self._live: dict[int, int] = {}
        #: Ranks that the start of the job waits for.
        self._expected: frozenset[int] = frozenset()
        self._late: set[int] = set()
        #: The payloads of open exchanges, by rank.
        self._open: dict[ExchangeKey, dict[int, bytes]] = {}
        #: By name and rank, the last open exchange that the worker joined.
        self._reached: dict[str, dict[int, int]] = {}
        #: Oldest first.
        self._complete: dict[ExchangeKey, CompleteExchange] = {}
        self._kept_bytes = 0
        self._dropped: dict[str, int] = {}
        #: The number of the newest complete exchange; it never falls.
        self.newest = 0

    @classmethod
    def restore(cls, records: ExchangeRecords, limits: ExchangeLimits | None = None) -> Exchanges:
        """Restore exchanges; workers send their payloads for open ones again."""
        made = cls(limits)
        made._live, made._late, made._dropped = dict(records.live), set(records.late), dict(records.dropped)
        made._complete = dict(sorted(records.complete.items(), key=lambda item: item[1].number))
        made._reached = {name: {} for name in (*made._dropped, *(key.name for key in made._complete))}
        made._kept_bytes = sum(each.nbytes for each in made._complete.values())
        made.newest = max((each.number for each in made._complete.values()), default=0)
        return made

    def persisted_state(self) -> ExchangeRecords:
        """The state for ``restore``."""
        return ExchangeRecords(dict(self._complete), dict(self._dropped), dict(self._live), frozenset(self._late))

    def members(self, live: Mapping[int, int], expected: Collection[int] = ()) -> None:
        """Set the incarnation of each live rank. ``expected``: other ranks that the start of the job waits for.

        Drops payloads of workers that are gone; exchanges that awaited only those are complete.
        """
        gone = {rank for rank, incarnation in self._live.items() if live.get(rank) != incarnation}
        new = {incarnation for rank, incarnation in live.items() if self._live.get(rank) != incarnation}
        self._live, self._expected = dict(live), frozenset(expected)
        if not live:
            self._forget_all()
            return
        if self._complete or self._dropped:
            self._late |= new
        self._late.intersection_update(live.values())
        for rank in gone:
            for payloads in self._open.values():
                payloads.pop(rank, None)
            for reached in self._reached.values():
                reached.pop(rank, None)
        self._settle()

    def give(self, rank: int, incarnation: int, key: ExchangeKey, payload: bytes) -> ExchangeState:
        """Accept the payload of a live worker, for the first time or again; a kept result does not change.

        Raises InvalidRequest for a name, number or payload above a limit, and for a result that was dropped.
        """
        self._check(key, payload)
        if done := self._complete.get(key):
            return ExchangeState(True, dict(done.payloads))
        self._check_new(rank, key, payload)
        self._late.discard(incarnation)
        self._open.setdefault(key, {})[rank] = payload
        reached = self._reached.setdefault(key.name, {})
        reached[rank] = max(key.ordinal, reached.get(rank, 0))
        self._settle()
        if done := self._complete.get(key):
            return ExchangeState(True, dict(done.payloads))
        return ExchangeState(False, missing=tuple(sorted(self._missing(key))))

    def _missing(self, key: ExchangeKey) -> set[int]:
        reached = self._reached.get(key.name, {})
        awaited = {rank for rank, incarnation in self._live.items() if incarnation not in self._late}
        ahead = {rank for rank, ordinal in reached.items() if ordinal > key.ordinal}
        return (awaited | self._expected) - ahead - self._open[key].keys()

    def _settle(self) -> None:
        """Complete the exchanges that await no worker."""
        for key in list(self._open):
            if not self._open[key]:
                del self._open[key]
            elif not self._missing(key):
                self.newest += 1
                done = CompleteExchange(self.newest, tuple(sorted(self._open.pop(key).items())))
                self._complete[key] = done
                self._kept_bytes += done.nbytes
        while len(self._complete) > self._limits.kept or self._kept_bytes > self._limits.kept_bytes:
            key = next(iter(self._complete))
            self._kept_bytes -= self._complete.pop(key).nbytes
            self._dropped[key.name] = max(key.ordinal, self._dropped.get(key.name, 0))

    def _forget_all(self) -> None:
        for each in (self._late, self._open, self._reached, self._complete, self._dropped):
            each.clear()
        self._kept_bytes = 0

    def _check(self, key: ExchangeKey, payload: bytes) -> None:
        if not key.name or len(key.name.encode()) > MAX_NAME_BYTES or not 0 <= key.ordinal <= _HIGHEST_ORDINAL:
            raise InvalidRequest(
                "an exchange needs a name and a number",
                expected=f"a name of 1 to {MAX_NAME_BYTES} bytes, a number from 0 to {_HIGHEST_ORDINAL}",
                actual=f"'{key.name[:40]}', {key.ordinal}",
            )
        if len(payload) > self._limits.payload_bytes:
            raise InvalidRequest(
                f"the payload of the exchange {key} is too large",
                expected=f"at most {self._limits.payload_bytes} bytes from one worker",
                actual=f"{len(payload)} bytes",
                remedy="exchange less, such as a mean in place of all values; parameters travel with steps",
            )

    def _check_new(self, rank: int, key: ExchangeKey, payload: bytes) -> None:
        """Raises InvalidRequest if ``key``, which has no result, can never get one."""
        if key.ordinal <= self._dropped.get(key.name, -1):
            raise InvalidRequest(
                f"the result of the exchange {key} is not kept any more",
                expected=f"a number above {self._dropped[key.name]}: the last {self._limits.kept} results are kept, "
                f"of {self._limits.kept_bytes} bytes at most",
                actual=f"worker {rank} is at number {key.ordinal}",
                remedy="a worker that was started again is too far behind the others: have the script begin at a "
                "checkpoint, or start all workers again",
            )
        if key.name not in self._reached and len(self._reached) >= self._limits.names:
            raise InvalidRequest(
                f"the exchange {key} has one name too many",
                expected=f"at most {self._limits.names} names in a job",
                actual=f"{len(self._reached)} other names",
                remedy="use the same name again; exchanges of one name are numbered",
            )
        others = sum(len(each) for other, each in self._open.get(key, {}).items() if other != rank)
        if others + len(payload) > self._limits.exchange_bytes:
            raise InvalidRequest(
                f"the payloads of the exchange {key} are too large together",
                expected=f"at most {self._limits.exchange_bytes} bytes from all workers",
                actual=f"{len(payload)} bytes more than {others}",
                remedy="exchange less in a job of this many workers",
            )
