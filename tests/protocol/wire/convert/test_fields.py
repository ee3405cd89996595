"""Every dataclass with a converter survives the wire; a converter that does not fit its message cannot be made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from enum import Enum
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.cluster.leases import LeaseAsk, Span
from ps_protocol.cluster.view import Member, MemberStats, Role
from ps_protocol.errors import InvalidRequest
from ps_protocol.v1 import coordinator_pb2 as pb
from ps_protocol.wire.convert import cluster, model, shard
from ps_protocol.wire.convert.fields import Converter

#: Options have tests of their own.
CONVERTERS = {
    name: found
    for module in (cluster, model, shard)
    for name, found in vars(module).items()
    if isinstance(found, Converter) and name not in {"TABLE", "SPEC", "SHARD_MAP"}
}
GIVEN = {"JOINED": "member", "HISTORY": "curves", "MODEL_STATUS": "epoch"}
PLAIN = {
    int: st.integers(1, 1 << 16),
    float: st.floats(0, 1e9),
    bool: st.booleans(),
    str: st.text("abcz", min_size=1, max_size=4),
    bytes: st.binary(max_size=4),
}


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a type as messages have them."""
    arguments = get_args(hint)
    if NoneType in arguments:
        return st.none() | values(arguments[0])
    if hint in PLAIN:
        return PLAIN[hint]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(hint)
    if is_dataclass(hint):
        return st.builds(hint, **{name: values(each) for name, each in get_type_hints(hint).items()})
    match get_origin(hint):
        case origin if origin is Mapping:
            return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=2)
        case origin if origin is frozenset:
            return st.frozensets(values(arguments[0]), max_size=3)
        case origin if origin is Sequence or arguments[-1] is ...:
            return st.lists(values(arguments[0]), max_size=3).map(tuple)
    return st.tuples(*map(values, arguments))


@pytest.mark.parametrize("name", CONVERTERS)
@given(st.data())
def test_what_is_converted_is_read_as_it_was(name: str, data: st.DataObject) -> None:
    converter = CONVERTERS[name]
    value = data.draw(values(converter.kind))
    given = {GIVEN[name]: getattr(value, GIVEN[name])} if name in GIVEN else {}
    message = converter.message.FromString(converter.to_pb(value).SerializeToString())
    assert converter.from_pb(message, **given) == value


def test_what_the_dataclass_lacks_comes_from_the_caller() -> None:
    assert cluster.SCALE_ASK.to_pb(cluster.SCALE_ASK.from_pb(pb.ScaleRequest(workers=3))).HasField("shards") is False
    request = cluster.LEASE_ASK.to_pb(cluster.LEASE_ASK.from_pb(pb.LeaseDataRequest(length=4)), rank=2)
    assert (request.length, request.rank) == (4, 2)


def test_a_worker_that_holds_nothing_is_told_from_one_that_does_not_say() -> None:
    ask = LeaseAsk("data", 4, 0, 1, 1)
    for held in (None, (), (Span(1, 2),)):
        message = cluster.LEASE_ASK.to_pb(replace(ask, held=held))
        sent = pb.LeaseDataRequest.FromString(message.SerializeToString())
        assert cluster.LEASE_ASK.from_pb(sent).held == held


def test_a_number_of_a_newer_version_is_refused_with_its_field() -> None:
    with pytest.raises(InvalidRequest, match=r"role of Member 9 is not known here; expected: 1 .shard., 2 .worker."):
        cluster.MEMBER.from_pb(pb.Member(role=9))
    with pytest.raises(InvalidRequest, match="role of Member 0 is not known here"):
        cluster.MEMBER.from_pb(pb.Member())


def test_text_for_people_is_read_without_characters_that_a_terminal_obeys_and_long_text_is_cut() -> None:
    assert cluster.MEMBER.from_pb(pb.Member(role=1, address="a\x1b[2J")).address == r"a\x1b[2J"
    read = cluster.STATS.from_pb(pb.MemberStats(activity="x" * 1000, metrics={f"m{n}\n": n for n in range(100)}))
    assert (len(read.activity), len(read.metrics)) == (256, 64)
    assert all(name.isprintable() for name in read.metrics)
    assert cluster.STATS.from_pb(pb.MemberStats()) == MemberStats()


@dataclass(frozen=True)
class Other:
    """No message has this field."""

    colour: str


@pytest.mark.parametrize(
    ("kind", "special", "why"),
    [
        (Other, {}, "Member has no field colour"),
        (Member, {"colour": str}, "Member has no field colour"),
    ],
)
def test_a_dataclass_that_its_message_does_not_fit_is_refused_where_it_is_declared(kind, special, why) -> None:
    with pytest.raises(TypeError, match=why):
        Converter(kind, pb.Member, **special)


def test_a_field_without_a_conversion_is_refused_where_it_is_declared() -> None:
    with pytest.raises(TypeError, match="has no conversion of its own"):
        Converter(dataclass(type("Odd", (), {"__annotations__": {"role": Role, "address": complex}})), pb.Member)
