"""The program as a user runs it, small. No timing decides anything here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from benchmarks.program import main
from tests.support.interpreters import Interpreter
from tests.support.length import choose

END_SECONDS = 60.0


def session_of(leader: int) -> list[psutil.Process]:
    """Processes of the session that this one has begun, whatever their parents are."""
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError):
            if os.getsid(process.pid) == leader:
                found.append(process)
    return found


def options(folder: Path, *words: str) -> list[str]:
    only = [argument for word in words for argument in ("--only", word)]
    return ["--quick", *only, "--output", str(folder / "bench.json"), "--plot", str(folder / "bench.png")]


@contextmanager
def bench(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """The program with interpreters of its own."""
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks", *options(folder, *words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as program:
        yield program
    assert psutil.wait_procs(session_of(program.pid), END_SECONDS)[1] == []


@contextmanager
def forked(folder: Path, *words: str) -> Iterator[Interpreter]:
    """The program forked, and its processes from it."""
    program = Interpreter("-m", "tests.benchmarks.forked_program", "program", *options(folder, *words))
    try:
        yield program
        assert psutil.wait_procs(session_of(program.pid), END_SECONDS)[1] == []
    finally:
        program.close()


def check_results(folder: Path, rows: list[str]) -> None:
    results = json.loads((folder / "bench.json").read_text())
    assert [row["name"] for row in results["rows"]] == rows
    for row in results["rows"]:
        taken = row["measures"]["seconds"]
        assert 0 < taken["low"] <= taken["median"] <= taken["high"]
        assert len(taken["rounds"]) == 3
        assert row["measures"]["server_cpu_seconds"]["median"] >= 0
    assert results["machine"]["torch"]
    assert (folder / "bench.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("began", choose([forked, bench], [forked]))
def test_it_measures_the_rows_asked_for_and_leaves_no_process(tmp_path: Path, began: Any) -> None:
    rows = ["raw socket: push+pull, 10 KB", "ours, grpc: step, 10 KB"]
    with began(tmp_path, *rows) as program:
        output = program.stdout.read()
        assert program.wait() == 0, output
    check_results(tmp_path, rows)


@pytest.mark.long
def test_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    with bench(tmp_path, "raw socket") as program:
        assert program.stdout is not None
        assert program.stdout.readline().startswith("[1/2]")
        while len(session_of(program.pid)) < 3:  # the program, Python's own helper of it, a child
            assert program.poll() is None
        os.killpg(program.pid, signal.SIGINT)
        output, _ = program.communicate(timeout=60)
        assert program.returncode == 1, output
    assert not (tmp_path / "bench.json").exists()


def test_a_name_that_no_row_has_is_an_error_that_says_so() -> None:
    result = CliRunner().invoke(main, ["--only", "no such row"])
    assert result.exit_code == 2
    assert "--list" in result.output
