"""A shard that lacks a class says so; one that was told of it trains, is killed, and replays. Costs 5 s."""

from __future__ import annotations

from tests.support.shards import wait_until

KNOWN = {"PS_OPTIMIZERS": "tests.support.user_optimizers"}


def digest(launch, kill=False):
    cluster = launch(start=False)
    cluster.coordinator.start()
    (shard,) = cluster.shards
    if kill:
        shard.start()
        assert "tests.support.user_optimizers.Counting' is not registered on this shard" in refused(cluster)
        shard.kill()
        shard.launch(PS_FAILPOINTS="after_log_before_apply=kill@5", **KNOWN)
        worker = cluster.worker(optimizer="Counting", steps=12)
        wait_until(lambda: not shard.alive)
    else:
        worker = cluster.worker(optimizer="Counting", steps=12)
    shard.start(**KNOWN)
    return worker.read("digest")


def refused(cluster):
    worker = cluster.worker(optimizer="Counting")
    assert worker.process.wait() != 0
    return worker.said


def test_a_shard_is_told_of_a_class_trains_with_it_and_replays_it_after_a_kill(launch):
    assert digest(launch, kill=True) == digest(launch)


def test_a_module_that_cannot_be_imported_ends_the_shard_with_the_remedy(launch):
    cluster = launch(start=False)
    shard = cluster.shards[0]
    shard.launch(PS_OPTIMIZERS="nowhere_at_all")
    assert shard.wait() == 2
    assert "nowhere_at_all cannot be imported" in shard.said
