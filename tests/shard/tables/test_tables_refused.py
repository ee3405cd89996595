"""Rows that a shard refuses: wrong options, ids that come twice, NaN, full tables."""

from __future__ import annotations

from dataclasses import replace

import grpc
import numpy as np
import pytest

from ps_protocol.errors import InvalidRequest, NonFiniteGradient, TableFull
from ps_protocol.model.ids import buckets_of
from ps_protocol.model.spec import NonFinite
from ps_protocol.model.tables import RowLife
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire.convert.errors import from_detail
from ps_protocol.wire.convert.options import options_to_pb
from tests.support.shards import error_of, load, running_shard
from tests.support.tables import RowStream, array, load_rows, spec_with, start_with, table_spec, whole_table_map

DENSE = bytes(64)
IDS = array(5, -3, 1 << 62, 0)


def test_an_id_of_another_shard_is_refused_and_the_stream_goes_on():
    with running_shard() as shard:
        spec = spec_with(table_spec(), shapes=((4, 3),))
        halves = replace(whole_table_map(spec), shards=2, tables=(tuple(bucket % 2 for bucket in range(16)),))
        model = shard.place(halves)
        load(shard, model, bytes(model.layout.region_bytes))
        ids = np.arange(100)
        here = ids[buckets_of(ids, 16) % 2 == 0]
        stream = RowStream(shard)
        stream.ask({0: ids})
        error = from_detail(next(stream.replies).rows.error)
        assert isinstance(error, InvalidRequest)
        assert error.variable == "ads"
        assert "another shard" in str(error)
        assert stream.look_up(here, 4).shape == (here.size, 4)
        refusal = refused(stream, (ids, np.ones((100, 4), np.float32)))
        assert "another shard" in str(refusal)
        assert model.tables[0].rows == 0


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ([{}, {}], "wrong number of tables"),
        ([{"lr": "fast"}], "not numbers by name"),
        ([{"lr": True}], "not numbers by name"),
        ([{"speed": 1}], "speed"),
        ([{"lr": -1}], "lr"),
    ],
)
def test_wrong_row_options_end_the_stream(options, part):
    with running_shard() as shard:
        start_with(shard, table_spec())
        stream = RowStream(shard)
        stream.push_rows(DENSE, {}, table_arguments=map(options_to_pb, options))
        with pytest.raises(grpc.RpcError) as caught:
            stream.result()
        assert part in str(error_of(caught.value))


@pytest.mark.parametrize(
    ("tables", "part"),
    [
        ([(1, 1)], "do not exist"),
        ([(0, 1), (0, 1)], "not in order"),
        ([(0, 1 << 60)], "more rows than one may"),
    ],
)
def test_rows_that_cannot_be_end_the_stream(tables, part):
    with running_shard() as shard:
        model = start_with(shard, table_spec())
        named = [pb.TableRows(table=table, rows=rows) for table, rows in tables]
        stream = RowStream(shard)
        stream.push(DENSE, tables=named)
        with pytest.raises(grpc.RpcError) as caught:
            stream.result()
        assert part in str(error_of(caught.value))
        stream = RowStream(shard)
        stream.send(lookup=pb.Lookup(number=1, tables=named, clock=1))
        with pytest.raises(grpc.RpcError) as caught:
            stream.rows(4)
        assert part in str(error_of(caught.value))
        assert model.tables[0].rows == 0


def refused(stream: RowStream, rows) -> Exception:
    result, _ = stream.exchange_rows(DENSE, {0: rows})
    assert result.outcome == pb.OUTCOME_REFUSED
    return from_detail(result.error)


def test_an_id_that_comes_twice_is_refused_and_nothing_is_applied():
    with running_shard() as shard:
        model = start_with(shard, table_spec())
        stream = RowStream(shard)
        error = refused(stream, (array(1, 2, 1), np.ones((3, 4), np.float32)))
        assert isinstance(error, InvalidRequest)
        assert "twice" in str(error)
        assert error.variable == "ads"
        assert model.tables[0].rows == 0


def test_nan_in_a_row_is_refused_naming_the_table_and_nothing_is_applied():
    with running_shard() as shard:
        model = start_with(shard, table_spec())
        stream = RowStream(shard)
        gradient = np.ones((2, 4), np.float32)
        gradient[1, 3] = np.nan
        error = refused(stream, (array(1, 2), gradient))
        assert isinstance(error, NonFiniteGradient)
        assert error.variable == "ads"
        assert model.tables[0].rows == 0
        assert stream.exchange_rows(DENSE, {})[0].version == 1


def test_nan_in_a_row_skips_the_whole_push_where_that_is_the_policy():
    with running_shard() as shard:
        model = start_with(shard, table_spec(), nonfinite=NonFinite.SKIP)
        stream = RowStream(shard)
        result, _ = stream.exchange_rows(DENSE, {0: (array(1), np.full((1, 4), np.inf, np.float32))})
        assert result.outcome == pb.OUTCOME_SKIPPED
        assert model.tables[0].rows == 0


def test_a_full_table_refuses_new_rows_and_takes_old_ones():
    with running_shard() as shard:
        model = start_with(shard, table_spec(life=RowLife(max_rows=16)))
        stream = RowStream(shard)
        first = np.arange(16)
        stream.exchange_rows(DENSE, {0: (first, np.ones((16, 4), np.float32))})
        error = refused(stream, (array(3, 99), np.ones((2, 4), np.float32)))
        assert isinstance(error, TableFull)
        assert error.variable == "ads"
        result, _ = stream.exchange_rows(DENSE, {0: (first, np.ones((16, 4), np.float32))})
        assert result.outcome == pb.OUTCOME_APPLIED
        assert model.tables[0].rows == 16


@pytest.mark.parametrize(
    ("header", "values", "part"),
    [
        ({"table": 3}, np.zeros((4, 4), np.float32), "does not exist"),
        ({}, np.full((4, 4), np.nan, np.float32), "NaN"),
        ({}, np.zeros((4, 5), np.float32), "payload"),
    ],
)
def test_rows_that_do_not_fit_are_not_loaded(header, values, part):
    with running_shard() as shard:
        model = start_with(shard, table_spec())
        with pytest.raises(grpc.RpcError) as caught:
            load_rows(shard, IDS, values, **header)
        assert part in str(error_of(caught.value))
        assert model.tables[0].rows == 0
