"""A server of weights and rows while shards and the coordinator are killed: rows are never older than the weights."""

from __future__ import annotations

import signal
import threading

import numpy as np
import pytest
import torch

import ps_worker
from ps_protocol.errors import StateLost
from ps_worker import rows
from ps_worker.feed import TableCopy
from tests.recovery.cluster import Cluster
from tests.support.length import choose
from tests.support.seeds import seeded
from tests.support.shards import wait_until

KILLS = choose(12, 2)
IDS = np.arange(300)


class Server(threading.Thread):
    """Serves to the end of the job. The weights of step k are k, and so is each row that was updated k times."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(daemon=True)
        self._cluster = cluster
        self.copy = TableCopy()
        self.seen: list[int] = []
        self.wrong: list[str] = []

    def run(self) -> None:
        address, patience = self._cluster.address, {"reconnect_timeout_seconds": 90.0}
        following = threading.Thread(target=self.copy.follow, args=(address, "words"), kwargs=patience, daemon=True)
        following.start()
        with ps_worker.subscribe("ranker", coordinator=address, **patience) as versions:
            for version in versions:
                self.copy.wait_for(version.tables, timeout_seconds=90)
                found, (weight,) = self.copy.rows(IDS), version.tensors().values()
                if not torch.equal(weight, torch.full((50,), float(version.step))) or (found < version.step).any():
                    self.wrong.append(f"{version!r}: rows from {found.min()}, weights from {weight.min()}")
                self.seen.append(version.step)
        following.join(90)


@pytest.mark.timeout(600)
def test_rows_are_as_new_as_the_weights_while_servers_are_killed(launch, monkeypatch):
    chance = seeded()
    cluster = launch(2, lease_seconds=10.0, shard=["--durability", "durable"])
    monkeypatch.setenv("PS_RECONNECT_TIMEOUT", "90")
    server, stop = Server(cluster), threading.Event()

    def train() -> None:
        with ps_worker.connect(cluster.address, device="cpu") as worker:
            words = worker.embedding(1, name="words", optimizer=rows.SGD(lr=1.0), init=rows.Constant(0.0))
            weight = torch.nn.Parameter(torch.zeros(50))
            model = torch.nn.ModuleDict({"words": words, "top": torch.nn.ParameterList([weight])})
            optimizer = worker.optimizer(torch.optim.SGD, model, lr=1.0)
            step = 0
            while not stop.wait(0.01):
                step += 1
                optimizer.zero_grad()
                (-words(torch.from_numpy(IDS)).sum() - weight.sum()).backward()
                optimizer.step()
                worker.publish("ranker", optimizer, step=step, wait=step % 2 == 0)

    trainer = threading.Thread(target=train, daemon=True)
    for thread in (trainer, server):
        thread.start()
    wait_until(lambda: len(server.seen) > 2)
    for _ in range(KILLS):
        program = chance.choice([*cluster.shards, cluster.coordinator])
        program.kill()
        program.start()
        before = len(server.seen)
        wait_until(lambda before=before: len(server.seen) > before + 1 or not server.is_alive())
    stop.set()
    for thread in (trainer, server):
        thread.join(90)
        assert not thread.is_alive()
    assert server.wrong == []
    assert server.seen == sorted(set(server.seen))
    assert np.unique(server.copy.rows(IDS)).tolist() == [server.seen[-1]]
    print(f"{len(server.seen)} versions served of {server.seen[-1]}")


@pytest.mark.long
def test_rows_that_a_shard_has_lost_are_not_waited_for(launch, monkeypatch):
    cluster = launch(1, lease_seconds=10.0, shard=["--durability", "snapshot", "--snapshot-seconds", "1000"])
    monkeypatch.setenv("PS_RECONNECT_TIMEOUT", "90")
    (shard,), copy = cluster.shards, TableCopy()
    with ps_worker.connect(cluster.address, device="cpu") as worker:
        words = worker.embedding(1, name="words", optimizer=rows.SGD(lr=1.0), init=rows.Constant(0.0))
        model = torch.nn.ModuleDict({"words": words, "top": torch.nn.Linear(1, 1)})
        optimizer = worker.optimizer(torch.optim.SGD, model, lr=1.0)

        def train(steps: int) -> None:
            for _ in range(steps):
                optimizer.zero_grad()
                model["top"](words(torch.from_numpy(IDS))).sum().backward()
                optimizer.step()

        train(2)
        # It writes a snapshot at its end.
        shard.send(signal.SIGTERM)
        shard.wait()
        shard.start()
        train(3)
        worker.publish("ranker", optimizer, step=5, wait=True)
        with ps_worker.subscribe("ranker", coordinator=cluster.address) as versions:
            lost = next(versions)
        shard.kill()
        shard.start()
        following = threading.Thread(target=copy.follow, args=(cluster.address, "words"), daemon=True)
        following.start()
        with pytest.raises(StateLost, match=r"shard 0 has lost the last updates of table 'words'.*update 5.*update 2"):
            copy.wait_for(lost.tables, timeout_seconds=90)
        train(1)
        worker.publish("ranker", optimizer, step=6, wait=True)
        with ps_worker.subscribe("ranker", coordinator=cluster.address) as versions:
            copy.wait_for(next(versions).tables, timeout_seconds=90)
    following.join(90)
