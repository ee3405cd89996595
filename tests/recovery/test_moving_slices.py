"""Shards come and go while workers train: slices move, each push counts once, whichever process is killed meanwhile."""

from __future__ import annotations

import pytest

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.cluster.view import Role
from tests.recovery.reference import assert_each_push_was_applied_once, counts_of
from tests.recovery.test_join_and_leave import MODES
from tests.support.length import few
from tests.support.shards import wait_until

KILLED = few(["before_switch_log", "after_prepare_log", "before_prepare_log", "after_switch_log"])


def move(cluster, **wish) -> int:
    """Have slices moved, as psctl does; returns the bytes that were."""
    with CoordinatorClient(cluster.address) as client:
        progress = list(client.move(**wish))
    return progress[-1].moved_bytes if progress else 0


@pytest.mark.parametrize("mode", few(MODES))
def test_shards_are_added_and_drained_under_training(launch, mode):
    cluster = launch(2, coordinator=MODES[mode])
    stays = cluster.worker(tag=0, stays=True, pauses=[30], steps=60)
    other = cluster.worker(1, tag=1, steps=10)
    stays.read("step 5")
    added = cluster.shard(2, "--add")
    added.start()
    assert move(cluster, to=[2]) > 0
    stays.read("step 30")
    other.read("ledger")
    stays.tell()
    assert move(cluster, drain=[0]) > 0
    cluster.shards[0].kill()
    cluster.wait_for_members(Role.SHARD, 1, 2)
    stays.read("stays")
    stays.tell()
    counts = counts_of(stays.read("ledger"))
    assert stays.wait() == 0
    if mode == "sync":
        assert counts.sum() == counts[0].count_nonzero() == 60
    else:
        assert_each_push_was_applied_once(counts, [stays, other])


@pytest.mark.parametrize("point", KILLED)
@pytest.mark.early
def test_a_shard_killed_in_a_move_loses_nothing_and_the_move_is_made_after_all(launch, point):
    cluster = launch(2)
    added = cluster.shard(2, "--add")
    added.start(PS_FAILPOINTS=f"{point}=kill@1")
    stays = cluster.worker(tag=0, stays=True, steps=40)
    stays.read("step 5")
    with CoordinatorClient(cluster.address) as client:
        stream = client.move(to=[2])
        wait_until(lambda: not added.alive)
        added.start()
        list(stream)
    assert cluster.status().view.used_shards == (0, 1, 2)
    stays.read("stays")
    stays.tell()
    counts = counts_of(stays.read("ledger"))
    assert stays.wait() == 0
    assert_each_push_was_applied_once(counts, [stays])
