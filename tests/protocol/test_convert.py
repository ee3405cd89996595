"""Dataclasses survive the wire; what this version does not know is refused by name."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol import convert, errors
from ps_protocol.model import (
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
    Variable,
)
from ps_protocol.tables import Eviction, RowInit, RowLife, TableSpec
from ps_protocol.v1 import common_pb2 as pb

OPTIONS = st.dictionaries(
    st.text(max_size=5),
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.lists(st.floats(0, 1)),
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
    tables=st.lists(TABLES, max_size=2).map(tuple),
)
PLACEMENTS = st.lists(st.lists(st.integers(0, 9)).map(tuple), max_size=2).map(tuple)


@given(SPECS, st.integers(0, 9), PLACEMENTS)
def test_a_shard_map_survives_the_wire(spec, epoch, tables):
    shard_map = ShardMap(epoch, spec, 2, (Slice(0, 0, 1 << 40, 1),), tables=tables)
    data = convert.shard_map_to_pb(shard_map).SerializeToString()
    assert convert.shard_map_from_pb(pb.ShardMap.FromString(data)) == shard_map


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("policy", StalePolicy)
def test_a_consistency_mode_survives_the_wire(mode, policy):
    consistency = Consistency(mode, 3, 1, policy, 7)
    assert convert.consistency_from_pb(convert.consistency_to_pb(consistency)) == consistency


def test_numbers_in_options_survive_exactly():
    options = {"lr": 0.1 + 0.2, "eps": 5e-324, "limit": math.inf}
    assert convert.options_from_json(convert.options_to_json(options)) == options


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_options_that_are_no_json_object_are_refused(text):
    with pytest.raises(errors.InvalidRequest):
        convert.options_from_json(text)


@pytest.mark.parametrize(
    "text", ["", "[1]", '{"lr": "fast"}', '{"lr": true}', '{"lr": [1]}', '{"lr": 1' + "0" * 400 + "}", "[" * 5000]
)
def test_row_options_that_are_not_numbers_by_name_are_refused(text):
    with pytest.raises(errors.InvalidRequest):
        convert.spec_from_pb(pb.ModelSpec(nonfinite=1, buffers=1, tables=[pb.TableSpec(name="emb", options=text)]))


def test_a_table_without_a_word_on_eviction_refuses():
    message = pb.ModelSpec(nonfinite=1, buffers=1, tables=[pb.TableSpec(name="emb", options="{}")])
    assert convert.spec_from_pb(message).tables[0].life.eviction is Eviction.REFUSE
    message.tables[0].life.eviction = 9
    with pytest.raises(errors.InvalidRequest, match="eviction of table 'emb' 9"):
        convert.spec_from_pb(message)


def test_an_enum_number_of_a_newer_version_is_refused_by_name():
    message = pb.ModelSpec(variables=[pb.Variable(name="w", dtype=99)])
    with pytest.raises(errors.InvalidRequest, match="dtype of variable 'w' 99"):
        convert.spec_from_pb(message)


def test_every_error_code_has_one_exception_and_survives_the_wire():
    codes = set(pb.ErrorCode.values()) - {pb.ERROR_CODE_UNSPECIFIED}
    assert set(errors.by_code) == codes
    for code, kind in errors.by_code.items():
        error = kind("text", variable="w", shard="0", expected="a", actual="b", remedy="c")
        back = errors.from_detail(errors.to_detail(error))
        assert (type(back), str(back)) == (kind, str(error))
        assert kind.code == code


def test_an_error_code_of_a_newer_version_becomes_an_internal_error():
    assert type(errors.from_detail(pb.ErrorDetail(code=99, message="x"))) is errors.InternalError
