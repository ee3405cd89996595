"""A shard or a worker is frozen for longer than its lease: what returns is refused, and never merged."""

from __future__ import annotations

import re
import shutil
import signal

import pytest

from ps_protocol.cluster.view import Role
from tests.recovery.cluster import LOST, joins_and_leaves
from tests.recovery.reference import alone, assert_each_push_was_applied_once, assert_served_is_replayed
from tests.recovery.scripts import STEPS
from tests.support.length import few


def test_a_frozen_shard_ends_when_it_wakes_and_its_next_life_goes_on(launch):
    cluster, shard = (started := launch()), started.shards[0]
    worker = cluster.worker(pauses=[5])
    worker.read("step 5")
    shard.send(signal.SIGSTOP)
    worker.tell()
    cluster.wait_for_members(Role.SHARD)
    shard.send(signal.SIGCONT)
    assert shard.wait() == 1
    assert re.search(LOST, shard.said)
    shard.start()
    assert worker.read("digest") == f"digest {alone(STEPS)}"


def test_a_shard_that_froze_and_was_replaced_cannot_change_what_its_successor_holds(launch, tmp_path):
    cluster, frozen = (started := launch()), started.shards[0]
    worker = cluster.worker(pauses=[5, 10])
    worker.read("step 5")
    frozen.send(signal.SIGSTOP)
    cluster.wait_for_members(Role.SHARD)
    beside = cluster.shard(0)
    beside.launch()
    # The directory is still in the hands of the frozen one: nobody writes beside it.
    assert beside.wait() == 2
    assert "is in use by another process" in beside.said
    shutil.copytree(cluster.data / "shard-0", tmp_path / "copy" / "shard-0")
    successor = cluster.shard(0, data=tmp_path / "copy")
    successor.start()
    worker.tell()
    worker.read("step 10")
    frozen.send(signal.SIGCONT)
    assert frozen.wait() == 1
    worker.tell()
    assert worker.read("digest") == f"digest {alone(STEPS)}"


@pytest.mark.parametrize("mode", few(["async", "sync"]))
def test_a_frozen_worker_is_refused_when_it_wakes_and_nothing_of_it_is_merged(launch, mode):
    cluster = launch(2, coordinator=["--mode", mode])
    frozen = cluster.worker(1, tag=1, pauses=[4])
    stays = cluster.worker(0, tag=0, stays=True)
    frozen.read("step 4")
    frozen.process.send(signal.SIGSTOP)
    frozen.tell()
    cluster.wait_for_members(Role.WORKER, 0)
    stays.read("stays")
    if mode == "async":
        joined = joins_and_leaves(cluster)
    frozen.process.send(signal.SIGCONT)
    assert frozen.drain() == 1
    assert "worker 1 is not a member any more" in frozen.said or "Fenced" in frozen.said
    assert frozen.steps == 4
    counts = assert_served_is_replayed(cluster, stays)
    if mode == "async":
        assert_each_push_was_applied_once(counts, [stays, frozen, joined])
    assert counts[1].count_nonzero() == 4
