"""Published weights to several readers, small: what is measured, and what is printed. No timing decides anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import readers
from benchmarks.readers import (
    HTTP,
    OURS,
    RPC,
    SHARED,
    Publishing,
    Shared,
    downloader,
    once,
    served,
    subscriber,
    table,
)
from tests.weights.relays import relaying
from tests.worker.jobs import running_job


def test_readers_receive_what_is_published_and_what_is_served() -> None:
    with running_job() as job, job.cluster() as cluster:
        trainer = Publishing(cluster, 400_000)
        assert trainer.block(True) > 0
        cluster.publish("policy", step=1, wait=True)
        with subscriber(job.address) as ours:
            assert min(ours.run(OURS, 2)) > 0
            assert (ours.received(), ours.memory() > 0) == (800_000, True)
        with relaying(job.loop, job.address, "policy") as relay, subscriber(relay.address, "auto") as near:
            assert min(near.run(OURS, 2)) > 0
            assert near.received() == 0
    with served(400_000) as url, downloader(url) as theirs:
        assert min(theirs.run(HTTP, 2)) > 0


def test_the_slowest_reader_counts_and_the_faster_of_the_others_is_compared() -> None:
    class Done:
        def __init__(self, seconds: float) -> None:
            self.seconds = seconds

        def begin(self, *_: object) -> None:
            pass

        def answer(self) -> list[float]:
            return [self.seconds]

    assert once([Done(0.2), Done(0.5)], "read") == 0.5  # type: ignore[list-item]
    lines = table({"4": {OURS: [0.5], HTTP: [1.0], RPC: [0.8]}}, 100_000_000)
    assert lines[-1] == (
        "| 4 | 0.500 s, 0.80 GB/s | 1.000 s, 0.40 GB/s | 0.800 s, 0.50 GB/s | 1.60, asked ≥ 1.2: reached |"
    )


def test_everything_is_printed_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "measure", lambda *_: {"1": {OURS: [0.5], HTTP: [0.5], RPC: [0.8]}})
    monkeypatch.setattr(readers, "shares", lambda *_, read: [0.02, 0.3 if read else 0.04, 0.4])
    monkeypatch.setattr(readers, "behind_relay", lambda *_: {"1": {SHARED: Shared([0.25], 100_000_000, 0, 50_000_000)}})
    done = CliRunner().invoke(readers.main, ["--output", str(tmp_path / "readers.json")])
    assert done.exit_code == 0, done.output
    assert "| 1 | a relay, shared memory | 0.250 | 100 MB | 0 MB | 50 MB |" in done.output
    assert "1.00, asked ≥ 1.2: not reached" in done.output
    assert "a version every 10 steps beside no reader: 4.0% more time, asked ≤ 5%: reached" in done.output
    assert "beside a reader of this host: 30.0% more time, asked ≤ 5%: not reached" in done.output
    kept = json.loads((tmp_path / "readers.json").read_text())["publishing"]
    assert kept == {"no reader": [0.02, 0.04, 0.4], "a reader of this host": [0.02, 0.3, 0.4]}
