"""The output of a child process as lines."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.launch.child import MAX_LINE_BYTES, LineSplitter


@given(st.lists(st.binary(max_size=20)))
def test_lines_are_whole_however_the_pipe_cuts_them(pieces):
    splitter = LineSplitter()
    lines = [line for piece in pieces for line in splitter.feed(piece)] + splitter.flush()
    expected = b"".join(pieces).split(b"\n")
    if not expected[-1]:
        expected.pop()
    assert lines == [e.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace") for e in expected]


def test_a_line_without_end_is_cut_rather_than_kept_for_ever():
    splitter = LineSplitter()
    assert splitter.feed(b"x" * (MAX_LINE_BYTES + 1)) == ["x" * (MAX_LINE_BYTES + 1)]
    assert splitter.flush() == []
