"""The members of an enum by the numbers that the wire has for them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from ps_protocol.errors import InvalidRequest

E = TypeVar("E", bound=Enum)


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
