"""Weights of a version and rows of a copy that fit together, while shards stop, come back and move."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import ps_worker
from ps_protocol.errors import InvalidRequest, NotReady, PsError, UnknownModel
from ps_protocol.model.spec import Consistency, Mode
from ps_server.cli.options.storage import Durability, StorageConfig
from ps_worker import Version, rows
from ps_worker.feed import Cursor, TableCopy
from tests.support.length import choose
from tests.support.shards import wait_until
from tests.weights.relays import relaying
from tests.worker.jobs import Job, running_job, together

IDS = torch.arange(200)


class Trainer:
    """After n steps the weight and each row of the table are n: the gradients of both are -1, the rates 1."""

    def __init__(self, job: Job, workers: int = 1) -> None:
        self.clusters = together(*[job.cluster] * workers)
        self.parts = together(*(lambda c=c: self._part(c) for c in self.clusters))  # type: ignore[misc]

    def _part(self, cluster: ps_worker.Cluster) -> tuple[nn.Module, nn.Parameter, ps_worker.Optimizer]:
        words = cluster.embedding(1, name="words", optimizer=rows.SGD(lr=1.0), init=rows.Constant(0.0))
        weight = nn.Parameter(torch.zeros(3))
        model = nn.ModuleDict({"words": words, "top": nn.ParameterList([weight])})
        return words, weight, cluster.optimizer(torch.optim.SGD, model, lr=1.0)

    def step(self) -> None:
        def one(words: nn.Module, weight: nn.Parameter, optimizer: ps_worker.Optimizer) -> None:
            optimizer.zero_grad()
            (-words(IDS).sum() - weight.sum()).backward()
            optimizer.step()

        together(*(lambda p=p: one(*p) for p in self.parts))  # type: ignore[misc]

    def publish(self, step: int) -> int:
        return self.clusters[0].publish("policy", self.parts[0][2], step=step, wait=True)


@contextmanager
def following(job: Job, table: str = "words", model: str = "model") -> Iterator[TableCopy]:
    """A copy that follows until the job has stopped."""
    copy = TableCopy()

    def follow() -> None:
        try:
            copy.follow(job.address, table, model, reconnect_timeout_seconds=60)
        except PsError:
            pass  # the thread that waits gets it

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    yield copy


def values(copy: TableCopy) -> np.ndarray:
    return np.unique(copy.rows(IDS.numpy()))


def lineage(cursor: Cursor | None, shard: int) -> object:
    """Of the rows of ``shard`` that have come; None: not all have."""
    return (cursor or {"shards": {}})["shards"].get(str(shard), {}).get("lineage")


def check(version: Version, copy: TableCopy, *, paused: bool) -> None:
    copy.wait_for(version.tables, timeout_seconds=60)
    (weight,) = version.tensors().values()
    assert torch.equal(weight, torch.full((3,), float(version.step)))
    assert len(copy) == len(IDS)
    # Rows that are trained meanwhile are newer.
    assert (values(copy) >= version.step).all()
    if paused:
        assert values(copy).tolist() == [version.step]


@pytest.mark.parametrize("workers", [1, 2])
def test_in_sync_rows_that_have_come_to_a_version_fit_its_weights(workers: int) -> None:
    with running_job(shards=2, workers=workers, consistency=Consistency(Mode.SYNC)) as job, following(job) as copy:
        trainer = Trainer(job, workers)
        with ps_worker.subscribe("policy", coordinator=job.address) as versions:
            for number in range(1, 6):
                for _ in range(3):
                    trainer.step()
                trainer.publish(3 * number)
                check(next(versions), copy, paused=True)


def test_while_training_goes_on_rows_are_as_new_as_the_weights_or_newer() -> None:
    with running_job(shards=3) as job, following(job) as copy:
        trainer, stop = Trainer(job), threading.Event()

        def train() -> None:
            number = 0
            while not stop.is_set():
                number += 1
                trainer.step()
                trainer.publish(number)

        training = threading.Thread(target=train)
        training.start()
        try:
            with ps_worker.subscribe("policy", coordinator=job.address) as versions:
                for version, _ in zip(versions, range(15), strict=False):
                    # One shard has the weight, all have rows.
                    assert len(version.tables["words"]["shards"]) == 3
                    check(version, copy, paused=False)
        finally:
            stop.set()
            training.join(60)


def test_it_goes_on_after_shards_were_started_again(tmp_path: Path) -> None:
    def storage(shard: int) -> StorageConfig:
        return StorageConfig(durability=Durability.DURABLE, data_dir=tmp_path / str(shard))

    with running_job(shards=2, start_shards=0) as job:
        for shard in range(2):
            job.start_shard(shard, storage=storage(shard))
        with following(job) as copy:
            trainer = Trainer(job)
            with ps_worker.subscribe("policy", coordinator=job.address) as versions:
                order = [0, 1]
                for number in range(1, choose(7, 3)):
                    trainer.step()
                    trainer.publish(number)
                    version = next(versions)
                    # Between the version and the wait: what the shard sends is of another lineage.
                    job.stop_shard(0)
                    order.append(order.pop(0))
                    job.start_shard(order[-1], storage=storage(order[-1]))
                    job.wait_for_shards()
                    # Its rows are away from when it begins to send them again until all have come.
                    gone = lineage(version.tables["words"], order[-1])
                    wait_until(lambda: lineage(copy.cursor, order[-1]) not in (None, gone))  # noqa: B023
                    check(version, copy, paused=True)


def test_it_goes_on_after_buckets_have_moved() -> None:
    with running_job(shards=3) as job, following(job) as copy:
        trainer = Trainer(job)
        with ps_worker.subscribe("policy", coordinator=job.address) as versions:
            trainer.step()
            trainer.publish(1)
            before = next(versions)
            check(before, copy, paused=True)
            assert list(job.client.move(drain=[1]))
            trainer.step()
            trainer.publish(2)
            after = next(versions)
            assert sorted(after.tables["words"]["shards"]) == ["0", "2"]
            check(after, copy, paused=True)
            # What shard 1 had is on the others.
            copy.wait_for(before.tables, timeout_seconds=60)


def test_a_version_that_a_relay_serves_fits_a_copy_that_follows_the_job() -> None:
    with running_job(shards=2) as job, following(job) as copy, relaying(job.loop, job.address, "policy") as relay:
        trainer = Trainer(job)
        with ps_worker.subscribe("policy", coordinator=relay.address) as versions:
            for number in (1, 2):
                trainer.step()
                trainer.publish(number)
                check(next(versions), copy, paused=True)


def test_positions_that_cannot_be_waited_for_are_typed_errors() -> None:
    with running_job(shards=1, job_id="first") as job:
        trainer = Trainer(job)
        trainer.step()
        trainer.publish(1)
        with ps_worker.subscribe("policy", coordinator=job.address) as versions:
            other = next(versions)
    with running_job(shards=1, job_id="second") as job, following(job) as copy:
        trainer = Trainer(job)
        trainer.step()
        trainer.publish(1)
        with ps_worker.subscribe("policy", coordinator=job.address) as versions:
            check(next(versions), copy, paused=True)
        with pytest.raises(InvalidRequest, match=r"another job's table 'words'.*job second.*job first"):
            copy.wait_for(other.tables, timeout_seconds=60)
        with following(job, "nothing") as unknown, pytest.raises(InvalidRequest, match="no table 'nothing'"):
            unknown.wait_for({"nothing": other.tables["words"]}, timeout_seconds=60)
        with following(job, "words", "other") as waiting, pytest.raises((NotReady, UnknownModel)):
            waiting.wait_for(other.tables, timeout_seconds=0.5)
