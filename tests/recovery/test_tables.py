"""A shard is killed while rows come and go: every push is in every row once; what is served is what is on the disk."""

from __future__ import annotations

import pytest

from tests.recovery.rows_kept import assert_each_push_is_in_its_rows_once
from tests.support.seeds import seeded
from tests.support.shards import wait_until

STEPS, ROWS = 60, 200


@pytest.mark.parametrize("memory", [[], ["--table-memory", "1KB"]], ids=["all in memory", "few in memory"])
def test_a_shard_killed_during_inserts_and_evictions_loses_no_row_and_brings_none_back(launch, memory):
    chance = seeded()
    cluster = launch(shard=["--snapshot-seconds", "0.05", *memory])
    shard = cluster.shards[0]
    worker = cluster.worker(steps=STEPS, rows=ROWS)
    for step in sorted(chance.sample(range(5, 30), 2)):
        worker.read(f"step {step}")
        shard.kill()
        shard.start()
    worker.read("step 31")
    shard.kill()
    for point in ("before_log", "after_log_before_apply"):
        shard.launch(PS_FAILPOINTS=f"{point}=kill@{chance.randrange(1, 8)}")
        wait_until(lambda: not shard.alive)
    shard.start()
    assert_each_push_is_in_its_rows_once(cluster, shard, worker, cluster.data, STEPS, ROWS)
