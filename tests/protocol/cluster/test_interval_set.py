"""A set of ranges is the set of its positions."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.cluster.leases import IntervalSet, Span

spans = st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda ends: Span(min(ends), max(ends)))
changes = st.lists(st.tuples(st.sampled_from(["add", "remove", "take"]), spans), max_size=30)


@given(changes, spans, st.integers(1, 7))
def test_it_does_what_a_set_of_positions_does(changes: list[tuple[str, Span]], asked: Span, batch: int) -> None:
    ranges, positions = IntervalSet(), set[int]()
    for change, span in changes:
        of_span = set(range(span.begin, span.end))
        if change == "add":
            ranges.add(span)
            positions |= of_span
        elif change == "remove":
            ranges.remove(span)
            positions -= of_span
        elif positions and len(span):
            first = next(iter(ranges))
            taken = ranges.take(len(span), batch)
            run = set(range(taken.begin, taken.end))
            # At a border of batches, where there is one.
            borders_within = [at for at in run if at > taken.begin and at % batch == 0]
            assert taken.end in (first.end, first.begin + len(span)) or taken.end % batch == 0
            assert not (borders_within and taken.end % batch and taken.end != first.end)
            assert 0 < len(taken) <= len(span)
            assert taken.begin == min(positions)
            assert run <= positions
            positions -= run
    assert {p for span in ranges for p in range(span.begin, span.end)} == positions
    assert (ranges.positions, bool(ranges)) == (len(positions), bool(positions))
    borders = [(span.begin, span.end) for span in ranges]
    assert all(one[1] < other[0] for one, other in itertools.pairwise(borders))
    wanted = set(range(asked.begin, asked.end))
    assert ranges.overlaps(asked) == bool(wanted & positions)
    if wanted:
        assert ranges.covers(asked) == (wanted <= positions)


def test_a_list_of_few_ranges_with_many_positions_is_short() -> None:
    """The positions of files are far more than there is memory for."""
    many = Span(0, 1 << 62)
    assert tuple(IntervalSet([many])) == (many,)
