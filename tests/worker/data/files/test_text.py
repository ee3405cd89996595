"""Text files: divided at line ends, compressed ones whole, headers in the file or given."""

from __future__ import annotations

import bz2
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.errors import ConfigError, DamagedData
from ps_worker import files
from ps_worker.data.files import sources
from tests.support.length import examples
from tests.worker.data.files.made import ids_of, text


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "LEAST_BLOCK_BYTES", 64)


def lines(count: int, begin: int = 0) -> list[str]:
    return [f"{i},{i / 2},name {i}" for i in range(begin, begin + count)]


def test_a_text_file_is_read_in_ranges_of_whole_lines(tmp_path: Path) -> None:
    path = text(tmp_path / "a.csv", ["id,x,name", *lines(500)])
    columns = {"id": files.ids("id"), "x": files.floats("x"), "name": files.hashed("name")}
    batches = files.read(path, columns, batch_size=32)
    assert batches._data.layout.length > batches._data.layout.unit
    order = ids_of(batches)
    assert sorted(order) == list(range(500))
    assert order != list(range(500))
    assert ids_of(files.read(path, columns, batch_size=32, shuffle=False)) == list(range(500))
    assert 300 < batches.rows < 700


@pytest.mark.parametrize("suffix", ["gz", "bz2", "zst"])
def test_a_compressed_file_is_read_whole(tmp_path: Path, suffix: str) -> None:
    data = "".join(line + "\n" for line in ["id,x,name", *lines(500)]).encode()
    path = tmp_path / f"a.csv.{suffix}"
    if suffix == "zst":
        with pa.CompressedOutputStream(str(path), "zstd") as stream:
            stream.write(data)
    elif suffix == "bz2":
        path.write_bytes(bz2.compress(data))
    else:
        text(path, data.decode().splitlines())
    batches = files.read(path, {"id": files.ids("id")}, batch_size=32)
    assert sorted(ids_of(batches)) == list(range(500))
    assert batches._data.layout.length == batches._data.layout.unit


def test_names_of_columns_are_given_where_the_first_line_has_none(tmp_path: Path) -> None:
    text(tmp_path / "u.data", ["1\t7\t3.5", "2\t8\t4"])
    columns = {"user": files.ids("user"), "rating": files.floats("rating")}
    header = ["user", "item", "rating"]
    (batch,) = files.read(tmp_path / "u.data", columns, batch_size=4, shuffle=False, header=header)
    assert batch["user"].tolist() == [1, 2]
    assert batch["rating"].tolist() == [3.5, 4.0]


def test_columns_without_a_kind_have_the_types_of_the_first_lines(tmp_path: Path) -> None:
    path = text(tmp_path / "a.csv", ["id,x", "1,0.5", "2,1"])
    (batch,) = files.read(path, batch_size=4, shuffle=False)
    assert batch["id"].tolist() == [1, 2]
    assert batch["x"].tolist() == [0.5, 1.0]


def test_only_an_empty_value_is_null(tmp_path: Path) -> None:
    path = text(tmp_path / "a.csv", ["id,name", "1,NA", "2,", ',"null"'])
    columns = {"id": files.ids("id", fill=-1), "name": files.hashed("name", fill=0)}
    (batch,) = files.read(path, columns, batch_size=4, shuffle=False)
    assert batch["id"].tolist() == [1, 2, -1]
    assert [id == 0 for id in batch["name"].tolist()] == [False, True, False]


def test_line_ends_between_quotes_need_to_be_said(tmp_path: Path) -> None:
    path = text(tmp_path / "a.csv", ["id,name", *(f'{i},"two\nlines"' for i in range(50))])
    batches = files.read(path, {"id": files.ids("id")}, batch_size=4, quoted_lines=True)
    assert sorted(ids_of(batches)) == list(range(50))
    assert batches._data.layout.length == batches._data.layout.unit


@examples(40)
@given(
    widths=st.lists(st.integers(0, 200), min_size=1, max_size=60),
    block=st.integers(1, 400),
    ends=st.sampled_from(["\n", "\r\n"]),
    last=st.booleans(),
)
def test_any_lines_in_any_ranges_give_every_row_once(
    tmp_path_factory: pytest.TempPathFactory, widths: list[int], block: int, ends: str, last: bool
) -> None:
    path = tmp_path_factory.mktemp("text") / "a.csv"
    body = ends.join(["id,name", *(f"{i},{'x' * width}" for i, width in enumerate(widths))])
    path.write_bytes((body + ends * last).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "LEAST_BLOCK_BYTES", block)
        order = ids_of(files.read(path, {"id": files.ids("id")}, batch_size=7))
    assert sorted(order) == list(range(len(widths)))


def test_a_header_alone_is_a_file_without_rows(tmp_path: Path) -> None:
    text(tmp_path / "a.csv", ["id,x"])
    text(tmp_path / "b.csv", ["id,x", "3,1"])
    assert ids_of(files.read(tmp_path, ["id"], batch_size=4)) == [3]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("x,1.5,a", "column 'id' cannot be read.*'x'"),
        ("7,abc,a", "column 'x' cannot be read.*'abc'"),
        ("7,1.5", "cannot be read.*Expected 3 columns, got 2"),
        ("99999999999999999999,1.5,a", "column 'id' cannot be read"),
    ],
)
def test_wrong_values_name_the_file_the_range_and_the_column(tmp_path: Path, wrong: str, says: str) -> None:
    path = text(tmp_path / "a.csv", ["id,x,name", *lines(50), wrong, *lines(50, 50)])
    columns = {"id": files.ids("id"), "x": files.floats("x"), "name": files.hashed("name")}
    with pytest.raises(DamagedData, match=rf"a\.csv, lines from byte \d+ to \d+.*{says}"):
        ids_of(files.read(path, columns, batch_size=8))
    left = files.read(path, columns, batch_size=8, on_bad_file="skip")
    order = ids_of(left)
    assert 80 < len(order) < 100
    assert len(set(order)) == len(order)
    assert len(left.skipped) == 1


@pytest.mark.parametrize(("name", "says"), [("a.csv.xz", "codec that Arrow"), ("a.tsv.zip", "codec that Arrow")])
def test_a_codec_that_arrow_lacks_is_named(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ConfigError, match=says):
        files.read(tmp_path / name, batch_size=4)


def test_what_is_no_gzip_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv.gz").write_bytes(b"plain text\n")
    with pytest.raises(DamagedData, match=r"a\.csv\.gz cannot be read as text"):
        files.read(tmp_path, batch_size=4)


def test_a_column_is_text_or_numbers(tmp_path: Path) -> None:
    path = text(tmp_path / "a.csv", ["id", "1"])
    columns: dict[str, Any] = {"id": files.ids("id"), "name": files.hashed("id")}
    with pytest.raises(ConfigError, match="as text and as numbers"):
        files.read(path, columns, batch_size=4)
    with pytest.raises(ConfigError, match="no column 'b'"):
        files.read(path, {"b": files.ids("b")}, batch_size=4)
