"""A model that diverges in async is reported before it is NaN, and the checkpoint from before stays."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from ps_protocol.cluster.job_state import diverging
from ps_protocol.cluster.view import Divergence, Role
from ps_protocol.errors import InvalidRequest, NonFiniteGradient, StorageFull
from ps_protocol.model.spec import Consistency, Mode
from ps_server.checkpoint import directory
from ps_server.checkpoint.directory import committed, listed
from ps_server.checkpoint.files import MANIFEST_NAME
from ps_server.cli.options.checkpoint import CheckpointConfig
from ps_server.coordinator.jobs import checkpoints
from ps_worker import Cluster
from tests.support.shards import wait_until
from tests.worker.jobs import Job, running_job


def job_with(directory: Path, mode: Mode = Mode.ASYNC, keep: int = 2) -> AbstractContextManager[Job]:
    return running_job(
        checkpoints=CheckpointConfig(directory, keep=keep),
        heartbeat_seconds=0.05,
        clock_began=time.time() - time.monotonic(),
        consistency=Consistency(mode),
    )


class Training:
    """One worker and a model of two numbers, whose gradients the test chooses."""

    def __init__(self, job: Job, cluster: Cluster, nonfinite: str = "refuse", **options: Any) -> None:
        self.job, self.cluster = job, cluster
        model = torch.nn.Linear(2, 1, bias=False)
        self.weight = model.weight
        self.optimizer = cluster.optimizer(torch.optim.SGD, model, lr=1e-30, nonfinite=nonfinite, **options)
        job.run_checkpoints()

    def step(self, gradient: float = 1.0, loss: float | None = None) -> None:
        self.weight.grad = torch.full((1, 2), gradient)
        if loss is not None:
            self.cluster.report(loss=loss)
        self.optimizer.step()

    def until(
        self, reached: Callable[[], bool], gradient: float = 1.0, loss: Callable[[], float] | None = None
    ) -> None:
        """Make steps until ``reached``."""

        def stepped() -> bool:
            self.step(gradient, loss() if loss else None)
            return reached()

        wait_until(stepped)

    def beats(self, count: int, loss: Callable[[], float] | None = None) -> None:
        """Make steps until ``count`` heartbeats of shard and worker have reported them."""
        for _ in range(count):
            before = [self.job.member(role, 0).stats.steps for role in (Role.SHARD, Role.WORKER)]
            self.until(
                lambda before=before: all(
                    self.job.member(role, 0).stats.steps > steps
                    for role, steps in zip((Role.SHARD, Role.WORKER), before, strict=True)
                ),
                loss=loss,
            )

    def checkpoint(self) -> Path:
        return Path(self.job.client.checkpoint()[0])

    @property
    def found(self) -> tuple[Divergence, ...]:
        return self.job.client.get_status().divergences

    def has_kept(self) -> bool:
        return bool(self.found) and bool(self.found[0].checkpoint)


def test_gradients_that_grow_are_reported_and_the_newest_checkpoint_from_before_stays(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    with job_with(tmp_path, keep=3) as job, job.cluster() as cluster:
        training = Training(job, cluster)
        training.step()
        training.checkpoint()
        training.beats(4)
        before = training.checkpoint()
        step = listed(tmp_path)[-1].step
        training.beats(4)
        assert training.found == ()
        training.until(lambda: any(each.gradient_norm > 1e3 for each in job.member(Role.SHARD, 0).stats.updates), 1e6)
        after = training.checkpoint()
        training.until(training.has_kept, 1e6)
        (grown,) = training.found
        assert (grown.member.role, grown.what) == (Role.SHARD, "gradient norm of model 'model'")
        assert grown.usual == pytest.approx(math.sqrt(2), rel=0.01)
        assert (grown.checkpoint, grown.step) == (str(before), step)
        assert f"psctl restore step={step} goes back" in diverging(job.client.get_status())
        for _ in range(3):
            newest = training.checkpoint()
        assert before in committed(tmp_path)
        assert after not in committed(tmp_path)
        assert len(committed(tmp_path)) == 4
        assert {each.folder: bool(each.kept) for each in listed(tmp_path)} == {
            folder: folder == before for folder in committed(tmp_path)
        }
        assert newest == committed(tmp_path)[-1]
        job.client.restore_checkpoint(step=step)
        assert training.found == ()
    assert "the model diverges: gradient norm of model 'model' of shard 0 is" in caplog.text


def test_a_refused_step_is_reported_with_the_staleness_and_a_checkpoint_is_kept(tmp_path, caplog):
    with job_with(tmp_path) as job, job.cluster() as cluster:
        training = Training(job, cluster)
        training.beats(2)
        before = training.checkpoint()
        training.beats(1)
        with pytest.raises(NonFiniteGradient):
            training.step(math.nan)
        wait_until(training.has_kept)
        (refused,) = training.found
        assert (str(refused.member), refused.what, refused.checkpoint) == ("worker 0", "gradients", str(before))
        text = diverging(job.client.get_status())
        assert "worker 0 refused gradients that hold NaN or infinity; staleness is 0.0" in text
        job.client.set_consistency(Consistency(Mode.SYNC))
        assert training.found == ()
    assert "worker 0 refused gradients that hold NaN" in caplog.text


def test_a_worker_that_ends_by_its_refused_step_is_reported_too(tmp_path):
    with job_with(tmp_path) as job:

        def script() -> None:
            with job.cluster() as cluster:
                training = Training(job, cluster)
                training.beats(1)
                training.step(math.inf)

        with pytest.raises(NonFiniteGradient):
            script()
        assert job.gone(0)
        assert [grown.what for grown in job.client.get_status().divergences] == ["gradients"]


@pytest.mark.parametrize(("mode", "nonfinite"), [(Mode.SYNC, "refuse"), (Mode.ASYNC, "skip")])
def test_in_sync_and_where_steps_are_skipped_nothing_is_reported(tmp_path, mode, nonfinite):
    with job_with(tmp_path, mode) as job, job.cluster() as cluster:
        training = Training(job, cluster, nonfinite)
        training.beats(8)
        training.checkpoint()
        if nonfinite == "skip":
            training.step(math.nan)
        else:
            training.until(lambda: job.member(Role.WORKER, 0).stats.steps > 100, 1e6)
            with pytest.raises(NonFiniteGradient):
                training.step(math.nan)
            wait_until(lambda: job.member(Role.WORKER, 0).stats.nonfinite == 1)
        assert training.found == ()
        assert not any(each.kept for each in listed(tmp_path))


def test_a_loss_that_grows_is_reported_where_gradients_do_not(tmp_path):
    with job_with(tmp_path) as job, job.cluster() as cluster:
        training = Training(job, cluster)
        steps = 0

        def loss() -> float:
            nonlocal steps
            steps += 1
            return 0.01 + 0.001 * (steps % 7)

        training.beats(24, loss)
        training.checkpoint()
        assert training.found == ()
        training.until(training.has_kept, loss=lambda: 100.0 + loss())
        (grown,) = training.found
        assert (str(grown.member), grown.what) == ("worker 0", "loss")
        assert grown.usual < 0.02


def test_a_checkpoint_is_restored_by_its_step(tmp_path):
    with job_with(tmp_path, keep=9) as job, job.cluster() as cluster:
        training = Training(job, cluster)
        saved: dict[int, Path] = {}
        for _ in range(3):
            training.step()
            training.step()
            folder = training.checkpoint()
            saved[listed(tmp_path)[-1].step or 0] = folder
        assert list(saved) == [2, 4, 6]
        assert job.client.restore_checkpoint(step=4) == (str(saved[4]), ["model"])
        again = training.checkpoint()
        assert job.client.restore_checkpoint(step=listed(tmp_path)[-1].step)[0] == str(again)


def test_a_step_that_no_checkpoint_has_is_one_error_with_the_nearest(tmp_path):
    with job_with(tmp_path, keep=9) as job, job.cluster() as cluster:
        with pytest.raises(InvalidRequest, match=r"no complete checkpoint in .* is of step 5.*there is none"):
            job.client.restore_checkpoint(step=5)
        training = Training(job, cluster)
        for _ in range(6):
            training.step()
            training.checkpoint()
        with pytest.raises(InvalidRequest, match=r"is of step 50; .*expected: 3, 4, 5, 6, of 6 from 1 to 6"):
            job.client.restore_checkpoint(step=50)
        damaged = committed(tmp_path)[2] / MANIFEST_NAME
        damaged.write_bytes(damaged.read_bytes().replace(b"program", b"progrom"))
        with pytest.raises(InvalidRequest, match=r"is of step 3; .*expected: 1, 2, 4, 5, of 5"):
            job.client.restore_checkpoint(step=3)
        with pytest.raises(InvalidRequest, match="a checkpoint is named by its folder or by its step"):
            job.client.restore_checkpoint(str(committed(tmp_path)[0]), 1)
    with running_job() as job, pytest.raises(InvalidRequest, match="no place for checkpoints"):
        job.client.restore_checkpoint(step=1)


def test_a_checkpoint_that_cannot_be_kept_for_now_is_kept_later(tmp_path, caplog, monkeypatch):
    refusals = iter([StorageFull("the disk is full")] * 2)

    def protect(*arguments: Any) -> Path | None:
        if (error := next(refusals, None)) is not None:
            raise error
        return directory.protect(*arguments)

    monkeypatch.setattr(checkpoints, "protect", protect)
    with job_with(tmp_path) as job, job.cluster() as cluster:
        training = Training(job, cluster)
        training.beats(1)
        saved = training.checkpoint()
        with pytest.raises(NonFiniteGradient):
            training.step(math.nan)
        wait_until(training.has_kept)
        assert training.found[0].checkpoint == str(saved)
    assert caplog.text.count("no checkpoint from before the growth is kept: the disk is full") == 1


def test_without_a_checkpoint_the_job_says_that_there_is_none_to_keep(tmp_path, caplog):
    with job_with(tmp_path) as job, job.cluster() as cluster:
        training = Training(job, cluster)
        with pytest.raises(NonFiniteGradient):
            training.step(math.nan)
        wait_until(lambda: "there is no checkpoint to keep from before gradients grew" in caplog.text)
        assert [grown.checkpoint for grown in training.found] == [""]


def test_clipped_gradients_are_judged_by_their_norm_before_they_are_clipped(tmp_path):
    with job_with(tmp_path) as job, job.cluster() as cluster:
        training = Training(job, cluster, clip_grad_norm=0.5)
        training.beats(8)
        assert training.found == ()
        training.until(lambda: bool(training.found), 1e6)
        assert training.found[0].usual == pytest.approx(math.sqrt(2), rel=0.01)
