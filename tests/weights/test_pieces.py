"""What a shard sends of a version is compared with what it says, before any of it is used."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import xxhash

from ps_protocol.errors import DamagedData
from ps_protocol.model.spec import DType, Variable
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.weights.memory import VersionMemory
from ps_protocol.weights.pieces import _Stage, _Steps
from ps_protocol.wire.deltas import encode_delta

WHOLE, DELTA, SAME = pb.PIECE_ENCODING_WHOLE, pb.PIECE_ENCODING_DELTA, pb.PIECE_ENCODING_SAME
TABLE = Variable("w", (6, 4), DType.FLOAT32)


def rows(begin: int, end: int) -> pb.PieceTensor:
    return pb.PieceTensor(row_begin=begin, row_end=end)


def placed(*parts: tuple[int, int], variables: int = 1) -> None:
    stage = _Stage(TABLE.nbytes, VersionMemory())
    for begin, end in parts:
        stage.place(rows(begin, end), TABLE)
    stage.check_whole(variables)


def test_rows_of_a_variable_may_come_from_several_shards_in_any_order() -> None:
    placed((4, 6), (0, 1), (1, 4))


@pytest.mark.parametrize(
    ("parts", "variables"),
    [
        ([(0, 5)], 1),
        ([(1, 6)], 1),
        ([(0, 3), (4, 6)], 1),
        ([(0, 4), (3, 6)], 1),
        ([(0, 6), (0, 6)], 1),
        ([(0, 7)], 1),
        ([(-1, 6)], 1),
        ([(4, 2)], 1),
        ([(0, 6)], 2),
    ],
)
def test_rows_that_are_missing_twice_there_or_outside_are_refused(parts: list[tuple[int, int]], variables: int) -> None:
    with pytest.raises(DamagedData):
        placed(*parts, variables=variables)


def test_two_shards_with_different_shapes_of_a_variable_are_refused() -> None:
    stage = _Stage(TABLE.nbytes, VersionMemory())
    stage.place(rows(0, 3), TABLE)
    with pytest.raises(DamagedData, match="different shapes"):
        stage.place(rows(3, 6), Variable("w", (6, 5), DType.FLOAT32))


def header(*links: tuple[int, list[int], list[int]], payload: int | None = None) -> pb.PieceHeader:
    made = [pb.PieceLink(number=number, encodings=encodings, sizes=sizes) for number, encodings, sizes in links]
    size = sum(sum(link.sizes) for link in made)
    return pb.PieceHeader(links=made, payload_bytes=size if payload is None else payload)


def steps(sent: pb.PieceHeader, have: int = 0) -> _Steps:
    places = [memoryview(bytearray(100)), memoryview(bytearray(8))]
    return _Steps(sent, places, 5, have)


@pytest.mark.parametrize(
    ("sent", "have"),
    [
        (header(), 0),
        (header((4, [WHOLE, WHOLE], [100, 8])), 0),
        (header((5, [DELTA, SAME], [50, 0])), 0),
        (header((5, [DELTA, SAME], [50, 0])), 5),
        (header((4, [DELTA, SAME], [50, 0]), (4, [DELTA, SAME], [50, 0])), 3),
        (header((5, [WHOLE], [100])), 0),
        (header((5, [WHOLE, WHOLE], [100])), 0),
        (header((5, [WHOLE, WHOLE], [99, 8])), 0),
        (header((5, [WHOLE, WHOLE], [1 << 40, 8])), 0),
        (header((5, [DELTA, WHOLE], [1 << 40, 8])), 4),
        (header((5, [DELTA, WHOLE], [100, 8])), 4),
        (header((5, [DELTA, WHOLE], [0, 8])), 4),
        (header((5, [SAME, WHOLE], [1, 8])), 4),
        (header((5, [0, WHOLE], [0, 8])), 4),
        (header((5, [WHOLE, WHOLE], [100, 8]), payload=107), 0),
    ],
)
def test_links_and_sizes_that_cannot_be_are_refused(sent: pb.PieceHeader, have: int) -> None:
    with pytest.raises(DamagedData):
        steps(sent, have)


def state(value: int) -> bytes:
    return bytes([value]) + bytes(3999)


def chain(*changes: Callable[[], tuple[int, bytes]]) -> bytes:
    """What comes of ``changes``, link by link, from state(0)."""
    made = [change() for change in changes]
    links = [(2 + i, [encoding], [len(data)]) for i, (encoding, data) in enumerate(made)]
    place = memoryview(bytearray(4000))
    several = _Steps(header(*links), [place], 1 + len(made), 1)
    received = iter([data for encoding, data in made if encoding != SAME])
    for piece in several.pieces:
        piece[:] = next(received)
    several.apply(0, lambda: memoryview(state(0)), xxhash.xxh3_128_digest(state(len(made))))
    return bytes(place)


def delta(before: int, after: int) -> tuple[int, bytes]:
    made = encode_delta(state(before), state(after))
    assert made is not None
    return DELTA, made


def test_a_tensor_goes_through_every_link_of_a_chain() -> None:
    assert chain(lambda: delta(0, 1)) == state(1)
    assert chain(lambda: delta(0, 1), lambda: delta(1, 2), lambda: delta(2, 3)) == state(3)
    assert chain(lambda: delta(0, 1), lambda: (WHOLE, state(2))) == state(2)
    assert chain(lambda: (SAME, b""), lambda: delta(0, 2)) == state(2)
    assert chain(lambda: delta(0, 2), lambda: (SAME, b"")) == state(2)
    assert chain(lambda: (WHOLE, state(9)), lambda: delta(9, 2)) == state(2)


def test_a_chain_that_ends_elsewhere_or_builds_on_something_else_is_damaged() -> None:
    other = encode_delta(bytes([3] * 4000), bytes([1]) + bytes([3] * 3999))
    assert other is not None
    for change in (delta(0, 5), (DELTA, other), (SAME, b""), (DELTA, other[:-1]), (WHOLE, state(4))):
        with pytest.raises(DamagedData):
            chain(lambda change=change: change)  # type: ignore[misc]


def test_variables_larger_than_what_was_committed_take_no_memory() -> None:
    stage = _Stage(TABLE.nbytes, VersionMemory())
    stage.place(rows(0, 1), TABLE)
    stage.place(rows(1, 2), TABLE)
    with pytest.raises(DamagedData, match="larger than what was committed"):
        stage.place(rows(0, 1), Variable("large", (1 << 40, 1), DType.FLOAT32))


@pytest.mark.parametrize(
    ("links", "payload_bytes"),
    [
        ([(2, [WHOLE], [8])], 9),
        ([(2, [WHOLE], [8]), (3, [WHOLE], [8]), (4, [WHOLE], [8])], 24),
        ([(2, [DELTA], [1 << 60]), (3, [DELTA], [1])], (1 << 60) + 1),
        ([(2, [DELTA], [1 << 63]), (3, [DELTA], [1 << 63])], 0),
    ],
)
def test_changes_larger_than_the_piece_take_no_memory(
    links: list[tuple[int, list[pb.PieceEncoding], list[int]]], payload_bytes: int
) -> None:
    header = pb.PieceHeader(payload_bytes=payload_bytes)
    for number, encodings, sizes in links:
        header.links.add(number=number, encodings=encodings, sizes=sizes)
    with pytest.raises(DamagedData, match="its payload has"):
        _Steps(header, [memoryview(bytearray(8))], links[-1][0], 1)
