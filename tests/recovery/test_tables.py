"""A shard is killed while rows come and go: every push is in every row once; what is served is what is on the disk."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path

import pytest

from tests.recovery.cluster import Program
from tests.recovery.rows_kept import assert_each_push_is_in_its_rows_once
from tests.support.length import few
from tests.support.seeds import seeded
from tests.support.shards import wait_until

STEPS, ROWS = 60, 200


@pytest.mark.parametrize("memory", few([["--table-memory", "1KB"], []]), ids=few(["few in memory", "all in memory"]))
def test_a_shard_killed_during_inserts_and_evictions_loses_no_row_and_brings_none_back(launch, memory):
    chance = seeded()
    cluster = launch(shard=["--snapshot-seconds", "0.05", *memory])
    shard = cluster.shards[0]
    worker = cluster.worker(steps=STEPS, rows=ROWS, pauses=[31])
    for step in sorted(chance.sample(range(5, 30), 2)):
        worker.read(f"step {step}")
        shard.kill()
        shard.start()
    worker.read("step 31")
    shard.kill()
    worker.tell()
    for point in ("before_log", "after_log_before_apply"):
        shard.launch(PS_FAILPOINTS=f"{point}=kill@{chance.randrange(1, 8)}")
        wait_until(lambda: not shard.alive)
    shard.start()
    assert_each_push_is_in_its_rows_once(cluster, shard, worker, cluster.data, STEPS, ROWS)


def damage_rows_on_disk(shard: Program) -> int:
    """Change every byte of the files of rows of a running shard, which have no name; returns how many files."""
    found = 0
    for descriptor in Path(f"/proc/{shard.running.pid}/fd").iterdir():
        # It may be closed meanwhile.
        with suppress(FileNotFoundError):
            where = str(descriptor.readlink())
            if "/shard-0/#" in where and where.endswith(" (deleted)"):
                with descriptor.open("r+b") as file:
                    data = file.read()
                    file.seek(0)
                    file.write(data.translate(bytes(range(255, -1, -1))))
                    found += 1
    return found


@pytest.mark.parametrize("snapshots", few(["0.05", "600"]), ids=few(["often", "never"]))
def test_a_shard_that_meets_a_damaged_row_reads_its_rows_again_by_itself(launch, snapshots):
    cluster = launch(shard=["--snapshot-seconds", snapshots, "--table-memory", "1KB"])
    shard = cluster.shards[0]
    worker = cluster.worker(steps=20, rows=100, pauses=[5, 12])
    again = "shard 0 reads its rows from snapshot and log: the file of rows of table "
    for times, step in enumerate(("step 5", "step 12")):
        worker.read(step)
        shard.send(signal.SIGSTOP)  # or it might meet the first of them, and read its rows again, before the second
        wait_until(lambda: shard.stopped)
        assert damage_rows_on_disk(shard) == 2
        shard.send(signal.SIGCONT)
        worker.tell()
        wait_until(lambda times=times: shard.said.count(again) > times)
    assert_each_push_is_in_its_rows_once(cluster, shard, worker, cluster.data, 20, 100)
    assert shard.said.count(again) == 2
