"""The region: every byte of every slice once, arenas aligned, ranges merged."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.model.layout import Layout, merge, total_bytes
from ps_protocol.model.spec import ALIGNMENT_BYTES, DType, Kind, ModelSpec, ShardMap, Slice, Variable

VARIABLES = st.lists(
    st.builds(
        lambda shape, dtype, kind, group: (tuple(shape), dtype, kind, group if kind is Kind.PARAMETER else 0),
        st.lists(st.integers(0, 5), max_size=3),
        st.sampled_from([DType.FLOAT32, DType.BFLOAT16, DType.INT64]),
        st.sampled_from(Kind),
        st.integers(0, 1),
    ),
    max_size=8,
)


def layout_of(variables, shards=1):
    named = tuple(Variable(f"v{i}", *fields) for i, fields in enumerate(variables))
    spec = ModelSpec("model", "torch.optim.SGD", named, ({"lr": 1.0}, {"lr": 1.0}))
    slices = tuple(Slice(i, 0, v.rows, i % shards) for i, v in enumerate(named))
    return [Layout.of(ShardMap(1, spec, shards, slices), shard) for shard in range(shards)]


@given(VARIABLES, st.integers(1, 3))
def test_slices_lie_one_after_another_in_their_arenas_and_parameters_come_first(variables, shards):
    for layout in layout_of(variables, shards):
        for number, arena in enumerate(layout.arenas):
            inside = [s for s in layout.slices if s.arena == number]
            assert arena.begin % ALIGNMENT_BYTES == 0
            assert all(s.begin % ALIGNMENT_BYTES == 0 for s in inside)
            assert all(s.end - s.begin == s.variable.nbytes for s in inside)
            assert all(0 <= s.padded_end - s.end < ALIGNMENT_BYTES for s in inside)
            assert [s.begin for s in inside] == [arena.begin, *(s.padded_end for s in inside)][: len(inside)]
            assert arena.end == (inside[-1].padded_end if inside else arena.begin)
        kinds = [span.variable.kind for span in layout.slices]
        assert kinds == [Kind.PARAMETER] * layout.parameter_slices + [Kind.BUFFER] * (
            len(kinds) - layout.parameter_slices
        )
        assert all(s.end <= layout.parameter_bytes for s in layout.slices[: layout.parameter_slices])


@given(VARIABLES, st.data())
def test_ranges_hold_the_bytes_of_the_present_slices_and_no_others(variables, data):
    (layout,) = layout_of(variables)
    absent = data.draw(st.sets(st.integers(0, max(0, layout.parameter_slices - 1))))
    for buffers in (True, False):
        ranges = layout.ranges(absent, buffers=buffers)
        wanted = {
            byte
            for i, span in enumerate(layout.slices)
            if i not in absent and (buffers or span.variable.kind is Kind.PARAMETER)
            for byte in range(span.begin, span.padded_end)
        }
        assert {byte for begin, end in ranges for byte in range(begin, end)} == wanted
        assert total_bytes(ranges) == len(wanted)


def test_a_model_of_a_thousand_tensors_is_one_range():
    (layout,) = layout_of([((10,), DType.FLOAT32, Kind.PARAMETER, 0)] * 1000)
    assert layout.ranges() == [(0, 64_000)]


def test_a_scalar_is_one_row():
    (layout,) = layout_of([((), DType.FLOAT32, Kind.PARAMETER, 0)])
    assert (layout.slices[0].shape, layout.slices[0].end, layout.region_bytes) == ((), 4, 64)


def test_merging_joins_what_touches_and_drops_what_is_empty():
    assert merge([(0, 2), (2, 2), (2, 5), (6, 7)]) == [(0, 5), (6, 7)]
