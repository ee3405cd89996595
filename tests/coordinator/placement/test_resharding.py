"""Shards added to and drained from a job that trains: real shards, a real worker, checkpoints in between."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from click.testing import CliRunner

from ps_protocol.cluster.view import Role
from ps_protocol.model.spec import Consistency, Mode
from ps_server.checkpoint.checkpoint import Checkpoint
from ps_server.checkpoint.directory import committed
from ps_server.cli.options.checkpoint import CheckpointConfig
from ps_server.shard import main as shard_main
from ps_server.shard.config import ShardConfig
from ps_server.shard.process import serve
from tests.support.length import few
from tests.support.shards import wait_until
from tests.worker.jobs import Job, RunningShard, running_job

SLICES = 8
ROWS = 1000


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr("ps_server.coordinator.times.BREATH_SECONDS", 0.05)


def add_shard(job: Job, number: int) -> None:
    ready_file = job.folder / f"shard-{number}"
    config = ShardConfig(
        shard=number,
        coordinator=job.address,
        threads=1,
        ready_file=ready_file,
        add=True,
        checkpoint_dirs=job.checkpoint_dirs,
    )
    stop = asyncio.Event()
    served = asyncio.run_coroutine_threadsafe(serve(config, stop), job.loop.loop)
    job._shards.append(RunningShard(stop, served, ready_file))
    job.wait_for_shards()


def parameters():
    return [torch.nn.Parameter(torch.zeros(ROWS)) for _ in range(SLICES)]


def step(optimizer):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = -torch.ones_like(parameter)
    optimizer.step()


def undisturbed(steps: int):
    """What plain torch makes of so many steps."""
    mine = parameters()
    optimizer = torch.optim.SGD(mine, lr=1.0, momentum=0.5)
    for _ in range(steps):
        step(optimizer)
    return mine[0][0].item()


class Training:
    """Workers that push ones until they are told to stop."""

    def __init__(self, job: Job, workers: int) -> None:
        self._job = job
        self._done = threading.Event()
        self._pool = ThreadPoolExecutor(workers)
        self.steps = [0] * workers
        self._ended = [self._pool.submit(self._train, rank) for rank in range(workers)]
        self.goes_on()

    def _train(self, rank: int):
        with self._job.cluster(rank=rank) as cluster:
            mine = parameters()
            made = cluster.optimizer(torch.optim.SGD, mine, lr=1.0, momentum=0.5)
            while not self._done.is_set():
                step(made)
                self.steps[rank] += 1
            made.pull()
            return made.version, {value for parameter in mine for value in parameter.tolist()}

    def goes_on(self) -> None:
        before = list(self.steps)
        wait_until(lambda: all(now > then for now, then in zip(self.steps, before, strict=True)))

    def ends(self):
        """What each worker had at the end: a version, and the values of all elements."""
        self._done.set()
        with self._pool:
            return [each.result(120) for each in self._ended]


@pytest.mark.parametrize(("mode", "workers"), few([(Mode.SYNC, 2), (Mode.ASYNC, 1)]))
def test_slices_move_while_a_job_trains_and_every_push_is_in_every_element_once(mode, workers):
    with running_job(2, workers, consistency=Consistency(mode)) as job:
        training = Training(job, workers)
        add_shard(job, 2)
        for change in ({"to": [2]}, {"drain": [1]}, {"to": [1]}, {"model": "model", "variable": "param_0", "to": [2]}):
            *_, last = job.client.move(batch_bytes=4 * ROWS, **change)
            assert last.moved_bytes == last.total_bytes
            training.goes_on()
        assert job.client.get_shard_map("model").holders == [0, 1, 2]
        ended = training.ends()
    for version, values in ended:
        assert values == {undisturbed(version)}
    assert mode is Mode.SYNC or ended[0][0] == training.steps[0]


def test_a_drained_shard_may_be_stopped_and_checkpoints_go_on_and_are_restored_on_other_shards(
    tmp_path,
):
    with running_job(3, 1, checkpoints=CheckpointConfig(tmp_path)) as job:
        training = Training(job, 1)
        list(job.client.move(drain=[1]))
        job.client.checkpoint()
        training.goes_on()
        job.stop_shard(1)
        wait_until(lambda: 1 not in job.view.live(Role.SHARD))
        training.goes_on()
        job.client.checkpoint()
        training.ends()
    for folder in committed(tmp_path):
        record = Checkpoint.open(folder).model("model")
        assert record.shard_map.holders == [0, 2]
        assert len(record.facts) == 2
    saved = Checkpoint.open(committed(tmp_path)[-1])
    saved.verify()
    version = saved.model("model").facts[0]["tracker"]["version"]
    for shards in (2, 3):
        with running_job(shards, 1, saved=saved) as job, job.cluster(rank=0) as cluster:
            mine = parameters()
            made = cluster.optimizer(torch.optim.SGD, mine, lr=1.0, momentum=0.5)
            assert made.version == version
            step(made)
            assert {value for parameter in mine for value in parameter.tolist()} == {undisturbed(version + 1)}
            assert job.client.get_shard_map("model").holders == list(range(shards))


def test_a_checkpoint_is_put_back_into_a_job_whose_slices_have_moved_since(tmp_path):
    with running_job(2, 1, checkpoints=CheckpointConfig(tmp_path)) as job, job.cluster(rank=0) as cluster:
        mine = parameters()
        made = cluster.optimizer(torch.optim.SGD, mine, lr=1.0, momentum=0.5)
        step(made)
        job.client.checkpoint()
        add_shard(job, 2)
        list(job.client.move(to=[2], drain=[0]))
        step(made)
        job.client.restore_checkpoint()
        step(made)
        assert {value for parameter in mine for value in parameter.tolist()} == {undisturbed(2)}


def test_the_flag_add_reaches_the_shard(monkeypatch):
    told = []
    monkeypatch.setattr("ps_server.shard.process.serve", lambda config, stop: told.append(config.add))
    monkeypatch.setattr(shard_main.grpc_server, "run", lambda main: main(None))
    monkeypatch.setattr(shard_main, "tune_allocator", lambda: None)
    for flags in ([], ["--add"]):
        done = CliRunner().invoke(shard_main.main, ["--shard", "3", "--coordinator", "127.0.0.1:1", *flags])
        assert done.exit_code == 0, done.output
    assert told == [False, True]
