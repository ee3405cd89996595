"""Messages of a step stream are read as they were written, and a body that is none of a stream is named."""

from dataclasses import replace

import pytest
from google.protobuf.message import DecodeError

from ps_protocol.cluster import answers, requests
from ps_protocol.cluster.answers import Outcome
from ps_protocol.cluster.requests import Contribution
from ps_protocol.cluster.transport import Transport
from ps_protocol.errors import InvalidRequest, ModelMoved
from ps_protocol.model.spec import OptionDifference
from ps_protocol.model.tables import RowCount
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire.convert.step import (
    reply_from_bytes,
    reply_to_bytes,
    reply_to_pieces,
    request_from_bytes,
    request_to_bytes,
    request_to_pieces,
)
from ps_protocol.wire.formats import Wire

COUNTS = [RowCount(0, 3), RowCount(2, 1)]

REQUESTS = [
    requests.OpenRequest(transports=[]),
    requests.OpenRequest(
        "model", 3, (1, 7), 9, 2, 0, Wire.parse("topk:0.5"), 4, "2.0", True, [Transport.SHM, Transport.BULK, None], 5
    ),
    requests.AttachRequest(b"token", 2),
    requests.ConfirmRequest(),
    requests.PushHeader(
        4, 1, 3, 2, (0, 5), [{"lr": 0.1, "betas": [0.9, 1]}], [{"lr": 2.0}], True, False, True, 1, (0, 8), COUNTS
    ),
    requests.PushHeader(1, 0, 1, payload=b"abc", segment=2, rows_in_room=True),
    requests.PushHeader(1, 0, 1, skipped=True),
    requests.PushHeader(
        1, 0, 1, weight=3.0, contributions=(Contribution((1, 7), 4, 1, 3, 2), Contribution((2, 8), 5, 1, 3, 2, True))
    ),
    requests.StageRequest(0, 4, b"abcd"),
    requests.LookupHeader(5, COUNTS, (1, 2), b"ids"),
    requests.LookupHeader(5, COUNTS, None),
    requests.FetchRequest(),
    requests.ArriveRequest(3),
    requests.ReleaseRequest(),
]

CHANNELS = [
    answers.SideChannel(Transport.SHM, b"token", name="name"),
    answers.SideChannel(Transport.BULK, b"other", port=80),
]

REPLIES = [
    answers.OpenedStream(1, 2, 3, 4, True, "2.0", CHANNELS),
    answers.AttachedChannel(1 << 40, 7),
    answers.WaitingAnswer("worker 1 is behind"),
    answers.StepAnswer(),
    answers.StepAnswer(
        1, Outcome.LATE, 2, 3, 4, (5, 6), True, True, None, [OptionDifference(0, False, "lr", 1, 0.1, 0.2)]
    ),
    answers.StepAnswer(1, Outcome.SEPARATE, 2, clock=3),
    answers.StepAnswer(payload_bytes=3, payload=b"abc", segment=1),
    answers.RowsAnswer(3, 4, payload_bytes=8, in_room=True),
    answers.RowsAnswer(3, payload_bytes=2, payload=b"ab"),
]


@pytest.mark.parametrize("sent", REQUESTS, ids=lambda each: type(each).__name__)
def test_a_request_is_read_as_it_was_written(sent):
    assert request_from_bytes(request_to_bytes(sent)) == sent


@pytest.mark.parametrize("reply", REPLIES, ids=lambda each: type(each).__name__)
def test_a_reply_is_read_as_it_was_written(reply):
    assert reply_from_bytes(reply_to_bytes(reply)) == reply


@pytest.mark.parametrize("kind", [answers.RefusedChannel, answers.StepAnswer, answers.RowsAnswer])
def test_an_error_is_read_as_it_was_written(kind):
    error = ModelMoved("moved", shard="1", expected="this", actual="that", remedy="ask again")
    found = reply_from_bytes(reply_to_bytes(kind(error=error))).error
    assert (type(found), str(found)) == (ModelMoved, str(error))


def test_what_another_version_of_the_protocol_opens_with_is_not_read_any_further():
    data = pb.StepRequest(open=pb.Open(protocol_version=99, model="model", wire={"format": 77})).SerializeToString()
    assert request_from_bytes(data) == requests.OpenRequest(protocol_version=99)


def test_an_outcome_that_this_version_does_not_know_is_refused_by_its_number():
    for number in (0, 77):
        with pytest.raises(InvalidRequest, match=rf"outcome {number} is not known here; expected: 1 \(applied\), 2"):
            reply_from_bytes(pb.StepReply(result=pb.StepResult(sequence=1, outcome=number)).SerializeToString())


def test_a_transport_that_this_version_does_not_know_is_none():
    data = pb.StepReply(opened=pb.Opened(side_channels=[pb.SideChannel(transport=77)])).SerializeToString()
    assert reply_from_bytes(data).side_channels[0].transport is None


def test_what_is_no_request_is_refused_and_a_body_that_is_none_of_a_stream_is_named():
    assert request_from_bytes(b"") == requests.UnknownRequest("None")
    with pytest.raises(InvalidRequest, match="belongs to no payload"):
        request_from_bytes(pb.StepRequest(chunk=pb.Chunk()).SerializeToString())
    with pytest.raises(InvalidRequest, match="not a StepRequest"):
        request_from_bytes(b"\xff\xff")


def test_a_body_of_a_reply_that_is_none_of_a_stream_is_named():
    assert reply_from_bytes(pb.StepReply(chunk=pb.Chunk()).SerializeToString()) == "chunk"
    assert reply_from_bytes(b"") == "None"
    with pytest.raises(DecodeError):
        reply_from_bytes(b"\xff\xff")


@pytest.mark.parametrize("size", [0, 1, 127, 128, 300, 20_000, 70_000])
def test_a_payload_is_in_a_message_as_protobuf_writes_it(size):
    payload = bytes(range(256)) * (size // 256 + 1)
    pieces = [memoryview(payload)[: size // 3], memoryview(payload)[size // 3 : size]]
    push = requests.PushHeader(4, 1, 3, options=[{"lr": 0.1}])
    lookup = requests.LookupHeader(5, COUNTS, (1, 2))
    for request in (push, lookup, requests.StageRequest(0, size)):
        read = request_from_bytes(b"".join(request_to_pieces(request, pieces)))
        assert read == replace(request, payload=payload[:size])
    for reply in (
        answers.StepAnswer(1, Outcome.LATE, payload_bytes=size),
        answers.RowsAnswer(3, 4, payload_bytes=size),
    ):
        read = reply_from_bytes(b"".join(reply_to_pieces(reply, pieces)))
        assert read == replace(reply, payload=payload[:size])
    written = request_to_pieces(push, pieces)
    assert [piece.obj for piece in written[1:]] == [payload, payload], "the payload was copied"


def test_an_option_that_no_message_holds_is_refused():
    with pytest.raises(InvalidRequest, match="'lr' cannot be sent"):
        request_to_bytes(requests.PushHeader(options=[{"lr": 1 << 70}]))
