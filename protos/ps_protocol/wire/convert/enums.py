"""The members of enums by the numbers that the wire has for them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from ps_protocol.cluster.transport import Transport
from ps_protocol.errors import InvalidRequest
from ps_protocol.v1 import common_pb2 as pb

E = TypeVar("E", bound=Enum)

_NUMBERS: dict[Transport, pb.Transport] = {each: getattr(pb, f"TRANSPORT_{each.name}") for each in Transport}
_TRANSPORTS: dict[int, Transport] = {number: each for each, number in _NUMBERS.items()}


def enum_member(table: Mapping[E, int], number: int, what: str) -> E:
    """The member ``number`` stands for in ``table``; raises InvalidRequest for one this version does not know."""
    for member, value in table.items():
        if value == number:
            return member
    raise InvalidRequest(
        f"{what} {number} is not known here",
        expected=", ".join(f"{value} ({member.value})" for member, value in table.items()),
        actual=str(number),
        remedy="use the same torch-ps on both sides",
    )


def transport_to_pb(transport: Transport | None) -> pb.Transport:
    """The wire's number of ``transport``; None: unspecified."""
    return _NUMBERS[transport] if transport else pb.TRANSPORT_UNSPECIFIED


def transport_from_pb(number: int) -> Transport | None:
    """None where it is unspecified, or one that this version does not know."""
    return _TRANSPORTS.get(number)
