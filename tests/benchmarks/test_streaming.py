"""The stream in several systems: what is made of their scores, and a small run with kills. No figure decides."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.processes import ChildFailed
from benchmarks.streaming import program
from benchmarks.streaming.program import KILLED, ONE, OURS, TENSORFLOW, Outcome, Script, Settings

SMALL = Settings(windows=2, events=8192, items=10, batch=64, rank_every=8)


def outcome(*aucs: float, seconds: float = 2.0, **counts: int) -> Outcome:
    first = {"window": 0, "events": 1000, "seconds": 100.0, "auc": aucs[0], "best": 0.8, "again": 0}
    return Outcome([first | {"window": n, "auc": auc, "seconds": seconds} for n, auc in enumerate(aucs)], **counts)


def test_a_rate_leaves_the_first_window_out() -> None:
    found = outcome(0.6, 0.7, 0.7, seconds=4.0)
    found.windows[0]["seconds"] = 1000.0
    assert found.rate == 250


def test_what_is_asked_is_judged_against_the_fastest_process_and_where_both_were_measured() -> None:
    found = {
        f"{ONE}, 1 thread": outcome(0.7, 0.72, seconds=2.0),
        f"{ONE}, 2 threads": outcome(0.7, 0.72, seconds=1.0),
        OURS: outcome(0.699, 0.723, seconds=1.25),
        KILLED: outcome(0.6992, 0.7215, seconds=3.0, twice=1, again=4),
        TENSORFLOW: outcome(0.6, 0.6, seconds=2.0),
    }
    assert program.asked(found) == [
        "- AUC of a window, away from one process: 0.003, asked ≤ 0.002: not reached",
        "- events/s, by one process: 0.8, asked ≥ 0.8: reached",
        "- AUC of a window from the kills on, away from without: 0.0015, asked ≤ 0.001: not reached",
        "- the same in the windows before the kills, by chance: 0.0002",
        "- batches lost or trained twice with kills: 1, asked ≤ 0: not reached",
        "- events/s, by TensorFlow: 1.6, asked ≥ 2: not reached",
    ]
    assert program.asked({OURS: found[OURS]}) == []
    lines = program.tables(found)
    assert "| 2 | 0.8000 | 0.7200 | 0.7200 | 0.7230 | 0.7215 | 0.6000 |" in lines
    assert f"| {KILLED} | 333 | 0, 1 | 4 |" in lines


@pytest.mark.long
def test_scores_of_another_system_are_judged_as_those_of_the_example(tmp_path: Path) -> None:
    own = program.one_process(SMALL, tmp_path, threads=1)
    for window in own.windows:
        found = program.judged(SMALL, tmp_path, int(window["window"]))
        assert (found["auc"], found["best"]) == pytest.approx((window["auc"], window["best"]))


@pytest.mark.long
def test_a_worker_that_fails_is_told(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("{}")
    script = Script(SMALL.flags(tmp_path), {})
    with pytest.raises(ChildFailed, match="code 2 before window 0"):
        script.until(0)
    script.kill()


def test_the_program_keeps_and_draws_what_it_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "one_process", lambda settings, out, threads: outcome(0.6, 0.7))
    monkeypatch.setattr(program, "ours", lambda settings, out, **_: outcome(0.6, 0.7))
    monkeypatch.setattr(program, "tensorflow", lambda settings, out, **_: outcome(0.6, 0.7))
    kept, picture = tmp_path / "results" / "kept.json", tmp_path / "auc.png"
    flags = ["--quick", "--tensorflow", str(Path(program.__file__)), "--output", str(kept), "--plot", str(picture)]
    done = CliRunner().invoke(program.main, flags)
    assert done.exit_code == 0, done.output
    assert "events/s, by TensorFlow: 1, asked ≥ 2: not reached" in done.output
    assert {OURS, KILLED, TENSORFLOW} < json.loads(kept.read_text())["systems"].keys()
    assert picture.read_bytes().startswith(b"\x89PNG")
    asked = {}
    monkeypatch.setattr(
        program, "ours", lambda settings, out, **how: asked.update(lr=settings.lr, **how) or outcome(0.6)
    )
    bounded = ["--only", OURS, "--lr", "0.004", "--staleness", "1", "--output", str(kept)]
    assert CliRunner().invoke(program.main, bounded).exit_code == 0
    assert asked == {"lr": 0.004, "workers": 2, "shards": 1, "options": ("--mode", "ssp", "--staleness", "1")}
    assert json.loads(kept.read_text())["staleness"] == 1
    none = CliRunner().invoke(program.main, ["--only", TENSORFLOW, "--output", str(kept)])
    assert none.exit_code == 2


@pytest.mark.long
def test_with_a_shard_and_a_worker_killed_every_batch_is_trained_once(tmp_path: Path) -> None:
    found = program.ours(SMALL, tmp_path, kill_in=1, options=("--lease-seconds", "5"))
    assert (found.missed, found.twice) == (0, 0)
    # What the killed worker had trained and not reported.
    assert found.again > 0
    assert np.isfinite([window["auc"] for window in found.windows]).all()
