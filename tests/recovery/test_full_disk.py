"""A shard's disk is really full: a small file system, in a mount namespace of its own."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.recovery.inside import NAMESPACE
from tests.recovery.reference import alone
from tests.support.shards import wait_until

BALLAST = 1 << 18
"""Elements; a push of 1 MB soon fills a log."""

STEPS = 50

ROOM_BYTES = 400_000
"""Enough for a start, and for no snapshot and no further segment of the log."""

SMALL_BALLAST = 1 << 13

SMALL_STEPS = 500


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

    @contextmanager
    def filled(self) -> Iterator[Callable[[int], None]]:
        """Every byte is taken by a file of others, also what becomes free meanwhile, until they are told to leave some
        bytes; at the end they remove it.
        """
        file = self.folder / "of-others"
        fill = f"while :; do cat /dev/zero >> {file} 2> /dev/null; sleep 0.02; done"
        others = subprocess.Popen(["nsenter", "-t", str(self.pid), "-m", "sh", "-c", fill], start_new_session=True)
        seen_from_here = f"/proc/{self.pid}/root{self.folder}"

        def end() -> None:
            if others.poll() is None:
                os.killpg(others.pid, signal.SIGKILL)
                others.wait()

        def leave(nbytes: int) -> None:
            end()
            truncate = ["truncate", "--size", f"-{nbytes}", str(file)]
            subprocess.run(["nsenter", "-t", str(self.pid), "-m", *truncate], check=True)

        try:
            wait_until(lambda: os.statvfs(seen_from_here).f_bavail == 0)
            yield leave
        finally:
            end()
            subprocess.run(["nsenter", "-t", str(self.pid), "-m", "rm", str(file)], check=True)

    @contextmanager
    def without_snapshots(self) -> Iterator[None]:
        """No snapshot of shard 0 finds a byte of room; the log does."""
        snapshots = str(self.folder / "shard-0" / "snapshots")
        here = ["nsenter", "-t", str(self.pid), "-m"]
        subprocess.run([*here, "mkdir", "--parents", "--mode=700", snapshots], check=True)
        subprocess.run([*here, "mount", "-t", "tmpfs", "-o", "size=4k", "none", snapshots], check=True)
        try:
            yield
        finally:
            subprocess.run([*here, "umount", "--lazy", snapshots], check=True)

    def grow(self):
        remount = ["mount", "-o", "remount,size=300m", str(self.folder)]
        subprocess.run(["nsenter", "-t", str(self.pid), "-m", *remount], check=True)


def test_pushes_wait_for_room_on_a_full_disk_and_training_ends_with_the_bits_of_an_undisturbed_run(launch, small_disk):
    cluster = launch(start=False)
    shard = cluster.shard(0, "--log-mb", "1000", "--snapshot-seconds", "1e6", data=small_disk.folder)
    cluster.shards = [shard]
    cluster.start(**small_disk.inside)
    worker = cluster.worker(optimizer="SGD", ballast=BALLAST, steps=STEPS, pauses=[15])
    worker.read("step 15")
    # No snapshot finds room for itself, and makes some.
    with small_disk.filled() as leave:
        worker.tell()
        wait_until(lambda: "waiting: shard 0 has no room for its log" in worker.said)
        # What was acknowledged survives, here too; and the next life has no more room than this one.
        shard.kill()
        leave(ROOM_BYTES)
        shard.start(**small_disk.inside)
        small_disk.grow()
    assert worker.read("digest") == f"digest {alone(STEPS, 'SGD', BALLAST)}"
    assert worker.steps == STEPS


@pytest.mark.long
def test_a_shard_that_was_stopped_at_the_limit_of_its_log_trains_on_once_there_is_room(launch, small_disk):
    cluster = launch(start=False)
    shard = cluster.shard(0, "--log-mb", "6", "--snapshot-seconds", "1e6", data=small_disk.folder)
    cluster.shards = [shard]
    cluster.start(**small_disk.inside)
    worker = cluster.worker(optimizer="Adam", ballast=SMALL_BALLAST, steps=SMALL_STEPS, pauses=[20])
    worker.read("step 20")
    with ExitStack() as full:
        with small_disk.without_snapshots():
            worker.tell()
            wait_until(lambda: "waiting: the log of shard 0 has reached its limit" in worker.said)
            full.enter_context(small_disk.filled())
            shard.send(signal.SIGTERM)
            assert shard.wait() == 0
        # Where there is still no room for a byte, it says so and ends.
        shard.launch(**small_disk.inside)
        assert shard.wait() != 0
        assert "Error: shard 0 has no room for its log" in shard.said
    assert "no snapshot at the end" in shard.said
    shard.start(**small_disk.inside)
    assert worker.read("digest") == f"digest {alone(SMALL_STEPS, 'Adam', SMALL_BALLAST)}"
    assert worker.steps == SMALL_STEPS
