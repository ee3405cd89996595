"""Rows of tables in checkpoints: they come back bit for bit on any number of shards, also through increments."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from ps_protocol.errors import DamagedData, InvalidRequest, ModelMismatch
from ps_protocol.model.row_optimizers import ROW_OPTIMIZERS
from ps_protocol.model.tables import Eviction, RowLife
from ps_server.checkpoint.checkpoint import Checkpoint
from ps_server.checkpoint.commit import commit
from ps_server.checkpoint.directory import begin, prune
from ps_server.checkpoint.files import CHECKED_BYTES
from ps_server.tables.row_memory import RowMemory
from ps_server.tables.step import RowStep
from tests.support.length import examples

from .tables import TableJob, same, size_of, spec_of, table_spec

IDS = st.lists(st.integers(-20, 20), min_size=1, max_size=12, unique=True)
ADMITS = RowLife(admit_after=2)
COUNTS = RowLife(max_rows=1000, eviction=Eviction.LFU)
EVENTS = st.one_of(
    st.tuples(st.just("push"), IDS, st.integers(0, 99)),
    st.tuples(st.just("load"), IDS, st.integers(0, 99)),
    st.tuples(st.just("drop"), IDS, IDS),
    st.tuples(st.just("move"), st.integers(0, 7), st.integers(0, 1)),
    st.tuples(st.just("save"), st.booleans(), st.none()),
)


def ids_of(*ids: int) -> np.ndarray:
    return np.array(ids, np.int64)


def happens(job: TableJob, event: tuple, directory: Path | None = None) -> None:
    kind, first, then = event
    if kind == "push":
        job.push(ids_of(*first), then)
    elif kind == "load":
        job.load(ids_of(*first), then)
    elif kind == "drop":
        job.drop(ids_of(*first), ids_of(*then))
    elif kind == "move":
        job.move(first, then)
    elif directory and first:
        job.save(directory, full_every=3)
    elif directory:
        job.parts(begin(directory), full_every=3)  # nobody commits it


@examples(40)
@given(
    st.sampled_from(sorted(ROW_OPTIMIZERS)),
    st.sampled_from([RowLife(), ADMITS, COUNTS]),
    st.lists(EVENTS, max_size=12),
    st.sampled_from([1, 2, 3]),
    st.booleans(),
)
def test_whatever_happened_between_checkpoints_the_last_one_gives_everything_back_on_any_number_of_shards(
    optimizer: str, life: RowLife, events: list, shards: int, on_disk: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        memory = RowMemory(1, segment_bytes=1 << 10) if on_disk else None
        job = TableJob.of(table_spec(optimizer=optimizer, life=life), shards=2, memory=memory)
        for event in events:
            happens(job, event, directory)
        increment, full = job.save(directory, full_every=4), job.save(directory)
        for checkpoint in (increment, full):
            checkpoint.verify()
            assert same(TableJob.restored(checkpoint, shards, memory).contents(), job.contents())


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 2)])
def test_several_tables_come_back_with_waiting_ids_and_counters(tmp_path: Path, before: int, after: int) -> None:
    job = TableJob.of(
        table_spec("ads", 3, "adam", ADMITS), table_spec("a/b", 5, "rowwise_adagrad", COUNTS), shards=before
    )
    for step in range(6):
        job.push(np.arange(step, 40 + step * step), step, number=0)
        job.push(np.arange(-50, 10 * step), step, number=1)
    checkpoint = job.save(tmp_path)
    checkpoint.verify()
    restored = TableJob.restored(checkpoint, after)
    assert same(restored.contents(), job.contents())
    assert sum(tables[0].waiting for tables in restored.shards) == sum(tables[0].waiting for tables in job.shards) > 0
    for each in (job, restored):
        each.push(np.arange(80), 9)
    assert same(restored.contents(), job.contents())


def test_columns_larger_than_a_checksum_are_cut_and_joined_anywhere(tmp_path: Path) -> None:
    job = TableJob.of(table_spec(dim=7))
    job.push(np.arange(60_000))
    assert 2 * CHECKED_BYTES / 3 < 60_000 * 7 * 4 / 2
    checkpoint = job.save(tmp_path)
    checkpoint.verify()
    assert same(TableJob.restored(checkpoint, 3).contents(), job.contents())


def test_safetensors_reads_the_rows_of_a_checkpoint_directly(tmp_path: Path) -> None:
    job = TableJob.of(table_spec(), shards=1)
    job.push(ids_of(5, -3, 1 << 62))
    with safe_open(job.save(tmp_path).folder / "model/tables/ads/rows-00001-of-00001.safetensors", "np") as file:
        ids, rows, state = (file.get_tensor(name) for name in ("ids", "rows", "state"))
        assert set(file.keys()) == {"index", "ids", "last_use", "rows", "state"}
    assert sorted(ids) == [-3, 5, 1 << 62]
    wanted = np.empty((3, 3), np.float32)
    job.shards[0][0].look_up(ids, wanted)
    assert np.array_equal(rows, wanted)
    assert state.shape == (3, 3)


# -- increments


def test_an_increment_after_one_percent_of_the_rows_changed_takes_at_most_three_percent_of_the_bytes(
    tmp_path: Path,
) -> None:
    job = TableJob.of(table_spec(dim=16, optimizer="rowwise_adagrad"), shards=1)
    job.push(np.arange(100_000))
    full = job.save(tmp_path, full_every=2)
    job.push(np.random.default_rng(1).choice(100_000, 900, replace=False))
    job.drop(np.arange(100), ids_of())
    increment = job.save(tmp_path, full_every=2)
    share = size_of(increment) / size_of(full)
    print(f"increment: {size_of(increment)} of {size_of(full)} bytes, {share:.2%}")
    assert share <= 0.03
    assert same(TableJob.restored(increment, 2).contents(), job.contents())


def test_every_so_many_checkpoints_one_holds_everything(tmp_path: Path) -> None:
    job = TableJob.of(table_spec())
    job.push(np.arange(100))
    lengths = []
    for step in range(6):
        job.push(np.arange(step), step)
        lengths.append(len(job.save(tmp_path, full_every=3).lineage("model", "ads")))
    assert lengths == [1, 2, 3, 1, 2, 3]


def test_where_most_rows_changed_everything_is_written(tmp_path: Path) -> None:
    job = TableJob.of(table_spec())
    job.push(np.arange(100))
    job.save(tmp_path, full_every=9)
    job.push(np.arange(90))
    assert len(job.save(tmp_path, full_every=9).lineage("model", "ads")) == 1


def test_a_table_that_was_brought_back_from_elsewhere_is_written_whole(tmp_path: Path) -> None:
    job = TableJob.of(table_spec())
    job.push(np.arange(100))
    again = TableJob.restored(job.save(tmp_path, full_every=9), 2)
    again.push(ids_of(1))
    checkpoint = again.save(tmp_path, full_every=9)
    assert len(checkpoint.lineage("model", "ads")) == 1
    assert same(TableJob.restored(checkpoint, 2).contents(), again.contents())


def test_a_bucket_that_moved_is_whole_in_the_next_increment_and_the_others_are_not(tmp_path: Path) -> None:
    job = TableJob.of(table_spec())
    job.push(np.arange(400))
    full = job.save(tmp_path, full_every=9)
    job.move(0, 1)
    increment = job.save(tmp_path, full_every=9)
    assert len(increment.lineage("model", "ads")) == 2
    assert size_of(increment) < size_of(full) / 2
    assert same(TableJob.restored(increment, 3).contents(), job.contents())


def test_when_too_many_rows_went_to_tell_which_everything_is_written(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("ps_server.tables.changes.KEPT_CHANGES", 8)
    job = TableJob.of(table_spec(), shards=1)
    job.push(np.arange(100))
    job.save(tmp_path, full_every=9)
    job.drop(np.arange(9), ids_of())
    checkpoint = job.save(tmp_path, full_every=9)
    assert len(checkpoint.lineage("model", "ads")) == 1
    assert same(TableJob.restored(checkpoint, 1).contents(), job.contents())


def test_an_increment_never_goes_on_from_an_attempt_that_was_not_completed(tmp_path: Path) -> None:
    job = TableJob.of(table_spec())
    job.push(np.arange(100))
    first = job.save(tmp_path, full_every=9)
    job.push(np.arange(5), 1)
    job.parts(begin(tmp_path), full_every=9)
    job.push(np.arange(5, 8), 2)
    last = job.save(tmp_path, full_every=9)
    assert [each.folder for each in last.lineage("model", "ads")] == [last.folder, first.folder]
    assert same(TableJob.restored(last, 1).contents(), job.contents())


def test_a_checkpoint_stays_as_long_as_another_goes_on_from_it(tmp_path: Path) -> None:
    job = TableJob.of(table_spec())
    job.push(np.arange(100))
    saved = []
    for step in range(5):
        job.push(ids_of(step), step)
        saved.append(job.save(tmp_path, full_every=3))
    assert prune(tmp_path, 3) == []
    assert prune(tmp_path, 1) == [each.folder for each in saved[:3]]
    saved.append(job.save(tmp_path, full_every=3))
    assert prune(tmp_path, 1) == []
    saved[-1].verify()
    assert same(TableJob.restored(saved[-1], 1).contents(), job.contents())


# -- what is wrong


def chain(directory: Path) -> tuple[Checkpoint, Checkpoint]:
    job = TableJob.of(table_spec())
    job.push(np.arange(100))
    full = job.save(directory, full_every=9)
    job.push(np.arange(5), 1)
    return full, job.save(directory, full_every=9)


def test_a_base_that_is_not_there_is_named(tmp_path: Path) -> None:
    full, increment = chain(tmp_path)
    shutil.rmtree(full.folder)
    for use in (increment.verify, lambda: TableJob.restored(increment, 1)):
        with pytest.raises(DamagedData, match=r"touched since checkpoint-00000001, and that is not beside it"):
            use()


def test_another_checkpoint_in_the_place_of_the_base_is_noticed(tmp_path: Path) -> None:
    full, increment = chain(tmp_path)
    shutil.rmtree(full.folder)
    chain(tmp_path / "other")
    shutil.copytree(tmp_path / "other/checkpoint-00000002", full.folder)
    with pytest.raises(DamagedData, match=r"with a manifest of checksum [0-9a-f]{16}; actual: [0-9a-f]{16}"):
        increment.verify()


def test_a_byte_that_changed_in_the_base_is_found_by_reading_the_increment(tmp_path: Path) -> None:
    full, increment = chain(tmp_path)
    path = next(full.folder.rglob("rows-00001*"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    for use in (increment.verify, lambda: TableJob.restored(increment, 1)):
        with pytest.raises(DamagedData, match=r"checkpoint-00000001/model/tables/ads/rows-00001.*variable: ads\["):
            use()


def test_parts_without_a_table_or_with_one_twice_are_no_checkpoint(tmp_path: Path) -> None:
    job = TableJob.of(table_spec(), table_spec("users"))
    folder = begin(tmp_path)
    parts = job.parts(folder)
    with pytest.raises(InvalidRequest, match="the shards differ"):
        commit(folder, [job.shard_map], parts[:1], {}, 1.0)
    lacking = [parts[0], type(parts[1])(**{**_fields(parts[1]), "tables": parts[1].tables[:1]})]
    with pytest.raises(InvalidRequest, match=r"the tables differ; expected: \('users', 1\)"):
        commit(folder, [job.shard_map], lacking, {}, 1.0)


def _fields(part) -> dict:
    return {name: getattr(part, name) for name in part.__slots__}


def test_a_table_that_does_not_fit_the_checkpoint_is_one_error_that_names_it(tmp_path: Path) -> None:
    checkpoint = TableJob.of(table_spec(), table_spec("users")).save(tmp_path)
    with pytest.raises(ModelMismatch) as refused:
        checkpoint.check_matches(spec_of(table_spec(dim=5, optimizer="ftrl"), table_spec("users")))
    assert "table 'ads': dim 5 instead of 3" in str(refused.value)
    assert "table 'ads': optimizer ftrl instead of adagrad" in str(refused.value)
    assert "users" not in str(refused.value)


def test_updates_counted_without_rows_here_come_back(tmp_path: Path) -> None:
    job = TableJob.of(table_spec(optimizer="adam"), shards=1)
    table = job.shards[0][0]
    table.apply(RowStep(0, ids_of(), np.empty((0, 3), np.float32), 41, table.spec.options))
    assert TableJob.restored(job.save(tmp_path), 2).shards[1][0].updates == 41
