"""A child process: the lines of its output, its address, and what is left of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.launch import shim
from ps_protocol.launch.child import MAX_LINE_BYTES, Child, LineSplitter
from ps_protocol.launch.life import LifePipe
from tests.support.shards import wait_until


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


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_server_has_its_address_while_it_serves_and_leaves_no_descriptor():
    descriptors = open_descriptors()
    program = "import sys; open(sys.argv[2], 'w').write('127.0.0.1:7\\n'); import time; time.sleep(100)"
    child = Child("server", [sys.executable, "-I", "-S", "-c", program], os.environ, serves=True, watch=LifePipe)
    assert child.ready is not None
    wait_until(child.address)
    assert child.address() == "127.0.0.1:7"
    child.kill()
    assert child.address() == ""
    # Fewer: those of earlier tests may be closed meanwhile, and other threads have some open for a moment.
    wait_until(lambda: open_descriptors() <= descriptors)


def test_one_that_cannot_be_started_leaves_no_descriptor(monkeypatch):
    descriptors = open_descriptors()
    monkeypatch.setattr(shim, "command", lambda program: ["/nonexistent"])
    with pytest.raises(FileNotFoundError):
        Child("server", ["x"], os.environ, serves=True, watch=LifePipe)
    # Fewer: those of earlier tests may be closed meanwhile, and other threads have some open for a moment.
    wait_until(lambda: open_descriptors() <= descriptors)
