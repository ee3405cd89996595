"""A model that takes long to be placed is not ready, and its workers are told how far it is; it is not unknown."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import torch

from ps_protocol.errors import InternalError, NotReady, Unavailable, UnknownModel
from ps_protocol.model.spec import ShardMap
from ps_server.checkpoint.commit import commit
from ps_server.checkpoint.directory import begin
from ps_server.checkpoint.model_writer import write_part
from ps_server.checkpoint.source import ModelFiles
from ps_server.consistency import TrackerState
from ps_server.shard.placing import PlacingProgress
from tests.checkpoint.support import Job, shard_map_of, small_spec
from tests.shard.disks import held
from tests.support.shards import StubStream, TestShard, error_of, running_shard, wait_until
from tests.support.tables import spec_with, table_spec, whole_table_map


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr("ps_server.shard.times.UNKNOWN_SECONDS", 0.05)
    monkeypatch.setattr("ps_server.shard.times.PLACING_SECONDS", 0.05)


@contextmanager
def declared(shard_map: ShardMap) -> Iterator[TestShard]:
    """A shard that has heard of the model from the coordinator."""

    async def fetch(name: str) -> ShardMap:
        return shard_map

    with running_shard(fetch=fetch) as shard:
        shard.set_view({0: 1}, models={shard_map.spec.name: shard_map.epoch})
        yield shard


def saved(folder: Path) -> tuple[ShardMap, torch.Tensor]:
    """A checkpoint of a small model with optimizer state, all on one shard; its map, and the bytes of its values."""
    job = Job.of(shard_map_of(small_spec(), 1), seed=3).train([1])
    (shard,) = job.shards
    begun = begin(folder)
    facts = {"tracker": TrackerState(1).to_json()}
    part = write_part(begun, shard.region.layout, shard.region.bytes, shard.optimizer.state(), facts)
    commit(begun, [job.shard_map], [part], {}, 0.0)
    return replace(job.shard_map, restored_from=str(begun)), shard.region.data.clone()


def refused(shard: TestShard, name: str = "model", **fields: int) -> Exception:
    with pytest.raises(grpc.RpcError) as failure:
        StubStream(shard, name=name, **fields)
    return error_of(failure.value)


def test_a_model_that_the_shard_has_not_heard_of_is_not_unknown_to_a_worker_that_has_its_shard_map():
    with running_shard() as shard:
        shard.set_view({0: 1})
        unheard = refused(shard, epoch=1)
        assert isinstance(unheard, Unavailable)
        assert (unheard.expected, unheard.actual) == ("epoch 1", "none")
        assert isinstance(refused(shard), UnknownModel)


class SlowDisk:
    """Every read of a checkpoint waits until it is let through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._through = threading.Semaphore(0)
        read = ModelFiles._checked

        def slowly(*arguments):
            assert self._through.acquire(timeout=60)
            return read(*arguments)

        monkeypatch.setattr(ModelFiles, "_checked", slowly)

    def let(self, reads: int) -> None:
        for _ in range(reads):
            self._through.release()


def test_a_model_that_is_being_restored_is_not_ready_and_advances_until_it_is_there(tmp_path: Path, monkeypatch):
    shard_map, values = saved(tmp_path)
    disk = SlowDisk(monkeypatch)
    with declared(shard_map) as shard:
        wait_until(lambda: "is restored from" in shard.registry.activity)
        first = refused(shard)
        assert isinstance(first, NotReady)
        assert "is restored from" in first.message
        assert isinstance(refused(shard, "nobody"), UnknownModel)
        disk.let(2)
        wait_until(lambda: "read" in shard.registry.activity)
        second = refused(shard)
        assert isinstance(second, NotReady)
        assert second.progress > first.progress
        assert "MB read" in second.message
        disk.let(1000)
        wait_until(lambda: not shard.registry.activity)
        assert StubStream(shard).opened.initialised
        assert torch.equal(held(shard, shard.model()), values)


def test_a_model_whose_kernels_are_compiled_is_not_ready_and_advances_with_each(monkeypatch):
    shard_map = whole_table_map(spec_with(table_spec()))
    compiled, ready = threading.Event(), threading.Event()

    def compile_slowly(spec, on_kernel):
        assert compiled.wait(60)
        on_kernel("first")
        assert ready.wait(60)

    monkeypatch.setattr("ps_server.tables.warm_up", compile_slowly)
    with declared(shard_map) as shard:
        wait_until(lambda: "compiled" in shard.registry.activity)
        first = refused(shard)
        compiled.set()
        wait_until(lambda: refused(shard).progress > first.progress)
        assert "compiled" in first.message
        ready.set()
        wait_until(lambda: not shard.registry.activity)
        StubStream(shard).end()


def test_a_defect_while_a_model_is_placed_is_told_to_its_workers(monkeypatch):
    def broken(spec, on_kernel):
        raise ZeroDivisionError("eps")

    monkeypatch.setattr("ps_server.tables.warm_up", broken)
    with declared(whole_table_map(spec_with(table_spec()))) as shard:
        # Its placing may not have begun yet.
        wait_until(lambda: isinstance(refused(shard), InternalError))
        assert "ZeroDivisionError: eps" in str(refused(shard))


def test_a_write_in_one_go_counts_as_advancing_for_as_long_as_it_may_take():
    now = [0.0]
    progress = PlacingProgress("model", lambda: now[0])
    progress.begin("is restored", unseen_seconds=3.0)
    seen = []
    for now[0] in (1.0, 2.0, 3.0, 4.0, 5.0):
        seen.append(progress.done)
    assert seen[0] < seen[1] < seen[2] == seen[3] == seen[4]


def test_what_was_read_is_told_through_all_of_a_restore():
    progress = PlacingProgress("model")
    progress.begin("is restored")
    progress.count_read(3_000_000)
    progress.begin("is restored", unseen_seconds=1.0)
    assert "is restored, 3 MB read" in progress.error(0).message
    progress.begin("is laid out")
    assert "MB" not in str(progress)


def test_trying_again_is_progress_only_where_it_gets_further():
    progress = PlacingProgress("model")
    progress.begin("is laid out")
    progress.count_read(100)
    before = progress.done
    progress.fail(OSError("no room"))
    assert "no room" in str(progress)
    progress.begin("is laid out")
    progress.count_read(50)
    assert progress.done == before
    progress.count_read(60)
    assert progress.done > before
