"""Two processes are started as the same shard, and directories are mixed up: one clear error, nothing overwritten."""

from __future__ import annotations

import shutil

from tests.recovery.reference import alone, replayed
from tests.recovery.scripts import STEPS


def test_a_second_process_on_the_same_directory_is_refused_and_the_first_trains_on(launch):
    cluster = launch()
    worker = cluster.worker(pauses=[5])
    worker.read("step 5")
    second = cluster.shard(0)
    second.launch()
    assert second.wait() == 2
    assert "is in use by another process; remedy: stop the other ps-server --shard 0" in second.said
    worker.tell()
    assert worker.read("digest") == f"digest {alone(STEPS)}"


def test_a_second_process_with_a_directory_of_its_own_is_refused_and_the_first_trains_on(launch, tmp_path):
    cluster = launch()
    worker = cluster.worker(pauses=[5])
    worker.read("step 5")
    second = cluster.shard(0, data=tmp_path / "other")
    second.launch()
    assert second.wait() == 1
    assert "shard 0 is held by another process" in second.said
    assert "--take-over takes the place from it" in second.said
    worker.tell()
    assert worker.read("digest") == f"digest {alone(STEPS)}"


def test_a_second_process_that_is_told_to_take_over_fences_the_first_and_training_stops(launch, tmp_path):
    cluster, first = (started := launch()), started.shards[0]
    worker = cluster.worker(pauses=[5])
    worker.read("step 5")
    held = replayed(cluster.data)
    second = cluster.shard(0, "--take-over", data=tmp_path / "other")
    second.start()
    assert first.wait() == 1
    assert f"incarnation {cluster.status().view.members[0].incarnation} took its place" in first.said
    worker.tell()
    # Values that are gone are not made up.
    assert worker.drain() == 1
    assert "came back without the parameters of model 'model'" in worker.said
    assert replayed(cluster.data) == held


def test_a_process_started_by_mistake_on_an_empty_directory_does_not_lock_the_right_one_out(launch, tmp_path):
    cluster, first = (started := launch()), started.shards[0]
    worker = cluster.worker(pauses=[5])
    worker.read("step 5")
    first.kill()
    mistaken = cluster.shard(0, data=tmp_path / "empty")
    mistaken.start()
    mistaken.kill()
    first.start()
    worker.tell()
    assert worker.read("digest") == f"digest {alone(STEPS)}"


def test_a_directory_of_another_shard_is_refused(launch):
    cluster = launch(2)
    for shard in cluster.shards:
        shard.kill()
    (cluster.data / "shard-0").rename(cluster.data / "kept")
    (cluster.data / "shard-1").rename(cluster.data / "shard-0")
    cluster.shards[0].launch()
    assert cluster.shards[0].wait() == 1
    assert "holds the data of another shard; shard: 0; expected: shard 0; actual: shard 1" in cluster.shards[0].said


def test_an_older_copy_of_a_directory_is_refused_and_the_newest_goes_on(launch, tmp_path):
    cluster, shard = (started := launch()), started.shards[0]
    worker = cluster.worker(pauses=[8, 16])
    worker.read("step 8")
    shard.kill()
    copy = tmp_path / "copy"
    shutil.copytree(cluster.data / "shard-0", copy / "shard-0")
    shard.start()
    worker.tell()
    worker.read("step 16")
    shard.kill()
    old = cluster.shard(0, data=copy)
    old.launch()
    assert old.wait() == 1
    assert "has newer state elsewhere than this process brings" in old.said
    shard.start()
    worker.tell()
    assert worker.read("digest") == f"digest {alone(STEPS)}"
