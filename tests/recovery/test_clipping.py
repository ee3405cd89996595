"""Shards are killed around the norm of a clipped step: every shard scales it alike all the same. Costs 8 s."""

from __future__ import annotations

import itertools

import pytest

from tests.support.length import FULL
from tests.support.shards import wait_until

SETTINGS = {
    # No worker may lose its place here because the machine is busy: the numbers would rightly be others.
    "lease_seconds": 30.0,
    "coordinator": ["--mode", "sync", "--workers", "2"],
    "shard": ["--snapshot-seconds", "0.05"],
}
POINTS = ("after_round_norm", "before_log", "after_log_before_apply", "after_apply_before_reply")
#: The others are under TEST_LENGTH=full.
KILLS = [(0, POINTS[0]), (1, POINTS[0]), (0, POINTS[2]), (1, POINTS[3])]


def train(cluster, kills=()):
    """The digests two workers end with; ``kills`` are (shard, failpoint) pairs, one after another.

    One of the shards is always away before the last of them, so that the workers do not come to their end before it.
    """
    if kills:
        cluster.shards[kills[0][0]].kill()
    workers = [cluster.worker(rank, clip=0.7) for rank in range(2)]
    for number, (shard, point) in enumerate(kills, 1):
        running = cluster.shards[shard]
        running.launch(PS_FAILPOINTS=f"{point}=kill@2")
        wait_until(lambda running=running: not running.alive)
        following = cluster.shards[kills[number][0]] if number < len(kills) else None
        if following is running:
            continue
        if following is not None:
            following.kill()
        running.start()
    return [worker.read("digest") for worker in workers]


@pytest.mark.parametrize("kills", [KILLS, *([list(itertools.product((0, 1), POINTS))] if FULL else [])])
@pytest.mark.early
def test_shards_killed_around_the_norm_end_with_the_bits_of_an_undisturbed_run(launch, kills):
    undisturbed = train(launch(2, **SETTINGS))
    assert undisturbed[0] == undisturbed[1]
    cluster = launch(2, **SETTINGS)
    assert train(cluster, kills) == undisturbed
