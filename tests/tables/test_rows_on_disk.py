"""Tables with little memory: the same bits as with much, whatever is in memory and whatever the disk does."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ps_protocol.errors import DamagedData, InvalidRequest
from ps_protocol.model.tables import Eviction, Ids, RowLife, TableSpec, size_in_bytes
from ps_server.tables import record_file
from ps_server.tables.bucket_contents import BucketContents
from ps_server.tables.paged_rows import PagedRows
from ps_server.tables.row_memory import FEWEST_ROWS, RowMemory
from ps_server.tables.step import RowStep
from ps_server.tables.table import ShardTable
from tests.support.descriptors import referring
from tests.support.length import paired
from tests.support.seeds import drawn_seed
from tests.tables.samples import ids_there, random_ids, spec, use, values

LIVES = {
    "plain": RowLife(),
    "admitted": RowLife(admit_after=2, expire_after_updates=25),
    "expiring": RowLife(expire_after_updates=15),
    "lru": RowLife(max_rows=600, eviction=Eviction.LRU),
    "lfu": RowLife(max_rows=600, eviction=Eviction.LFU),
}


def memory_of(folder: Path, of: TableSpec, rows: int) -> RowMemory:
    """Memory for about so many of 1,000 rows, besides their ids and maps; for FEWEST_ROWS at least."""
    return RowMemory(27_000 + rows * (9 + 4 * of.width) if rows else 1, folder, 3, 1 << 10)


def paged(table: ShardTable) -> PagedRows:
    held = table._store.paged
    assert held is not None
    return held


def same(first: BucketContents, second: BucketContents) -> bool:
    return [bytes(piece) for piece in first.pieces()] == [bytes(piece) for piece in second.pieces()] and (
        first.updates == second.updates
    )


@dataclass
class Pair:
    """Two tables with the same history: one with little memory, one without a limit."""

    little: ShardTable
    much: ShardTable

    def both(self) -> Iterator[ShardTable]:
        yield self.little
        yield self.much

    def check(self) -> None:
        assert self.little.rows == self.much.rows
        assert self.little.waiting == self.much.waiting
        for bucket in range(self.little.spec.buckets):
            assert same(self.little.contents(bucket), self.much.contents(bucket))
        consistent(self.little)

    def counters(self) -> list[tuple[int, ...]]:
        return [
            (table.inserted, table.expired, table.evicted, table.updates, table.changes, table.waiting_changes)
            for table in self.both()
        ]


def consistent(table: ShardTable) -> None:
    """Every row has exactly one place, and the numbers of free ones are right."""
    held = paged(table)
    place = held.place[: table.rows].astype(np.int64)
    slots, records = place[place >= 0], -1 - place[place < 0]
    assert np.unique(slots).size == slots.size == held.in_memory
    assert (held._owner[slots] == np.flatnonzero(place >= 0)).all()
    homes = held._home[slots].astype(np.int64)
    alive = np.concatenate((records, homes[homes >= 0]))
    assert np.unique(alive).size == alive.size
    file = held._file
    if file is not None:
        assert (np.bincount(alive // file.per_segment, minlength=file.living.size) == file.living).all()
        assert file.rows == alive.size
    else:
        assert not records.size


def act(table: ShardTable, random: np.random.Generator, ids: Ids) -> Any:
    kind = random.integers(0, 20)
    some = random.permutation(ids)[: int(random.integers(1, 400))]
    if kind < 9:
        gradients = random.normal(size=(some.size, table.spec.dim)).astype(np.float32)
        table.apply(RowStep(0, some, gradients, table.updates + 1, table.spec.options))
    elif kind < 13:
        return values(table, some).tobytes()
    elif kind == 13:
        table.drop(some[:50], some[50:60])
    elif kind == 14:
        rows = random.normal(size=(some.size, table.spec.dim)).astype(np.float32)
        return table.load(some, rows, with_state=False, only_new=bool(random.integers(0, 2)))
    elif kind == 15:
        bucket = int(random.integers(0, table.spec.buckets))
        contents = table.contents(bucket)
        table.forget(bucket)
        table.put(contents)
    elif kind == 16:
        found = table.copy_ids(some)
        return [each.tobytes() for each in (found.ids, found.touched, found.rows, found.uses)]
    elif kind == 17:
        return (table.prepare(some), table.memory_ahead(some) and None)
    else:
        rows, waiting = table.to_drop(0.0, some[:5])
        table.drop(rows, waiting)
        return sorted(rows.tolist()), sorted(waiting.tolist())
    return None


@pytest.mark.parametrize(
    ("life", "of_optimizer"), paired(list(LIVES), [("sgd", 50), ("adagrad", 50), ("rowwise_adagrad", 0)]), ids=str
)
def test_a_random_history_gives_the_same_bits_with_memory_for_a_twentieth(
    tmp_path: Path, life: str, of_optimizer: tuple[str, int]
) -> None:
    optimizer, rows = of_optimizer
    seed = drawn_seed()
    of = spec(optimizer, dim=3, life=LIVES[life])
    pair = Pair(ShardTable(of, range(of.buckets), memory_of(tmp_path, of, rows)), ShardTable(of, range(of.buckets)))
    ids = random_ids(np.random.default_rng(seed), 1000)
    for number in range(150):
        answers = [act(table, np.random.default_rng([seed, number]), ids) for table in pair.both()]
        assert answers[0] == answers[1]
        if number % 10 == 9:
            pair.check()
    first, second = pair.counters()
    assert first == second
    held = paged(pair.little)
    assert held.missed > 0
    assert held.disk_bytes > 0
    assert held.disk_bytes < 4 * 1000 * held._rows_file.record_bytes, "dead records take the disk"


def _table(folder: Path, *, rows: int = 0, **of: Any) -> ShardTable:
    of = spec("adagrad", dim=3, **of)
    return ShardTable(of, range(of.buckets), memory_of(folder, of, rows))


def test_memory_stays_within_the_limit_while_the_table_grows(tmp_path: Path) -> None:
    of = spec("adagrad", dim=16)
    memory = RowMemory(2 << 20, tmp_path)
    table = ShardTable(of, range(of.buckets), memory)
    for begin in range(0, 40_000, 500):
        use(table, range(begin, begin + 500))
        assert table.memory_bytes <= memory.limit_bytes * 1.1
    assert table.on_disk > 30_000
    assert table.size_bytes > 5 << 20
    consistent(table)


def test_memory_stays_within_the_limit_while_buckets_come(tmp_path: Path) -> None:
    of = spec("adagrad", dim=8, buckets=64)
    whole = ShardTable(of, range(of.buckets))
    use(whole, range(40_000))
    memory = RowMemory(2_500_000, tmp_path)
    table = ShardTable(of, [], memory)
    for bucket in range(of.buckets):
        table.put(whole.contents(bucket))
        assert table.memory_bytes <= memory.limit_bytes * 1.1
    assert all(same(table.contents(bucket), whole.contents(bucket)) for bucket in range(of.buckets))
    consistent(table)


def test_rows_used_often_stay_in_memory(tmp_path: Path) -> None:
    table = _table(tmp_path, rows=300)
    often = list(range(100))
    for begin in range(0, 8000, 100):
        use(table, often)
        use(table, range(100 + begin % 900, 200 + begin % 900))
    before = paged(table).missed
    values(table, often)
    assert paged(table).missed - before < 10


def test_a_lookup_brings_the_rows_that_its_push_needs(tmp_path: Path) -> None:
    table = _table(tmp_path, rows=300)
    use(table, range(1000))
    wanted = list(range(50))
    values(table, wanted)
    before = paged(table).missed
    use(table, wanted)
    assert paged(table).missed == before


def test_a_push_larger_than_the_memory_is_made_in_pieces(tmp_path: Path) -> None:
    pair = Pair(_table(tmp_path), ShardTable(spec("adagrad", dim=3), range(8)))
    ids = np.arange(1000)
    gradients = np.random.default_rng(1).normal(size=(1000, 3)).astype(np.float32)
    for table in pair.both():
        use(table, ids, gradients)
        use(table, ids[::-1].copy(), gradients)
    pair.check()
    assert paged(pair.little).in_memory < 50


def test_tables_of_one_shard_share_its_memory(tmp_path: Path) -> None:
    memory = RowMemory(400_000, tmp_path)
    small, large = (ShardTable(spec("adagrad", dim=16, name=name), range(8), memory) for name in ("small", "large"))
    for begin in range(0, 10_000, 100):
        use(large, range(begin, begin + 100))
        use(small, range(50))
    assert small.on_disk == 0
    assert large.on_disk > 5000
    assert small.memory_bytes + large.memory_bytes < 1.2 * memory.limit_bytes


def test_a_table_that_is_gone_takes_nothing_of_the_memory(tmp_path: Path) -> None:
    memory = RowMemory(400_000, tmp_path)
    first = ShardTable(spec("adagrad", dim=16), range(8), memory)
    use(first, range(3000))
    second = ShardTable(spec("adagrad", dim=16), range(8), memory)
    del first
    assert list(memory._tables) == [paged(second)]


def test_a_copy_for_a_checkpoint_is_read_later_while_rows_change_and_segments_are_written_again(tmp_path: Path) -> None:
    table = _table(tmp_path, rows=50)
    use(table, range(1000))
    kept = table.keep_values(None)
    assert kept is not None
    ids = table._store.ids[:1000].copy()
    expected = table.copy_ids(ids).rows
    random = np.random.default_rng(2)
    for _ in range(30):
        use(table, random.permutation(1000)[:300], random.normal(size=(300, 3)).astype(np.float32))
    table.drop(np.arange(100), np.empty(0, np.int64))
    chosen = random.permutation(1000)
    assert (kept.read(chosen) == expected[chosen]).all()
    size = paged(table).disk_bytes
    del kept
    for _ in range(30):
        use(table, random.permutation(1000)[:300])
    assert paged(table).disk_bytes <= size
    consistent(table)


# -- a disk that is full, or gives back other bytes


class Full:
    """``os``, of a disk that takes nothing as long as ``full``."""

    def __init__(self) -> None:
        self.full = True

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _check(self) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")

    def posix_fallocate(self, *arguments: int) -> None:
        self._check()
        os.posix_fallocate(*arguments)

    def pwrite(self, *arguments: Any) -> int:
        self._check()
        return os.pwrite(*arguments)


def test_on_a_full_disk_rows_stay_in_memory_and_leave_it_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Full()
    caplog.set_level("INFO")
    monkeypatch.setattr(record_file, "os", disk)
    pair = Pair(_table(tmp_path), ShardTable(spec("adagrad", dim=3), range(8)))
    random = np.random.default_rng(3)

    def train() -> None:
        for _ in range(20):
            ids = random.permutation(1000)[:200]
            gradients = random.normal(size=(200, 3)).astype(np.float32)
            for table in pair.both():
                use(table, ids, gradients)
        for table in pair.both():
            table.put(table.contents(1))

    train()
    assert pair.little.on_disk == 0
    pair.check()
    assert [each.message for each in caplog.records if "table 'items': rows stay in memory" in each.message]
    assert str(tmp_path) in caplog.text
    disk.full = False
    train()
    assert paged(pair.little).in_memory < 50
    assert "takes rows again" in caplog.text
    disk.full = True
    train()
    pair.check()


@pytest.mark.parametrize("damage", ["bit", "cut", "zeros", "swapped"])
def test_a_damaged_record_is_refused_and_named(tmp_path: Path, damage: str) -> None:
    table = _table(tmp_path)
    use(table, range(1000), np.ones((1000, 3), np.float32))
    held = paged(table)
    file = held._rows_file
    row = int(np.flatnonzero(held.place[:1000] < 0)[0])
    at = (-1 - int(held.place[row])) * file.record_bytes
    record = os.pread(file.descriptor, file.record_bytes, at)
    if damage == "bit":
        os.pwrite(file.descriptor, record[:30] + bytes([record[30] ^ 4]) + record[31:], at)
    elif damage == "cut":
        os.ftruncate(file.descriptor, at + 7)
    elif damage == "zeros":
        os.pwrite(file.descriptor, bytes(file.record_bytes), at)
    else:
        # A whole record, of another place.
        other = at + file.record_bytes * (1 if at == 0 else -1)
        os.pwrite(file.descriptor, os.pread(file.descriptor, file.record_bytes, other), at)
    damaged = int(table._store.ids[row])
    with pytest.raises(DamagedData, match=f"table 'items' in {tmp_path} is damaged: the row of id {damaged}") as found:
        values(table, [damaged])
    assert (found.value.variable, found.value.shard) == ("items", "3")
    with pytest.raises(DamagedData):
        table.contents(int(np.flatnonzero([damaged in table.ids_of(bucket) for bucket in range(8)])[0]))
    if damage != "cut":
        table.drop(np.array([damaged]), np.empty(0, np.int64))
        assert len(ids_there(table)) == 999
        consistent(table)


def test_a_segment_with_damaged_ids_is_not_emptied_for_ever(tmp_path: Path) -> None:
    table = _table(tmp_path)
    ids = np.arange(1000)
    use(table, ids, np.ones((1000, 3), np.float32))
    held = paged(table)
    file = held._rows_file
    place = held.place[:1000].astype(np.int64)
    damaged = np.flatnonzero(place < 0)[::7]
    for record in -1 - place[damaged]:
        os.pwrite(file.descriptor, b"\xff" * 8, int(record) * file.record_bytes + 8)
    others = np.setdiff1d(ids, table._store.ids[damaged])

    def train() -> None:
        for seed in range(50):
            some = np.random.default_rng(seed).permutation(others)[:300]
            use(table, some, np.ones((300, 3), np.float32))

    with pytest.raises(DamagedData, match="are not what was written"):
        train()


def test_no_flipped_bit_of_a_record_goes_unseen(tmp_path: Path) -> None:
    table = _table(tmp_path)
    use(table, range(100), np.ones((100, 3), np.float32))
    held = paged(table)
    file = held._rows_file
    row = int(np.flatnonzero(held.place[:100] < 0)[0])
    at, damaged = (-1 - int(held.place[row])) * file.record_bytes, int(table._store.ids[row])
    record = os.pread(file.descriptor, file.record_bytes, at)
    for bit in range(8 * len(record)):
        changed = bytearray(record)
        changed[bit // 8] ^= 1 << bit % 8
        os.pwrite(file.descriptor, changed, at)
        with pytest.raises(DamagedData):
            values(table, [damaged])


def test_of_many_rows_that_leave_together_the_file_has_room_for_as_many_again_and_no_more(tmp_path: Path) -> None:
    """One lot fills several segments."""
    of = spec("adagrad", dim=8)
    table = ShardTable(of, range(of.buckets), RowMemory(27 * 5_000 + 2_500 * (9 + 4 * of.width), tmp_path, 0, 1 << 12))
    chance = np.random.default_rng(3)
    ids = random_ids(chance, 5_000)
    use(table, ids)
    most = 0
    for _ in range(200):
        use(table, np.unique(chance.choice(ids, 300)))
        file = paged(table)._file
        assert file is not None
        most = max(most, paged(table).on_disk)
        lot = paged(table).lot_rows
        assert file.living.size * file.per_segment <= record_file.most_records(most + lot, lot) + 4 * file.per_segment


def test_rows_on_disk_are_never_fewer_than_none_while_others_come(tmp_path: Path, monkeypatch: Any) -> None:
    of = spec("sgd")
    table = ShardTable(of, range(of.buckets), RowMemory(1 << 20, tmp_path))
    seen: list[int] = []
    take = PagedRows._take

    def seen_meanwhile(self: PagedRows, count: int) -> Any:
        taken = take(self, count)
        seen.append(table.on_disk)
        return taken

    monkeypatch.setattr(PagedRows, "_take", seen_meanwhile)
    use(table, range(100))
    assert seen == [0]


def test_the_file_has_no_name_and_goes_with_the_table(tmp_path: Path) -> None:
    table = _table(tmp_path)
    use(table, range(1000))
    assert os.fstat(paged(table)._rows_file.descriptor).st_nlink == 0
    assert list(tmp_path.iterdir()) == []
    assert referring(str(tmp_path)) == 1
    del table
    assert referring(str(tmp_path)) == 0


def test_the_limit_counts_ids_and_maps(tmp_path: Path) -> None:
    table = _table(tmp_path)
    use(table, range(1000))
    assert paged(table).in_memory <= 2 * FEWEST_ROWS


def test_memory_that_hardly_suffices_is_said_once_while_it_hardly_suffices(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = _table(tmp_path)
    use(table, range(2000))
    caplog.clear()
    for most, said in ((FEWEST_ROWS, 0), (500, 0), (FEWEST_ROWS, 0), (5000, 0), (FEWEST_ROWS, 1), (50, 1)):
        paged(table)._say_crowded(most)
        assert caplog.text.count("hardly a row stays in memory") == said


def test_a_table_with_a_limit_of_its_own_has_the_share_of_the_buckets_that_are_here(tmp_path: Path) -> None:
    of = spec("adagrad", dim=16, life=RowLife(memory_bytes=800_000))
    whole, half = ShardTable(of, range(8)), ShardTable(of, range(4), RowMemory(folder=tmp_path))
    use(whole, range(10_000))
    for bucket in range(4):
        half.put(whole.contents(bucket))
    assert whole.on_disk > 3000
    assert 600_000 < whole.memory_bytes < 850_000
    assert half.memory_bytes < 450_000
    assert all(same(half.contents(bucket), whole.contents(bucket)) for bucket in range(4))
    half.forget(3)
    use(half, [int(each) for each in half.ids_of(0)])
    assert half.memory_bytes < 350_000


def test_the_smaller_one_of_two_limits_holds_and_a_table_without_one_has_the_rest(tmp_path: Path) -> None:
    memory = RowMemory(1_000_000, tmp_path)
    limited = ShardTable(spec("adagrad", dim=16, life=RowLife(memory_bytes=300_000)), range(8), memory)
    free = ShardTable(spec("adagrad", dim=16, name="free"), range(8), memory)
    for begin in range(0, 8000, 200):
        use(limited, range(begin, begin + 200))
        use(free, range(begin, begin + 200))
    assert limited.memory_bytes < 400_000
    assert 500_000 < free.memory_bytes < 900_000


def test_without_any_limit_all_rows_are_in_memory(tmp_path: Path) -> None:
    table = ShardTable(spec(), range(8), RowMemory(folder=tmp_path))
    assert table.paged is None


@pytest.mark.parametrize(("text", "size"), [("4GB", 4 << 30), ("512 mb", 512 << 20), ("1.5KiB", 1536), (77, 77)])
def test_a_size_is_a_number_of_bytes_with_a_unit(text: int | str, size: int) -> None:
    assert size_in_bytes(text) == size


@pytest.mark.parametrize(
    "size",
    [
        *("", "GB", "-1", "4 GBs", "1e9", "four", "４GB", f"{'9' * 400}GB", "8388608TB", 1 << 63, -1),
        pytest.param(1 << 20_000, id="more digits than Python prints"),
    ],
)
def test_what_is_no_size_is_refused(size: int | str) -> None:
    with pytest.raises(InvalidRequest, match="no number of bytes"):
        size_in_bytes(size)


def test_the_log_says_once_that_ids_and_maps_leave_no_memory_for_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    of = spec(dim=3)
    table = ShardTable(of, range(of.buckets), RowMemory(1 << 10, tmp_path))
    use(table, range(1000), np.ones((1000, 3), np.float32))
    assert "hardly a row stays in memory" not in caplog.text
    for begin in (1000, 1500):
        use(table, range(begin, begin + 500), np.ones((500, 3), np.float32))
        use(table, [1], np.ones((1, 3), np.float32))
    table.drop(np.arange(1000, 2000), np.empty(0, np.int64))
    use(table, [1], np.ones((1, 3), np.float32))
    use(table, range(1000, 2000), np.ones((1000, 3), np.float32))
    assert caplog.text.count("hardly a row stays in memory") == 1


def test_a_file_whose_number_is_that_of_another_by_now_is_left_alone_when_it_goes(tmp_path: Path) -> None:
    table = _table(tmp_path, rows=10)
    use(table, range(100))
    rows_file = paged(table)._rows_file
    other = os.open(tmp_path, os.O_RDONLY)
    # In one step: another thread would take a number that is free, or have freed a lower one.
    os.dup2(other, rows_file.descriptor)
    rows_file.__del__()
    assert os.path.samestat(os.fstat(rows_file.descriptor), os.fstat(other))
    rows_file.close()
    os.close(other)


@pytest.mark.parametrize("seconds", [0.0, 1.0], ids=["quick", "slow"])
def test_of_many_rows_the_others_are_announced_where_the_first_ones_were_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    table = _table(tmp_path)
    use(table, range(1000), np.ones((1000, 3), np.float32))
    asked: list[tuple[int, bool]] = []
    read = record_file.RecordFile._read

    def watched(self: Any, rising: Any, *others: Any, announce: bool) -> int:
        asked.append((rising.size, announce))
        return read(self, rising, *others, announce=announce)

    clock = iter(np.arange(100) * seconds)
    monkeypatch.setattr(record_file, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    monkeypatch.setattr(record_file.RecordFile, "_read", watched)
    rows = table.copy_ids(np.arange(900)).rows
    assert [announce for _, announce in asked] == [False, bool(seconds)]
    assert asked[0][0] < asked[1][0]
    other = ShardTable(spec("adagrad", dim=3), range(8))
    use(other, range(1000), np.ones((1000, 3), np.float32))
    assert (rows == other.copy_ids(np.arange(900)).rows).all()
