"""A shard is killed and started again: workers wait and go on, and end with the bits of an undisturbed run."""

from __future__ import annotations

import random

import pytest

from ps_server.shard.execution.watchdog import EXIT_STUCK
from tests.recovery.reference import alone, replayed
from tests.recovery.scripts import STEPS
from tests.support.length import few
from tests.support.seeds import drawn_seed
from tests.support.shards import wait_until


@pytest.mark.parametrize("transport", few(["shm", "grpc", "bulk"]))
def test_a_shard_killed_again_and_again_loses_nothing(launch, transport):
    seed = drawn_seed()
    kills = sorted(random.Random(seed).sample(range(1, STEPS), 3))
    cluster = launch(shard=["--snapshot-seconds", "0.05"])
    worker = cluster.worker(transport=transport)
    for step in kills:
        worker.read(f"step {step}")
        cluster.shards[0].kill()
        cluster.shards[0].start()
    assert worker.read("digest") == f"digest {alone(STEPS)}"
    assert worker.wait() == 0


@pytest.mark.parametrize("point", few(["after_log_before_apply", "after_apply_before_reply", "before_log"], 2))
def test_a_push_is_applied_once_when_its_shard_dies_at(launch, point):
    cluster, shard = (started := launch()), started.shards[0]
    shard.kill()
    worker = cluster.worker()
    for count in (3, 5, 1):
        shard.launch(PS_FAILPOINTS=f"{point}=kill@{count}")
        wait_until(lambda: not shard.alive)
    shard.start()
    assert worker.read("digest") == f"digest {alone(STEPS)}"
    assert replayed(cluster.data)["model"] == alone(STEPS)


def test_a_shard_that_hangs_ends_itself_with_a_code_of_its_own_and_training_goes_on(launch):
    cluster, shard = (started := launch(shard=["--stuck-seconds", "5"])), started.shards[0]
    shard.kill()
    worker = cluster.worker()
    shard.launch(PS_FAILPOINTS="after_log_before_apply=hang@4")
    wait_until(lambda: not shard.alive)
    assert shard.wait() == EXIT_STUCK
    assert "in _hang" in shard.said
    shard.start()
    assert worker.read("digest") == f"digest {alone(STEPS)}"
    assert replayed(cluster.data)["model"] == alone(STEPS)


def test_an_update_that_fails_half_way_stops_the_model_and_a_restart_makes_it_whole(launch):
    cluster, shard = (started := launch()), started.shards[0]
    shard.kill()
    shard.launch(PS_FAILPOINTS="after_log_before_apply=raise@6")
    failed = cluster.worker()
    assert failed.drain() == 1
    assert "an update failed" in failed.said
    assert failed.steps == 5
    shard.kill()
    shard.start()
    again = cluster.worker()
    # The sixth was in the log.
    assert again.number("started") == 6
    assert again.read("digest") == f"digest {alone(STEPS)}"


def test_everything_killed_at_once_resumes_where_it_was(launch):
    cluster = launch()
    worker = cluster.worker(pauses=[12])
    worker.read("step 12")
    for program in (cluster.coordinator, *cluster.shards, worker):
        program.kill()
    cluster.start()
    again = cluster.worker()
    assert again.number("started") == 12
    assert again.read("digest") == f"digest {alone(STEPS)}"
    assert again.wait() == 0
