"""What a worker tells about itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ps_protocol.cluster.view import Member, Role
from ps_worker.session.reporting import Progress


@pytest.fixture
def progress() -> Progress:
    return Progress(Member(Role.WORKER, 3, 9))


def test_reported_metrics_keep_their_newest_value(progress: Progress) -> None:
    progress.report({"loss": 2.0, "accuracy": 0.5})
    progress.report({"loss": torch.tensor(1.5)})
    assert progress.stats().metrics == {"loss": 1.5, "accuracy": 0.5}


def test_steps_and_samples_are_counted(progress: Progress) -> None:
    progress.record_samples(32)
    progress.record_step(1000, 2)
    progress.record_step(1000, 4)
    assert (progress.stats().steps, progress.stats().staleness) == (2, 4)


def test_hints_name_the_worker_and_come_at_most_every_five_seconds(
    progress: Progress, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    # Not the function itself, which other threads call.
    monkeypatch.setattr("ps_worker.session.reporting.time", SimpleNamespace(monotonic=lambda: now))
    for now in (100.0, 100.1, 104.9, 105.0, 109.0):
        progress.hint(f"waiting at {now}")
    assert caplog.messages == ["worker 3: waiting at 100.0", "worker 3: waiting at 105.0"]
