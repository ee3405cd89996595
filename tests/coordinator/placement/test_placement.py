import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.model.layout import Layout
from ps_protocol.model.spec import DType, Kind, ModelSpec, ShardMap, Slice, Variable
from ps_server.coordinator.placement.variables import Balanced, FixedShards, MaxSize, MinSize, PartitionRule, place
from tests.support.length import examples


def model(*shapes: tuple[int, ...], unsplit: bool = False) -> ModelSpec:
    variables = tuple(Variable(f"v{i}", shape, DType.FLOAT32) for i, shape in enumerate(shapes))
    return ModelSpec("m", "torch.optim.SGD", variables, ({"lr": 0.1},), unsplit=unsplit)


def loads(spec: ModelSpec, slices: tuple[Slice, ...], shards: int) -> list[int]:
    nbytes = [0] * shards
    for s in slices:
        nbytes[s.shard] += (s.row_end - s.row_begin) * spec.variables[s.variable].row_bytes
    return nbytes


def cuts(slices: tuple[Slice, ...]) -> dict[int, int]:
    return dict(Counter(s.variable for s in slices))


shapes = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 5000)),
    st.tuples(st.integers(0, 5000), st.integers(0, 40)),
    st.tuples(st.integers(1, 64), st.integers(1, 8), st.integers(1, 9)),
)
kinds = st.sampled_from([Kind.PARAMETER, Kind.BUFFER])
variables = st.lists(st.tuples(shapes, st.sampled_from(list(DType)), kinds), max_size=30).map(
    lambda items: tuple(Variable(f"v{i}", shape, dtype, kind) for i, (shape, dtype, kind) in enumerate(items))
)
specs = st.builds(
    ModelSpec,
    st.just("m"),
    st.just("torch.optim.SGD"),
    variables,
    st.just(({"lr": 0.1},)),
    unsplit=st.booleans(),
)
rules = st.one_of(
    st.just(Balanced()),
    st.builds(FixedShards, st.integers(1, 8)),
    st.builds(MinSize, st.integers(1, 1 << 14), st.integers(1, 8)),
    st.builds(MaxSize, st.integers(1, 1 << 14), st.integers(0, 8)),
)


@given(specs, st.integers(1, 9), rules)
@examples(200)
def test_every_row_of_every_variable_is_placed_exactly_once(spec: ModelSpec, shards: int, rule: PartitionRule) -> None:
    slices = place(spec, shards, rule)
    assert all(0 <= s.shard < shards for s in slices)
    for number, variable in enumerate(spec.variables):
        rows = sorted((s.row_begin, s.row_end) for s in slices if s.variable == number)
        assert rows[0][0] == 0
        assert rows[-1][1] == variable.rows
        assert all(a[1] == b[0] for a, b in itertools.pairwise(rows))
        assert len(rows) == 1 or not spec.unsplit


@given(specs, st.integers(1, 9))
@examples(300)
def test_the_largest_shard_is_within_five_percent_of_the_mean_unless_a_row_is_too_large(
    spec: ModelSpec, shards: int
) -> None:
    total = sum(v.nbytes for v in spec.variables)
    largest_unit = max((v.nbytes if spec.unsplit else v.row_bytes for v in spec.variables if v.rows), default=0)
    slices = place(spec, shards, Balanced())
    if largest_unit * 20 * shards <= total:
        assert 100 * shards * max(loads(spec, slices, shards)) <= 105 * total
        assert len(slices) < len(spec.variables) + shards
    else:
        # Greedy placement is never worse than the mean plus one indivisible unit (Graham 1969).
        assert shards * max(loads(spec, slices, shards)) <= 1.05 * total + shards * largest_unit


@given(specs, st.integers(1, 9), rules)
@examples(50)
def test_placement_is_the_same_each_time(spec: ModelSpec, shards: int, rule: PartitionRule) -> None:
    assert place(spec, shards, rule) == place(spec, shards, rule)


def test_variables_that_balance_whole_are_not_split() -> None:
    spec = model((600,), (600,), (400,), (400,))
    assert cuts(place(spec, 2, Balanced())) == {0: 1, 1: 1, 2: 1, 3: 1}


def test_one_large_variable_is_cut_once_per_border() -> None:
    slices = place(model((1_000_000, 8), (10,)), 4, Balanced())
    assert cuts(slices) == {0: 4, 1: 1}


def test_small_variables_fill_up_what_large_rows_leave() -> None:
    spec = model((5, 10), *[(1,)] * 25)
    assert loads(spec, place(spec, 3, Balanced()), 3) == [100, 100, 100]


def test_a_model_on_one_shard_is_one_range() -> None:
    spec = model((30, 4), (30,), (), (7, 3, 3))
    layout = Layout.of(ShardMap(1, spec, 1, place(spec, 1, Balanced())), 0)
    assert len(layout.ranges()) == 1
    assert [s.slice.variable for s in layout.slices] == [0, 1, 2, 3]


def test_whole_variables_come_before_slices_of_split_ones() -> None:
    slices = [s for s in place(model((10_000, 16), (100,), (50, 3)), 2, Balanced()) if s.shard == 1]
    assert [s.variable for s in slices] == [1, 2, 0]


def test_an_unsplit_model_is_placed_whole() -> None:
    spec = model((1000, 10), (10,), (20,), unsplit=True)
    slices = place(spec, 3, Balanced())
    assert cuts(slices) == {0: 1, 1: 1, 2: 1}
    assert len({s.shard for s in slices}) == 3


def test_scalars_spread_over_the_shards() -> None:
    spec = model(*[()] * 6)
    assert loads(spec, place(spec, 3, Balanced()), 3) == [8, 8, 8]


@pytest.mark.parametrize(
    ("rule", "shape", "expected"),
    [
        # The examples of TensorFlow's own documentation and tests.
        (FixedShards(2), (10, 3), 2),
        (FixedShards(2), (1, 3), 1),
        (MinSize(2 << 10, 100), (2048,), 4),
        (MinSize(256 << 10, 100), (2048, 1024), 32),
        (MinSize(256 << 10, 16), (2048, 1024), 16),
        (MinSize(), (2048, 1024), 1),
        (MaxSize(4), (6, 1), 6),
        (MaxSize(4, 2), (6, 1), 2),
        (MaxSize(1024), (6, 1), 1),
    ],
)
def test_tensorflow_rules_cut_as_tensorflow_does(rule: PartitionRule, shape: tuple[int, ...], expected: int) -> None:
    slices = place(model(shape), 4, rule)
    assert len(slices) == expected
    sizes = [s.row_end - s.row_begin for s in slices]
    assert max(sizes) - min(sizes) <= 1


def test_slices_cut_by_a_rule_are_spread_by_bytes() -> None:
    spec = model((400, 10), (200, 10), (100, 10))
    assert loads(spec, place(spec, 2, FixedShards(2)), 2) == [14_000, 14_000]
