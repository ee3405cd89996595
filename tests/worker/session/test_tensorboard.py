"""Reported numbers in event files: whose, at which step, and what happens where they cannot be written."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

from ps_protocol.cluster.view import Member, Role
from ps_protocol.errors import ConfigError
from ps_worker.session.instruments import Instruments
from ps_worker.session.tensorboard import ReportedScalars, open_writer
from tests.end_to_end.training import batches, loss_of, net
from tests.worker.jobs import running_job


def events_in(folder):
    """Step and value of each scalar, by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return {tag: [(each.step, each.value) for each in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_each_worker_has_a_folder_and_the_models_version_is_the_step(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    monkeypatch.setenv("PS_TENSORBOARD", str(tmp_path / "runs"))
    with running_job() as job, job.cluster(rank=0) as cluster:
        model = net()
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        losses = []
        for (batch,) in batches(4):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            cluster.report(loss=loss, epoch=1)
            losses.append(loss.item())
    found = events_in(tmp_path / "runs" / "worker-0")
    assert [step for step, _ in found["loss"]] == [1, 2, 3, 4]
    assert [value for _, value in found["loss"]] == pytest.approx(losses)
    assert found["epoch"] == [(step, 1.0) for step in range(1, 5)]


def test_an_evaluator_has_a_folder_too(tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    instruments = Instruments()
    instruments.open({"PS_TENSORBOARD": str(tmp_path)}, Member(Role.EVALUATOR, 1, 5))
    assert instruments.tracer is None
    instruments.version = 70
    instruments.report({"accuracy": 0.5})
    instruments.close()
    instruments.close()
    assert events_in(tmp_path / "evaluator-1") == {"accuracy": [(70, 0.5)]}


def test_without_the_package_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"torch-ps\[tensorboard\]"):
        open_writer(tmp_path)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file/runs cannot be written"):
        open_writer(tmp_path / "file" / "runs")


class Slow:
    """A writer that waits until it is let go, and fails where told."""

    def __init__(self, error=None):
        self.go = threading.Event()
        self.written = []
        self.closed = False
        self._error = error

    def add_scalar(self, tag, scalar_value, global_step, walltime):
        self.go.wait()
        if self._error:
            raise self._error
        self.written.append((tag, scalar_value, global_step))

    def close(self):
        self.closed = True


def test_reports_that_come_too_fast_are_left_out_and_counted(monkeypatch, caplog):
    monkeypatch.setattr("ps_worker.session.tensorboard.WAITING", 2)
    writer = Slow()
    scalars = ReportedScalars(writer)
    for step in range(10):
        scalars.add({"loss": torch.tensor(0.5)}, step)
    writer.go.set()
    scalars.close()
    assert writer.closed
    assert 2 <= len(writer.written) <= 3
    assert f"lacks {10 - len(writer.written)} calls" in caplog.text


def test_a_disk_that_fills_up_ends_the_files_and_not_the_training(caplog):
    writer = Slow(OSError(28, "No space left on device"))
    writer.go.set()
    scalars = ReportedScalars(writer)
    scalars.add({"loss": 0.5}, 1)
    scalars.close()
    assert "event files end here" in caplog.text


def test_a_value_is_as_it_was_when_it_was_reported():
    writer = Slow()
    scalars = ReportedScalars(writer)
    loss = torch.tensor(0.5)
    scalars.add({"loss": loss}, 1)
    loss.fill_(7.0)
    writer.go.set()
    scalars.close()
    assert writer.written == [("loss", 0.5, 1)]
