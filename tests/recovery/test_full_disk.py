"""A shard's disk is really full: a small file system, in a mount namespace of its own."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.recovery.inside import NAMESPACE
from tests.recovery.reference import alone
from tests.support.shards import wait_until

BALLAST = 1 << 18
"""Elements; a push of 1 MB soon fills a log."""

STEPS = 50


@pytest.fixture
def small_disk(tmp_path):
    """A folder that is a file system of 32 MB to processes ``inside``."""
    if os.geteuid() != 0:
        pytest.skip("a small file system can be mounted by root only")
    folder = tmp_path / "small"
    folder.mkdir()
    mount = f"mount -t tmpfs -o size=32m none {folder} && echo mounted && exec sleep 1000"
    holder = subprocess.Popen(["unshare", "-m", "sh", "-c", mount], stdout=subprocess.PIPE, text=True)
    try:
        if holder.stdout.readline() != "mounted\n":
            pytest.skip("no file system can be mounted here")
        yield SmallDisk(holder.pid, folder)
    finally:
        holder.kill()
        holder.communicate()


class SmallDisk:
    def __init__(self, pid, folder):
        self.pid = pid
        self.folder = folder
        self.inside = {NAMESPACE: f"/proc/{pid}/ns/mnt"}

    def grow(self):
        remount = ["mount", "-o", "remount,size=300m", str(self.folder)]
        subprocess.run(["nsenter", "-t", str(self.pid), "-m", *remount], check=True)


def test_pushes_wait_for_room_on_a_full_disk_and_training_ends_with_the_bits_of_an_undisturbed_run(launch, small_disk):
    cluster = launch(start=False)
    shard = cluster.shard(0, data=small_disk.folder)
    cluster.shards = [shard]
    cluster.start(**small_disk.inside)
    worker = cluster.worker(optimizer="SGD", ballast=BALLAST, steps=STEPS)
    wait_until(lambda: "waiting: shard 0 has no room for its log" in worker.said)
    # What was acknowledged survives, here too; and the next life has no more room than this one.
    shard.kill()
    shard.start(**small_disk.inside)
    small_disk.grow()
    assert worker.read("digest") == f"digest {alone(STEPS, 'SGD', BALLAST)}"
    assert worker.steps == STEPS
