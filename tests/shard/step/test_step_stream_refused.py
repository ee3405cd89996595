"""Step streams that break the protocol, or may not open: refused with a typed error, and no other stream notices."""

from __future__ import annotations

from types import MappingProxyType

import grpc
import pytest

from ps_protocol.errors import Fenced, InvalidRequest, ProtocolVersionMismatch, PsError, Unavailable
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.v1.common_pb2 import Option, Options, OptionValue
from ps_protocol.wire.convert.options import options_to_pb
from tests.support.shards import StubStream, error_of, flat, gradients, refused_as, running_shard, start, wait_until

TWICE = [Option(name="lr", value=OptionValue(number=rate)) for rate in (0.1, 0.2)]


def push(**fields):
    return {"push": pb.PushHeader(**{"sequence": 1, "clock": 1} | fields)}


def options(*given):
    return push(groups=[Options(options=given)])


def combined(*ranks, weight=2.0, numbers=MappingProxyType({"sequence": 1, "clock": 1})):
    workers = [pb.WorkerId(rank=rank, incarnation=rank + 1) for rank in ranks]
    return push(weight=weight, contributions=[pb.PushContribution(worker=each, **numbers) for each in workers])


BAD_MESSAGES = {
    "a chunk without a header": ([{"chunk": pb.Chunk(payload=b"x")}], "a chunk came that belongs to no payload"),
    "a chunk out of order": ([push(), {"chunk": pb.Chunk(position=8, payload=b"x")}], "position 0"),
    "more bytes than the model has": ([push(), {"chunk": pb.Chunk(payload=bytes(1000))}], "at most 128 bytes"),
    "a header inside a payload": ([push()] * 2, "128 more bytes"),
    "an absent slice that does not exist": ([push(absent=[9])], "indexes below 2"),
    "an unknown argument": ([push(groups=[options_to_pb({"speed": 1})])], "'speed'"),
    "an argument of another kind": ([push(groups=[options_to_pb({"lr": "fast"})])], "lr='fast'"),
    "too many groups": ([push(groups=[Options(), Options()])], "groups"),
    "an option without a value": ([options(Option(name="lr"))], "no value"),
    "an option that comes twice": ([options(*TWICE)], "given twice"),
    "a negative weight": ([push(weight=-1.0)], "positive finite"),
    "an infinite weight": ([push(weight=float("inf"))], "positive finite"),
    "a weight that is no number": ([push(weight=float("nan"))], "positive"),
    "no sequence": ([push(sequence=0)], "sequence"),
    "a combined push that has a worker twice": ([combined(1, 1)], "a worker twice"),
    "a combined push that has its sender twice": ([combined(0)], "a worker twice"),
    "a combined push of too many workers": ([combined(*range(1, 257))], "at most 256"),
    "a combined push without a weight": ([combined(1, weight=0.0)], "positive finite"),
    "a combined push without a sequence of each": ([combined(1, numbers={})], "sequence"),
    "a second Open": ([{"open": pb.Open(model="model")}], "step stream"),
}


@pytest.mark.parametrize(("messages", "text"), BAD_MESSAGES.values(), ids=BAD_MESSAGES.keys())
def test_a_message_that_breaks_the_protocol_ends_its_stream_with_a_typed_error_and_no_other(messages, text):
    with running_shard({0: 1, 1: 2}) as shard:
        model, _ = start(shard)
        bystander, stream = StubStream(shard, rank=1, incarnation=2), StubStream(shard)
        for body in messages:
            stream.send(**body)
        with pytest.raises(grpc.RpcError) as failure:
            stream.result()
        error = error_of(failure.value)
        assert isinstance(error, InvalidRequest)
        assert text in str(error)
        result, _ = bystander.exchange(flat(model.layout, *gradients(model, 1)))
        assert result.version == 1
        wait_until(lambda: model.pool.in_use == 0)


def test_a_clock_that_does_not_rise_is_refused():
    with running_shard() as shard:
        model, _ = start(shard)
        stream = StubStream(shard)
        payload = flat(model.layout, *gradients(model, 1))
        stream.exchange(payload)
        result, _ = stream.exchange(payload, sequence=2, clock=1)
        assert result.error.code == InvalidRequest.code


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"rank": 7}, Fenced),
        ({"incarnation": 9}, Fenced),
        ({"protocol_version": 99}, ProtocolVersionMismatch),
        ({"epoch": 5}, Unavailable),
    ],
)
def test_a_stream_that_may_not_open_gets_a_typed_error(fields, kind, monkeypatch):
    monkeypatch.setattr("ps_server.shard.times.UNKNOWN_SECONDS", 0.1)
    with running_shard() as shard:
        start(shard)
        with refused_as(kind):
            StubStream(shard, **fields)


def test_an_unknown_model_is_waited_for_and_then_refused_by_name(monkeypatch):
    monkeypatch.setattr("ps_server.shard.times.UNKNOWN_SECONDS", 0.1)
    with running_shard() as shard, refused_as(PsError, "nobody"):
        StubStream(shard, name="nobody")


def test_bytes_that_are_no_message_end_the_stream_with_a_typed_error():
    with running_shard() as shard:
        start(shard)
        call = shard.channel.stream_stream("/ps_protocol.v1.Shard/Step")
        replies = call(iter([b"\xff\xff\xff"]))
        with refused_as(InvalidRequest):
            next(replies)


def test_a_new_incarnation_of_a_rank_fences_the_old_one():
    with running_shard() as shard:
        model, _ = start(shard)
        old = StubStream(shard)
        shard.set_view({0: 2})
        new = StubStream(shard, incarnation=2)
        old.push(flat(model.layout, *gradients(model, 1)))
        with refused_as(Fenced):
            old.result()
        assert new.exchange(flat(model.layout, *gradients(model, 1)))[0].version == 1


def test_a_failed_update_stops_the_model_and_says_so_to_everyone():
    with running_shard({0: 1, 1: 2}) as shard:
        model, _ = start(shard)

        def fail():
            raise OSError("the disk is gone")

        shard.failpoints.arm("after_log_before_apply", fail)
        stream, other = StubStream(shard), StubStream(shard, rank=1, incarnation=2)
        for each in (stream, other):
            each.push(flat(model.layout, *gradients(model, 1)))
            with refused_as(PsError, "the disk is gone"):
                each.result()
