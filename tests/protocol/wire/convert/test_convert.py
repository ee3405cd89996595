"""Dataclasses survive the wire; what this version does not know is refused by name."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol import errors
from ps_protocol.model.spec import (
    Buffers,
    Consistency,
    DType,
    Kind,
    Mode,
    ModelSpec,
    NonFinite,
    ShardMap,
    Slice,
    StalePolicy,
    StaleRule,
    Variable,
)
from ps_protocol.model.tables import Eviction, RowInit, RowLife, TableSpec
from ps_protocol.v1 import common_pb2 as pb
from ps_protocol.wire.convert import model as convert_model
from ps_protocol.wire.convert.errors import from_detail
from ps_protocol.wire.convert.options import changed_options, options_from_pb, options_to_pb
from tests.protocol.options import INTEGERS, VALUES

OPTIONS = st.dictionaries(
    st.text(max_size=5),
    st.none() | st.booleans() | INTEGERS | st.floats(allow_nan=False) | st.lists(st.floats(0, 1)),
)
NUMBERS = st.floats(allow_nan=False)
COUNTS = st.integers(0, (1 << 64) - 1)
TABLES = st.builds(
    TableSpec,
    name=st.text(max_size=5),
    dim=st.integers(0, 1 << 14),
    seed=COUNTS,
    init=st.builds(RowInit, st.text(max_size=5), NUMBERS, NUMBERS),
    optimizer=st.text(max_size=5),
    options=st.dictionaries(st.text(max_size=5), NUMBERS),
    life=st.builds(RowLife, COUNTS, NUMBERS, COUNTS, NUMBERS, COUNTS, st.sampled_from(Eviction)),
    buckets=st.integers(0, 1 << 16),
)
SPECS = st.builds(
    ModelSpec,
    name=st.text(max_size=5),
    optimizer=st.just("torch.optim.SGD"),
    variables=st.lists(
        st.builds(
            Variable,
            st.text(max_size=5),
            st.lists(st.integers(0, 1 << 40), max_size=3).map(tuple),
            st.sampled_from(DType),
            st.sampled_from(Kind),
            st.integers(0, 3),
        ),
        max_size=4,
    ).map(tuple),
    group_options=st.lists(OPTIONS, max_size=2).map(tuple),
    nonfinite=st.sampled_from(NonFinite),
    buffers=st.sampled_from(Buffers),
    unsplit=st.booleans(),
    stale=st.none() | st.builds(StaleRule, st.sampled_from(StalePolicy), COUNTS, st.booleans()),
    tables=st.lists(TABLES, max_size=2).map(tuple),
)
PLACEMENTS = st.lists(st.lists(st.integers(0, 9)).map(tuple), max_size=2).map(tuple)


@given(SPECS, st.integers(0, 9), PLACEMENTS)
def test_a_shard_map_survives_the_wire(spec, epoch, tables):
    shard_map = ShardMap(epoch, spec, 2, (Slice(0, 0, 1 << 40, 1),), tables=tables)
    data = convert_model.SHARD_MAP.to_pb(shard_map).SerializeToString()
    assert convert_model.SHARD_MAP.from_pb(pb.ShardMap.FromString(data)) == shard_map


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("policy", StalePolicy)
def test_a_consistency_mode_survives_the_wire(mode, policy):
    consistency = Consistency(mode, 3, 1, policy, 7, stale_by_workers=mode is Mode.SSP)
    assert convert_model.CONSISTENCY.from_pb(convert_model.CONSISTENCY.to_pb(consistency)) == consistency


def test_numbers_in_options_survive_exactly():
    options = {"lr": 0.1 + 0.2, "eps": 5e-324, "limit": math.inf, "zero": -0.0, "steps": 1 << 62, "flag": True}
    again = options_from_pb(pb.Options.FromString(options_to_pb(options).SerializeToString()))
    assert {name: repr(value) for name, value in again.items()} == {n: repr(v) for n, v in options.items()}


@given(st.dictionaries(st.text(max_size=5), VALUES, max_size=5))
def test_options_of_every_shape_survive_and_equal_ones_are_equal_bytes(options):
    message = options_to_pb(options)
    backwards = dict(reversed(options.items()))
    assert options_to_pb(backwards).SerializeToString() == message.SerializeToString()
    assert repr(options_from_pb(message)) == repr({name: options[name] for name in sorted(options)})


@pytest.mark.parametrize("value", [1 << 63, -(1 << 63) - 1, "\ud800", {"a": 1}, (1, 2), object()])
def test_a_value_that_no_message_holds_is_refused_by_name(value):
    for odd in (value, [value]):
        with pytest.raises(errors.InvalidRequest, match="the optimizer argument 'lr' cannot be sent"):
            options_to_pb({"lr": odd})


def test_options_without_a_value_or_given_twice_are_refused():
    empty = pb.Option(name="lr")
    with pytest.raises(errors.InvalidRequest, match="no value"):
        options_from_pb(pb.Options(options=[empty]))
    one = pb.Option(name="lr", value=pb.OptionValue(number=1.0))
    with pytest.raises(errors.InvalidRequest, match="twice"):
        options_from_pb(pb.Options(options=[one, one]))


def test_what_changed_tells_kinds_of_numbers_apart():
    declared = {"a": 1, "b": 0.0, "c": [1, 2.0], "d": True, "e": None, "f": math.nan}
    assert changed_options(declared, dict(declared)) == {}
    other = {"a": 1.0, "b": -0.0, "c": [1, 2], "d": 1, "e": 0, "g": 7}
    assert repr(changed_options(declared, other)) == repr(other)


@pytest.mark.parametrize("value", ["fast", True, [1], None])
def test_row_options_that_are_not_numbers_by_name_are_refused(value):
    table = pb.TableSpec(name="emb", arguments=options_to_pb({"lr": value}))
    with pytest.raises(errors.InvalidRequest, match="not numbers by name"):
        convert_model.SPEC.from_pb(pb.ModelSpec(nonfinite=1, buffers=1, tables=[table]))


@pytest.mark.parametrize("alignment_bytes", [0, 128])
def test_an_alignment_of_another_version_is_refused(alignment_bytes):
    with pytest.raises(errors.InvalidRequest, match="aligned in a way"):
        convert_model.SHARD_MAP.from_pb(
            pb.ShardMap(spec=pb.ModelSpec(nonfinite=1, buffers=1), alignment_bytes=alignment_bytes)
        )


def test_a_table_without_a_word_on_eviction_refuses():
    message = pb.ModelSpec(nonfinite=1, buffers=1, tables=[pb.TableSpec(name="emb")])
    assert convert_model.SPEC.from_pb(message).tables[0].life.eviction is Eviction.REFUSE
    message.tables[0].life.eviction = 9
    with pytest.raises(errors.InvalidRequest, match="eviction of RowLife 9"):
        convert_model.SPEC.from_pb(message)


def test_an_enum_number_of_a_newer_version_is_refused_by_name():
    message = pb.ModelSpec(variables=[pb.Variable(name="w", dtype=99)])
    with pytest.raises(errors.InvalidRequest, match="dtype of Variable 'w' 99"):
        convert_model.SPEC.from_pb(message)


def test_an_error_code_of_a_newer_version_becomes_an_internal_error():
    assert type(from_detail(pb.ErrorDetail(code=99, message="x"))) is errors.InternalError
