"""A copy of a table is a mapping from ids to rows, whatever changes it takes."""

from __future__ import annotations

import random
import threading
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.errors import DamagedData, InvalidRequest
from ps_protocol.feed.reader import Change
from ps_protocol.model.ids import buckets_of
from ps_worker import copy_kernels, feed
from ps_worker.feed import TableCopy
from tests.feed.following import rows_of
from tests.support.length import examples
from tests.support.seeds import drawn_seed
from tests.support.shards import wait_until
from tests.support.tables import array, table_spec

SPEC = table_spec(dim=2, buckets=4)
IDS = st.lists(st.integers(-6, 60), max_size=40, unique=True)
EVEN_ODDER = st.tuples(st.lists(st.integers(0, 3), max_size=2, unique=True), IDS, IDS)


def change_of(number: int, buckets: list[int], deleted: list[int], ids: list[int]) -> Change:
    rows = np.stack([np.array(ids, np.float32), np.full(len(ids), number, np.float32)], 1)
    return Change(0, SPEC, tuple(buckets), array(*deleted), array(*ids), rows, whole=True, cursor={"number": number})


@examples(60)
@given(st.lists(EVEN_ODDER, max_size=12))
def test_it_holds_what_the_changes_say(changes):
    copy, expected = TableCopy(), {}
    for number, (buckets, deleted, ids) in enumerate(changes):
        copy.apply(change_of(number, buckets, deleted, ids))
        expected = {id_: row for id_, row in expected.items() if buckets_of(array(id_), 4)[0] not in buckets}
        expected = {id_: row for id_, row in expected.items() if id_ not in deleted}
        expected |= {id_: (float(id_), float(number)) for id_ in ids}
        assert rows_of(copy) == expected
        assert len(copy) == len(expected)
        asked = np.arange(-6, 61)
        assert copy.has(asked).tolist() == [id_ in expected for id_ in asked.tolist()]


def test_other_threads_see_whole_rows_while_changes_are_applied(monkeypatch):
    monkeypatch.setattr(feed, "_FIRST_ROWS", 4)
    monkeypatch.setattr(feed, "_ROWS_AT_ONCE", 64)
    copy, ids, done = TableCopy(), np.arange(4000), threading.Event()
    spec = table_spec(dim=16, buckets=4)

    def apply():
        for number in range(1, 41):
            part = ids[: 100 * number]
            rows = np.repeat((part * 1000 + number).astype(np.float32)[:, None], 16, axis=1)
            copy.apply(Change(0, spec, (), part[::7].copy(), part, rows, whole=True, cursor={}))
        done.set()

    writer = threading.Thread(target=apply)
    writer.start()
    try:
        while not done.is_set():
            seen = copy.rows(ids, missing=-1)
            if seen.shape[1]:
                assert (seen == seen[:, :1]).all()
                there = seen[:, 0] >= 0
                assert (seen[there, 0] // 1000 == ids[there]).all()
            assert copy.has(copy.ids).sum() >= 0
            assert len(copy) <= ids.size
    finally:
        writer.join()
    assert (copy.rows(ids)[:, 0] == ids * 1000 + 40).all()


def test_a_look_up_has_its_turn_after_the_part_that_is_written(monkeypatch):
    monkeypatch.setattr(feed, "_ROWS_AT_ONCE", 64)
    copy, ids, seen, write = TableCopy(), np.arange(640), [], copy_kernels.write
    reader = threading.Thread(target=lambda: seen.append(int(copy.has(ids).sum())))

    def written(*arguments):
        write(*arguments)
        if reader.ident is None:
            reader.start()
            wait_until(copy._lock.next.locked)

    monkeypatch.setattr(copy_kernels, "write", written)
    rows = np.ones((640, 2), np.float32)
    copy.apply(Change(0, table_spec(dim=2), (), array(), ids, rows, whole=True, cursor={}))
    reader.join()
    assert seen == [64]
    assert len(copy) == 640


def test_it_grows_far_beyond_what_it_began_with(monkeypatch):
    monkeypatch.setattr(feed, "_FIRST_ROWS", 4)
    copy, random = TableCopy(), np.random.default_rng(3)
    ids = np.unique(random.integers(-(2**63), 2**63 - 1, 30_000))
    rows = random.standard_normal((ids.size, 2)).astype(np.float32)
    change = change_of(0, [], [], [])
    for begin in range(0, ids.size, 700):
        copy.apply(replace(change, ids=ids[begin : begin + 700], rows=rows[begin : begin + 700]))
    copy.apply(replace(change, deleted=ids[::3].copy()))
    kept = np.delete(np.arange(ids.size), np.s_[::3])
    assert np.array_equal(copy.rows(ids[kept]), rows[kept])
    assert not copy.has(ids[::3]).any()
    assert len(copy) == kept.size


def test_an_id_without_a_row_gives_what_is_asked_for():
    copy = TableCopy()
    copy.apply(change_of(1, [], [], [5]))
    assert copy.rows([5, 6]).tolist() == [[5, 1], [0, 0]]
    assert copy.rows([6], missing=-1).tolist() == [[-1, -1]]


def test_rows_of_another_width_are_refused():
    copy = TableCopy()
    copy.apply(change_of(1, [], [], [5]))
    with pytest.raises(InvalidRequest, match="another width"):
        copy.apply(replace(change_of(2, [], [], [6]), rows=np.ones((1, 3), np.float32)))
    assert rows_of(copy) == {5: (5, 1)}


def test_a_file_holds_rows_and_cursor(tmp_path):
    copy, path = TableCopy(), tmp_path / "copy"
    assert len(TableCopy.load(path)) == 0
    copy.save(path)
    assert TableCopy.load(path).cursor is None
    copy.apply(change_of(7, [], [], [5, 6]))
    copy.save(path)
    again = TableCopy.load(path)
    assert (rows_of(again), again.cursor) == (rows_of(copy), {"number": 7})
    whole = path.read_bytes()
    path.write_bytes(whole[:50])
    with pytest.raises(DamagedData, match="not a copy of a table"):
        TableCopy.load(path)


def test_a_flipped_bit_in_the_file_of_a_copy_is_found_or_changes_nothing(tmp_path):
    copy, path = TableCopy(), tmp_path / "copy"
    copy.apply(change_of(7, [], [], list(range(100))))
    copy.save(path)
    seed = drawn_seed()
    whole, chance = path.read_bytes(), random.Random(seed)
    # The first array says in text how many items it has.
    shape = whole.index(b"(100,)") + 1
    for at in [shape, *(chance.randrange(len(whole)) for _ in range(300))]:
        damaged = bytearray(whole)
        damaged[at] ^= 1 << (0 if at == shape else chance.randrange(8))
        path.write_bytes(damaged)
        with suppress(DamagedData):
            again = TableCopy.load(path)
            assert (rows_of(again), again.cursor) == (rows_of(copy), copy.cursor), f"byte {at}"


def test_the_file_of_a_copy_from_before_it_had_a_checksum_is_read(tmp_path):
    ids, rows = np.array([5, 6], np.int64), np.ones((2, 2), np.float32)
    cursor = np.frombuffer(b'{"number": 7}', np.uint8)
    with (tmp_path / "copy").open("wb") as file:
        np.savez(file, ids=ids, rows=rows, cursor=cursor)
    copy = TableCopy.load(tmp_path / "copy")
    assert (rows_of(copy), copy.cursor) == ({5: (1, 1), 6: (1, 1)}, {"number": 7})
