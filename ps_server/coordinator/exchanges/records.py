"""The persisted part of exchanges: results, and which workers have not caught up with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ps_protocol.cluster.exchange import ExchangeKey

_OVERHEAD_BYTES = 64


@dataclass(frozen=True, slots=True)
class CompleteExchange:
    """The payloads of one exchange. Never changes."""

    #: Rises from one complete exchange to the next.
    number: int
    #: With ranks, in ascending order.
    payloads: tuple[tuple[int, bytes], ...]

    @property
    def nbytes(self) -> int:
        """About what it takes to keep, in bytes."""
        return _OVERHEAD_BYTES + sum(len(payload) for _, payload in self.payloads)


@dataclass(frozen=True, slots=True)
class ExchangeRecords:
    """Made by ``Exchanges.persisted_state`` for ``Exchanges.restore``. Open exchanges are not persisted."""

    complete: Mapping[ExchangeKey, CompleteExchange] = field(default_factory=dict)
    #: By name, the highest number whose result is not kept any more.
    dropped: Mapping[str, int] = field(default_factory=dict)
    #: The incarnation of each live rank.
    live: Mapping[int, int] = field(default_factory=dict)
    #: Incarnations that joined after an exchange was complete and have not come to an open one.
    late: frozenset[int] = frozenset()
