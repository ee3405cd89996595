"""Shards killed as ``kill -9`` leaves them, without a process of their own."""

from __future__ import annotations

import asyncio
import shutil
import threading
from contextlib import contextmanager

import pytest

from ps_server.tables.row_memory import RowMemory
from tests.shard.disks import shard_on
from tests.support.length import few


@pytest.fixture
def disk(monkeypatch):
    """Held while a helper thread writes, so that a copy of the directory is of one moment."""
    lock = threading.Lock()

    def work(function, *arguments, **keywords):
        with lock:
            return function(*arguments, **keywords)

    async def locked(*arguments, **keywords):
        return await asyncio.to_thread(work, *arguments, **keywords)

    monkeypatch.setattr("ps_server.shard.durability.snapshotter.to_thread", locked)
    monkeypatch.setattr("ps_server.log.durable.to_thread", locked)
    return lock


@pytest.fixture
def killed(tmp_path, disk):
    """``killed(shard)``: a shard with what lies on the disk now, as ``kill -9`` leaves it; the first one lives on."""

    @contextmanager
    def start_again(shard, live=None, mode=None, **fields):
        copy = tmp_path / "killed"
        shutil.rmtree(copy, ignore_errors=True)

        def take():
            with disk:
                shutil.copytree(tmp_path / "a", copy)

        async def in_lane():
            await shard.registry.context.executor.submit(take, 1 << 62)  # no record is written meanwhile

        shard.loop.run(in_lane())
        with shard_on(copy, live, mode, **fields) as again:
            yield again

    return start_again


@pytest.fixture
def small_blocks(monkeypatch):
    """Several blocks, also of a model of some bytes."""
    monkeypatch.setattr("ps_server.state.blocks.BLOCK_BYTES", 40)


@pytest.fixture
def small_files(small_blocks, monkeypatch):
    """Several segments and snapshots, also of a model of some bytes."""
    monkeypatch.setattr("ps_server.log.segments.SEGMENT_BYTES", 1 << 18)
    monkeypatch.setattr("ps_server.shard.times.SNAPSHOT_LOOK_SECONDS", 0.001)


@pytest.fixture(params=few([True, False]), ids=few(["few in memory", "all in memory"]))
def row_memory(request, monkeypatch):
    """A few rows of each table are in memory, the others on disk; in full length once more with all in memory."""

    def nearly_none(config, shard):
        return RowMemory(1, shard=shard, segment_bytes=1 << 10)

    if request.param:
        monkeypatch.setattr("ps_server.shard.durability.storage.row_memory", nearly_none)
