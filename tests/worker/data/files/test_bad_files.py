"""Files that cannot be read are refused by name, or left out and counted; the rest is read as if without them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ps_protocol.errors import ConfigError, DamagedData
from ps_worker import files
from ps_worker.session.metrics import DATA_WAIT, SAMPLES, SKIPPED, read_worker
from tests.worker.data.files.made import folder, ids_of, parquet
from tests.worker.jobs import running_job


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def truncated(path: Path) -> None:
    cut(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    cut(path, 0)


def other(path: Path) -> None:
    path.write_text("id,x\n1,2\n" * 10)


def broken_footer(path: Path) -> None:
    overwrite(path, path.stat().st_size - 40, b"\xff" * 30)


def long_footer(path: Path) -> None:
    overwrite(path, path.stat().st_size - 8, b"\xff\xff\xff\x7f")


def without_column(path: Path) -> None:
    pq.write_table(pa.table({"id": [1000]}), path)


def strings(path: Path) -> None:
    pq.write_table(pa.table({"id": [1000], "x": ["a"]}), path)


BAD = {
    truncated: "is not a whole Parquet file",
    empty: "an empty file",
    other: "is not a whole Parquet file",
    broken_footer: "",
    long_footer: "is not a whole Parquet file",
    without_column: "has no column 'x'",
    strings: "column 'x': strings where numbers are due",
}


@pytest.mark.parametrize("spoil", BAD, ids=lambda spoil: spoil.__name__)
def test_a_file_that_cannot_be_read_is_refused_by_name_or_left_out(tmp_path: Path, spoil: Any, caplog) -> None:
    folder(tmp_path, [200, 200, 200])
    spoil(tmp_path / "001.parquet")
    with pytest.raises(DamagedData, match=rf"001\.parquet.*{BAD[spoil]}"):
        files.read(tmp_path, ["id", "x"], batch_size=16)
    left = files.read(tmp_path, ["id", "x"], batch_size=16, on_bad_file="skip")
    assert sorted(ids_of(left)) == [*range(200), *range(400, 600)]
    assert list(left.skipped) == [str(tmp_path / "001.parquet")]
    assert any("left out" in record.getMessage() for record in caplog.records)


def test_an_unreadable_file_is_refused_by_name(tmp_path: Path) -> None:
    folder(tmp_path, [20])
    (tmp_path / "gone.parquet").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DamagedData, match=r"gone\.parquet cannot be read"):
        files.read(tmp_path, batch_size=16)


def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.parquet")
    with pytest.raises(DamagedData, match="no regular file"):
        files.read(tmp_path, batch_size=16)


def test_only_bad_files_are_refused_also_where_they_may_be_left_out(tmp_path: Path) -> None:
    folder(tmp_path, [20])
    truncated(tmp_path / "000.parquet")
    with pytest.raises(DamagedData, match=r"000\.parquet"):
        files.read(tmp_path, batch_size=16, on_bad_file="skip")


def test_a_column_that_no_file_has_is_an_error_of_the_call(tmp_path: Path) -> None:
    folder(tmp_path, [20])
    with pytest.raises(ConfigError, match=r"no column 'y'; expected: id, x"):
        files.read(tmp_path, ["y"], batch_size=16, on_bad_file="skip")


def test_damaged_pages_are_named_by_row_group_or_left_out(tmp_path: Path) -> None:
    folder(tmp_path, [500], group=100)
    path = tmp_path / "000.parquet"
    column = pq.read_metadata(path).row_group(2).column(0)
    begin = column.dictionary_page_offset or column.data_page_offset
    overwrite(path, begin, b"\xff" * column.total_compressed_size)
    with pytest.raises(DamagedData, match=r"000\.parquet, row group 2 cannot be read"):
        ids_of(files.read(tmp_path, batch_size=16))
    left = files.read(tmp_path, batch_size=16, on_bad_file="skip")
    assert sorted(ids_of(left)) == [*range(200), *range(300, 500)]
    assert left._data.skipped is not None
    assert left._data.skipped.rows == 100


@pytest.mark.parametrize("window", [True, 30])
def test_a_null_leaves_out_the_rows_read_with_it_and_names_its_row(tmp_path: Path, window: bool | int) -> None:
    folder(tmp_path, [300], group=100)
    x = [None if i == 57 else 0.5 for i in range(100)]
    pq.write_table(pa.table({"id": range(300, 400), "x": pa.array(x, pa.float32())}), tmp_path / "b.parquet")
    says = r"b\.parquet, row group 0, column 'x': a null.*row 57"
    with pytest.raises(DamagedData, match=says):
        ids_of(files.read(tmp_path, batch_size=16, shuffle=window))
    left = files.read(tmp_path, batch_size=16, shuffle=window, on_bad_file="skip")
    for _ in range(2):
        order = ids_of(left)
        lost = set(range(400)) - set(order)
        assert len(order) == len(set(order))
        assert 357 in lost
        assert lost <= set(range(300, 400))
    assert list(left.skipped) == [f"{tmp_path}/b.parquet, row group 0"]


@pytest.mark.parametrize("change", ["size", "time", "gone"])
def test_a_file_that_changes_between_epochs_is_refused_by_name(tmp_path: Path, change: str) -> None:
    folder(tmp_path, [100, 100])
    batches = files.read(tmp_path, batch_size=16)
    ids_of(batches)
    path = tmp_path / "001.parquet"
    if change == "size":
        parquet(path, range(90))
    elif change == "time":
        os.utime(path, ns=(1, 1))
    else:
        path.unlink()
    with pytest.raises(DamagedData, match=r"001\.parquet (has changed|cannot be read any more)"):
        ids_of(batches)


def test_files_need_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path, [20])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"need pyarrow.*torch-ps\[data\]"):
        files.read(tmp_path, batch_size=16)


def test_what_is_left_out_is_counted_by_a_metric(tmp_path: Path) -> None:
    folder(tmp_path, [100, 100])
    truncated(tmp_path / "001.parquet")
    with running_job() as job:
        cluster = job.cluster()
        assert len(ids_of(cluster.files(tmp_path, batch_size=16, on_bad_file="skip"))) == 100
        read = read_worker(cluster._session.progress)
    values = {sample.metric: sample.value for sample in read}
    assert values[SKIPPED] == 1
    assert values[SAMPLES] == 100
    assert values[DATA_WAIT] > 0


def test_random_damage_is_refused_or_gives_the_rows_of_what_is_whole(tmp_path: Path) -> None:
    """Flipped bytes: never a hang, never another class of error; pages have checksums, so values are never wrong."""
    from random import Random

    random = Random(0)
    whole = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": range(600)}), whole, 100, write_page_checksum=True)
    data = whole.read_bytes()
    for _ in range(60):
        at = random.randrange(len(data))
        whole.write_bytes(data[:at] + bytes([data[at] ^ (1 << random.randrange(8))]) + data[at + 1 :])
        try:
            order = ids_of(files.read(tmp_path, ["id"], batch_size=16, on_bad_file="skip"))
        except (DamagedData, ConfigError):
            continue
        assert len(order) == len(set(order)) <= 600


PAIRS: dict[str, tuple[Any, Any]] = {
    "units of times": (pa.array([1, 2], pa.timestamp("ms")), pa.array([1, 2], pa.timestamp("us"))),
    "a time and a number": (pa.array([1, 2], pa.timestamp("ms")), pa.array([1, 2])),
    "a list and a number": (pa.array([[1], [2]]), pa.array([1, 2])),
    "lists of one length and of any": (pa.array([[1], [2]], pa.list_(pa.int64(), 1)), pa.array([[1], [2]])),
    "lists and nulls": (pa.array([[1], [2]], pa.list_(pa.int64(), 1)), pa.nulls(2)),
}


@pytest.mark.parametrize("shuffle", [True, 2])
@pytest.mark.parametrize("pair", PAIRS)
def test_files_whose_columns_would_be_other_tensors_are_refused(tmp_path: Path, pair: str, shuffle: bool | int) -> None:
    for name, column in zip("ab", PAIRS[pair], strict=True):
        pq.write_table(pa.table({"id": column}), tmp_path / f"{name}.parquet")
    with pytest.raises(DamagedData, match=r"b\.parquet, column 'id': another type than in other files"):
        files.read(tmp_path, {"id": files.ids("id", fill=0)}, batch_size=1, shuffle=shuffle)


def test_values_that_no_type_holds_together_are_refused_by_name(tmp_path: Path) -> None:
    for name, column in {"a": pa.array([2**63], pa.uint64()), "b": pa.array([-1])}.items():
        pq.write_table(pa.table({"id": column}), tmp_path / f"{name}.parquet")
    with pytest.raises(DamagedData, match=r"[ab]\.parquet, row group 0 to .*values that do not go together"):
        ids_of(files.read(tmp_path, batch_size=4))


def test_a_column_that_is_there_twice_is_refused_where_it_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,x,x\n1,2,3\n")
    assert ids_of(files.read(tmp_path, ["id"], batch_size=4)) == [1]
    with pytest.raises(DamagedData, match=r"a\.csv has several columns 'x'; expected: one; actual: 2"):
        files.read(tmp_path, ["x"], batch_size=4)


def test_a_name_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    folder(tmp_path, [20])
    (tmp_path / "000.parquet").rename(tmp_path / os.fsdecode(b"\xff.parquet"))
    folder(tmp_path, [20])
    with pytest.raises(DamagedData, match="is not UTF-8"):
        files.read(tmp_path, batch_size=16)
    left = files.read(tmp_path, batch_size=16, on_bad_file="skip")
    assert len(ids_of(left)) == 20
    assert left._data.fingerprint


@pytest.mark.parametrize(
    ("data", "says"),
    [("id\n1\n2\n".encode("utf-16"), "cannot be read as text"), (b"id\r1\r2\r", "lines end with CR alone")],
)
def test_text_of_another_kind_is_refused(tmp_path: Path, data: bytes, says: str) -> None:
    (tmp_path / "a.csv").write_bytes(b"id\n1\n")
    (tmp_path / "b.csv").write_bytes(data)
    with pytest.raises(DamagedData, match=rf"b\.csv:? .*{says}"):
        files.read(tmp_path, ["id"], batch_size=16)


def test_a_link_to_a_folder_is_not_searched_which_the_log_says(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder(tmp_path / "data", [20])
    folder(tmp_path / "other", [20])
    (tmp_path / "data" / "link").symlink_to(tmp_path / "other")
    assert len(ids_of(files.read(tmp_path / "data", batch_size=16))) == 20
    assert "data/link is a link to a folder, which is not searched" in caplog.text
    assert len(ids_of(files.read([tmp_path / "data", tmp_path / "data" / "link"], batch_size=16))) == 40


@pytest.mark.parametrize("shuffle", ["x", 2.5, -1])
def test_a_window_that_is_no_number_of_rows_is_refused(tmp_path: Path, shuffle: Any) -> None:
    folder(tmp_path, [20])
    with pytest.raises(ConfigError, match="shuffle is no number of rows"):
        files.read(tmp_path, batch_size=16, shuffle=shuffle)


@pytest.mark.parametrize(
    "fields", [{"delimiter": ",,"}, {"delimiter": "é"}, {"delimiter": "\n"}, {"delimiter": ""}, {"header": "ab"}]
)
def test_a_form_that_text_cannot_have_is_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match=f"{next(iter(fields))}="):
        files.read(tmp_path, ["a"], batch_size=4, **fields)
