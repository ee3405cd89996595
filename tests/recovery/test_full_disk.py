"""A shard's disk is really full: a small file system, in a mount namespace of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.recovery.reference import alone
from tests.support.shards import wait_until

BALLAST = 1 << 18
"""Elements; a push of 1 MB soon fills a log."""

STEPS = 75


@pytest.fixture
def small_disk(tmp_path):
    """A folder that is a file system of 100 MB where the processes that ``inside`` starts look."""
    if os.geteuid() != 0:
        pytest.skip("a small file system can be mounted by root only")
    folder = tmp_path / "small"
    folder.mkdir()
    mount = f"mount -t tmpfs -o size=100m none {folder} && echo mounted && exec sleep 1000"
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
        self.folder = folder
        self.inside = ["nsenter", "-t", str(pid), "-m"]

    def grow(self):
        subprocess.run([*self.inside, "mount", "-o", "remount,size=300m", str(self.folder)], check=True)


def test_pushes_wait_for_room_on_a_full_disk_and_training_ends_with_the_bits_of_an_undisturbed_run(launch, small_disk):
    cluster = launch(start=False)
    cluster.coordinator.start()
    shard = cluster.shard(0)

    def start():
        options = [*shard.arguments, "--data-dir", str(small_disk.folder), "--ready-file", str(shard.ready_file)]
        with shard.log.open("a") as log:
            command = [*small_disk.inside, sys.executable, "-m", "ps_server.shard.main", *options]
            process = subprocess.Popen(command, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
        wait_until(lambda: shard.ready_file.exists() or process.poll() is not None)
        return process

    process = start()
    try:
        worker = cluster.worker(optimizer="SGD", ballast=BALLAST, steps=STEPS)
        wait_until(lambda: "waiting: shard 0 has no room for its log" in worker.said)
        # What was acknowledged survives, here too; and the next life has no more room than this one.
        process.kill()
        process.wait()
        shard.ready_file.unlink()
        process = start()
        small_disk.grow()
        assert worker.read("digest") == f"digest {alone(STEPS, 'SGD', BALLAST)}"
        assert worker.steps == STEPS
    finally:
        process.kill()
        process.wait()
