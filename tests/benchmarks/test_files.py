"""The program that measures reading files: it reads what it has written, and shows a line for each file."""

from pathlib import Path

from benchmarks import files
from ps_worker.files import read


def test_each_kind_of_file_is_read_by_arrow_alone_and_as_tensors(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(files, "GROUP_ROWS", 500)
    lines = files.compare(tmp_path, 2000, rounds=1)
    assert len(lines) == 2 + 3
    assert all(line.count("|") == 6 for line in lines)
    for kind, path in (("ids", tmp_path / "ids.parquet"), ("text", tmp_path / "text.tsv")):
        assert files.arrow_alone(path)() == 2000
        columns = files.IDS if kind == "ids" else files.STRINGS
        assert files.in_batches(read(path, columns, batch_size=64))() == 2000


def test_the_peak_of_memory_is_that_of_reading(tmp_path: Path) -> None:
    files.written(tmp_path, 2000)
    assert 0 <= files.peak(tmp_path / "ids.parquet") < 500
