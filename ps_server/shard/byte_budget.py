"""Limits the bytes under way: of all clients together, and of each. Answers have one budget, uploads another."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ps_protocol.errors import Unavailable
from ps_server.limits import ANSWERS, UPLOADS, LimitCounts
from ps_server.tables.arrays import machine_bytes
from ps_server.tasks import Conditions

READERS = "readers"
"""Clients that are no members: together they share what one worker may take."""

FREE_BYTES = 64 << 10
"""Uploads of at most this size are not counted: the number of calls limits them."""


@dataclass(frozen=True, slots=True)
class BudgetKind:
    """What a budget is for."""

    #: One of LIMITS.
    limit: str
    what: str
    flag: str


PATIENCE_SECONDS = {ANSWERS: 10.0, UPLOADS: 60.0}
"""How long a request waits for memory before it is refused. A worker's push waits as for a slow network."""

ANSWER_KIND = BudgetKind(ANSWERS, "answers on their way", "--answer-mb")
UPLOAD_KIND = BudgetKind(UPLOADS, "uploads on their way", "--upload-mb")


class ByteBudget:
    """Used on the shard's event loop. Nothing is taken while something else is held, so there is no deadlock."""

    def __init__(self, limit_bytes: int = 0, counts: LimitCounts | None = None, kind: BudgetKind = ANSWER_KIND) -> None:
        """``limit_bytes``: of all clients; 0: a quarter of this machine's memory. One client may take half of it."""
        self._counts = counts or LimitCounts()
        self._kind = kind
        self.limit_bytes = limit_bytes or machine_bytes() // 4
        self._used: Counter[Hashable] = Counter()
        self._conditions = Conditions()
        self._counts.track(kind.limit, self.limit_bytes, lambda: self.used_bytes)

    @property
    def used_bytes(self) -> int:
        """Of what is under way."""
        return self._used.total()

    @asynccontextmanager
    async def taken(self, who: Hashable, size_bytes: int) -> AsyncIterator[None]:
        """Hold ``size_bytes`` for something to or from ``who``.

        A request above a client's limit counts as the limit: it is admitted when its client has no other. Raises
        Unavailable when there is no room for it in time.
        """
        size_bytes, kind = min(size_bytes, self.limit_bytes // 2), self._kind
        if not await self._conditions.until(lambda: self._fits(who, size_bytes), PATIENCE_SECONDS[kind.limit]):
            self._counts.add(kind.limit)
            raise Unavailable(
                f"this shard has too many {kind.what}",
                expected=f"{self.limit_bytes} bytes of all clients together, and half of that of one",
                actual=f"{self.used_bytes} bytes, and one of {size_bytes} bytes more",
                remedy=f"take less at a time, or start ps-server with a larger {kind.flag}",
            )
        self._used[who] += size_bytes
        try:
            yield
        finally:
            self.give_back(who, size_bytes)

    def take_now(self, who: Hashable, size_bytes: int) -> bool:
        """As ``taken`` until ``give_back``, where there is room without waiting; whether that is so."""
        fits = size_bytes <= self.limit_bytes // 2 and self._fits(who, size_bytes)
        if fits:
            self._used[who] += size_bytes
        return fits

    def give_back(self, who: Hashable, size_bytes: int) -> None:
        """What ``take_now`` took is not under way any more."""
        self._used[who] -= size_bytes
        if not self._used[who]:
            del self._used[who]
        self._conditions.wake()

    def _fits(self, who: Hashable, size_bytes: int) -> bool:
        own = self._used.get(who, 0)
        return self.used_bytes + size_bytes <= self.limit_bytes and own + size_bytes <= self.limit_bytes // 2


@dataclass(frozen=True)
class ByteBudgets:
    """Those of one shard."""

    answers: ByteBudget
    uploads: ByteBudget

    @classmethod
    def of(cls, answer_bytes: int = 0, upload_bytes: int = 0, counts: LimitCounts | None = None) -> ByteBudgets:
        """With these limits; 0: a quarter of this machine's memory."""
        counts = counts or LimitCounts()
        return cls(ByteBudget(answer_bytes, counts), ByteBudget(upload_bytes, counts, UPLOAD_KIND))
