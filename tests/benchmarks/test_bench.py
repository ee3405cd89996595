"""The program as a user runs it, small. No timing decides anything here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from benchmarks.program import main
from tests.support.length import choose

MARK = "PS_BENCH_TEST"
END_SECONDS = 20.0


@pytest.fixture
def mark() -> str:
    return uuid.uuid4().hex


def marked(mark: str) -> list[psutil.Process]:
    """Processes that belong to the program started with ``mark``, however they came to be."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:
            continue
    return found


def bench(mark: str, folder: Path, *words: str) -> subprocess.Popen[str]:
    only = [argument for word in words for argument in ("--only", word)]
    kept = ["--output", str(folder / "bench.json"), "--plot", str(folder / "bench.png")]
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks", "--quick", *only, *kept],
        env=dict(os.environ) | {MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def test_it_measures_the_rows_asked_for_and_leaves_no_process(tmp_path: Path, mark: str) -> None:
    rows = ["raw socket: push+pull, 10 KB", "ours, grpc: step, 10 KB"]
    rows = choose(rows, rows[1:])
    program = bench(mark, tmp_path, *rows)
    output, _ = program.communicate(timeout=120)
    assert program.returncode == 0, output
    results = json.loads((tmp_path / "bench.json").read_text())
    names = [row["name"] for row in results["rows"]]
    assert names == rows
    for row in results["rows"]:
        taken = row["measures"]["seconds"]
        assert 0 < taken["low"] <= taken["median"] <= taken["high"]
        assert len(taken["rounds"]) == 3
        assert row["measures"]["server_cpu_seconds"]["median"] >= 0
    assert results["machine"]["torch"]
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert psutil.wait_procs(marked(mark), END_SECONDS)[1] == []


def test_ctrl_c_leaves_no_process(tmp_path: Path, mark: str) -> None:
    program = bench(mark, tmp_path, "raw socket")
    assert program.stdout is not None
    assert program.stdout.readline().startswith("[1/2]")
    while len(marked(mark)) < 3:  # the program, Python's own helper of it, a child
        assert program.poll() is None
    os.killpg(program.pid, signal.SIGINT)
    output, _ = program.communicate(timeout=60)
    assert program.returncode == 1, output
    assert psutil.wait_procs(marked(mark), END_SECONDS)[1] == []
    assert not (tmp_path / "bench.json").exists()


def test_a_name_that_no_row_has_is_an_error_that_says_so() -> None:
    result = CliRunner().invoke(main, ["--only", "no such row"])
    assert result.exit_code == 2
    assert "--list" in result.output
