"""A reader that is killed holds the old version or the new one after its restart, whenever that was."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import ps_worker
from ps_protocol.weights.version import WholeVersion
from tests.checkpoint.weight_reader import Server
from tests.support.interpreters import Interpreter
from tests.support.length import choose, paired
from tests.support.seeds import seeded
from tests.weights.dying_reader import NEVER
from tests.weights.test_weights_follow import Trainer
from tests.worker.jobs import Job, running_job

ROWS = choose(30_000, 15_000)
KILLS = choose(10_000, 5)
MOMENTS = choose(300, 3)


def started(program: str, *arguments: object) -> Interpreter:
    return Interpreter("-c", f"from tests.weights.dying_reader import {program}; {program}()", *map(str, arguments))


def said(program: str, *arguments: object) -> str:
    """The last line of a program that ends by itself, or is killed."""
    process = started(program, *arguments)
    try:
        lines = process.stdout.readlines()
        process.wait()
        return lines[-1].strip() if lines else ""
    finally:
        process.close()


def some(events: int) -> list[int]:
    """As many of these as this length of the tests has time for, the first and the last among them."""
    return sorted({n * (events - 1) // (min(KILLS, events) - 1) for n in range(min(KILLS, events))})


class Constant:
    """A trainer of whose version of step n each value is n."""

    def __init__(self, job: Job) -> None:
        self.parameters = [nn.Parameter(torch.zeros(size)) for size in ((ROWS, 40), (7,), ())]
        self.cluster = job.cluster()
        self.optimizer = self.cluster.optimizer(torch.optim.SGD, self.parameters, lr=1.0)
        self.steps = 0

    def publish(self) -> int:
        for parameter in self.parameters:
            parameter.grad = -torch.ones_like(parameter)
        self.optimizer.step()
        self.steps += 1
        return self.cluster.publish("policy", self.optimizer, step=self.steps, wait=True)


def check_constant(version: ps_worker.Version) -> None:
    for value in version.tensors().values():
        assert torch.equal(value, torch.full_like(value, version.step))


@pytest.mark.parametrize(("dtype", "transport"), paired(["", "bfloat16"], ["bulk", "grpc"]))
def test_a_reader_killed_at_any_event_has_the_old_or_the_new_version(
    dtype: str, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PS_TRANSPORT", transport)
    with running_job(shards=2) as job:
        trainer, old = Constant(job), tmp_path / "old"
        trainer.publish()
        assert said("reader", job.address, old, NEVER, dtype)
        trainer.publish()
        whole = tmp_path / "whole"
        shutil.copytree(old, whole)
        events = int(said("reader", job.address, whole, NEVER, dtype))
        (file,) = whole.iterdir()
        numbers = []
        for number in some(events):
            folder = tmp_path / f"killed-{number}"
            shutil.copytree(old, folder)
            assert said("reader", job.address, folder, number, dtype) == ""
            kept = WholeVersion.load(folder / file.name)
            assert kept is not None
            numbers.append(kept.number)
            with ps_worker.subscribe(
                "policy",
                coordinator=job.address,
                cache=folder,
                follow=False,
                dtype=getattr(torch, dtype) if dtype else None,
            ) as versions:
                seen = []
                for version in versions:
                    seen.append(version.number)
                    check_constant(version)
            assert seen == [1, 2][kept.number - 1 :]
        assert numbers == sorted(numbers)
        assert set(numbers) == {1, 2}


def test_a_reader_killed_at_any_moment_has_a_whole_version(tmp_path: Path) -> None:
    chance, stop = seeded(), threading.Event()
    with running_job(shards=2) as job:
        trainer = Constant(job)

        def train() -> None:
            while not stop.wait(0.01):
                trainer.publish()

        thread = threading.Thread(target=train)
        thread.start()
        try:
            kept = []
            for _ in range(MOMENTS):
                process = started("endless", job.address, tmp_path)
                process.stdout.readline()
                time.sleep(chance.random() * 0.3)  # any moment will do: that is what is tried
                process.close()
                with ps_worker.subscribe("policy", coordinator=job.address, cache=tmp_path) as versions:
                    version = next(versions)
                check_constant(version)
                kept.append(version.number)
            assert kept == sorted(kept)
        finally:
            stop.set()
            thread.join(60)


def test_a_follower_killed_at_any_file_operation_leaves_a_directory_that_servers_can_read(tmp_path: Path) -> None:
    with running_job(shards=2) as job:
        trainer, old = Trainer(job), tmp_path / "old"
        trainer.publish()
        assert said("follower", job.address, old, NEVER).startswith("events ")
        trainer.publish()
        whole = tmp_path / "whole"
        shutil.copytree(old, whole)
        events = int(said("follower", job.address, whole, NEVER).removeprefix("events "))
        versions = []
        for number in some(events):
            folder = tmp_path / f"killed-{number}"
            shutil.copytree(old, folder)
            assert not said("follower", job.address, folder, number).startswith("events ")
            server = Server()
            server.pull(folder)
            versions.append(server.version)
            assert said("follower", job.address, folder, NEVER).startswith("events ")
            server.pull(folder)
            trainer.assert_served(server)
        assert versions == sorted(versions)
        assert set(versions) == {1, 2}
