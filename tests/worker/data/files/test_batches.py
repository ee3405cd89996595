"""Files in one process: every row once an epoch, mixed by a seed, in batches of one size, from any layout of files."""

from __future__ import annotations

import itertools
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.errors import ConfigError
from ps_worker import files
from ps_worker.data.files.layout import LEAST_ROWS
from ps_worker.files import Ragged
from tests.support.length import examples
from tests.worker.data.files.made import folder, ids_of, parquet


def test_an_epoch_has_every_row_once_in_whole_batches_and_each_epoch_another_order(tmp_path: Path) -> None:
    count = folder(tmp_path, [300, 70, 1], group=100)
    batches = files.read(tmp_path, batch_size=32, seed=3)
    sizes = [len(batch["id"]) for batch in batches]
    assert sizes == [32] * 11 + [count - 32 * 11]
    assert len(batches) == len(sizes)
    second, third = ids_of(batches), ids_of(batches)
    assert sorted(second) == sorted(third) == list(range(count))
    assert second != third
    assert ids_of(files.read(tmp_path, batch_size=32, seed=3)) not in (second, third)


def test_the_same_seed_gives_the_same_order_and_another_seed_another_one(tmp_path: Path) -> None:
    folder(tmp_path, [500], group=50)
    orders = [ids_of(files.read(tmp_path, batch_size=7, seed=seed)) for seed in (1, 1, 2)]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]


def test_rows_of_small_row_groups_are_mixed_over_all_files(tmp_path: Path) -> None:
    folder(tmp_path, [1000] * 4, group=100)
    first = ids_of(files.read(tmp_path, batch_size=100))[:400]
    assert {id // 1000 for id in first} == {0, 1, 2, 3}
    assert all(abs(a - b) != 1 for a, b in itertools.pairwise(first[:20]))


def test_rows_of_a_large_row_group_are_mixed_within_windows_only(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", range(1000), group=1000)
    order = ids_of(files.read(tmp_path, batch_size=50, shuffle=100))
    assert order != list(range(1000))
    assert [sorted(order[at : at + 100]) for at in range(0, 1000, 100)] == [
        list(range(at, at + 100)) for at in range(0, 1000, 100)
    ]


def test_without_shuffling_rows_come_in_the_order_of_the_files(tmp_path: Path) -> None:
    count = folder(tmp_path, [130, 0, 5, 222], group=60)
    assert ids_of(files.read(tmp_path, batch_size=16, shuffle=False)) == list(range(count))


def test_the_last_rows_are_left_out_where_only_whole_batches_are_wanted(tmp_path: Path) -> None:
    folder(tmp_path, [100])
    batches = files.read(tmp_path, batch_size=30, drop_last=True)
    assert [len(batch["id"]) for batch in batches] == [30] * 3
    assert len(batches) == 3


def test_all_columns_of_a_row_stay_together(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    lists = [[i] * (i % 4) for i in range(500)]
    pq.write_table(pa.table({"id": range(500), "half": [i / 2 for i in range(500)], "list": lists}), path, 90)
    columns = {"id": files.ids("id"), "both": files.floats("id", "half"), "list": files.ids("list")}
    for batch in files.read(path, columns, batch_size=64, shuffle=70):
        assert batch["both"].tolist() == [[id, id / 2] for id in batch["id"].tolist()]
        assert isinstance(batch["list"], Ragged)
        values, offsets = batch["list"]
        parts = torch.tensor_split(values, offsets[1:])
        assert [part.tolist() for part in parts] == [[id] * (id % 4) for id in batch["id"].tolist()]


@examples(60)
@given(
    sizes=st.lists(st.integers(0, 400), min_size=1, max_size=6).filter(any),
    group=st.integers(1, 300),
    window=st.integers(1, 300),
    batch=st.integers(1, 200),
    seed=st.integers(0, 2**64 - 1),
    shuffle=st.booleans(),
)
def test_any_layout_of_files_gives_every_row_once(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    group: int,
    window: int,
    batch: int,
    seed: int,
    shuffle: bool,
) -> None:
    root = tmp_path_factory.mktemp("files")
    count = folder(root, sizes, group)
    batches = files.read(root, ["id"], batch_size=batch, seed=seed, shuffle=window if shuffle else False)
    for _ in range(2):
        order = ids_of(batches)
        assert sorted(order) == list(range(count))
        assert shuffle or order == list(range(count))


def test_an_iteration_that_is_left_early_begins_the_next_epoch_afterwards(tmp_path: Path) -> None:
    folder(tmp_path, [400], group=40)
    batches = files.read(tmp_path, batch_size=10, seed=5)
    next(iter(batches))
    again = files.read(tmp_path, batch_size=10, seed=5)
    ids_of(again)
    assert ids_of(batches) == ids_of(again)
    batches.start_epochs(1)
    again.start_epochs(1)
    assert ids_of(batches) == ids_of(again)


def test_files_folders_lists_and_patterns_name_the_same_files(tmp_path: Path) -> None:
    for name in ("a/1.parquet", "a/b/2.parquet", "3.parquet"):
        parquet(tmp_path / name, [int(Path(name).stem)])
    (tmp_path / "a/_SUCCESS").touch()
    (tmp_path / "a/.hidden.parquet").write_text("not Parquet")
    (tmp_path / "_temporary").mkdir()
    parquet(tmp_path / "_temporary/4.parquet", [4])

    def found(paths: object) -> list[int]:
        return sorted(ids_of(files.read(paths, batch_size=4)))  # type: ignore[arg-type]

    assert found(tmp_path) == [1, 2, 3]
    assert found(str(tmp_path / "**/*.parquet")) == [1, 2, 3, 4]
    assert found([tmp_path / "3.parquet", tmp_path / "a", tmp_path / "a/1.parquet"]) == [1, 2, 3]
    assert found(tmp_path / "a/?.parquet") == [1]


def test_names_of_folders_are_columns(tmp_path: Path) -> None:
    parquet(tmp_path / "day=3/country=CH/a.parquet", [1])
    parquet(tmp_path / "day=4/country=__HIVE_DEFAULT_PARTITION__/a.parquet", [2])
    columns = {"id": files.ids("id"), "day": files.ids("day"), "country": files.hashed("country", fill=7)}
    (batch,) = files.read(tmp_path, columns, batch_size=4, shuffle=False)
    assert batch["day"].tolist() == [3, 4]
    assert batch["country"].tolist()[1] == 7
    assert batch["country"].tolist()[0] != 7


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_a_column_in_the_file_comes_before_the_name_of_its_folder(tmp_path: Path, kind: str) -> None:
    (tmp_path / "id=7/kind=a").mkdir(parents=True)
    if kind == "parquet":
        parquet(tmp_path / "id=7/kind=a/a.parquet", [1, 2])
    else:
        (tmp_path / "id=7/kind=a/a.csv").write_text("id,x\n1,0.5\n2,1\n")
    (batch,) = files.read(tmp_path, batch_size=4, shuffle=False)
    assert list(batch) == ["id", "x"]
    assert batch["id"].tolist() == [1, 2]


def test_relative_paths_are_those_of_the_call(tmp_path: Path, monkeypatch) -> None:
    folder(tmp_path / "data", [10])
    monkeypatch.chdir(tmp_path)
    batches = files.read("data", batch_size=4)
    monkeypatch.chdir("/")
    assert sorted(ids_of(batches)) == list(range(10))


def test_batches_are_what_the_transform_makes_of_them(tmp_path: Path) -> None:
    folder(tmp_path, [10])
    batches = files.read(tmp_path, batch_size=4, shuffle=False, transform=lambda batch: batch["id"] * 2)
    assert torch.cat(list(batches)).tolist() == list(range(0, 20, 2))


def test_batches_may_be_written_to(tmp_path: Path) -> None:
    folder(tmp_path, [10])
    for shuffle in (True, False):
        for batch in files.read(tmp_path, batch_size=4, shuffle=shuffle):
            batch["x"].mul_(2)
            batch["id"].add_(1)
        assert sorted(ids_of(files.read(tmp_path, batch_size=4))) == list(range(10))


@pytest.mark.parametrize(
    ("paths", "says"),
    [
        ("nothing/*.parquet", "no file matches"),
        ("nothing.parquet", "does not exist"),
        ([], "no file matches"),
        ("s3://bucket/a.parquet", "is not a path"),
        ("note.md", "format of .* is not known"),
        ("a.parquet.gz", "format of .* is not known"),
        (["a.parquet", "b.csv"], "different formats"),
        ("empty", "no file matches"),
        ("none.parquet", "have no rows"),
    ],
)
def test_paths_that_name_no_rows_are_refused(tmp_path: Path, monkeypatch, paths: str | list[str], says: str) -> None:
    monkeypatch.chdir(tmp_path)
    parquet(tmp_path / "a.parquet", [1])
    parquet(tmp_path / "none.parquet", [])
    for name in ("note.md", "a.parquet.gz", "b.csv"):
        (tmp_path / name).write_text("a\n1\n")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=says):
        files.read(paths, batch_size=4)


@pytest.mark.parametrize(
    "arguments",
    [{"batch_size": 0}, {"shuffle": -1}, {"on_bad_file": "ignore"}, {"format": "orc"}],
    ids=str,
)
def test_arguments_that_mean_nothing_are_refused(tmp_path: Path, arguments: dict[str, object]) -> None:
    parquet(tmp_path / "a.parquet", [1])
    with pytest.raises(ConfigError, match=r"expected:"):
        files.read(tmp_path, **{"batch_size": 4, **arguments})  # type: ignore[arg-type]


def test_a_little_data_is_divided_into_parts_for_many_workers(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", range(10 * LEAST_ROWS), group=10 * LEAST_ROWS)
    batches = files.read(tmp_path, batch_size=8)
    layout = batches._data.layout
    assert (layout.unit, layout.length) == (LEAST_ROWS, 10 * LEAST_ROWS)


@pytest.mark.parametrize("kept", [False, True])
def test_an_iteration_that_begins_ends_the_one_that_is_open(tmp_path: Path, kept: bool) -> None:
    count = folder(tmp_path, [300, 200])
    batches = files.read(tmp_path, ["id"], batch_size=16)
    first = iter(batches)
    next(first)
    second = iter(batches)
    found = ids_of([next(second)])
    if kept:
        assert ids_of(first) == []
    del first
    assert sorted(found + ids_of(second)) == list(range(count))
