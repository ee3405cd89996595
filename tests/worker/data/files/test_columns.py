"""Columns become tensors: numbers, ids, hashed strings, lists, with values for null where they are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import xxhash

from ps_protocol.errors import ConfigError, DamagedData
from ps_worker import files
from ps_worker.files import ColumnSpec, Ragged
from tests.worker.data.files.made import ids_of, parquet


def one_batch(folder: Path, columns: Any, **arrays: Any) -> dict[str, Any]:
    """The rows of a file of ``arrays``, in one batch."""
    path = folder / "a.parquet"
    pq.write_table(pa.table(arrays), path)
    (batch,) = files.read(path, columns, batch_size=100, shuffle=False)
    return batch


def id_of(text: str, seed: int = 0) -> int:
    number = xxhash.xxh64(text.encode(), seed=seed).intdigest()
    return number - 2**64 if number >= 2**63 else number


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (pa.array([1, 2, 3], pa.int8()), torch.int64),
        (pa.array([1, 2, 3], pa.uint32()), torch.int64),
        (pa.array([1, 2, 3], pa.int64()), torch.int64),
        (pa.array([1, 2, 3], pa.timestamp("ms")), torch.int64),
        (pa.array([1, 2, 3], pa.date32()), torch.int64),
        (pa.array([1.0, 2.0, 3.0], pa.float64()), torch.float32),
        (pa.array([1.0, 2.0, 3.0], pa.float32()), torch.float32),
        (pa.array([1, 2, 3], pa.decimal128(9, 0)), torch.float32),
        (pa.array([1, 2, 3]).dictionary_encode(), torch.int64),
    ],
    ids=lambda value: str(getattr(value, "type", value)),
)
def test_a_column_without_a_kind_is_ids_or_floats_by_its_type(tmp_path: Path, array: Any, dtype: torch.dtype) -> None:
    batch = one_batch(tmp_path, None, a=array)
    assert batch["a"].dtype == dtype
    assert batch["a"].tolist() == [1, 2, 3]


def test_unsigned_ids_keep_their_bits(tmp_path: Path) -> None:
    batch = one_batch(tmp_path, {"a": files.ids("a")}, a=pa.array([2**64 - 1, 5], pa.uint64()))
    assert batch["a"].tolist() == [-1, 5]


def test_several_columns_stand_side_by_side(tmp_path: Path) -> None:
    columns = {"ids": files.ids("a", "b"), "x": files.floats("b", "c", dtype=torch.float64), "a": "a"}
    batch = one_batch(tmp_path, columns, a=[1, 2], b=[3, 4], c=[True, False])
    assert list(batch) == ["ids", "x", "a"]
    assert batch["ids"].tolist() == [[1, 3], [2, 4]]
    assert batch["x"].dtype == torch.float64
    assert batch["x"].tolist() == [[3, 1], [4, 0]]
    assert batch["a"].tolist() == [1, 2]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())])
def test_strings_become_the_ids_that_any_xxh64_gives(tmp_path: Path, kind: pa.DataType) -> None:
    texts = ["", "a", "Zürich", "x" * 100, "a"]
    values: Any = [text.encode() for text in texts] if kind == pa.binary() else texts
    array = (
        pa.array(values, pa.string()).dictionary_encode() if pa.types.is_dictionary(kind) else pa.array(values, kind)
    )
    batch = one_batch(tmp_path, {"a": files.hashed("a"), "b": files.hashed("a", seed=7)}, a=array)
    assert batch["a"].tolist() == [id_of(text) for text in texts]
    assert batch["b"].tolist() == [id_of(text, 7) for text in texts]


def test_lists_are_values_and_offsets_for_an_embedding_bag(tmp_path: Path) -> None:
    batch = one_batch(tmp_path, None, a=[[1, 2], [], [3]], b=[[0.5], [1.5, 2.5], []])
    assert isinstance(batch["a"], Ragged)
    assert (batch["a"].values.tolist(), batch["a"].offsets.tolist()) == ([1, 2, 3], [0, 2, 2])
    assert (batch["b"].values.tolist(), batch["b"].offsets.tolist()) == ([0.5, 1.5, 2.5], [0, 1, 3])
    bag = torch.nn.EmbeddingBag(4, 2, mode="sum")
    assert bag(*batch["a"]).shape == (3, 2)


def test_lists_of_one_length_are_a_tensor_of_that_width(tmp_path: Path) -> None:
    array = pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32(), 2))
    assert one_batch(tmp_path, None, a=array)["a"].tolist() == [[1, 2], [3, 4]]


def test_strings_are_split_at_a_separator(tmp_path: Path) -> None:
    columns = {"genres": files.hashed("a", split="|"), "ids": files.ids("b", split=",")}
    batch = one_batch(tmp_path, columns, a=["Drama|War", "", "War"], b=["1,2", "3", ""])
    assert batch["genres"].values.tolist() == [id_of("Drama"), id_of("War"), id_of("War")]
    assert batch["genres"].offsets.tolist() == [0, 2, 2]
    assert (batch["ids"].values.tolist(), batch["ids"].offsets.tolist()) == ([1, 2, 3], [0, 2, 3])


@pytest.mark.parametrize(
    ("columns", "array", "expected"),
    [
        (files.ids("a", fill=-1), [1, None], [1, -1]),
        (files.floats("a", fill=0.5), [1.0, None], [1.0, 0.5]),
        (files.hashed("a", fill=3), ["x", None], [id_of("x"), 3]),
        (files.hashed("a", fill=3), pa.array(["x", None]).dictionary_encode(), [id_of("x"), 3]),
    ],
)
def test_null_becomes_the_value_that_is_given(tmp_path: Path, columns: Any, array: Any, expected: list[float]) -> None:
    assert one_batch(tmp_path, {"a": columns}, a=array)["a"].tolist() == expected


def test_a_list_that_is_null_is_empty_where_a_value_for_null_is_given(tmp_path: Path) -> None:
    columns = {"a": files.ids("a", fill=9), "b": files.hashed("b", split="|", fill=0)}
    batch = one_batch(tmp_path, columns, a=[[1, None], None, [2]], b=[None, "x", "y"])
    assert (batch["a"].values.tolist(), batch["a"].offsets.tolist()) == ([1, 9, 2], [0, 2, 2])
    assert batch["b"].offsets.tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("columns", "array"),
    [
        (files.ids("a"), [1, None, 3]),
        (files.floats("a"), [1.0, None]),
        (files.hashed("a"), ["x", None]),
        (files.hashed("a"), pa.array(["x", None]).dictionary_encode()),
        (files.ids("a"), [[1], None]),
        (files.ids("a"), [[1, None]]),
        (files.hashed("a", split="|"), ["x", None]),
        (files.floats("a"), pa.array([[1.0, 2.0], None], pa.list_(pa.float32(), 2))),
    ],
)
def test_null_without_such_a_value_names_file_row_group_and_column(tmp_path: Path, columns: Any, array: Any) -> None:
    with pytest.raises(DamagedData, match=r"a\.parquet, row group 0, column .a.(, in a list)?: a null.*fill="):
        one_batch(tmp_path, {"a": columns}, a=array)


@pytest.mark.parametrize(
    ("columns", "array", "says"),
    [
        (None, ["x"], "has strings.*files.hashed"),
        (files.ids("a"), ["1"], "strings where numbers are due"),
        (files.floats("a"), ["1"], "strings where numbers are due"),
        (files.ids("a"), [1.5], "ids are integers"),
        (files.hashed("a"), [1], "only strings are hashed"),
        (files.floats("a"), [{"b": 1}], "not numbers"),
        (files.floats("a"), pa.array([1], pa.timestamp("s")), "not numbers"),
        (files.ids("a", split=","), [1], "only strings are split"),
        (files.ids("b"), [1], "no column 'b'"),
    ],
)
def test_a_column_of_another_type_is_refused_at_once(tmp_path: Path, columns: Any, array: Any, says: str) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": array}), path)
    with pytest.raises(ConfigError, match=says):
        files.read(path, {"a": columns} if columns else None, batch_size=4)


def test_strings_that_are_no_numbers_are_named_where_they_are_split(tmp_path: Path) -> None:
    with pytest.raises(DamagedData, match=r"row group 0, column 'a': strings where numbers are due"):
        one_batch(tmp_path, {"a": files.ids("a", split=",")}, a=["1,x"])


@pytest.mark.parametrize(
    "columns",
    ["a", files.ids("a"), {"a": 3}, {}, [], ["a", "a"], {"a": files.ids}],
    ids=["name", "ids", "number", "nothing", "no names", "twice", "function"],
)
def test_columns_that_say_nothing_are_refused(tmp_path: Path, columns: Any) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(ConfigError, match="columns="):
        files.read(path, columns, batch_size=4)


@pytest.mark.parametrize(
    "made",
    [
        lambda: files.ids(),
        lambda: files.ids(""),
        lambda: files.ids("a", "b", split=","),
        lambda: files.ids("a", split=""),
        lambda: files.floats("a", dtype=torch.int64),
    ],
)
def test_a_specification_that_cannot_be_is_refused(made: Any) -> None:
    with pytest.raises(ConfigError):
        made()


def test_lists_do_not_stand_side_by_side(tmp_path: Path) -> None:
    with pytest.raises(DamagedData, match="side by side"):
        one_batch(tmp_path, {"a": files.ids("a", "b")}, a=[[1]], b=[[2]])


FILLED: dict[str, tuple[Any, ColumnSpec, list[float]]] = {
    "-1 of small unsigned": (pa.array([1, None], pa.uint8()), files.ids("c", fill=-1), [1, -1]),
    "-1 of large unsigned": (pa.array([2**63, None], pa.uint64()), files.ids("c", fill=-1), [-(2**63), -1]),
    "300 of int8": (pa.array([1, None], pa.int8()), files.ids("c", fill=300), [1, 300]),
    "a date": (pa.array([3, None], pa.date32()), files.ids("c", fill=0), [3, 0]),
    "a time": (pa.array([3, None], pa.timestamp("us")), files.ids("c", fill=-1), [3, -1]),
    "a half of integers": (pa.array([1, None]), files.floats("c", fill=0.5), [1, 0.5]),
    "a half of booleans": (pa.array([True, None]), files.floats("c", fill=0.5), [1, 0.5]),
    "a half of float16": (pa.array(np.ones(2, np.float16), mask=np.array([False, True])), files.floats("c", fill=0.5),
                          [1, 0.5]),
}  # fmt: skip


@pytest.mark.parametrize("case", FILLED)
def test_a_value_in_place_of_null_need_not_be_of_the_type_of_the_column(tmp_path: Path, case: str) -> None:
    column, entry, due = FILLED[case]
    pq.write_table(pa.table({"c": column}), tmp_path / "a.parquet")
    (batch,) = files.read(tmp_path, {"c": entry}, batch_size=2, shuffle=False)
    assert batch["c"].tolist() == due


def test_a_folder_names_integers_where_all_of_its_kind_do_else_strings(tmp_path: Path) -> None:
    for value in ("7", "__HIVE_DEFAULT_PARTITION__"):
        parquet(tmp_path / "days" / f"day={value}" / "a.parquet", [1])
    for value in ("7", "x", "--1", "9" * 30):
        parquet(tmp_path / "sites" / f"site={value}" / "a.parquet", [1])
    days = files.read(tmp_path / "days", {"id": files.ids("day", fill=0)}, batch_size=1, shuffle=False)
    assert sorted(ids_of(days)) == [0, 7]
    sites = files.read(tmp_path / "sites", {"id": files.hashed("site")}, batch_size=9)
    assert len(set(ids_of(sites))) == 4
