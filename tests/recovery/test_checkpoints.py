"""Everything is killed in the middle of a checkpoint, or after one, and a job goes on from it, on other shards too."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.errors import Unavailable
from ps_server.checkpoint.checkpoint import Checkpoint
from ps_server.checkpoint.directory import committed
from tests.recovery.inside import STOPS_AT
from tests.recovery.reference import Undisturbed, replayed
from tests.recovery.scripts import STEPS
from tests.support.shards import wait_until


def checkpoint_now(cluster):
    """The folder of a checkpoint made now."""
    with CoordinatorClient(cluster.address) as client:
        return Path(client.checkpoint()[0])


def kill_everything(cluster, worker):
    for program in (cluster.coordinator, *cluster.shards, worker):
        program.kill()


@pytest.mark.parametrize(
    ("victim", "place"),
    [
        pytest.param("shard", "pwrite checkpoint-00000002/model/model-00002", marks=pytest.mark.long),
        ("shard", "fsync checkpoint-00000002/model/optimizer-00002"),
        pytest.param("coordinator", "pwrite checkpoint-00000002/manifest.json", marks=pytest.mark.long),
        ("coordinator", "rename checkpoint-00000002/manifest.json"),
    ],
    ids=lambda word: word.replace("/", "-"),
)
def test_everything_killed_in_mid_checkpoint_goes_on_and_the_checkpoint_before_it_is_the_newest(
    launch, tmp_path, victim, place
):
    saved = tmp_path / "saved"
    cluster = launch(2, start=False, lease_seconds=30.0, coordinator=["--checkpoint-dir", str(saved)])
    cluster.start(**{STOPS_AT: place})
    stopped = cluster.coordinator if victim == "coordinator" else cluster.shards[1]
    worker = cluster.worker(pauses=[8, 16, 20])
    worker.read("step 8")
    complete = checkpoint_now(cluster)
    worker.tell()
    worker.read("step 16")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(checkpoint_now, cluster)
        wait_until(lambda: stopped.stopped)
        if victim == "coordinator":
            # Training does not wait for the files.
            worker.tell()
            worker.read("step 20")
        kill_everything(cluster, worker)
        with pytest.raises(Unavailable):
            asked.result()
    assert (saved / "checkpoint-00000002" / "model").is_dir()
    assert committed(saved) == [complete]
    expected = Undisturbed(2).train(*range(STEPS)).digest

    # From the checkpoint alone, as on other machines.
    shutil.copytree(saved, tmp_path / "copy")
    elsewhere = launch(2, coordinator=["--checkpoint-dir", str(tmp_path / "copy"), "--restore", "latest"])
    restored = elsewhere.worker()
    assert restored.number("started") == 8
    assert restored.read("digest") == f"digest {expected}"

    # From the directories of the shards and of the coordinator.
    cluster.start()
    again = cluster.worker()
    assert again.number("started") == worker.steps
    assert again.read("digest") == f"digest {expected}"
    assert replayed(cluster.data, 2)["model"] == expected
    # The next checkpoint shares nothing with the one that was broken off, which is gone.
    Checkpoint.open(checkpoint_now(cluster)).verify()
    assert not (saved / "checkpoint-00000002").exists()


@pytest.mark.parametrize(("before", "after"), [(2, 3), pytest.param(3, 2, marks=pytest.mark.long)])
def test_a_job_restored_on_another_number_of_shards_has_the_exact_state_of_the_optimizer(
    launch, tmp_path, before, after
):
    saved = ["--checkpoint-dir", str(tmp_path / "saved")]
    cluster = launch(before, coordinator=saved)
    worker = cluster.worker(pauses=[STEPS // 2])
    worker.read(f"step {STEPS // 2}")
    checkpoint_now(cluster)
    kill_everything(cluster, worker)
    restored = launch(after, coordinator=[*saved, "--restore", "latest"])
    again = restored.worker()
    assert again.number("started") == STEPS // 2
    expected = Undisturbed(before).train(*range(STEPS // 2)).move(after).train(*range(STEPS // 2, STEPS))
    assert again.read("digest") == f"digest {expected.digest}"
    assert replayed(restored.data, after)["model"] == expected.digest
