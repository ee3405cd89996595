"""What is measured of sparse tables, small: no figure decides anything."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

import numpy as np
import psutil
import pytest

from benchmarks import catalog, ours
from benchmarks.ratios import Ratio, ratios
from benchmarks.rows import Key, Measures
from benchmarks.tables import growth, rates, saved, training
from benchmarks.tables.ids import power_law, scattered
from benchmarks.timing import Figures, Loop
from ps_server.cli.options.checkpoint import CheckpointConfig
from tests.worker.jobs import running_job


def figures(value: float) -> Figures:
    return Figures.of([[value]])


class Here:
    """Stands for a child process: the object of its role, in this one."""

    def __init__(self, held: object) -> None:
        self._held = held

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self._held, method)(*arguments)


def only(found: list[Ratio], words: str) -> Ratio:
    (ratio,) = (ratio for ratio in found if words in ratio.title)
    return ratio


def test_rows_are_pulled_and_pushed_and_counted() -> None:
    with running_job() as job, rates.worker(job.address, ours.BULK, 2_000) as loop:
        assert 0 < loop.rows_at_once() <= 2_000
        assert all(len(loop.run(operation, 2, 1)) == 2 for operation in rates.OPERATIONS)


def test_a_step_is_trained_in_one_process_and_with_tables_on_a_shard() -> None:
    names = tuple(training.key(ours.SHM, training.ADAGRAD, prefetched=ahead).operation for ahead in (False, True))
    with training.local_worker("step", training.ADAGRAD, 32, 500) as loop:
        assert len(loop.run("step", 2)) == 2
    with running_job() as job, training.worker(job.address, ours.SHM, names, training.ADAGRAD, 32, 500) as loop:
        assert [len(loop.run(name, 2)) for name in names] == [2, 2]


def test_growing_is_timed_while_another_worker_waits() -> None:
    with running_job(workers=0) as job, ExitStack() as stack:
        workers = [Here(stack.enter_context(growth.worker(rank, job.address, ours.BULK))) for rank in range(2)]
        growing = growth.Growing(workers[0], workers[1], psutil.Process(), 50_000)
        found = {name: median(samples) for name, samples in growing.run(growth.OPERATION, 1, 0).items()}
    assert found["with_look_ups_seconds"] > found["seconds"] > 0
    assert found["longest_wait_seconds"] >= found["median_wait_seconds"] > 0
    assert found["million_rows"] == 0.05
    assert found["bound_bytes"] == 50_000 * 95


def test_a_checkpoint_after_few_changes_is_smaller_than_a_full_one(tmp_path: Path) -> None:
    kept = CheckpointConfig(tmp_path, full_every=9)
    with running_job(checkpoints=kept) as job, saved.worker(job.address) as toucher:
        toucher.touch(0, 50_000)
        found = saved.Saved(Here(toucher), job.client, 50_000).run(saved.OPERATION, 1, 0)
    assert found["increment_bytes"][0] < found["full_bytes"][0] / 10


def test_ids_follow_a_power_law_and_are_scattered_without_a_collision() -> None:
    numbers = power_law(np.random.default_rng(1), 200_000, 1_000)
    counts = np.bincount(numbers, minlength=1_000)
    assert counts.size == 1_000
    slope, _ = linear_regression(np.log(np.arange(10, 110)), np.log(counts[10:110]))
    assert slope == pytest.approx(-1.05, abs=0.15)
    ids = scattered(0, 10_000)
    assert len(np.unique(ids)) == 10_000
    assert ids.min() < 0 < ids.max()
    assert scattered(500, 501)[0] == ids[500]


def test_what_comes_before_an_operation_is_not_timed_and_comes_each_time() -> None:
    calls: list[str] = []
    loop = Loop({"step": lambda: calls.append("step")}, {"step": lambda: calls.append("before")})
    assert len(loop.run("step", 2, warm_up=1)) == 2
    assert calls == ["before", "step"] * 3


def test_rates_are_millions_of_rows_a_second_and_judged_at_the_size_asked_for() -> None:
    asked = {"seconds": figures(0.01), "million_rows": figures(0.032)}
    small = {"seconds": figures(0.001), "million_rows": figures(0.002)}
    rows: dict[Key, Measures] = {
        rates.key(ours.BULK, rates.PULL, catalog.TABLE_ROWS): asked,
        rates.key(ours.SHM, rates.PULL, catalog.TABLE_ROWS): asked | {"seconds": figures(0.005)},
        rates.key(ours.BULK, rates.PULL, 1_000): small,
    }
    found = ratios(rows)
    fast = only(found, "with bulk: millions a second, 1,000,000 rows")
    assert (fast.value, fast.target, fast.reached) == (pytest.approx(3.2), "≥ 3", True)
    assert only(found, "with bulk: millions a second, 1,000 rows").reached is None
    assert only(found, "times faster with shm").value == pytest.approx(2.0)


def test_a_key_of_a_table_says_rows_and_not_bytes() -> None:
    assert str(growth.key(ours.BULK, 10**7)) == (
        "ours, bulk: rows inserted, row-wise Adagrad, 10,000,000 rows, 2 workers"
    )
