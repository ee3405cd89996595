"""Versions and their readers: no reader sees bytes change, and nothing is copied for nobody."""

from __future__ import annotations

import asyncio

import pytest

from ps_server.shard.execution import executor
from ps_server.shard.step.published import CopyInProgress
from tests.support.loops import in_loop
from tests.support.shards import StubStream, flat, gradients, load, running_shard, simple_spec, wait_until, whole_map


@pytest.fixture(params=[executor.INLINE_WORK_BYTES, 0], ids=["inline", "in the thread"], autouse=True)
def _where_work_runs(request, monkeypatch):
    """Small work runs on the event loop, large work on the executor's thread."""
    monkeypatch.setattr(executor, "INLINE_WORK_BYTES", request.param)


def place(shard):
    model = shard.place(whole_map(simple_spec(momentum=0.9)))
    load(shard, model, bytes(model.layout.region_bytes))
    return model


def test_a_reader_keeps_its_version_while_updates_go_on():
    with running_shard() as shard:
        model, stream = place(shard), StubStream(shard)
        published, _ = shard.take(model)
        held = bytes(published.region.bytes)
        for seed in range(3):
            stream.push(flat(model.layout, *gradients(model, seed)))
            stream.result()
        assert bytes(published.region.bytes) == held
        newest, _ = shard.take(model)
        assert newest.version == published.version + 3
        assert bytes(newest.region.bytes) != held


def test_an_update_copies_the_region_once_for_its_readers_and_never_for_nobody():
    with running_shard() as shard:
        model, stream = place(shard), StubStream(shard)

        def region_after_push(seed):
            stream.push(flat(model.layout, *gradients(model, seed)))
            stream.result()
            published, give_back = shard.take(model)
            give_back()
            return published.region

        first = region_after_push(0)
        assert region_after_push(1) is first
        readers = [shard.take(model) for _ in range(2)]
        second = region_after_push(2)
        assert second is not first
        assert region_after_push(3) is second
        assert model.pool.in_use == 1
        for reader, give_back in readers:
            assert reader.region is first
            give_back()
        wait_until(lambda: model.pool.in_use == 0 or model.pool.spare > 0)


def test_training_is_the_same_with_and_without_readers():
    def train(read):
        with running_shard() as shard:
            model, stream = place(shard), StubStream(shard)
            for seed in range(5):
                if read:
                    shard.take(model)
                _, payload = stream.exchange(flat(model.layout, *gradients(model, seed)))
            return payload

    assert train(read=True) == train(read=False)


def test_an_update_waits_for_readers_of_shared_memory_and_copies_nothing(monkeypatch):
    monkeypatch.setattr(executor, "INLINE_WORK_BYTES", 0)
    monkeypatch.setattr("ps_server.shard.step.applier.INLINE_WORK_BYTES", 0)
    monkeypatch.setattr("ps_server.shard.times.UNREAD_SECONDS", 60.0)
    with running_shard() as shard:
        model, stream = place(shard), StubStream(shard)
        published, give_back = shard.take(model, quick=True)
        region = published.region
        stream.push(flat(model.layout, *gradients(model, 1)))
        wait_until(lambda: model.tracker.version == 1)
        give_back()
        newest, _ = shard.take(model)
        assert newest.region is region


def test_an_update_does_not_wait_long_for_a_reader_of_shared_memory_that_stands_still():
    with running_shard() as shard:
        model, stream = place(shard), StubStream(shard)
        published, _ = shard.take(model, quick=True)
        stream.exchange(flat(model.layout, *gradients(model, 1)))
        newest, _ = shard.take(model)
        assert newest.region is not published.region


@in_loop
async def test_memory_for_gradients_is_taken_when_no_copy_is_being_made():
    copies = CopyInProgress()
    await copies.ended()
    copies.begin()
    waiting = [asyncio.ensure_future(copies.ended()) for _ in range(2)]
    for _ in range(3):
        await asyncio.sleep(0)
    assert not any(future.done() for future in waiting)
    copies.end()
    await asyncio.gather(*waiting)
    await copies.ended()
