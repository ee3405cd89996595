"""Readers of one host map what a relay, or a shard, has in memory: they hold the bytes of a version once."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ps_protocol.errors import DamagedData, PermissionDenied
from ps_protocol.weights import memory
from ps_protocol.weights.memory import Room
from ps_protocol.wire import bulk
from ps_protocol.wire.shared_memory import SharedMemory
from ps_server.cli.options.storage import Durability
from ps_server.shard.config import SideChannelConfig
from ps_server.shard.transport.socket_stream import SocketServerTransport
from tests.support.shards import wait_until
from tests.weights.relays import Relay, relaying
from tests.weights.test_published_weights import Odd, bits, durable, net, published, reader
from tests.weights.test_relay import change
from tests.worker.jobs import running_job


@pytest.fixture(autouse=True)
def _this_host(_other_host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PS_TRANSPORT", "auto")
    memory._no_room.cache_clear()


def received(*subscriptions: Any) -> int:
    return sum(each.delta_bytes + each.full_bytes for each in subscriptions)


def segment_of(value: torch.Tensor) -> str:
    """The file in memory that has ``value``; empty: it is in memory of this process, as rows of several shards are."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(each, 16) for each in line.split()[0].split("-"))
        if begin <= value.data_ptr() < end:
            return line.split()[4] if "memfd:torch-ps" in line else ""
    raise AssertionError("it is nowhere")


def has_all(relay: Relay, number: int) -> None:
    wait_until(lambda: relay.versions[-1:] == [number])


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_readers_of_one_host_receive_no_byte_and_map_the_same_memory(dtype: torch.dtype | None) -> None:
    with running_job(shards=2) as job, relaying(job.loop, job.address, "policy") as relay:
        model = net()
        cluster, optimizer = published(job, model)
        options: dict[str, Any] = {"coordinator": relay.address, "dtype": dtype}
        with reader(job, **options) as first, reader(job, **options) as second:
            for number in range(1, 4):
                if number > 1:
                    change(model, optimizer, number)
                    cluster.publish("policy", optimizer, step=number, wait=True)
                has_all(relay, number)
                seen = [next(each) for each in (first, second)]
                places = [{segment_of(value) for value in each.tensors().values()} for each in seen]
                assert places[0] == places[1]
                assert places[0] - {""}
                for version in seen:
                    assert version.number == number
                    tensors = version.tensors()
                    for name, value in model.state_dict().items():
                        wanted = value.to(dtype) if dtype and value.is_floating_point() else value
                        assert torch.equal(tensors[name], wanted)
            assert received(first, second) == 0


def test_odd_tensors_in_several_pieces_are_exact() -> None:
    model, mine = Odd(), Odd()
    with torch.no_grad():
        model.first.weight.view(torch.int32)[0, 0] = 0x7FC01234
        model.bfloat.view(torch.int16)[0, 0] = 0x7FA5
    with running_job(shards=3) as job:
        published(job, model)
        with (
            relaying(job.loop, job.address, "policy") as relay,
            reader(job, coordinator=relay.address) as versions,
        ):
            next(versions).apply_(mine)
            assert received(versions) == 0
    assert bits(mine) == bits(model)


def test_a_version_stays_as_it_is_when_the_relay_removes_it_and_ends_and_when_another_reader_writes_to_it() -> None:
    with running_job() as job:
        model = net()
        cluster, optimizer = published(job, model)
        wanted = {name: value.clone() for name, value in model.state_dict().items()}
        with relaying(job.loop, job.address, "policy", keep=1) as relay:
            with reader(job, coordinator=relay.address) as first, reader(job, coordinator=relay.address) as second:
                kept, other = next(first), next(second)
                for value in other.tensors().values():
                    value.zero_()
                for number in range(2, 5):
                    change(model, optimizer, number)
                    cluster.publish("policy", optimizer, step=number, wait=True)
                    has_all(relay, number)
                    assert next(second).number == number
            relay.end()
        for name, value in kept.tensors().items():
            assert torch.equal(value, wanted[name])


def test_a_shard_that_keeps_versions_in_memory_shares_them() -> None:
    with running_job(shards=2) as job, reader(job) as versions:
        model, mine = net(), net(2)
        cluster, optimizer = published(job, model)
        for number in range(1, 4):
            if number > 1:
                change(model, optimizer, number)
                cluster.publish("policy", optimizer, step=number, wait=True)
            next(versions).apply_(mine)
            assert bits(mine) == bits(model)
        assert received(versions) == 0


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_a_shard_uses_memory_again_that_readers_have_let_go_and_none_that_one_has(dtype: torch.dtype | None) -> None:
    with running_job() as job, reader(job, dtype=dtype) as quick, reader(job, dtype=dtype) as slow:
        model = net()
        cluster, optimizer = published(job, model)
        kept = next(slow).tensors()
        wanted = {name: value.clone() for name, value in kept.items()}
        (segment,) = {segment_of(value) for value in kept.values()} - {""}
        used = []
        for number in range(2, 12):
            change(model, optimizer, number)
            cluster.publish("policy", optimizer, step=number, wait=True, keep=1)
            tensors = next(quick).tensors()
            used += [{segment_of(value) for value in tensors.values()} - {""}]
            for name, value in model.state_dict().items():
                assert torch.equal(tensors[name], value.to(tensors[name].dtype))
        assert all(len(each) == 1 for each in used)
        assert len(set.union(*used)) <= 4
        assert {segment} not in used
        for name, value in kept.items():
            assert torch.equal(value, wanted[name])


def test_memory_that_is_being_handed_over_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, go_on = threading.Event(), threading.Event()
    handed_over = SocketServerTransport.hand_over

    async def late(self: SocketServerTransport, room: Room) -> None:
        if not asked.is_set():
            asked.set()
            await asyncio.to_thread(go_on.wait)
        await handed_over(self, room)

    monkeypatch.setattr(SocketServerTransport, "hand_over", late)
    with running_job(start_shards=0) as job, reader(job) as versions, ThreadPoolExecutor(1) as pool:
        # It waits for what is handed over while the test publishes.
        job.start_shard(0, side_channels=SideChannelConfig(token_seconds=60.0))
        model, mine = net(), net(2)
        cluster, optimizer = published(job, model)
        wanted = bits(model)
        reading = pool.submit(versions.fetch, 1)
        assert asked.wait(60)
        for number in range(2, 8):
            change(model, optimizer, number)
            cluster.publish("policy", optimizer, step=number, wait=True, keep=1)
        go_on.set()
        version = reading.result()
        for number in range(8, 12):
            change(model, optimizer, number)
            cluster.publish("policy", optimizer, step=number, wait=True, keep=1)
        version.apply_(mine)
        assert bits(mine) == wanted


def test_a_shard_with_files_sends_bytes_and_shares_converted_values(tmp_path: Path) -> None:
    with running_job(start_shards=0) as job:
        job.start_shard(0, storage=durable(tmp_path, Durability.DURABLE))
        job.wait_for_shards()
        model = net()
        cluster, optimizer = published(job, model)
        with reader(job) as native, reader(job, dtype=torch.float64) as converted:
            for number in range(1, 3):
                if number > 1:
                    change(model, optimizer, number)
                    cluster.publish("policy", optimizer, step=number, wait=True)
                assert (next(native).number, next(converted).number) == (number, number)
            assert min(native.full_bytes, native.delta_bytes) > 0
            assert received(converted) == 0


def refused(*_: object) -> None:
    raise PermissionDenied("memory is not shared with a process of another user")


def absent(*_: object) -> None:
    raise FileNotFoundError(2, "No such file or directory")


@pytest.mark.parametrize(
    ("name", "broken", "said"), [("check_peer", refused, 1), ("connect_unix", absent, 0), ("map_private", absent, 0)]
)
def test_where_memory_cannot_be_shared_bytes_come_and_the_reason_is_said_once(
    name: str, broken: Any, said: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bulk, name, broken)
    with running_job(shards=2) as job:
        model, mine = net(), net(2)
        cluster, optimizer = published(job, model)
        with relaying(job.loop, job.address, "policy") as relay, reader(job, coordinator=relay.address) as versions:
            for number in range(1, 4):
                if number > 1:
                    change(model, optimizer, number)
                    cluster.publish("policy", optimizer, step=number, wait=True)
                next(versions).apply_(mine)
                assert bits(mine) == bits(model)
            assert versions.full_bytes > 0
            assert versions.delta_bytes > 0
    assert sum("cannot be shared" in record.message for record in caplog.records) == said


def test_without_room_for_shared_memory_bytes_come_and_the_relay_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with running_job() as job:
        model, mine = net(), net(2)
        cluster, optimizer = published(job, model)
        monkeypatch.setattr(SharedMemory, "create", full)
        with relaying(job.loop, job.address, "policy") as relay, reader(job, coordinator=relay.address) as versions:
            for number in range(1, 4):
                if number > 1:
                    cluster.publish("policy", optimizer, step=number, wait=True)
                next(versions).apply_(mine)
            assert bits(mine) == bits(model)
            assert versions.full_bytes > 0
    assert sum("do not share memory" in record.message for record in caplog.records) == 1


def test_a_relay_that_shares_no_memory_and_a_reader_that_wants_none_use_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_job() as job:
        published(job, net())
        closed = SideChannelConfig(shm=False)
        with (
            relaying(job.loop, job.address, "policy", side_channels=closed) as relay,
            reader(job, coordinator=relay.address) as versions,
        ):
            next(versions)
            assert versions.full_bytes > 0
        monkeypatch.setenv("PS_TRANSPORT", "grpc")
        with relaying(job.loop, job.address, "policy") as relay, reader(job, coordinator=relay.address) as versions:
            next(versions)
            assert versions.full_bytes > 0


def test_memory_that_is_not_what_was_committed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_job() as job:
        model: nn.Module = net()
        published(job, model)
        with relaying(job.loop, job.address, "policy") as relay, reader(job, coordinator=relay.address) as versions:
            has_all(relay, 1)
            made = bulk.map_private

            def flipped(fd: int, size: int) -> memoryview:
                data = made(fd, size)
                data[size // 2] ^= 1
                return data

            monkeypatch.setattr(bulk, "map_private", flipped)
            with pytest.raises(DamagedData, match="checksum"):
                next(versions)
            monkeypatch.undo()
            monkeypatch.setenv("PS_TRANSPORT", "auto")
            mine = net(2)
            next(versions).apply_(mine)
            assert bits(mine) == bits(model)


def test_a_segment_that_could_become_smaller_is_not_mapped() -> None:
    fd = os.memfd_create("torch-ps", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    with pytest.raises(ValueError, match="that stay"):
        bulk.map_private(fd, 4096)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
