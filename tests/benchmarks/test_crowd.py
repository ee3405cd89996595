"""Steps of many workers: what is measured in turn, what is made of it, and a small run. No timing decides anything."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from benchmarks.crew import WARM_UP_SHARE, Crowd
from benchmarks.crowd import program
from benchmarks.crowd.program import BULK, FULL, GRPC, SHM, groups, needed_seconds, ratio, ratios, tables
from benchmarks.peers import mxnet_async, torch_rpc
from benchmarks.processes import ChildFailed
from benchmarks.rows import KB, MB, Group, Key, Measures
from benchmarks.timing import Figures, Loop
from tests.benchmarks.test_bench import END_SECONDS, session_of
from tests.support.interpreters import Interpreter
from tests.support.length import few

PLENTY = 10**12


class Worker:
    """A worker of this process, whose steps took what the test says."""

    pid = 0  # the clock of this process

    def __init__(self, *visits: list[float]) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self._visits = iter([[0.0], *visits])

    def begin(self, *asked: Any) -> None:
        self.asked.append(asked)

    def answer(self) -> list[float]:
        return next(self._visits)


def figures(*rounds: float) -> Figures:
    return Figures.of([[value] for value in rounds])


def measures(*seconds: float, server: float = 0.0002, worker: float = 0.0003) -> Measures:
    own = {"server_cpu_seconds": figures(server), "worker_cpu_seconds": figures(worker)}
    return {"seconds": figures(*seconds), "step_seconds": figures(*seconds), **own}


def row(system: str, nbytes: int = MB, workers: int = 8) -> Key:
    return program.key_of(system, nbytes, workers)


def all_groups(memory: int = PLENTY, python: Path | None = None) -> list[Group]:
    return list(groups([10 * KB, MB], [1, 8], FULL, python, memory))


def test_every_worker_runs_for_the_same_time_and_the_steps_of_all_count() -> None:
    workers = [Worker([0.1] * 10), Worker([0.25] * 4)]
    found = Crowd(workers, [0], seconds=1.0).run("step", 0, 0)
    assert workers[0].asked == workers[1].asked
    assert [(asked[:2], asked[3] - asked[2]) for asked in workers[0].asked] == [
        (("run_between", "step"), pytest.approx(WARM_UP_SHARE)),
        (("run_between", "step"), pytest.approx(1.0)),
    ]
    assert found["seconds"] == [pytest.approx(1 / 14)]
    assert sorted(found["step_seconds"]) == [0.1] * 10 + [0.25] * 4
    assert found["least_share"] == [0.4]
    assert found["server_cpu_seconds"][0] >= 0
    assert found["worker_cpu_seconds"][0] >= 0


def test_beside_slow_workers_only_the_steps_of_the_first_count() -> None:
    workers = [Worker([0.1] * 10), Worker([0.5] * 2)]
    found = Crowd(workers, [0], seconds=1.0, beside="wait").run("step", 0, 0)
    assert [worker.asked[1][1] for worker in workers] == ["step", "wait"]
    assert found["seconds"] == [pytest.approx(0.1)]
    assert "server_cpu_seconds" not in found


def test_a_loop_runs_once_at_least_however_short_the_time_is() -> None:
    prepared: list[int] = []
    loop = Loop({"step": lambda: prepared.append(2)}, {"step": lambda: prepared.append(1)})
    assert len(loop.run_between("step", 0.0, 0.0)) == 1
    assert prepared == [1, 2]


def test_the_systems_of_one_size_and_number_of_workers_are_measured_in_turn() -> None:
    first, *_, last = all_groups(python=Path(sys.executable))
    assert [key.system for subject in first.subjects for key in subject.keys] == list(program.SYSTEMS)
    assert {(key.nbytes, key.workers) for subject in first.subjects for key in subject.keys} == {(10 * KB, 1)}
    assert [key.operation for subject in last.subjects for key in subject.keys] == ["step beside slow workers"] * 3
    without = all_groups()[0]
    assert mxnet_async.SYSTEM not in {key.system for subject in without.subjects for key in subject.keys}


def test_systems_that_need_too_much_memory_together_are_up_one_at_a_time_which_takes_longer() -> None:
    assert all(group.together for group in all_groups())
    *large, _ = all_groups(memory=5000 * MB)
    assert [group.together for group in large] == [True, False, True, False]
    assert needed_seconds(large[1], FULL) > needed_seconds(all_groups()[1], FULL)


def test_ratios_are_those_of_rounds_that_lie_side_by_side_with_quartiles() -> None:
    rows = {row(BULK): measures(0.001, 0.002, 0.001), row(torch_rpc.TCP): measures(0.002, 0.008, 0.003)}
    found = ratio(rows, row(BULK), row(torch_rpc.TCP))
    assert found is not None
    assert (found.low, found.median, found.high) == (2.5, 3.0, 3.5)
    assert ratio(rows, row(SHM), row(torch_rpc.SHM)) is None
    (asked,) = ratios(rows)
    assert (asked.title, asked.target, asked.reached) == ("8 × 1 MB: ours, bulk against torch RPC, TCP", "≥ 1.8", True)


def test_tables_have_steps_per_second_cpu_time_and_ratios_of_what_was_measured() -> None:
    beside = Key(SHM, "step beside slow workers", MB)
    rows = {
        row(BULK, 10 * KB, 1): measures(0.0005),
        row(BULK): measures(0.001, 0.002),
        row(torch_rpc.TCP): measures(0.25, 0.25, server=0.1),
        beside: measures(0.001),
    }
    text = "\n".join(tables(rows))
    assert "| workers × size | ours, bulk | torch RPC, TCP |" in text
    assert "| 1 × 10 KB | 2,000 |  |" in text
    assert "| 8 × 1 MB | 667 | 4.0 |" in text
    assert "| 8 × 1 MB | 0.2, 0.3 | 100, 0.3 |" in text
    assert "| 8 × 1 MB | 187.50 [156.25 – 218.75] |" in text
    assert "- ours, shm, 1 MB: 1,000 steps/s" in text
    assert list(tables({})) == []


def test_rows_and_time_are_shown_before_anything_is_measured() -> None:
    shown = CliRunner().invoke(program.main, ["--list", "--only", "grpc", "--workers", "2", "--size", "10 KB"])
    assert shown.exit_code == 0, shown.output
    assert "1 rows, about" in shown.output
    assert f"{GRPC}: step, 10 KB, 2 workers" in shown.output
    assert CliRunner().invoke(program.main, ["--only", "no such row"]).exit_code == 2


def test_a_small_run_measures_transports_and_peers_in_turn_and_leaves_no_process(tmp_path: Path) -> None:
    systems = few([BULK, SHM, GRPC, torch_rpc.SHM, torch_rpc.TCP])
    only = [argument for system in systems for argument in ("--only", f"{system}:")]
    options = ("--quick", "--workers", "2", "--size", "10 KB", *only, "--output", str(tmp_path / "crowd.json"))
    run = Interpreter("-m", "tests.benchmarks.forked_program", "crowd.program", *options)
    try:
        output = run.stdout.read()
        assert run.wait() == 0, output
        assert psutil.wait_procs(session_of(run.pid), END_SECONDS)[1] == []
    finally:
        run.close()
    assert "| 2 × 10 KB |" in output
    rows = json.loads((tmp_path / "crowd.json").read_text())["rows"]
    assert [found["system"] for found in rows] == systems
    for found in rows:
        assert found["measures"]["server_cpu_seconds"]["median"] > 0
        assert found["measures"]["worker_cpu_seconds"]["median"] > 0
        assert 0 < found["measures"]["least_share"]["median"] <= 1


def test_a_peer_that_does_not_start_is_a_failed_child() -> None:
    subject = mxnet_async.subject(Path(sys.executable), 10 * KB, 1, 0.1)
    with pytest.raises(ChildFailed, match=r"mxnet_steps.py has ended"), subject.open():
        pass
