"""One of two shards is killed under two workers, again and again."""

from __future__ import annotations

import signal

import pytest
import torch

import ps_worker
from tests.recovery.reference import assert_each_push_was_applied_once, assert_served_is_replayed
from tests.support.seeds import seeded

LEASE_SECONDS = 30.0
"""No worker may lose its place here because the machine is busy: the numbers would rightly be others."""


def train_in_sync(cluster, kills):
    """The digests two workers end with; ``kills`` are (step, shard) pairs."""
    workers = [cluster.worker(rank) for rank in range(2)]
    for step, shard in kills:
        workers[0].read(f"step {step}")
        cluster.shards[shard].kill()
        cluster.shards[shard].start()
    return [worker.read("digest") for worker in workers]


def test_sync_training_ends_with_the_bits_of_an_undisturbed_run(launch):
    chance = seeded()
    kills = [(step, chance.randrange(2)) for step in sorted(chance.sample(range(1, 20), 3))]
    settings = {
        "lease_seconds": LEASE_SECONDS,
        "coordinator": ["--mode", "sync", "--workers", "2"],
        "shard": ["--snapshot-seconds", "0.05"],
    }
    undisturbed = train_in_sync(launch(2, **settings), [])
    assert undisturbed[0] == undisturbed[1]
    assert train_in_sync(launch(2, **settings), kills) == undisturbed


def test_async_training_applies_each_push_once_on_each_shard_and_serves_what_was_logged(launch):
    chance = seeded()
    cluster = launch(2, lease_seconds=LEASE_SECONDS)
    workers = [cluster.worker(rank, tag=rank, stays=True, steps=40) for rank in range(2)]
    for step in sorted(chance.sample(range(1, 40), 3)):
        workers[0].read(f"step {step}")
        shard = chance.choice(cluster.shards)
        shard.kill()
        shard.start()
    for worker in workers:
        worker.read("stays")
    assert_each_push_was_applied_once(assert_served_is_replayed(cluster, workers[0]), workers)


def test_a_shard_and_a_worker_killed_together_lose_nothing_that_was_acknowledged(launch):
    cluster = launch(2)
    stays, killed = cluster.worker(tag=0, stays=True, steps=40), cluster.worker(1, tag=1)
    killed.read("step 4")
    cluster.shards[1].kill()
    killed.kill()
    killed.drain()
    cluster.shards[1].start()
    again = cluster.worker(1, tag=2, steps=6)
    again.read("ledger")
    stays.read("stays")
    counts = assert_served_is_replayed(cluster, stays, {1: killed})
    assert_each_push_was_applied_once(counts, [stays, killed, again])


@pytest.mark.long
def test_a_version_and_a_mode_come_after_a_shard_has_lost_pushes_that_the_worker_does_not_repeat(launch, monkeypatch):
    monkeypatch.setenv("PS_RECONNECT_TIMEOUT", "30")
    cluster = launch(2, lease_seconds=10.0, shard=["--durability", "snapshot", "--snapshot-seconds", "1000"])
    shard = cluster.shards[1]
    with ps_worker.connect(cluster.address, device="cpu") as worker:
        model = torch.nn.Sequential(torch.nn.Linear(50, 40), torch.nn.Linear(40, 50))
        optimizer = worker.optimizer(torch.optim.SGD, model, lr=0.1)

        def train(steps):
            for _ in range(steps):
                optimizer.zero_grad()
                model(torch.ones(4, 50)).square().mean().backward()
                optimizer.step()

        def lose_pushes():
            train(2)
            shard.kill()
            shard.start()

        train(1)
        # It writes a snapshot at its end.
        shard.send(signal.SIGTERM)
        shard.wait()
        shard.start()
        lose_pushes()
        assert worker.publish("weights", optimizer, step=3, wait=True) == 1
        lose_pushes()
        worker.set_mode("ssp", staleness=2)
        train(1)
