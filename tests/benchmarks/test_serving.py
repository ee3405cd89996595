"""Look-ups of a process that serves, small: what is measured, and what is printed. No timing decides anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import serving
from benchmarks.serving import COPY, SHARDS, Serving, Training
from tests.support.shards import wait_until
from tests.worker.jobs import running_job


def test_look_ups_are_timed_in_a_copy_and_on_shards_while_a_worker_trains() -> None:
    with running_job(workers=1) as job:
        worker = Training(job.address, 0, 2000)
        worker.fill()
        worker.start()
        wait_until(lambda: worker._steps > 0)
        server = Serving(job.address, 2000)
        in_copy, came = server.from_copy(50)
        on_shards, _ = server.from_shards(50)
        assert worker.stop() > 0
        worker.close()
    assert len(in_copy) == len(on_shards) == 50
    assert min(in_copy + on_shards) > 0
    assert came >= 0


def test_percentiles_are_printed_and_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    each = {"median": 0.0002, "99 %": 0.004, "longest": 0.009, "rows a second": 12345.6, "steps a second": 50.0}
    monkeypatch.setattr(serving, "measure", lambda *_: {COPY: each, SHARDS: each | {"99 %": 0.02}})
    done = CliRunner().invoke(serving.main, ["--output", str(tmp_path / "results" / "serving.json")])
    assert done.exit_code == 0, done.output
    assert f"| {COPY} | 0.20 ms | 4.00 ms | 9.00 ms | 12,346/s | 50/s |" in done.output
    assert "99 % in a copy, asked ≤ 5 ms: reached" in done.output
    assert json.loads((tmp_path / "results" / "serving.json").read_text())["look-ups"][SHARDS]["99 %"] == 0.02
