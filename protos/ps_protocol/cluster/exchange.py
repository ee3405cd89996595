"""Exchanges among workers: each gives a small payload under a common key, and gets those of all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ps_protocol.model.spec import DType

MAX_PAYLOAD_BYTES = 64 << 10
"""The largest payload of one worker, in bytes."""


@dataclass(frozen=True, slots=True)
class ExchangeKey:
    """What workers of one exchange have in common: a name, and a number that rises with each of that name."""

    name: str
    ordinal: int

    def __str__(self) -> str:
        return f"'{self.name}', number {self.ordinal}"


@dataclass(frozen=True, slots=True)
class ExchangeState:
    """The answer to a worker: the payloads of all that took part, or whom the exchange waits for."""

    complete: bool
    #: By rank, in ascending order; empty until it is complete.
    payloads: Mapping[int, bytes] = field(default_factory=dict)
    missing: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """A dense tensor: its elements in C order, little-endian."""

    dtype: DType
    shape: tuple[int, ...]
    elements: bytes


@dataclass(frozen=True, slots=True)
class ExchangeValue:
    """What workers put into a payload: JSON text or a tensor, and the call that all of them make."""

    call: str
    json: str = ""
    tensor: TensorBytes | None = None
