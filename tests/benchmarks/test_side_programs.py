"""What the programs beside ``make bench`` make of their samples."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks import other_python, startup, tensorflow
from benchmarks.forked import answers, forked
from benchmarks.peers import grpc_echo
from benchmarks.processes import ChildFailed
from benchmarks.tables import table_parts


def test_rates_of_rows_are_medians_and_the_ratio_that_of_neighbours() -> None:
    blocks = [(([0.001, 0.001], [0.004]), ([0.002], [0.004])), (([0.002], [0.002]), ([0.008], [0.008]))]
    assert tensorflow.row("bulk", 1000, blocks) == (
        "bulk    pulled: 0.75 M/s, TensorFlow 0.31, ratio 3.00 [2.50 - 3.50]   "
        "pulled and pushed: 0.38 M/s, TensorFlow 0.19, ratio 2.50 [1.75 - 3.25]"
    )


def test_a_program_of_another_interpreter_answers_and_one_that_ends_is_an_error(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(other_python, "PROGRAMS", tmp_path)
    (tmp_path / "echo.py").write_text("""
import sys
print("0", flush=True)
for line in sys.stdin:
    print(int(line) * int(sys.argv[1]), flush=True)
""")
    with other_python.running(Path(sys.executable), "echo.py", 7) as steps:
        assert [steps(2), steps(3)] == [14, 21]
    (tmp_path / "ends.py").write_text("raise SystemExit(4)")
    with other_python.Program(Path(sys.executable), "ends.py") as ended:
        with pytest.raises(ChildFailed):
            ended.answer()
        ended.rest()
        ended.wake()
    with (
        pytest.raises(ChildFailed, match=r"ends.py has ended with code 4; its last words are above"),
        other_python.running(Path(sys.executable), "ends.py"),
    ):
        pass


def test_a_table_is_timed_and_holds_what_was_inserted(monkeypatch) -> None:
    for name, value in {"ROWS": 3_000, "IDS": 500, "INSERTED": 1_000}.items():
        monkeypatch.setattr(table_parts, name, value)
    table = table_parts.Worked("adam")
    assert all(table.seconds(operation) > 0 for operation in table_parts.OPERATIONS)
    assert table._table.rows == 5_000
    assert table._table.updates == 6


def test_jobs_are_shown_with_their_extremes() -> None:
    jobs = [startup.Job(3.0, 0.5, 9.0), startup.Job(4.0, 0.25, 8.0), startup.Job(5.0, 0.75, 10.0)]
    assert startup.row("this", jobs) == "this      4.00 (3.00 - 5.00)    0.50 (0.25 - 0.75)    9.00 (8.00 - 10.00)"


def test_a_forked_function_answers_and_one_that_fails_is_an_error() -> None:
    assert answers([forked(max, 3, 5), forked(os.getppid)]) == [5, os.getpid()]
    with pytest.raises(ChildProcessError, match="has ended with code 1"):
        answers([forked(int, "three")])


def test_an_echo_over_grpc_sends_all_chunks_there_and_back(monkeypatch) -> None:
    for name in ("tune_allocator", "keep_freed_memory"):  # of the process that runs tests
        monkeypatch.setattr(grpc_echo, name, lambda: None)
    with (
        grpc_echo.server(3_000_000) as served,
        grpc_echo.worker(served.address, 3_000_000) as loop,
    ):
        assert len(loop.run(grpc_echo.ECHO, 2, warm_up=1)) == 2
