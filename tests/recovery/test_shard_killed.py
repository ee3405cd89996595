"""A shard is killed and started again: the worker waits and goes on, and ends with the bits of an undisturbed run."""

from __future__ import annotations

import random

import pytest

from tests.recovery.cluster import running_cluster
from tests.recovery.scripts import STEPS, TRAIN, alone


@pytest.mark.parametrize("transport", ["shm", "bulk", "grpc"])
def test_a_shard_killed_again_and_again_loses_nothing(tmp_path, transport):
    seed = random.SystemRandom().randrange(1 << 20)
    print(f"seed {seed}")
    chance = random.Random(seed)
    kills = sorted(chance.sample(range(1, STEPS), 3))
    with running_cluster(tmp_path) as cluster:
        worker = cluster.worker(TRAIN, str(STEPS), "Adam", transport, "model")
        for step in kills:
            worker.read(f"step {step}")
            cluster.shards[0].kill()
            cluster.shards[0].start()
        assert worker.read("digest") == f"digest {alone(STEPS, 'Adam')}"
        assert worker.process.wait() == 0


def test_everything_killed_at_once_resumes_where_it_was(tmp_path):
    with running_cluster(tmp_path) as cluster:
        worker = cluster.worker(TRAIN, str(STEPS), "Adam", "auto", "model", "20")
        worker.read("step 20")
        for program in (cluster.coordinator, *cluster.shards, worker):
            program.kill()
        cluster.start()
        again = cluster.worker(TRAIN, str(STEPS), "Adam", "auto", "model")
        assert again.read("started") == "started 20"
        assert again.read("digest") == f"digest {alone(STEPS, 'Adam')}"
        assert again.process.wait() == 0
