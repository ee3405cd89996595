"""Text from outside cannot speak to a terminal, wherever it enters."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.errors import InvalidRequest
from ps_protocol.text import printable, whole_number
from ps_protocol.v1 import coordinator_pb2 as pb
from ps_protocol.wire.convert import cluster as convert
from ps_protocol.wire.convert.errors import from_detail, to_detail

CLEARS_SCREEN = "loss\x1b[2J"


@given(st.text(st.characters()))
def test_nothing_but_printed_characters_is_left_and_repeating_changes_nothing(text):
    shown = printable(text)
    assert shown.isprintable()
    assert printable(shown) == shown


@pytest.mark.parametrize("text", ["loss", "Größe 0·5", "a\\nb", "🙂"])
def test_printed_characters_stay(text):
    assert printable(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (CLEARS_SCREEN, "loss\\x1b[2J"),
        ("left\nERROR forged", "left\\nERROR forged"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\x9b31m", "\\x9b31m"),
        ("\ud800", "\\ud800"),
    ],
)
def test_others_become_visible(text, shown):
    assert printable(text) == shown


def test_characters_to_keep_are_kept():
    assert printable("one\ntwo\x1b", keep="\n") == "one\ntwo\\x1b"


def test_status_names_addresses_and_ends_are_escaped_where_they_enter():
    told = pb.ClusterStatus(
        view=pb.ClusterView(consistency=pb.ClusterView().consistency, moving="x\x1b"),
        members=[pb.MemberStatus(member=pb.Member(role=1, address="a\x1b:1"), host="h\n", gone="left: \x1b]0;t\x07")],
    )
    told.view.consistency.mode = 1
    status = convert.STATUS.from_pb(told)
    (entry,) = status.members
    assert (entry.member.address, entry.host, entry.gone) == ("a\\x1b:1", "h\\n", "left: \\x1b]0;t\\x07")
    assert status.view.moving == "x\\x1b"


def test_an_error_of_another_process_keeps_its_lines_and_nothing_else():
    detail = to_detail(InvalidRequest("two\nlines\x1b", variable="w\r", remedy="r\x07"))
    error = from_detail(detail)
    assert (error.message, error.variable, error.remedy) == ("two\nlines\\x1b", "w\\r", "r\\x07")


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("007", 7), ("9" * 18, 10**18 - 1)])
def test_a_whole_number_is_a_few_ascii_digits(text: str, number: int) -> None:
    assert whole_number(text) == number


@pytest.mark.parametrize(
    "text", ["", " 4", "4 ", "+4", "-4", "4_0", "4.0", "٤", "²", "４", "9" * 19, "1" * 5000, "4\n"]
)
def test_nothing_else_is_a_whole_number(text: str) -> None:
    assert whole_number(text) is None
