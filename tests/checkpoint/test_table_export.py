"""Rows leave a checkpoint as plain files and come back from them; a file that does not fit is refused before."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ps_protocol.errors import ConfigError, InvalidRequest
from ps_server.checkpoint.export import RowFormat, export
from ps_server.checkpoint.row_files import RowFile

from .tables import TableJob, table_spec

#: pyarrow is optional.
FORMATS = [RowFormat.SAFETENSORS] + [RowFormat.PARQUET] * (find_spec("pyarrow") is not None)


def trained(*tables, shards: int = 2) -> TableJob:
    job = TableJob.of(*(tables or (table_spec(),)), shards=shards)
    for number in range(len(tables or (1,))):
        job.push(np.arange(-100, 200), number, number)
    return job


def rows_of(job: TableJob, number: int = 0) -> dict[int, bytes]:
    """Values and state by id."""
    buckets = job.shard_map.spec.tables[number].buckets
    contents = job.contents()[number * buckets : (number + 1) * buckets]
    return {int(i): row.tobytes() for each in contents for i, row in zip(each.ids, each.rows, strict=True)}


def read(*paths: Path, spec) -> dict[int, bytes]:
    pieces = [piece for path in paths for piece in RowFile(path, spec).pieces(7)]
    return {int(i): row.tobytes() for piece in pieces for i, row in zip(piece.ids, piece.values, strict=True)}


@pytest.mark.parametrize("rows", FORMATS)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_what_is_exported_is_read_back_bit_for_bit(tmp_path: Path, rows: RowFormat, optimizer: str) -> None:
    specs = table_spec("ads", 3, optimizer), table_spec("a/b", 5, "rowwise_adagrad"), table_spec("empty")
    job = TableJob.of(*specs)
    job.push(np.arange(-100, 200), 1, 0)
    job.push(np.arange(50), 2, 1)
    files = export(job.save(tmp_path / "checkpoints"), tmp_path / "out", "model", rows=rows)
    suffix = rows.value
    assert [str(f.relative_to(tmp_path / "out")) for f in files] == [
        f"tables/{name}.{suffix}" for name in ("ads", "a%2Fb", "empty")
    ]
    assert sorted(path for path in (tmp_path / "out").rglob("*") if path.is_file()) == sorted(files)
    for number, (path, spec) in enumerate(zip(files, specs, strict=True)):
        assert read(path, spec=spec) == rows_of(job, number)


@pytest.mark.parametrize("rows", FORMATS)
def test_a_large_table_is_cut_into_files(tmp_path: Path, rows: RowFormat) -> None:
    job = trained()
    files = export(job.save(tmp_path / "checkpoints"), tmp_path / "out", "model", 4000, rows)
    assert len(files) > 1
    assert files[1].name.startswith(f"ads-00002-of-0000{len(files)}.")
    assert read(*files, spec=table_spec()) == rows_of(job)


def test_an_increment_is_exported_with_what_it_goes_on_from(tmp_path: Path) -> None:
    job = trained()
    job.save(tmp_path / "checkpoints", full_every=5)
    job.push(np.arange(190, 210), 5)
    job.drop(np.arange(20), np.arange(0))
    checkpoint = job.save(tmp_path / "checkpoints", full_every=5)
    assert len(checkpoint.lineage("model", "ads")) == 2
    assert read(*export(checkpoint, tmp_path / "out", "model"), spec=table_spec()) == rows_of(job)


def test_any_loader_reads_an_exported_table(tmp_path: Path) -> None:
    job = trained()
    tensors = load_file(export(job.save(tmp_path / "checkpoints"), tmp_path / "out", "model")[0])
    assert {name: (t.dtype.name, t.shape) for name, t in tensors.items()} == {
        "ids": ("int64", (300,)),
        "rows": ("float32", (300, 3)),
        "state": ("float32", (300, 3)),
    }


def test_parquet_without_pyarrow_is_one_error_with_the_remedy_and_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    checkpoint = trained().save(tmp_path / "checkpoints")
    remedy = "pip install 'torch-ps[parquet]', or use safetensors"
    with pytest.raises(ConfigError, match=rf"files need pyarrow.*remedy: {re.escape(remedy)}"):
        export(checkpoint, tmp_path / "out", "model", rows=RowFormat.PARQUET)
    with pytest.raises(ConfigError, match="Parquet files need pyarrow"):
        RowFile(tmp_path / "rows.parquet", table_spec())
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


# -- files of others

GOOD = {
    "ids": np.arange(4),
    "rows": np.ones((4, 3), np.float32),
    "state": np.ones((4, 3), np.float32),
}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rows": np.ones((4, 5), np.float32)}, r"'rows'.*expected: float32 \[n, 3\]; actual: float32 \[n, 5\]"),
        ({"rows": np.ones((4, 3), np.float64)}, r"'rows'.*expected: float32 \[n, 3\]; actual: F64"),
        ({"rows": np.ones(4, np.float32)}, r"'rows'.*actual: float32 \[n\]"),
        ({"rows": None}, r"'rows'.*actual: missing"),
        ({"ids": np.ones(4, np.float32)}, r"'ids'.*expected: int64 \[n\]; actual: float32 \[n\]"),
        ({"ids": np.arange(4, dtype=np.int32)}, r"'ids'.*expected: int64 \[n\]; actual: I32"),
        ({"ids": np.arange(5)}, r"numbers of ids, rows and state.*actual: \[4, 5\]"),
        ({"state": np.ones((4, 1), np.float32)}, r"'state'.*expected: float32 \[n, 3\]; actual: float32 \[n, 1\]"),
    ],
)
def test_a_file_of_another_form_is_refused_with_what_was_expected(tmp_path: Path, changes: dict, text: str) -> None:
    path = tmp_path / "rows.safetensors"
    save_file({name: t for name, t in {**GOOD, **changes}.items() if t is not None}, path)
    with pytest.raises(InvalidRequest, match=rf"does not fit table 'ads': {text}"):
        RowFile(path, table_spec())


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_value_that_is_no_number_is_found_before_anything_is_written(tmp_path: Path, bad: float) -> None:
    rows = GOOD["rows"].copy()
    rows[2, 1] = bad
    path = tmp_path / "rows.safetensors"
    save_file({**GOOD, "rows": rows}, path)
    with pytest.raises(InvalidRequest, match="NaN or infinity in the row of id 2"):
        RowFile(path, table_spec()).check_values()


def test_state_may_be_left_out_or_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "rows.safetensors"
    save_file({"ids": GOOD["ids"], "rows": GOOD["rows"]}, path)
    assert not RowFile(path, table_spec()).with_state
    save_file({**GOOD, "state": np.ones((4, 7), np.float32)}, path)
    file = RowFile(path, table_spec(), with_state=False)
    assert [piece.values.shape for piece in file.pieces(3)] == [(3, 3), (1, 3)]


def _with_header(header: str, tensors: bytes = b"") -> Callable[[Path], object]:
    return lambda path: path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + tensors)


def _ids(shape: str, begin: int, end: int) -> str:
    return f'{{"ids":{{"dtype":"I64","shape":{shape},"data_offsets":[{begin},{end}]}}}}'


@pytest.mark.parametrize(
    "write",
    [
        lambda path: path.write_bytes((1 << 62).to_bytes(8, "little") + b"{}"),
        _with_header("[" * 50_000),
        _with_header(_ids("[1]", 0, 8)),
        _with_header(_ids("[1]", 8, 0), b"x" * 8),
        _with_header(_ids("[-1]", 0, 8), b"x" * 8),
        _with_header(_ids("[4294967296,4294967296,4294967296]", 0, 8), b"x" * 8),
        _with_header(_ids("[1]", 8, 16), b"x" * 16),
        _with_header('{"ids":{"dtype":"X64","shape":[1],"data_offsets":[0,8]}}', b"x" * 8),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\xff" * 100),
        lambda path: path.write_bytes((5).to_bytes(8, "little") + b"[1,2]"),
        lambda path: path.write_bytes((2).to_bytes(8, "little") + b"{}" + b"x"),
        lambda path: path.mkdir(),
        lambda path: None,
    ],
)
def test_what_is_no_file_of_rows_is_one_typed_error(tmp_path: Path, write: Callable[[Path], object]) -> None:
    path = tmp_path / "rows.safetensors"
    write(path)
    with pytest.raises((ConfigError, InvalidRequest), match=r"rows\.safetensors"):
        RowFile(path, table_spec())
