"""Side channels of a real shard against workers that lie and come late: tokens, and how a channel begins."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, suppress

import pytest

from ps_protocol.errors import InvalidRequest, Unavailable
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire.convert.errors import from_detail
from ps_protocol.wire.socket_messages import LENGTH, MAX_MESSAGE_BYTES, framed
from ps_server.shard.config import SideChannelConfig
from ps_server.shard.transport.side_channels import Offer
from tests.support.shards import (
    StubStream,
    flat,
    gradients,
    wait_until,
)
from tests.support.side_channels import (
    BOTH,
    BULK,
    HURRIED,
    SHM,
    Channel,
    header,
    unharmed,
    worker_of,
)
from tests.transports.support import UvloopThread

TOKEN_SECONDS = 77.0


@pytest.fixture(autouse=True)
def _uvloop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.shards.LoopThread", UvloopThread)


@BOTH
def test_who_has_no_valid_token_is_told_so_and_shut_out(transport):
    with unharmed() as (shard, _), worker_of(shard, transport) as worker:
        stranger = worker.connect()
        stranger.token = bytes(32)
        refused = from_detail(stranger.attach().refused)
        assert isinstance(refused, InvalidRequest)
        assert "token is wrong, used, or expired" in str(refused)
        assert stranger.ended()
        # The token is still good for the one who has it.
        assert worker.connect().attach().WhichOneof("body") == "attached"


@BOTH
def test_a_token_admits_once(transport):
    with unharmed() as (shard, _), worker_of(shard, transport) as worker:
        channel, second = worker.confirmed(), worker.connect()
        assert second.attach().WhichOneof("body") == "refused"
        assert second.ended()
        channel.send(push=header(skipped=True))
        assert channel.receive().result.outcome == pb.OUTCOME_SKIPPED


@BOTH
def test_a_token_expires_and_so_does_a_connection_that_shows_none(transport):
    with unharmed(config=HURRIED) as (shard, _), worker_of(shard, transport) as worker:
        silent = worker.connect()
        assert silent.ended()  # it came after the token did, so the token has had its time too
        shard.service._side_channels._config = SideChannelConfig()  # the next one has time to show it
        assert worker.connect().attach().WhichOneof("body") == "refused"


@BOTH
def test_the_end_of_the_stream_ends_its_token(transport):
    with unharmed() as (shard, _), worker_of(shard, transport) as worker:
        worker.stream.end()
        assert worker.connect().attach().WhichOneof("body") == "refused"


STRANGE_BEGINNINGS = {
    "another message than Attach": (framed(pb.StepRequest(confirm=pb.Confirm()).SerializeToString()), "with Attach"),
    "no message": (framed(b"\xff\xff\xff"), "not a StepRequest"),
    "an empty message": (framed(b""), "with Attach"),
    "a chunk": (framed(pb.StepRequest(chunk=pb.Chunk(payload=b"x")).SerializeToString()), "a chunk came"),
    "a length above the limit": (LENGTH.pack(MAX_MESSAGE_BYTES + 1), "too long"),
    "HTTP": (b"GET / HTTP/1.1\r\n\r\n", "too long"),
    "noise": (b"\xff" * 5000, "too long"),
}


@BOTH
@pytest.mark.parametrize(("data", "text"), STRANGE_BEGINNINGS.values(), ids=STRANGE_BEGINNINGS)
def test_a_connection_that_begins_strangely_is_told_so_and_closed(transport, data, text):
    with unharmed() as (shard, _), worker_of(shard, transport) as worker:
        channel = worker.connect()
        channel.socket.sendall(data)
        assert text in str(from_detail(channel.receive().refused))
        assert channel.ended()


@BOTH
@pytest.mark.parametrize("data", [b"\x05", LENGTH.pack(50), LENGTH.pack(50) + b"half"], ids=["1", "4", "8"])
def test_a_connection_that_stalls_in_its_first_message_or_ends_there_is_closed(transport, data):
    with unharmed(config=HURRIED) as (shard, _), worker_of(shard, transport) as worker:
        stalls, ends = worker.connect(), worker.connect()
        with suppress(ConnectionError):  # where that took so long that both are closed by now
            ends.socket.sendall(data)
            ends.close()
            stalls.socket.sendall(data)
        assert stalls.ended()


@BOTH
def test_who_never_confirms_is_shut_out_and_goes_on_over_grpc(transport, monkeypatch):
    limits, timeout = [], asyncio.timeout

    def noted(seconds):
        limit = timeout(seconds)
        if seconds == TOKEN_SECONDS:
            limits.append(limit)
        return limit

    async def end():
        limits[-1].reschedule(asyncio.get_running_loop().time())

    monkeypatch.setattr(asyncio, "timeout", noted)
    config = SideChannelConfig(token_seconds=TOKEN_SECONDS)
    with unharmed(config=config) as (shard, model), worker_of(shard, transport) as worker:
        channel = worker.connect()
        assert channel.attach().WhichOneof("body") == "attached"
        shard.loop.run(end())  # not before, however long that took
        assert channel.ended()
        payload = flat(model.layout, *gradients(model, 1))
        assert worker.stream.exchange(payload)[0].outcome == pb.OUTCOME_APPLIED


@BOTH
def test_a_newer_stream_that_comes_while_the_older_takes_its_channel_up_leaves_no_error_unasked_for(
    transport, monkeypatch
):
    """The older one has its side channel, and still waits to hear of it."""
    pending, original = [], Offer.chosen

    async def never_told(offer, anchor):
        await original(offer, anchor)
        pending.append(anchor._first)
        await asyncio.Event().wait()

    with unharmed() as (shard, _), ExitStack() as stack:
        with monkeypatch.context() as late:
            late.setattr(Offer, "chosen", never_told)
            older = stack.enter_context(worker_of(shard, transport))
            older.confirmed()
            wait_until(lambda: len(pending) == 1)
        stack.enter_context(worker_of(shard, transport))
        assert isinstance(older.error(), Unavailable)
        (reading,) = pending
        wait_until(reading.done)
        shard.loop.run(asyncio.sleep(0))
        # asyncio prints the error of a task that nobody has asked for.
        assert not reading._log_traceback


@BOTH
def test_who_confirms_after_it_went_on_over_grpc_is_shut_out(transport):
    with unharmed() as (shard, model), worker_of(shard, transport) as worker:
        channel = worker.connect()
        channel.attach()
        payload = flat(model.layout, *gradients(model, 1))
        worker.stream.exchange(payload)
        channel.send(confirm=pb.Confirm())
        assert channel.ended()
        assert worker.stream.exchange(payload)[0].outcome == pb.OUTCOME_APPLIED


@BOTH
def test_who_confirms_after_its_stream_has_ended_is_shut_out(transport):
    with unharmed() as (shard, _):
        tasks = shard.loop.run(_tasks())
        with worker_of(shard, transport) as worker:
            channel = worker.connect()
            channel.attach()
            worker.stream.cancel()
            wait_until(lambda: shard.loop.run(_tasks()) <= tasks + 1)  # all that waits is for Confirm
            channel.send(confirm=pb.Confirm())
            assert channel.ended()


async def _tasks() -> int:
    return len(asyncio.all_tasks())


def test_of_two_channels_the_first_that_confirms_is_the_stream():
    with unharmed() as (shard, _):
        stream = StubStream(shard, transports=[SHM, BULK, SHM, 77])
        assert [offered.transport for offered in stream.opened.side_channels] == [SHM, BULK]
        first, second = (Channel(shard, offered) for offered in stream.opened.side_channels)
        for channel in (first, second):
            assert channel.attach().WhichOneof("body") == "attached"
        first.send(confirm=pb.Confirm())
        first.send(push=header(skipped=True))
        assert first.receive().result.outcome == pb.OUTCOME_SKIPPED
        second.send(confirm=pb.Confirm())
        assert second.ended()
        for channel in (first, second):
            channel.close()
        stream.cancel()


@pytest.mark.parametrize(("asked", "given"), [(0, 1), (1, 1), (2, 2), (9, 2), ((1 << 32) - 1, 2)])
def test_a_worker_gets_the_gradient_segments_it_asks_for_up_to_two(asked, given):
    with unharmed() as (shard, model), worker_of(shard, SHM) as worker:
        channel = worker.connect()
        attached = channel.attach(segments=asked).attached
        assert attached.segment_bytes == model.layout.region_bytes
        assert len(channel.descriptors) == given


def test_without_shared_memory_the_worker_is_told_that_it_goes_on_over_tcp(monkeypatch):
    with unharmed() as (shard, _), worker_of(shard, SHM) as worker:
        monkeypatch.setattr("ps_protocol.wire.shared_memory.SharedMemory.create", _no_memory)
        channel = worker.connect()
        assert "not enough shared memory" in str(from_detail(channel.attach().refused))
        assert channel.ended()
        monkeypatch.undo()


def _no_memory(size_bytes: int, reserved_bytes: int = 0) -> None:
    raise OSError("no room")


# Once confirmed
