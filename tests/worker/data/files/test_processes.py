"""Rows of files over real processes: a worker killed or told to end, a job that starts again in the middle."""

from __future__ import annotations

import signal
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.support.length import few
from tests.worker.data.files.made import parquet, text
from tests.worker.data.test_leased_processes import Cluster, counted, running

ROWS = 700
#: Rows of a part of these files.
PART = 64

WORKER = """
import select, sys
import ps_worker
from ps_worker import files
from ps_worker.data import leased_loader

leased_loader.BRIEF_CALL_SECONDS = 20.0
address, pattern, epochs, stop_after = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
with ps_worker.connect(address, device="cpu") as cluster:
    batches = cluster.files(pattern, {"id": files.ids("id")}, batch_size=8)
    for epoch in range(epochs):
        for number, batch in enumerate(batches):
            if number == stop_after:
                print("stopped", flush=True)
                while not select.select([sys.stdin], [], [], 0.1)[0]:
                    pass
                sys.stdin.readline()
            print(epoch, *batch["id"].tolist(), flush=True)
"""
"""Prints each batch when it is trained. After ``stop_after`` batches of an epoch it holds the next one untrained."""


def job_of(folder: Path) -> AbstractContextManager[Cluster]:
    return running(folder / "data", WORKER, str(folder / "[ab].*"))


def written(folder: Path, kind: str) -> None:
    """ROWS rows in two files of a kind."""
    if kind == "parquet":
        parquet(folder / "a.parquet", range(ROWS - 100), group=ROWS)
        parquet(folder / "b.parquet", range(ROWS - 100, ROWS), group=30)
    else:
        text(folder / f"a.{kind}", ["id", *map(str, range(ROWS - 100))])
        text(folder / f"b.{kind}", ["id", *map(str, range(ROWS - 100, ROWS))])


@pytest.mark.parametrize("kind", few(["parquet", "csv.gz"]))
def test_the_rows_of_a_killed_worker_are_trained_by_others_and_each_row_is_counted(tmp_path: Path, kind: str) -> None:
    written(tmp_path, kind)
    with job_of(tmp_path) as job:
        killed = job.worker(stop_after=13)
        killed.run_until("stopped")
        other = job.worker()
        if kind == "parquet":
            other.run_until("0")
        killed.process.kill()
        assert killed.end() == -signal.SIGKILL
        assert other.end() == 0
        times = counted(killed, other)
        assert set(times) == set(range(ROWS))
        assert set(times.values()) <= {1, 2}
        # What the killed one had trained and not reported: no more than the parts that it held.
        held = 2 * PART if kind == "parquet" else ROWS
        assert sum(times.values()) - ROWS <= held


@pytest.mark.parametrize("kind", few(["parquet", "csv.gz", "csv"], 2))
def test_a_job_that_starts_again_goes_on_in_the_middle_of_a_part(tmp_path: Path, kind: str) -> None:
    written(tmp_path, kind)
    with job_of(tmp_path) as job:
        told = job.worker(epochs=3, stop_after=7)
        told.run_until("stopped")
        told.process.terminate()
        assert told.end() == 128 + signal.SIGTERM
        assert len(told.items()) == 7 * 8
    with job_of(tmp_path) as job:
        workers = [job.worker(epochs=2) for _ in range(2)]
        assert [worker.end() for worker in workers] == [0, 0]
        assert counted(told, *workers) == Counter(range(ROWS))
        assert counted(*workers, epoch=1) == Counter(range(ROWS))


def test_a_file_that_changed_while_the_job_was_down_is_refused_by_name(tmp_path: Path) -> None:
    written(tmp_path, "parquet")
    with job_of(tmp_path) as job:
        told = job.worker(stop_after=3)
        told.run_until("stopped")
        told.process.terminate()
        told.end()
    parquet(tmp_path / "b.parquet", range(1000, 1100), group=30)
    with job_of(tmp_path) as job:
        again = job.worker()
        assert again.end() != 0
        assert again.lines == []
