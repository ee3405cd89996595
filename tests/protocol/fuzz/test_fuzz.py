"""No bytes a worker can send break what reads them, or the shard behind it."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import grpc
import pytest
from google.protobuf.message import DecodeError
from hypothesis import assume, example, given
from hypothesis import strategies as st

from ps_protocol.cluster.requests import UnknownRequest
from ps_protocol.errors import DamagedData, InternalError, InvalidRequest, UnsupportedOptimizer
from ps_protocol.v1 import common_pb2
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire.chunks import STEP_REQUESTS
from ps_protocol.wire.convert.options import options_from_pb, options_to_pb
from ps_protocol.wire.convert.step import request_from_bytes, request_to_bytes
from ps_protocol.wire.deltas import encode_delta, read_header
from ps_protocol.wire.formats import wire_from_pb
from ps_protocol.wire.frames import Scatter, parse_chunk
from ps_protocol.wire.socket_messages import LENGTH, framed
from ps_server.optimizers.shard_optimizer import ShardOptimizer
from ps_server.shard.step.options import merge_options
from ps_server.shard.step.stream import scatter
from ps_server.state.region import Region
from tests.protocol.fuzz.attacked import PAYLOAD_BYTES, Target, call, target, whole_streams
from tests.protocol.options import OPTIONS
from tests.protocol.wire.test_deltas import applied, sealed
from tests.support.length import examples
from tests.support.shards import Layout, StubStream, TestShard, error_of, simple_spec, whole_map

U64 = st.integers(0, 3) | st.sampled_from([(1 << 31) - 1, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
U32 = st.integers(0, 3) | st.sampled_from([(1 << 31) - 1, (1 << 32) - 1])
SMALL = st.integers(0, 2)
PAYLOADS = st.just(bytes(PAYLOAD_BYTES)) | st.binary(max_size=PAYLOAD_BYTES + 4) | st.just(b"\xff" * PAYLOAD_BYTES)
HEADERS = st.builds(
    pb.PushHeader,
    sequence=st.integers(1, 6) | U64,
    phase=st.just(0) | U64,
    clock=st.integers(1, 6) | U64,
    pulled_version=U64,
    absent=st.lists(SMALL | U32, max_size=3),
    groups=st.lists(OPTIONS, max_size=2),
    with_buffers=st.booleans(),
    skipped=st.booleans(),
    payload=st.just(b"") | PAYLOADS,
    segment=st.just(0) | U32,
    ahead=st.just(0) | U32,
    staged=st.just([]) | st.lists(st.sampled_from([0, 4, 20, PAYLOAD_BYTES]) | U64, max_size=4),
)
PLACES = st.sampled_from([0, 4, 20, PAYLOAD_BYTES]) | U64
BODIES = st.one_of(
    HEADERS.map(lambda header: pb.StepRequest(push=header)),
    st.builds(pb.Stage, begin=PLACES, end=PLACES, payload=PAYLOADS).map(lambda stage: pb.StepRequest(stage=stage)),
    st.builds(pb.Arrive, phase=U64).map(lambda arrive: pb.StepRequest(arrive=arrive)),
    st.just(pb.StepRequest(fetch=pb.Fetch())),
    st.just(pb.StepRequest(release=pb.Release())),
    st.just(pb.StepRequest(open=pb.Open(model="model"))),
    st.builds(pb.Attach, token=st.binary(max_size=3), segments=U32).map(lambda attach: pb.StepRequest(attach=attach)),
    st.just(pb.StepRequest(confirm=pb.Confirm())),
    st.just(pb.StepRequest()),
)
CHUNKS = st.builds(pb.Chunk, position=st.just(0) | PLACES, payload=PAYLOADS).map(lambda c: pb.StepRequest(chunk=c))
SERIAL = (BODIES | CHUNKS).map(pb.StepRequest.SerializeToString)


@st.composite
def mutated(draw: st.DrawFn, valid: st.SearchStrategy[bytes]) -> bytes:
    """A valid message with some of its bytes changed, lost, repeated or added."""
    data = bytearray(draw(valid))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        kind = draw(st.sampled_from(["flip", "cut", "insert", "repeat", "end"]))
        if kind == "flip" and at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del data[at : at + draw(st.integers(1, 8))]
        elif kind == "insert":
            data[at:at] = draw(st.binary(max_size=8))
        elif kind == "repeat":
            data[at:at] = data[at : at + draw(st.integers(1, 8))]
        else:
            del data[at:]
    return bytes(data)


ANYTHING = SERIAL | mutated(SERIAL) | st.binary(max_size=80)


# -- readers


@examples(500)
@given(ANYTHING | mutated(CHUNKS.map(pb.StepRequest.SerializeToString)))
@example(b"\x1a\x0d\x08" + b"\xff" * 9 + b"\x7f\x12\x00")  # a position beyond 64 bits
@example(b"\x1a\x0e\x08" + b"\xff" * 9 + b"\x01\x12\x01\x00")
def test_a_chunk_read_by_hand_is_the_one_protobuf_reads(data: bytes):
    parsed = parse_chunk(STEP_REQUESTS.field, data)
    if parsed is not None:
        chunk = pb.StepRequest.FromString(data).chunk
        assert (parsed[0], bytes(parsed[1])) == (chunk.position, chunk.payload)


_BASE, _NEW = bytes(200_000), bytes(70_000) + b"\1\2" + bytes(129_997) + b"\3"
_DELTA = encode_delta(_BASE, _NEW)
assert _DELTA is not None


@examples(500)
@given(mutated(st.just(_DELTA)), st.booleans())
def test_bytes_are_a_delta_or_refused(data: bytes, seal: bool):
    """``seal``: with the checksum that makes them whole."""
    with suppress(DamagedData, InvalidRequest):
        assert applied(_BASE, sealed(data) if seal and len(data) >= 72 else data) == _NEW
        assert read_header(data).changed == 3 or seal


@examples(200)
@given(ANYTHING)
def test_bytes_are_a_request_or_refused(data: bytes):
    try:
        request = request_from_bytes(data)
    except InvalidRequest:
        return
    if request != UnknownRequest("None"):
        # Compared as bytes: an option may be NaN.
        written = request_to_bytes(request)
        assert request_to_bytes(request_from_bytes(written)) == written


@given(
    sizes=st.lists(st.integers(0, 20), max_size=5),
    chunks=st.lists(st.tuples(st.none() | st.integers(-2, 70) | st.just(1 << 70), st.integers(0, 40)), max_size=8),
)
def test_only_bytes_in_order_are_written_and_none_beyond_the_pieces(sizes: list[int], chunks: list[tuple]):
    memory = bytearray(sum(sizes) + 2)
    views, at = [], 1
    for size in sizes:
        views.append(memoryview(memory)[at : at + size])
        at += size
    writer, written = Scatter(views), 0
    for number, (position, size) in enumerate(chunks, 1):
        place = written if position is None else position
        before = bytes(memory)
        try:
            writer.write(place, memoryview(bytes([number]) * size))
        except InvalidRequest:
            assert place != written or written + size > sum(sizes)
            assert memory == before
        else:
            assert place == written
            written += size
    assert writer.received_bytes == written <= sum(sizes)
    assert (memory[0], memory[-1]) == (0, 0)
    assert all(memory[1 : written + 1])
    assert not any(memory[written + 1 :])


@given(payload=st.binary(max_size=30), sizes=st.lists(st.integers(0, 12), max_size=4))
def test_an_inline_payload_fits_exactly_or_is_refused(payload: bytes, sizes: list[int]):
    buffers = [bytearray(size) for size in sizes]
    if len(payload) == sum(sizes):
        scatter(payload, [memoryview(buffer) for buffer in buffers])
        assert b"".join(buffers) == payload
    else:
        with pytest.raises(InvalidRequest):
            scatter(payload, [memoryview(buffer) for buffer in buffers])
        assert not any(map(any, buffers))


@given(
    st.builds(common_pb2.Wire, format=st.integers(-(1 << 31), (1 << 31) - 1) | st.integers(0, 6), ratio=st.floats())
    | st.builds(common_pb2.Wire, format=st.just(common_pb2.WIRE_FORMAT_TOPK), ratio=st.floats(0, 1))
)
def test_a_wire_format_is_known_or_refused(message: common_pb2.Wire):
    try:
        wire = wire_from_pb(message)
    except InvalidRequest:
        return
    assert 0 < wire.ratio <= 1


@examples(300)
@given(optimizer=st.sampled_from(["SGD", "Adam", "Adagrad", "Adafactor"]), pushed=OPTIONS)
@example("SGD", options_to_pb({"lr": -1}))
@example("SGD", options_to_pb({"lr": None}))
@example("SGD", options_to_pb({"lr": math.nan}))
@example("SGD", options_to_pb({"dampening": None}))
@example("SGD", options_to_pb({"maximize": None}))
@example("SGD", options_to_pb({"nesterov": True}))
@example("SGD", options_to_pb({"lr": (1 << 63) - 1}))
@example("Adam", options_to_pb({"betas": [0.9, None]}))
@example("Adam", options_to_pb({"betas": [[], 0.9]}))
def test_options_are_refused_or_make_a_step(optimizer: str, pushed: common_pb2.Options):
    """An update that fails half-way stops the model for everyone: what is let through must not fail."""
    declared = {
        "SGD": {"momentum": 0.9, "dampening": 0.1, "nesterov": False, "maximize": False, "foreach": None},
        "Adam": {"betas": [0.9, 0.999], "eps": 1e-8},
        "Adagrad": {"eps": 1e-10},
        "Adafactor": {"eps": [None, 1e-3]},
    }[optimizer]
    spec = simple_spec((2, 2), optimizer=f"torch.optim.{optimizer}", **declared)
    spec = replace(spec, unsplit=optimizer == "Adafactor")
    try:
        options = merge_options(spec, [options_from_pb(pushed)])
    except (InvalidRequest, UnsupportedOptimizer) as error:
        str(error).encode()  # it is to be sent
        return
    layout = Layout.of(whole_map(spec), 0)
    shard = ShardOptimizer(layout, Region(layout))
    for _ in range(2):
        shard.apply(Region(layout), options=options, scale=0.5)


# -- a real shard


@pytest.fixture(scope="module")
def attacked() -> Iterator[Target]:
    """One shard for all examples: what harms it in one is seen in that or in the next."""
    with target() as made:
        yield made


@whole_streams
@given(messages=st.lists(ANYTHING, max_size=5))
@example(messages=[pb.StepRequest(arrive=pb.Arrive(phase=(1 << 64) - 1)).SerializeToString()])
@example(
    messages=[
        pb.StepRequest(
            push=pb.PushHeader(sequence=1, clock=1, payload=bytes(128), groups=[options_to_pb({"lr": rate})])
        ).SerializeToString()
        for rate in (0, -1)
    ]
)
def test_whatever_comes_on_an_open_stream_harms_nobody_else(attacked: Target, messages: list[bytes]):
    call(attacked, "Step", [attacked.opening(), *messages])
    attacked.assert_unharmed()


@whole_streams
@given(first=ANYTHING, messages=st.lists(ANYTHING, max_size=2), data=st.data())
def test_whatever_comes_instead_of_an_open_harms_nobody(
    attacked: Target, first: bytes, messages: list[bytes], data: st.DataObject
):
    if data.draw(st.booleans()):
        first = data.draw(mutated(st.just(attacked.opening())))
    assume(names_known_model(pb.StepRequest, first))
    call(attacked, "Step", [first, *messages])
    attacked.assert_unharmed()


def names_known_model(kind: type[pb.StepRequest] | type[pb.LoadRequest], data: bytes) -> bool:
    """Whether the shard answers without asking the coordinator, which these tests have none of."""
    try:
        message = kind.FromString(data)
    except DecodeError:
        return True
    body = message.WhichOneof("body")
    return body not in ("open", "header") or getattr(message, body).model == "model"


#: The bystander, or nobody.
WRITERS = st.just(pb.WorkerId(rank=1, incarnation=2)) | st.builds(pb.WorkerId, rank=SMALL, incarnation=SMALL)

LOADS = st.builds(
    pb.LoadHeader,
    model=st.just("model"),
    worker=WRITERS,
    only_if_uninitialised=st.booleans(),
    with_region=st.booleans(),
    with_state=st.booleans(),
    state=st.lists(
        st.builds(
            pb.StateTensor,
            slice=SMALL | U32,
            name=st.sampled_from(["momentum_buffer", "step", ""]),
            dtype=st.integers(0, 12),
            shape=st.lists(st.integers(-2, 5) | st.sampled_from([1 << 40, (1 << 63) - 1]), max_size=3),
        ),
        max_size=2,
    ),
)
WIDE = pb.LoadHeader(
    worker=pb.WorkerId(rank=1, incarnation=2),
    model="model",
    with_state=True,
    state=[pb.StateTensor(name="step", dtype=1, shape=[0, 1 << 62, 9])],
)
LOAD_CHUNKS = st.builds(pb.Chunk, position=st.just(0) | PLACES, payload=PAYLOADS)


@whole_streams
@given(header=LOADS | st.just(WIDE), chunks=st.lists(LOAD_CHUNKS, max_size=3), data=st.data())
def test_whatever_is_loaded_harms_nobody(
    attacked: Target, header: pb.LoadHeader, chunks: list[pb.Chunk], data: st.DataObject
):
    messages = [pb.LoadRequest(header=header), *(pb.LoadRequest(chunk=chunk) for chunk in chunks)]
    serial = [message.SerializeToString() for message in messages]
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(serial) - 1))
        serial[at] = data.draw(mutated(st.just(serial[at])))
    assume(names_known_model(pb.LoadRequest, serial[0]))
    call(attacked, "Load", serial)
    attacked.assert_unharmed()


FRAMES = ANYTHING.map(framed)
SENT = st.one_of(
    FRAMES,
    PAYLOADS,
    mutated(FRAMES),
    st.binary(max_size=20),
    st.integers(0, (1 << 32) - 1).map(LENGTH.pack),
    st.just(framed(pb.StepRequest(push=pb.PushHeader(sequence=1, clock=1)).SerializeToString()) + bytes(PAYLOAD_BYTES)),
)


def attach(stream: StubStream, shard: TestShard) -> socket.socket:
    """The stream's bulk socket, confirmed."""
    (offered,) = stream.opened.side_channels
    sock = socket.create_connection((shard.address.rpartition(":")[0], offered.port), timeout=60)
    sock.sendall(framed(pb.StepRequest(attach=pb.Attach(token=offered.token)).SerializeToString()))
    (length,) = LENGTH.unpack(sock.recv(LENGTH.size, socket.MSG_WAITALL))
    reply = pb.StepReply.FromString(sock.recv(length, socket.MSG_WAITALL) if length else b"")
    assert reply.WhichOneof("body") == "attached"
    sock.sendall(framed(pb.StepRequest(confirm=pb.Confirm()).SerializeToString()))
    return sock


@whole_streams
@given(sent=st.lists(SENT, max_size=6))
def test_whatever_comes_on_a_bulk_socket_harms_nobody_else(attacked: Target, sent: list[bytes]):
    stream = StubStream(attacked.shard, incarnation=attacked.newcomer(), transports=[common_pb2.TRANSPORT_BULK])
    with attach(stream, attacked.shard) as sock, suppress(OSError):
        sock.sendall(b"".join(sent))
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 16):
            pass
    try:
        stream.end()
    except grpc.RpcError as failure:
        error = error_of(failure)
        assert not isinstance(error, InternalError), error
    attacked.assert_unharmed()


@whole_streams
@given(sent=st.lists(SENT, max_size=3))
def test_whatever_comes_on_a_bulk_socket_before_its_token_admits_nobody(attacked: Target, sent: list[bytes]):
    stream = StubStream(attacked.shard, incarnation=attacked.newcomer(), transports=[common_pb2.TRANSPORT_BULK])
    (offered,) = stream.opened.side_channels
    address = attacked.shard.address.rpartition(":")[0], offered.port
    with socket.create_connection(address, timeout=60) as sock, suppress(OSError):
        sock.sendall(b"".join(sent))
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 16):
            pass
    # The worker goes on over the stream itself.
    result, _ = stream.exchange(bytes(PAYLOAD_BYTES), sequence=1, clock=stream.clock + 1)
    assert result.sequence == 1
    stream.end()
    attacked.assert_unharmed()
