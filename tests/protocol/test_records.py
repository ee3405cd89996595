"""Dataclasses as JSON's types and back, and as dicts without copies of what is in them."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest

from ps_protocol.records import fields_from, fields_of, from_plain, to_plain


class Kind(enum.Enum):
    ONE = "one"


class Place(NamedTuple):
    phase: int
    clock: int


@dataclass(frozen=True, slots=True)
class Part:
    kind: Kind
    data: bytes = b""


@dataclass(frozen=True, slots=True)
class Whole:
    number: int
    share: float
    parts: tuple[Part, ...]
    place: Place | None = None
    ranks: frozenset[int] = frozenset()
    counts: Mapping[int, str] = field(default_factory=dict)
    pairs: tuple[tuple[Place, float], ...] = ()
    facts: Any = None
    late: bool = False


WHOLE = Whole(3, 0.5, (Part(Kind.ONE, b"\xff"),), Place(1, 2), frozenset({3, 1}), {7: "a"}, ((Place(0, 1), 2.0),), [1])
PLAIN = {"number": 3, "share": 1, "parts": []}


def test_a_record_comes_back_through_json_as_it_was() -> None:
    plain = json.loads(json.dumps(to_plain(WHOLE)))
    assert from_plain(Whole, plain) == WHOLE
    assert (plain["ranks"], plain["parts"], plain["place"]) == ([1, 3], [{"kind": "one", "data": "ff"}], [1, 2])
    assert from_plain(Whole, PLAIN) == Whole(3, 1.0, ())
    assert fields_from(Whole, {"ranks": [2]}) == {"ranks": frozenset({2})}


@pytest.mark.parametrize(
    "changed",
    [
        {"number": "3"},
        {"number": True},
        {"number": 3.0},
        {"share": "1"},
        {"share": 10**400},
        {"late": 1},
        {"parts": {}},
        {"parts": [{"kind": "two"}]},
        {"parts": [{"kind": "one", "data": "x"}]},
        {"parts": [{"data": ""}]},
        {"place": [1]},
        {"place": [1, "2"]},
        {"ranks": 3},
        {"counts": {"a": "b"}},
        {"counts": {"1": 2}},
        {"pairs": [[[0, 1]]]},
        {"unknown": 1},
    ],
)
def test_what_is_not_of_its_types_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError, LookupError)):
        from_plain(Whole, PLAIN | changed)
    with pytest.raises(TypeError):
        from_plain(Whole, [PLAIN])


def test_the_fields_of_a_record_are_in_order_and_not_copied() -> None:
    facts = [1, 2]
    record = Whole(3, 0.5, (Part(Kind.ONE),), facts=facts)
    found = fields_of(record)
    assert list(found) == list(Whole.__match_args__)
    assert found["parts"] is record.parts
    assert found["facts"] is facts
