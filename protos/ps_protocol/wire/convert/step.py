"""Between the messages of a step stream and the dataclasses that both sides think in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from google.protobuf.message import DecodeError, Message

from ps_protocol import PROTOCOL_VERSION
from ps_protocol.cluster import answers, requests
from ps_protocol.cluster.transport import Transport
from ps_protocol.errors import InvalidRequest
from ps_protocol.model.tables import RowCount
from ps_protocol.v1 import common_pb2 as pb_common
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire.convert.errors import from_detail, to_detail
from ps_protocol.wire.convert.fields import EnumNumbers
from ps_protocol.wire.convert.options import (
    differences_from_pb,
    differences_to_pb,
    options_from_pb,
    options_to_pb,
    row_options_from_pb,
)
from ps_protocol.wire.formats import wire_from_pb, wire_to_pb
from ps_protocol.wire.frames import SPLIT_BYTES, split_payload, varint

_TRANSPORTS = EnumNumbers(Transport, pb_common.Transport.DESCRIPTOR)
_OUTCOMES = EnumNumbers(answers.Outcome, pb.Outcome.DESCRIPTOR)


def transport_to_pb(transport: Transport | None) -> pb_common.Transport:
    """The number of ``transport``; None: unspecified."""
    return _TRANSPORTS.numbers[transport] if transport else pb_common.TRANSPORT_UNSPECIFIED


def transport_from_pb(number: int) -> Transport | None:
    """None where it is unspecified, or one that this version does not know."""
    return _TRANSPORTS.members.get(number)


def request_to_bytes(request: requests.StepRequest) -> bytes:
    """One message of a worker. Raises InvalidRequest for an option that no message can have."""
    return b"".join(request_to_pieces(request))


def request_to_pieces(request: requests.StepRequest, payload: Sequence[memoryview] = ()) -> list[bytes | memoryview]:
    """One message of a worker with ``payload`` in it, in pieces: the payload is not copied. Raises InvalidRequest."""
    body, convert = _REQUESTS_TO_PB[type(request)]
    return _in_pieces(_REQUEST_TAGS[body], convert(request), payload)


def request_from_bytes(data: bytes) -> requests.StepRequest:
    """One message of a worker.

    Raises InvalidRequest for bytes that are no StepRequest, for a chunk, for unknown options and wire formats.
    """
    try:
        name, body, payload = _parsed(pb.StepRequest, data)
    except DecodeError as error:
        raise InvalidRequest(
            "a message is not a StepRequest", actual=f"{len(data)} bytes", expected=str(error)
        ) from error
    if name == "chunk":
        raise InvalidRequest(
            "a chunk came that belongs to no payload",
            expected="chunks behind the header of a payload, and on the gRPC stream alone",
            remedy="send the header first; on a side channel send the payload as it is, without chunks",
        )
    if (convert := _REQUESTS_FROM_PB.get(name)) is None:
        return requests.UnknownRequest(str(name))
    return convert(body) if payload is None else _with(payload, convert(body))


def reply_to_bytes(reply: answers.StepReply) -> bytes:
    """One message of a shard."""
    return b"".join(reply_to_pieces(reply))


def reply_to_pieces(reply: answers.StepReply, payload: Sequence[memoryview] = ()) -> list[bytes | memoryview]:
    """One message of a shard with ``payload`` in it, in pieces: the payload is not copied."""
    body, convert = _REPLIES_TO_PB[type(reply)]
    return _in_pieces(_REPLY_TAGS[body], convert(reply), payload)


def reply_from_bytes(data: bytes) -> answers.StepReply | str:
    """One message of a shard, or the name of its body where that is none of a step stream.

    Raises DecodeError; InvalidRequest for an unknown outcome and for options without values.
    """
    name, body, payload = _parsed(pb.StepReply, data)
    if (convert := _REPLIES_FROM_PB.get(name)) is None:
        return str(name)
    return convert(body) if payload is None else _with(payload, convert(body))


def _in_pieces(tag: bytes, body: Message, payload: Sequence[memoryview]) -> list[bytes | memoryview]:
    """The message with ``body`` in its field ``tag``, and ``payload`` in ``body``: its fields may have any order."""
    data = body.SerializeToString()
    if not payload or not (size := sum(map(len, payload))):
        return [tag + varint(len(data)) + data, *payload]
    data += _PAYLOAD_TAGS[type(body)] + varint(size)
    return [tag + varint(len(data) + size) + data, *payload]


def _parsed(kind: type[pb.StepRequest | pb.StepReply], data: bytes) -> tuple[str | None, Any, memoryview | None]:
    """(name of the body, the body, its payload where that is large) of a message. Raises DecodeError."""
    if len(data) > SPLIT_BYTES and (parts := split_payload(data, _PAYLOAD_NUMBERS[kind])):
        number, fields, payload = parts
        name = kind.DESCRIPTOR.fields_by_number[number].name
        return name, _WITH_PAYLOAD[name].FromString(fields), payload
    message = kind.FromString(data)
    name = message.WhichOneof("body")
    return name, name and getattr(message, name), None


def _with(payload: memoryview, message: Any) -> Any:
    message.payload = payload
    return message


def _payload_number(body: type[Message]) -> int:
    return int(body.DESCRIPTOR.fields_by_name["payload"].number)


def _tag(number: int) -> bytes:
    """What begins a field of bytes or a message (protobuf's encoding, wire type 2)."""
    return varint(number << 3 | 2)


# Of pushes and answers only the fields that are set are converted: a step has few, and each costs time. They are
# assigned, which takes a fraction of the time that they take as arguments by name.


def _push_to_pb(header: requests.PushHeader) -> pb.PushHeader:
    message = pb.PushHeader()
    message.sequence = header.sequence
    message.phase = header.phase
    message.clock = header.clock
    message.pulled_version = header.pulled_version
    message.finite = header.finite
    if header.with_buffers:
        message.with_buffers = True
    if header.skipped:
        message.skipped = True
    if header.ahead:
        message.ahead = header.ahead
    if header.weight:
        message.weight = header.weight
    if header.squared_norm is not None:
        message.squared_norm = header.squared_norm
    if header.traceparent:
        message.traceparent = header.traceparent
    if header.payload:
        message.payload = bytes(header.payload)
    if header.segment:
        message.segment = header.segment
    if header.rows_in_room:
        message.rows_in_room = True
    if header.absent:
        message.absent.extend(header.absent)
    if header.options:
        message.groups.extend(map(options_to_pb, header.options))
    if header.table_options:
        message.table_arguments.extend(map(options_to_pb, header.table_options))
    if header.staged:
        message.staged.extend(header.staged)
    if header.tables:
        message.tables.extend(_row_counts_to_pb(header.tables))
    if header.contributions:
        message.contributions.extend(map(_contribution_to_pb, header.contributions))
    return message


def _push_from_pb(message: pb.PushHeader) -> requests.PushHeader:
    header = requests.PushHeader(message.sequence, message.phase, message.clock, message.pulled_version)
    header.with_buffers = message.with_buffers
    header.skipped = message.skipped
    header.finite = message.finite
    header.ahead = message.ahead
    header.traceparent = message.traceparent
    header.weight = message.weight
    header.payload = message.payload
    header.segment = message.segment
    header.rows_in_room = message.rows_in_room
    if absent := message.absent:
        header.absent = tuple(absent)
    if groups := message.groups:
        header.options = list(map(options_from_pb, groups))
    if arguments := message.table_arguments:
        header.table_options = list(map(row_options_from_pb, arguments))
    if staged := message.staged:
        header.staged = tuple(staged)
    if tables := message.tables:
        header.tables = _row_counts_from_pb(tables)
    if message.HasField("squared_norm"):
        header.squared_norm = message.squared_norm
    if contributions := message.contributions:
        header.contributions = tuple(map(_contribution_from_pb, contributions))
    return header


def _contribution_to_pb(each: requests.Contribution) -> pb.PushContribution:
    rank, incarnation = each.worker
    return pb.PushContribution(
        worker=pb.WorkerId(rank=rank, incarnation=incarnation),
        sequence=each.sequence,
        phase=each.phase,
        clock=each.clock,
        pulled_version=each.pulled_version,
        skipped=each.skipped,
    )


def _contribution_from_pb(message: pb.PushContribution) -> requests.Contribution:
    return requests.Contribution(
        (message.worker.rank, message.worker.incarnation),
        message.sequence,
        message.phase,
        message.clock,
        message.pulled_version,
        message.skipped,
    )


def _step_answer_to_pb(answer: answers.StepAnswer) -> pb.StepResult:
    message = pb.StepResult()
    message.sequence = answer.sequence
    message.outcome = _OUTCOMES.numbers[answer.outcome]
    message.version = answer.version
    message.staleness = answer.staleness
    message.clock = answer.clock
    message.payload_bytes = answer.payload_bytes
    if answer.with_buffers:
        message.with_buffers = True
    if answer.encoded:
        message.encoded = True
    if answer.error:
        message.error.CopyFrom(to_detail(answer.error))
    if answer.waited_for:
        message.waited_for = answer.waited_for
    if answer.waited_seconds:
        message.waited_micros = int(answer.waited_seconds * 1e6)
    if answer.payload:
        message.payload = bytes(answer.payload)
    if answer.segment:
        message.segment = answer.segment
    if answer.copied:
        message.copied = True
    if answer.absent:
        message.absent.extend(answer.absent)
    if answer.differences:
        message.option_differences.extend(differences_to_pb(answer.differences))
    return message


def _outcome(number: int, sequence: int) -> answers.Outcome:
    """The answer to a fetch or a pull needs none. Raises InvalidRequest for one that this version does not know."""
    return _OUTCOMES.refuse(number, "outcome") if number or sequence else answers.Outcome.APPLIED


def _step_answer_from_pb(message: pb.StepResult) -> answers.StepAnswer:
    number = message.outcome
    outcome = _OUTCOMES.members.get(number) or _outcome(number, message.sequence)
    answer = answers.StepAnswer(message.sequence, outcome, message.version, message.staleness, message.clock)
    answer.with_buffers = message.with_buffers
    answer.encoded = message.encoded
    answer.waited_for = message.waited_for
    answer.waited_seconds = message.waited_micros / 1e6
    answer.payload_bytes = message.payload_bytes
    answer.payload = message.payload
    answer.segment = message.segment
    answer.copied = message.copied
    if absent := message.absent:
        answer.absent = tuple(absent)
    if message.HasField("error"):
        answer.error = from_detail(message.error)
    if differences := message.option_differences:
        answer.differences = differences_from_pb(differences)
    return answer


def _open_to_pb(request: requests.OpenRequest) -> pb.Open:
    rank, incarnation = request.worker
    return pb.Open(
        model=request.model,
        epoch=request.epoch,
        worker=pb.WorkerId(rank=rank, incarnation=incarnation),
        membership_revision=request.membership_revision,
        protocol_version=request.protocol_version,
        phase=request.phase,
        transports=[transport_to_pb(each) for each in request.transports],
        clock=request.clock,
        wire=wire_to_pb(request.wire),
        acknowledged=request.acknowledged,
        torch_version=request.torch_version,
        keeps_slices=request.keeps_slices,
        answered=request.answered,
    )


def _open_from_pb(message: pb.Open) -> requests.OpenRequest:
    if message.protocol_version != PROTOCOL_VERSION:
        return requests.OpenRequest(protocol_version=message.protocol_version)  # the rest may mean something else
    return requests.OpenRequest(
        message.model,
        message.epoch,
        (message.worker.rank, message.worker.incarnation),
        message.membership_revision,
        message.phase,
        message.clock if message.HasField("clock") else None,
        wire_from_pb(message.wire),
        message.acknowledged,
        message.torch_version,
        message.keeps_slices,
        [transport_from_pb(each) for each in message.transports],
        message.answered,
    )


def _opened_to_pb(opened: answers.OpenedStream) -> pb.Opened:
    return pb.Opened(
        version=opened.version,
        phase=opened.phase,
        clock=opened.clock,
        last_sequence=opened.last_sequence,
        initialised=opened.initialised,
        torch_version=opened.torch_version,
        side_channels=map(side_channel_to_pb, opened.side_channels),
    )


def side_channel_to_pb(channel: answers.SideChannel) -> pb.SideChannel:
    """The message of a side channel that is offered."""
    return pb.SideChannel(
        transport=transport_to_pb(channel.transport),
        name=channel.name,
        port=channel.port,
        token=channel.token,
        tls=channel.tls,
    )


def side_channel_from_pb(message: pb.SideChannel) -> answers.SideChannel:
    """What a message offers."""
    return answers.SideChannel(
        transport_from_pb(message.transport), message.token, message.name, message.port, message.tls
    )


def _opened_from_pb(message: pb.Opened) -> answers.OpenedStream:
    return answers.OpenedStream(
        message.version,
        message.phase,
        message.clock,
        message.last_sequence,
        message.initialised,
        message.torch_version,
        list(map(side_channel_from_pb, message.side_channels)),
    )


def _row_counts_to_pb(counts: Iterable[RowCount]) -> list[pb.TableRows]:
    return [pb.TableRows(table=table, rows=rows) for table, rows in counts]


def _row_counts_from_pb(messages: Iterable[pb.TableRows]) -> list[RowCount]:
    return [RowCount(each.table, each.rows) for each in messages]


def _lookup_to_pb(header: requests.LookupHeader) -> pb.Lookup:
    phase, clock = header.position or (0, 0)
    return pb.Lookup(
        number=header.number,
        tables=_row_counts_to_pb(header.tables),
        phase=phase,
        clock=clock,
        now=header.position is None,
        payload=bytes(header.payload),
    )


def _lookup_from_pb(message: pb.Lookup) -> requests.LookupHeader:
    position = None if message.now else (message.phase, message.clock)
    return requests.LookupHeader(message.number, _row_counts_from_pb(message.tables), position, message.payload)


def _rows_to_pb(answer: answers.RowsAnswer) -> pb.Rows:
    return pb.Rows(
        number=answer.number,
        version=answer.version,
        error=to_detail(answer.error) if answer.error else None,
        payload_bytes=answer.payload_bytes,
        payload=bytes(answer.payload),
        in_room=answer.in_room,
    )


def _rows_from_pb(message: pb.Rows) -> answers.RowsAnswer:
    error = from_detail(message.error) if message.HasField("error") else None
    return answers.RowsAnswer(
        message.number, message.version, error, message.payload_bytes, message.payload, message.in_room
    )


#: By dataclass: the name of the body in the message, and how it is made.
_REQUESTS_TO_PB: Mapping[type, tuple[str, Callable[[Any], Any]]] = {
    requests.OpenRequest: ("open", _open_to_pb),
    requests.AttachRequest: ("attach", lambda each: pb.Attach(token=each.token, segments=each.segments)),
    requests.ConfirmRequest: ("confirm", lambda _: pb.Confirm()),
    requests.PushHeader: ("push", _push_to_pb),
    requests.StageRequest: ("stage", lambda e: pb.Stage(begin=e.begin, end=e.end, payload=bytes(e.payload))),
    requests.LookupHeader: ("lookup", _lookup_to_pb),
    requests.FetchRequest: ("fetch", lambda _: pb.Fetch()),
    requests.ArriveRequest: ("arrive", lambda each: pb.Arrive(phase=each.phase)),
    requests.ReleaseRequest: ("release", lambda _: pb.Release()),
}

_REQUESTS_FROM_PB: Mapping[str | None, Callable[[Any], requests.StepRequest]] = {
    "open": _open_from_pb,
    "attach": lambda message: requests.AttachRequest(message.token, message.segments),
    "confirm": lambda _: requests.ConfirmRequest(),
    "push": _push_from_pb,
    "stage": lambda message: requests.StageRequest(message.begin, message.end, message.payload),
    "lookup": _lookup_from_pb,
    "fetch": lambda _: requests.FetchRequest(),
    "arrive": lambda message: requests.ArriveRequest(message.phase),
    "release": lambda _: requests.ReleaseRequest(),
}

_REPLIES_TO_PB: Mapping[type, tuple[str, Callable[[Any], Any]]] = {
    answers.OpenedStream: ("opened", _opened_to_pb),
    answers.AttachedChannel: (
        "attached",
        lambda each: pb.Attached(segment_bytes=each.segment_bytes, room_bytes=each.room_bytes),
    ),
    answers.RefusedChannel: ("refused", lambda each: to_detail(each.error)),
    answers.WaitingAnswer: ("waiting", lambda each: pb.Waiting(reason=each.reason)),
    answers.StepAnswer: ("result", _step_answer_to_pb),
    answers.RowsAnswer: ("rows", _rows_to_pb),
}

_REPLIES_FROM_PB: Mapping[str | None, Callable[[Any], answers.StepReply]] = {
    "opened": _opened_from_pb,
    "attached": lambda message: answers.AttachedChannel(message.segment_bytes, message.room_bytes),
    "refused": lambda message: answers.RefusedChannel(from_detail(message)),
    "waiting": lambda message: answers.WaitingAnswer(message.reason),
    "result": _step_answer_from_pb,
    "rows": _rows_from_pb,
}

_REQUEST_TAGS = {name: _tag(field.number) for name, field in pb.StepRequest.DESCRIPTOR.fields_by_name.items()}
_REPLY_TAGS = {name: _tag(field.number) for name, field in pb.StepReply.DESCRIPTOR.fields_by_name.items()}

#: The bodies that a payload may be in.
_WITH_PAYLOAD: Mapping[str, type[Message]] = {
    "push": pb.PushHeader,
    "stage": pb.Stage,
    "lookup": pb.Lookup,
    "result": pb.StepResult,
    "rows": pb.Rows,
}

_PAYLOAD_TAGS = {body: _tag(_payload_number(body)) for body in _WITH_PAYLOAD.values()}

#: By class of a message, and by number of the body's field: that of the payload in the body.
_PAYLOAD_NUMBERS: Mapping[type[Message], Mapping[int, int]] = {
    kind: {
        field.number: _payload_number(_WITH_PAYLOAD[field.name])
        for field in kind.DESCRIPTOR.fields
        if field.name in _WITH_PAYLOAD
    }
    for kind in (pb.StepRequest, pb.StepReply)
}
