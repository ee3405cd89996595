from ps_protocol.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_APPLIED: _ClassVar[Outcome]
    OUTCOME_DUPLICATE: _ClassVar[Outcome]
    OUTCOME_LATE: _ClassVar[Outcome]
    OUTCOME_STALE: _ClassVar[Outcome]
    OUTCOME_SKIPPED: _ClassVar[Outcome]
    OUTCOME_REFUSED: _ClassVar[Outcome]
    OUTCOME_SEPARATE: _ClassVar[Outcome]

class PieceEncoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PIECE_ENCODING_UNSPECIFIED: _ClassVar[PieceEncoding]
    PIECE_ENCODING_WHOLE: _ClassVar[PieceEncoding]
    PIECE_ENCODING_DELTA: _ClassVar[PieceEncoding]
    PIECE_ENCODING_SAME: _ClassVar[PieceEncoding]
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_APPLIED: Outcome
OUTCOME_DUPLICATE: Outcome
OUTCOME_LATE: Outcome
OUTCOME_STALE: Outcome
OUTCOME_SKIPPED: Outcome
OUTCOME_REFUSED: Outcome
OUTCOME_SEPARATE: Outcome
PIECE_ENCODING_UNSPECIFIED: PieceEncoding
PIECE_ENCODING_WHOLE: PieceEncoding
PIECE_ENCODING_DELTA: PieceEncoding
PIECE_ENCODING_SAME: PieceEncoding

class WorkerId(_message.Message):
    __slots__ = ("rank", "incarnation")
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    rank: int
    incarnation: int
    def __init__(self, rank: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class Position(_message.Message):
    __slots__ = ("phase", "clock")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    phase: int
    clock: int
    def __init__(self, phase: _Optional[int] = ..., clock: _Optional[int] = ...) -> None: ...

class WorkerStanding(_message.Message):
    __slots__ = ("worker", "position", "last_sequence")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerId
    position: Position
    last_sequence: int
    def __init__(self, worker: _Optional[_Union[WorkerId, _Mapping]] = ..., position: _Optional[_Union[Position, _Mapping]] = ..., last_sequence: _Optional[int] = ...) -> None: ...

class KnownPushes(_message.Message):
    __slots__ = ("version", "applied", "highest", "standings", "outcomes", "staleness_counts", "norms")
    class OutcomesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_FIELD_NUMBER: _ClassVar[int]
    STANDINGS_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    STALENESS_COUNTS_FIELD_NUMBER: _ClassVar[int]
    NORMS_FIELD_NUMBER: _ClassVar[int]
    version: int
    applied: Position
    highest: Position
    standings: _containers.RepeatedCompositeFieldContainer[WorkerStanding]
    outcomes: _containers.ScalarMap[str, int]
    staleness_counts: _containers.RepeatedScalarFieldContainer[int]
    norms: _containers.RepeatedCompositeFieldContainer[RoundNorm]
    def __init__(self, version: _Optional[int] = ..., applied: _Optional[_Union[Position, _Mapping]] = ..., highest: _Optional[_Union[Position, _Mapping]] = ..., standings: _Optional[_Iterable[_Union[WorkerStanding, _Mapping]]] = ..., outcomes: _Optional[_Mapping[str, int]] = ..., staleness_counts: _Optional[_Iterable[int]] = ..., norms: _Optional[_Iterable[_Union[RoundNorm, _Mapping]]] = ...) -> None: ...

class RoundNorm(_message.Message):
    __slots__ = ("position", "squared_norm")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    SQUARED_NORM_FIELD_NUMBER: _ClassVar[int]
    position: Position
    squared_norm: float
    def __init__(self, position: _Optional[_Union[Position, _Mapping]] = ..., squared_norm: _Optional[float] = ...) -> None: ...

class ShardKey(_message.Message):
    __slots__ = ("incarnation", "token")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    token: str
    def __init__(self, incarnation: _Optional[int] = ..., token: _Optional[str] = ...) -> None: ...

class TableRows(_message.Message):
    __slots__ = ("table", "rows")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    table: int
    rows: int
    def __init__(self, table: _Optional[int] = ..., rows: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("position", "payload")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    position: int
    payload: bytes
    def __init__(self, position: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("model", "epoch", "worker", "membership_revision", "protocol_version", "phase", "transports", "wire", "clock", "acknowledged", "torch_version", "keeps_slices", "answered")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_REVISION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    WIRE_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    TORCH_VERSION_FIELD_NUMBER: _ClassVar[int]
    KEEPS_SLICES_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_FIELD_NUMBER: _ClassVar[int]
    model: str
    epoch: int
    worker: WorkerId
    membership_revision: int
    protocol_version: int
    phase: int
    transports: _containers.RepeatedScalarFieldContainer[_common_pb2.Transport]
    wire: _common_pb2.Wire
    clock: int
    acknowledged: int
    torch_version: str
    keeps_slices: bool
    answered: int
    def __init__(self, model: _Optional[str] = ..., epoch: _Optional[int] = ..., worker: _Optional[_Union[WorkerId, _Mapping]] = ..., membership_revision: _Optional[int] = ..., protocol_version: _Optional[int] = ..., phase: _Optional[int] = ..., transports: _Optional[_Iterable[_Union[_common_pb2.Transport, str]]] = ..., wire: _Optional[_Union[_common_pb2.Wire, _Mapping]] = ..., clock: _Optional[int] = ..., acknowledged: _Optional[int] = ..., torch_version: _Optional[str] = ..., keeps_slices: bool = ..., answered: _Optional[int] = ...) -> None: ...

class SideChannel(_message.Message):
    __slots__ = ("transport", "name", "port", "token", "tls")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TLS_FIELD_NUMBER: _ClassVar[int]
    transport: _common_pb2.Transport
    name: str
    port: int
    token: bytes
    tls: bool
    def __init__(self, transport: _Optional[_Union[_common_pb2.Transport, str]] = ..., name: _Optional[str] = ..., port: _Optional[int] = ..., token: _Optional[bytes] = ..., tls: bool = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("token", "segments")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    segments: int
    def __init__(self, token: _Optional[bytes] = ..., segments: _Optional[int] = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ("segment_bytes", "room_bytes")
    SEGMENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROOM_BYTES_FIELD_NUMBER: _ClassVar[int]
    segment_bytes: int
    room_bytes: int
    def __init__(self, segment_bytes: _Optional[int] = ..., room_bytes: _Optional[int] = ...) -> None: ...

class Confirm(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Opened(_message.Message):
    __slots__ = ("version", "phase", "clock", "last_sequence", "initialised", "side_channels", "torch_version")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    INITIALISED_FIELD_NUMBER: _ClassVar[int]
    SIDE_CHANNELS_FIELD_NUMBER: _ClassVar[int]
    TORCH_VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    phase: int
    clock: int
    last_sequence: int
    initialised: bool
    side_channels: _containers.RepeatedCompositeFieldContainer[SideChannel]
    torch_version: str
    def __init__(self, version: _Optional[int] = ..., phase: _Optional[int] = ..., clock: _Optional[int] = ..., last_sequence: _Optional[int] = ..., initialised: bool = ..., side_channels: _Optional[_Iterable[_Union[SideChannel, _Mapping]]] = ..., torch_version: _Optional[str] = ...) -> None: ...

class Stage(_message.Message):
    __slots__ = ("begin", "end", "payload")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    begin: int
    end: int
    payload: bytes
    def __init__(self, begin: _Optional[int] = ..., end: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...

class PushHeader(_message.Message):
    __slots__ = ("sequence", "phase", "clock", "pulled_version", "absent", "groups", "with_buffers", "skipped", "finite", "payload", "segment", "ahead", "staged", "tables", "table_arguments", "rows_in_room", "traceparent", "weight", "squared_norm", "contributions")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    PULLED_VERSION_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    WITH_BUFFERS_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    FINITE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    STAGED_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    TABLE_ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    ROWS_IN_ROOM_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    SQUARED_NORM_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    phase: int
    clock: int
    pulled_version: int
    absent: _containers.RepeatedScalarFieldContainer[int]
    groups: _containers.RepeatedCompositeFieldContainer[_common_pb2.Options]
    with_buffers: bool
    skipped: bool
    finite: bool
    payload: bytes
    segment: int
    ahead: int
    staged: _containers.RepeatedScalarFieldContainer[int]
    tables: _containers.RepeatedCompositeFieldContainer[TableRows]
    table_arguments: _containers.RepeatedCompositeFieldContainer[_common_pb2.Options]
    rows_in_room: bool
    traceparent: str
    weight: float
    squared_norm: float
    contributions: _containers.RepeatedCompositeFieldContainer[PushContribution]
    def __init__(self, sequence: _Optional[int] = ..., phase: _Optional[int] = ..., clock: _Optional[int] = ..., pulled_version: _Optional[int] = ..., absent: _Optional[_Iterable[int]] = ..., groups: _Optional[_Iterable[_Union[_common_pb2.Options, _Mapping]]] = ..., with_buffers: bool = ..., skipped: bool = ..., finite: bool = ..., payload: _Optional[bytes] = ..., segment: _Optional[int] = ..., ahead: _Optional[int] = ..., staged: _Optional[_Iterable[int]] = ..., tables: _Optional[_Iterable[_Union[TableRows, _Mapping]]] = ..., table_arguments: _Optional[_Iterable[_Union[_common_pb2.Options, _Mapping]]] = ..., rows_in_room: bool = ..., traceparent: _Optional[str] = ..., weight: _Optional[float] = ..., squared_norm: _Optional[float] = ..., contributions: _Optional[_Iterable[_Union[PushContribution, _Mapping]]] = ...) -> None: ...

class PushContribution(_message.Message):
    __slots__ = ("worker", "sequence", "phase", "clock", "pulled_version", "skipped")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    PULLED_VERSION_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerId
    sequence: int
    phase: int
    clock: int
    pulled_version: int
    skipped: bool
    def __init__(self, worker: _Optional[_Union[WorkerId, _Mapping]] = ..., sequence: _Optional[int] = ..., phase: _Optional[int] = ..., clock: _Optional[int] = ..., pulled_version: _Optional[int] = ..., skipped: bool = ...) -> None: ...

class Lookup(_message.Message):
    __slots__ = ("number", "tables", "phase", "clock", "now", "payload")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    number: int
    tables: _containers.RepeatedCompositeFieldContainer[TableRows]
    phase: int
    clock: int
    now: bool
    payload: bytes
    def __init__(self, number: _Optional[int] = ..., tables: _Optional[_Iterable[_Union[TableRows, _Mapping]]] = ..., phase: _Optional[int] = ..., clock: _Optional[int] = ..., now: bool = ..., payload: _Optional[bytes] = ...) -> None: ...

class Rows(_message.Message):
    __slots__ = ("number", "version", "payload_bytes", "payload", "error", "in_room")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    IN_ROOM_FIELD_NUMBER: _ClassVar[int]
    number: int
    version: int
    payload_bytes: int
    payload: bytes
    error: _common_pb2.ErrorDetail
    in_room: bool
    def __init__(self, number: _Optional[int] = ..., version: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., payload: _Optional[bytes] = ..., error: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ..., in_room: bool = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Fetch(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Arrive(_message.Message):
    __slots__ = ("phase",)
    PHASE_FIELD_NUMBER: _ClassVar[int]
    phase: int
    def __init__(self, phase: _Optional[int] = ...) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("open", "push", "chunk", "arrive", "release", "attach", "confirm", "fetch", "stage", "lookup")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    PUSH_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    ARRIVE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    CONFIRM_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    open: Open
    push: PushHeader
    chunk: Chunk
    arrive: Arrive
    release: Release
    attach: Attach
    confirm: Confirm
    fetch: Fetch
    stage: Stage
    lookup: Lookup
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., push: _Optional[_Union[PushHeader, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., arrive: _Optional[_Union[Arrive, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., attach: _Optional[_Union[Attach, _Mapping]] = ..., confirm: _Optional[_Union[Confirm, _Mapping]] = ..., fetch: _Optional[_Union[Fetch, _Mapping]] = ..., stage: _Optional[_Union[Stage, _Mapping]] = ..., lookup: _Optional[_Union[Lookup, _Mapping]] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("sequence", "outcome", "version", "staleness", "clock", "absent", "with_buffers", "payload_bytes", "error", "payload", "segment", "encoded", "option_differences", "waited_for", "waited_micros", "copied")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    WITH_BUFFERS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    ENCODED_FIELD_NUMBER: _ClassVar[int]
    OPTION_DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    WAITED_FOR_FIELD_NUMBER: _ClassVar[int]
    WAITED_MICROS_FIELD_NUMBER: _ClassVar[int]
    COPIED_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    outcome: Outcome
    version: int
    staleness: int
    clock: int
    absent: _containers.RepeatedScalarFieldContainer[int]
    with_buffers: bool
    payload_bytes: int
    error: _common_pb2.ErrorDetail
    payload: bytes
    segment: int
    encoded: bool
    option_differences: _containers.RepeatedCompositeFieldContainer[OptionDifference]
    waited_for: str
    waited_micros: int
    copied: bool
    def __init__(self, sequence: _Optional[int] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., version: _Optional[int] = ..., staleness: _Optional[int] = ..., clock: _Optional[int] = ..., absent: _Optional[_Iterable[int]] = ..., with_buffers: bool = ..., payload_bytes: _Optional[int] = ..., error: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ..., payload: _Optional[bytes] = ..., segment: _Optional[int] = ..., encoded: bool = ..., option_differences: _Optional[_Iterable[_Union[OptionDifference, _Mapping]]] = ..., waited_for: _Optional[str] = ..., waited_micros: _Optional[int] = ..., copied: bool = ...) -> None: ...

class OptionDifference(_message.Message):
    __slots__ = ("group", "table", "name", "used_rank", "used", "own")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    USED_RANK_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    OWN_FIELD_NUMBER: _ClassVar[int]
    group: int
    table: int
    name: str
    used_rank: int
    used: _common_pb2.OptionValue
    own: _common_pb2.OptionValue
    def __init__(self, group: _Optional[int] = ..., table: _Optional[int] = ..., name: _Optional[str] = ..., used_rank: _Optional[int] = ..., used: _Optional[_Union[_common_pb2.OptionValue, _Mapping]] = ..., own: _Optional[_Union[_common_pb2.OptionValue, _Mapping]] = ...) -> None: ...

class Waiting(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class StepReply(_message.Message):
    __slots__ = ("opened", "result", "chunk", "waiting", "attached", "refused", "rows")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    opened: Opened
    result: StepResult
    chunk: Chunk
    waiting: Waiting
    attached: Attached
    refused: _common_pb2.ErrorDetail
    rows: Rows
    def __init__(self, opened: _Optional[_Union[Opened, _Mapping]] = ..., result: _Optional[_Union[StepResult, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., waiting: _Optional[_Union[Waiting, _Mapping]] = ..., attached: _Optional[_Union[Attached, _Mapping]] = ..., refused: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ..., rows: _Optional[_Union[Rows, _Mapping]] = ...) -> None: ...

class GetRowsRequest(_message.Message):
    __slots__ = ("model", "epoch", "table", "ids")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    model: str
    epoch: int
    table: int
    ids: bytes
    def __init__(self, model: _Optional[str] = ..., epoch: _Optional[int] = ..., table: _Optional[int] = ..., ids: _Optional[bytes] = ...) -> None: ...

class LoadRowsHeader(_message.Message):
    __slots__ = ("model", "epoch", "table", "rows", "with_state", "only_new", "worker", "membership_revision")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    WITH_STATE_FIELD_NUMBER: _ClassVar[int]
    ONLY_NEW_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_REVISION_FIELD_NUMBER: _ClassVar[int]
    model: str
    epoch: int
    table: int
    rows: int
    with_state: bool
    only_new: bool
    worker: WorkerId
    membership_revision: int
    def __init__(self, model: _Optional[str] = ..., epoch: _Optional[int] = ..., table: _Optional[int] = ..., rows: _Optional[int] = ..., with_state: bool = ..., only_new: bool = ..., worker: _Optional[_Union[WorkerId, _Mapping]] = ..., membership_revision: _Optional[int] = ...) -> None: ...

class LoadRowsRequest(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: LoadRowsHeader
    chunk: Chunk
    def __init__(self, header: _Optional[_Union[LoadRowsHeader, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ...) -> None: ...

class LoadRowsReply(_message.Message):
    __slots__ = ("written",)
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    written: int
    def __init__(self, written: _Optional[int] = ...) -> None: ...

class SaveBucketsRequest(_message.Message):
    __slots__ = ("model", "epoch", "table", "buckets")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    model: str
    epoch: int
    table: int
    buckets: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, model: _Optional[str] = ..., epoch: _Optional[int] = ..., table: _Optional[int] = ..., buckets: _Optional[_Iterable[int]] = ...) -> None: ...

class Bucket(_message.Message):
    __slots__ = ("table", "bucket", "rows", "waiting", "width", "updates", "payload_bytes")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    table: int
    bucket: int
    rows: int
    waiting: int
    width: int
    updates: int
    payload_bytes: int
    def __init__(self, table: _Optional[int] = ..., bucket: _Optional[int] = ..., rows: _Optional[int] = ..., waiting: _Optional[int] = ..., width: _Optional[int] = ..., updates: _Optional[int] = ..., payload_bytes: _Optional[int] = ...) -> None: ...

class SaveBucketsReply(_message.Message):
    __slots__ = ("bucket", "chunk", "pushes")
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    PUSHES_FIELD_NUMBER: _ClassVar[int]
    bucket: Bucket
    chunk: Chunk
    pushes: KnownPushes
    def __init__(self, bucket: _Optional[_Union[Bucket, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., pushes: _Optional[_Union[KnownPushes, _Mapping]] = ...) -> None: ...

class FeedCursor(_message.Message):
    __slots__ = ("lineage", "updates", "changes", "incarnation")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    lineage: str
    updates: int
    changes: int
    incarnation: int
    def __init__(self, lineage: _Optional[str] = ..., updates: _Optional[int] = ..., changes: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class FeedRequest(_message.Message):
    __slots__ = ("model", "table", "cursor", "follow", "with_state", "epoch")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    WITH_STATE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    model: str
    table: int
    cursor: FeedCursor
    follow: bool
    with_state: bool
    epoch: int
    def __init__(self, model: _Optional[str] = ..., table: _Optional[int] = ..., cursor: _Optional[_Union[FeedCursor, _Mapping]] = ..., follow: bool = ..., with_state: bool = ..., epoch: _Optional[int] = ...) -> None: ...

class FeedReply(_message.Message):
    __slots__ = ("batch", "chunk")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    batch: FeedBatch
    chunk: Chunk
    def __init__(self, batch: _Optional[_Union[FeedBatch, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ...) -> None: ...

class FeedBatch(_message.Message):
    __slots__ = ("cursor", "buckets", "deleted", "rows", "width", "payload_bytes", "current")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    DELETED_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    CURRENT_FIELD_NUMBER: _ClassVar[int]
    cursor: FeedCursor
    buckets: _containers.RepeatedScalarFieldContainer[int]
    deleted: bytes
    rows: int
    width: int
    payload_bytes: int
    current: bool
    def __init__(self, cursor: _Optional[_Union[FeedCursor, _Mapping]] = ..., buckets: _Optional[_Iterable[int]] = ..., deleted: _Optional[bytes] = ..., rows: _Optional[int] = ..., width: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., current: bool = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("model", "epoch")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    model: str
    epoch: int
    def __init__(self, model: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class StateTensor(_message.Message):
    __slots__ = ("slice", "name", "dtype", "shape")
    SLICE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    slice: int
    name: str
    dtype: _common_pb2.DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, slice: _Optional[int] = ..., name: _Optional[str] = ..., dtype: _Optional[_Union[_common_pb2.DType, str]] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class LoadHeader(_message.Message):
    __slots__ = ("model", "epoch", "worker", "only_if_uninitialised", "with_region", "state", "with_state", "membership_revision", "slices", "checksums")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ONLY_IF_UNINITIALISED_FIELD_NUMBER: _ClassVar[int]
    WITH_REGION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WITH_STATE_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_REVISION_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    model: str
    epoch: int
    worker: WorkerId
    only_if_uninitialised: bool
    with_region: bool
    state: _containers.RepeatedCompositeFieldContainer[StateTensor]
    with_state: bool
    membership_revision: int
    slices: _containers.RepeatedScalarFieldContainer[int]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, model: _Optional[str] = ..., epoch: _Optional[int] = ..., worker: _Optional[_Union[WorkerId, _Mapping]] = ..., only_if_uninitialised: bool = ..., with_region: bool = ..., state: _Optional[_Iterable[_Union[StateTensor, _Mapping]]] = ..., with_state: bool = ..., membership_revision: _Optional[int] = ..., slices: _Optional[_Iterable[int]] = ..., checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: LoadHeader
    chunk: Chunk
    def __init__(self, header: _Optional[_Union[LoadHeader, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ...) -> None: ...

class LoadReply(_message.Message):
    __slots__ = ("version", "written")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    version: int
    written: bool
    def __init__(self, version: _Optional[int] = ..., written: bool = ...) -> None: ...

class SaveRequest(_message.Message):
    __slots__ = ("model", "epoch", "slices")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    model: str
    epoch: int
    slices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, model: _Optional[str] = ..., epoch: _Optional[int] = ..., slices: _Optional[_Iterable[int]] = ...) -> None: ...

class SaveHeader(_message.Message):
    __slots__ = ("version", "state", "payload_bytes", "pushes")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    PUSHES_FIELD_NUMBER: _ClassVar[int]
    version: int
    state: _containers.RepeatedCompositeFieldContainer[StateTensor]
    payload_bytes: int
    pushes: KnownPushes
    def __init__(self, version: _Optional[int] = ..., state: _Optional[_Iterable[_Union[StateTensor, _Mapping]]] = ..., payload_bytes: _Optional[int] = ..., pushes: _Optional[_Union[KnownPushes, _Mapping]] = ...) -> None: ...

class SaveReply(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: SaveHeader
    chunk: Chunk
    def __init__(self, header: _Optional[_Union[SaveHeader, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ...) -> None: ...

class WorkerSequence(_message.Message):
    __slots__ = ("worker", "sequence")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerId
    sequence: int
    def __init__(self, worker: _Optional[_Union[WorkerId, _Mapping]] = ..., sequence: _Optional[int] = ...) -> None: ...

class ModelCut(_message.Message):
    __slots__ = ("model", "accepted", "open")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    model: str
    accepted: _containers.RepeatedCompositeFieldContainer[WorkerSequence]
    open: _containers.RepeatedCompositeFieldContainer[WorkerSequence]
    def __init__(self, model: _Optional[str] = ..., accepted: _Optional[_Iterable[_Union[WorkerSequence, _Mapping]]] = ..., open: _Optional[_Iterable[_Union[WorkerSequence, _Mapping]]] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("quiesce", "seconds")
    QUIESCE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    quiesce: str
    seconds: float
    def __init__(self, quiesce: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class PauseReply(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelCut]
    def __init__(self, models: _Optional[_Iterable[_Union[ModelCut, _Mapping]]] = ...) -> None: ...

class CaptureRequest(_message.Message):
    __slots__ = ("quiesce", "models", "folder", "full_every")
    QUIESCE_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    FULL_EVERY_FIELD_NUMBER: _ClassVar[int]
    quiesce: str
    models: _containers.RepeatedCompositeFieldContainer[ModelCut]
    folder: str
    full_every: int
    def __init__(self, quiesce: _Optional[str] = ..., models: _Optional[_Iterable[_Union[ModelCut, _Mapping]]] = ..., folder: _Optional[str] = ..., full_every: _Optional[int] = ...) -> None: ...

class CaptureReply(_message.Message):
    __slots__ = ("models", "parts")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelCut]
    parts: _containers.RepeatedCompositeFieldContainer[CheckpointPart]
    def __init__(self, models: _Optional[_Iterable[_Union[ModelCut, _Mapping]]] = ..., parts: _Optional[_Iterable[_Union[CheckpointPart, _Mapping]]] = ...) -> None: ...

class CheckpointFile(_message.Message):
    __slots__ = ("name", "size_bytes", "head_bytes", "head_checksum")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HEAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    HEAD_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    name: str
    size_bytes: int
    head_bytes: int
    head_checksum: str
    def __init__(self, name: _Optional[str] = ..., size_bytes: _Optional[int] = ..., head_bytes: _Optional[int] = ..., head_checksum: _Optional[str] = ...) -> None: ...

class CheckpointPiece(_message.Message):
    __slots__ = ("variable", "row_begin", "row_end", "state", "dtype", "shape", "file", "at", "checksums")
    VARIABLE_FIELD_NUMBER: _ClassVar[int]
    ROW_BEGIN_FIELD_NUMBER: _ClassVar[int]
    ROW_END_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    variable: str
    row_begin: int
    row_end: int
    state: str
    dtype: _common_pb2.DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    file: str
    at: int
    checksums: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, variable: _Optional[str] = ..., row_begin: _Optional[int] = ..., row_end: _Optional[int] = ..., state: _Optional[str] = ..., dtype: _Optional[_Union[_common_pb2.DType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., file: _Optional[str] = ..., at: _Optional[int] = ..., checksums: _Optional[_Iterable[str]] = ...) -> None: ...

class CheckpointBase(_message.Message):
    __slots__ = ("folder", "seal")
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    folder: str
    seal: str
    def __init__(self, folder: _Optional[str] = ..., seal: _Optional[str] = ...) -> None: ...

class CheckpointTable(_message.Message):
    __slots__ = ("table", "shard", "updates", "base", "file", "pieces")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    table: str
    shard: int
    updates: int
    base: CheckpointBase
    file: str
    pieces: _containers.RepeatedCompositeFieldContainer[CheckpointPiece]
    def __init__(self, table: _Optional[str] = ..., shard: _Optional[int] = ..., updates: _Optional[int] = ..., base: _Optional[_Union[CheckpointBase, _Mapping]] = ..., file: _Optional[str] = ..., pieces: _Optional[_Iterable[_Union[CheckpointPiece, _Mapping]]] = ...) -> None: ...

class CheckpointPart(_message.Message):
    __slots__ = ("model", "shard", "epoch", "pushes", "files", "pieces", "tables")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PUSHES_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    model: str
    shard: int
    epoch: int
    pushes: KnownPushes
    files: _containers.RepeatedCompositeFieldContainer[CheckpointFile]
    pieces: _containers.RepeatedCompositeFieldContainer[CheckpointPiece]
    tables: _containers.RepeatedCompositeFieldContainer[CheckpointTable]
    def __init__(self, model: _Optional[str] = ..., shard: _Optional[int] = ..., epoch: _Optional[int] = ..., pushes: _Optional[_Union[KnownPushes, _Mapping]] = ..., files: _Optional[_Iterable[_Union[CheckpointFile, _Mapping]]] = ..., pieces: _Optional[_Iterable[_Union[CheckpointPiece, _Mapping]]] = ..., tables: _Optional[_Iterable[_Union[CheckpointTable, _Mapping]]] = ...) -> None: ...

class CatchUpRequest(_message.Message):
    __slots__ = ("quiesce", "models", "seconds")
    QUIESCE_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    quiesce: str
    models: _containers.RepeatedCompositeFieldContainer[ModelCut]
    seconds: float
    def __init__(self, quiesce: _Optional[str] = ..., models: _Optional[_Iterable[_Union[ModelCut, _Mapping]]] = ..., seconds: _Optional[float] = ...) -> None: ...

class CatchUpReply(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelCut]
    def __init__(self, models: _Optional[_Iterable[_Union[ModelCut, _Mapping]]] = ...) -> None: ...

class MakeRoomRequest(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[_common_pb2.ShardMap]
    def __init__(self, models: _Optional[_Iterable[_Union[_common_pb2.ShardMap, _Mapping]]] = ...) -> None: ...

class MakeRoomReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StageReshardRequest(_message.Message):
    __slots__ = ("quiesce", "membership_revision", "models")
    QUIESCE_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_REVISION_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    quiesce: str
    membership_revision: int
    models: _containers.RepeatedCompositeFieldContainer[_common_pb2.ShardMap]
    def __init__(self, quiesce: _Optional[str] = ..., membership_revision: _Optional[int] = ..., models: _Optional[_Iterable[_Union[_common_pb2.ShardMap, _Mapping]]] = ...) -> None: ...

class StageReshardReply(_message.Message):
    __slots__ = ("received_bytes",)
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    received_bytes: int
    def __init__(self, received_bytes: _Optional[int] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("quiesce", "membership_revision")
    QUIESCE_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_REVISION_FIELD_NUMBER: _ClassVar[int]
    quiesce: str
    membership_revision: int
    def __init__(self, quiesce: _Optional[str] = ..., membership_revision: _Optional[int] = ...) -> None: ...

class ResumeReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RestoreRequest(_message.Message):
    __slots__ = ("folder", "quiesce")
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    QUIESCE_FIELD_NUMBER: _ClassVar[int]
    folder: str
    quiesce: str
    def __init__(self, folder: _Optional[str] = ..., quiesce: _Optional[str] = ...) -> None: ...

class RestoreReply(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, models: _Optional[_Iterable[str]] = ...) -> None: ...

class FollowStart(_message.Message):
    __slots__ = ("shard", "protocol_version", "incarnation", "directory", "membership_revision", "primary", "number", "writer")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_REVISION_FIELD_NUMBER: _ClassVar[int]
    PRIMARY_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    shard: int
    protocol_version: int
    incarnation: int
    directory: str
    membership_revision: int
    primary: int
    number: int
    writer: int
    def __init__(self, shard: _Optional[int] = ..., protocol_version: _Optional[int] = ..., incarnation: _Optional[int] = ..., directory: _Optional[str] = ..., membership_revision: _Optional[int] = ..., primary: _Optional[int] = ..., number: _Optional[int] = ..., writer: _Optional[int] = ...) -> None: ...

class FollowRequest(_message.Message):
    __slots__ = ("start", "acknowledged")
    START_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    start: FollowStart
    acknowledged: int
    def __init__(self, start: _Optional[_Union[FollowStart, _Mapping]] = ..., acknowledged: _Optional[int] = ...) -> None: ...

class Following(_message.Message):
    __slots__ = ("number", "copy")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    COPY_FIELD_NUMBER: _ClassVar[int]
    number: int
    copy: bool
    def __init__(self, number: _Optional[int] = ..., copy: bool = ...) -> None: ...

class ModelCopy(_message.Message):
    __slots__ = ("shard_map", "initialised", "tracker_number", "pushes")
    SHARD_MAP_FIELD_NUMBER: _ClassVar[int]
    INITIALISED_FIELD_NUMBER: _ClassVar[int]
    TRACKER_NUMBER_FIELD_NUMBER: _ClassVar[int]
    PUSHES_FIELD_NUMBER: _ClassVar[int]
    shard_map: _common_pb2.ShardMap
    initialised: bool
    tracker_number: int
    pushes: KnownPushes
    def __init__(self, shard_map: _Optional[_Union[_common_pb2.ShardMap, _Mapping]] = ..., initialised: bool = ..., tracker_number: _Optional[int] = ..., pushes: _Optional[_Union[KnownPushes, _Mapping]] = ...) -> None: ...

class BlockCopy(_message.Message):
    __slots__ = ("first", "last", "begin", "end", "number", "state", "payload_bytes")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    first: int
    last: int
    begin: int
    end: int
    number: int
    state: _containers.RepeatedCompositeFieldContainer[StateTensor]
    payload_bytes: int
    def __init__(self, first: _Optional[int] = ..., last: _Optional[int] = ..., begin: _Optional[int] = ..., end: _Optional[int] = ..., number: _Optional[int] = ..., state: _Optional[_Iterable[_Union[StateTensor, _Mapping]]] = ..., payload_bytes: _Optional[int] = ...) -> None: ...

class BucketsCopy(_message.Message):
    __slots__ = ("buckets", "number")
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    buckets: _containers.RepeatedCompositeFieldContainer[Bucket]
    number: int
    def __init__(self, buckets: _Optional[_Iterable[_Union[Bucket, _Mapping]]] = ..., number: _Optional[int] = ...) -> None: ...

class Copied(_message.Message):
    __slots__ = ("through",)
    THROUGH_FIELD_NUMBER: _ClassVar[int]
    through: int
    def __init__(self, through: _Optional[int] = ...) -> None: ...

class FollowReply(_message.Message):
    __slots__ = ("following", "chunk", "model", "block", "copied", "buckets")
    FOLLOWING_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    COPIED_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    following: Following
    chunk: Chunk
    model: ModelCopy
    block: BlockCopy
    copied: Copied
    buckets: BucketsCopy
    def __init__(self, following: _Optional[_Union[Following, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., model: _Optional[_Union[ModelCopy, _Mapping]] = ..., block: _Optional[_Union[BlockCopy, _Mapping]] = ..., copied: _Optional[_Union[Copied, _Mapping]] = ..., buckets: _Optional[_Union[BucketsCopy, _Mapping]] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ("model", "epoch")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    model: str
    epoch: int
    def __init__(self, model: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class WorkerClock(_message.Message):
    __slots__ = ("rank", "incarnation", "phase", "clock", "last_sequence", "transport", "has_values")
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    HAS_VALUES_FIELD_NUMBER: _ClassVar[int]
    rank: int
    incarnation: int
    phase: int
    clock: int
    last_sequence: int
    transport: _common_pb2.Transport
    has_values: bool
    def __init__(self, rank: _Optional[int] = ..., incarnation: _Optional[int] = ..., phase: _Optional[int] = ..., clock: _Optional[int] = ..., last_sequence: _Optional[int] = ..., transport: _Optional[_Union[_common_pb2.Transport, str]] = ..., has_values: bool = ...) -> None: ...

class ModelStatus(_message.Message):
    __slots__ = ("shard_map", "version", "initialised", "consistency", "clocks", "staleness_counts", "outcomes", "parked_pulls", "tables", "assigned", "assigned_checksums", "learning_rates")
    class OutcomesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class AssignedChecksumsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    SHARD_MAP_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INITIALISED_FIELD_NUMBER: _ClassVar[int]
    CONSISTENCY_FIELD_NUMBER: _ClassVar[int]
    CLOCKS_FIELD_NUMBER: _ClassVar[int]
    STALENESS_COUNTS_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    PARKED_PULLS_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    ASSIGNED_FIELD_NUMBER: _ClassVar[int]
    ASSIGNED_CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATES_FIELD_NUMBER: _ClassVar[int]
    shard_map: _common_pb2.ShardMap
    version: int
    initialised: bool
    consistency: _common_pb2.Consistency
    clocks: _containers.RepeatedCompositeFieldContainer[WorkerClock]
    staleness_counts: _containers.RepeatedScalarFieldContainer[int]
    outcomes: _containers.ScalarMap[str, int]
    parked_pulls: int
    tables: _containers.RepeatedCompositeFieldContainer[TableStatus]
    assigned: int
    assigned_checksums: _containers.ScalarMap[int, int]
    learning_rates: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, shard_map: _Optional[_Union[_common_pb2.ShardMap, _Mapping]] = ..., version: _Optional[int] = ..., initialised: bool = ..., consistency: _Optional[_Union[_common_pb2.Consistency, _Mapping]] = ..., clocks: _Optional[_Iterable[_Union[WorkerClock, _Mapping]]] = ..., staleness_counts: _Optional[_Iterable[int]] = ..., outcomes: _Optional[_Mapping[str, int]] = ..., parked_pulls: _Optional[int] = ..., tables: _Optional[_Iterable[_Union[TableStatus, _Mapping]]] = ..., assigned: _Optional[int] = ..., assigned_checksums: _Optional[_Mapping[int, int]] = ..., learning_rates: _Optional[_Iterable[float]] = ...) -> None: ...

class TableStatus(_message.Message):
    __slots__ = ("name", "rows", "waiting", "size_bytes", "updates", "inserted", "expired", "evicted", "learning_rate")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    INSERTED_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    name: str
    rows: int
    waiting: int
    size_bytes: int
    updates: int
    inserted: int
    expired: int
    evicted: int
    learning_rate: float
    def __init__(self, name: _Optional[str] = ..., rows: _Optional[int] = ..., waiting: _Optional[int] = ..., size_bytes: _Optional[int] = ..., updates: _Optional[int] = ..., inserted: _Optional[int] = ..., expired: _Optional[int] = ..., evicted: _Optional[int] = ..., learning_rate: _Optional[float] = ...) -> None: ...

class RoundNormRequest(_message.Message):
    __slots__ = ("model", "epoch", "position")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    model: str
    epoch: int
    position: Position
    def __init__(self, model: _Optional[str] = ..., epoch: _Optional[int] = ..., position: _Optional[_Union[Position, _Mapping]] = ...) -> None: ...

class RoundNormReply(_message.Message):
    __slots__ = ("squared_norm",)
    SQUARED_NORM_FIELD_NUMBER: _ClassVar[int]
    squared_norm: float
    def __init__(self, squared_norm: _Optional[float] = ...) -> None: ...

class TakePieceRequest(_message.Message):
    __slots__ = ("quiesce", "models", "name", "number", "kept")
    QUIESCE_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    quiesce: str
    models: _containers.RepeatedCompositeFieldContainer[ModelCut]
    name: str
    number: int
    kept: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, quiesce: _Optional[str] = ..., models: _Optional[_Iterable[_Union[ModelCut, _Mapping]]] = ..., name: _Optional[str] = ..., number: _Optional[int] = ..., kept: _Optional[_Iterable[int]] = ...) -> None: ...

class TakePieceReply(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelCut]
    def __init__(self, models: _Optional[_Iterable[_Union[ModelCut, _Mapping]]] = ...) -> None: ...

class FinishPieceRequest(_message.Message):
    __slots__ = ("name", "number")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    name: str
    number: int
    def __init__(self, name: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class FinishPieceReply(_message.Message):
    __slots__ = ("checksum", "size_bytes", "directory")
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    checksum: bytes
    size_bytes: int
    directory: str
    def __init__(self, checksum: _Optional[bytes] = ..., size_bytes: _Optional[int] = ..., directory: _Optional[str] = ...) -> None: ...

class KeepPiecesRequest(_message.Message):
    __slots__ = ("name", "kept", "newest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    kept: _containers.RepeatedScalarFieldContainer[int]
    newest: int
    def __init__(self, name: _Optional[str] = ..., kept: _Optional[_Iterable[int]] = ..., newest: _Optional[int] = ...) -> None: ...

class KeepPiecesReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PieceTensor(_message.Message):
    __slots__ = ("variable", "row_begin", "row_end", "checksum")
    VARIABLE_FIELD_NUMBER: _ClassVar[int]
    ROW_BEGIN_FIELD_NUMBER: _ClassVar[int]
    ROW_END_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    variable: _common_pb2.Variable
    row_begin: int
    row_end: int
    checksum: bytes
    def __init__(self, variable: _Optional[_Union[_common_pb2.Variable, _Mapping]] = ..., row_begin: _Optional[int] = ..., row_end: _Optional[int] = ..., checksum: _Optional[bytes] = ...) -> None: ...

class PieceTable(_message.Message):
    __slots__ = ("table", "cursor")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    table: str
    cursor: FeedCursor
    def __init__(self, table: _Optional[str] = ..., cursor: _Optional[_Union[FeedCursor, _Mapping]] = ...) -> None: ...

class PieceManifest(_message.Message):
    __slots__ = ("name", "number", "model", "shard", "variables", "tensors", "tables", "epoch")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    name: str
    number: int
    model: str
    shard: int
    variables: int
    tensors: _containers.RepeatedCompositeFieldContainer[PieceTensor]
    tables: _containers.RepeatedCompositeFieldContainer[PieceTable]
    epoch: int
    def __init__(self, name: _Optional[str] = ..., number: _Optional[int] = ..., model: _Optional[str] = ..., shard: _Optional[int] = ..., variables: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[PieceTensor, _Mapping]]] = ..., tables: _Optional[_Iterable[_Union[PieceTable, _Mapping]]] = ..., epoch: _Optional[int] = ...) -> None: ...

class GetPieceRequest(_message.Message):
    __slots__ = ("name", "number", "checksum", "dtype", "have", "have_checksum", "bulk", "host")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    HAVE_FIELD_NUMBER: _ClassVar[int]
    HAVE_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    BULK_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    name: str
    number: int
    checksum: bytes
    dtype: _common_pb2.DType
    have: int
    have_checksum: bytes
    bulk: bool
    host: str
    def __init__(self, name: _Optional[str] = ..., number: _Optional[int] = ..., checksum: _Optional[bytes] = ..., dtype: _Optional[_Union[_common_pb2.DType, str]] = ..., have: _Optional[int] = ..., have_checksum: _Optional[bytes] = ..., bulk: bool = ..., host: _Optional[str] = ...) -> None: ...

class PieceLink(_message.Message):
    __slots__ = ("number", "encodings", "sizes")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ENCODINGS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    number: int
    encodings: _containers.RepeatedScalarFieldContainer[PieceEncoding]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, number: _Optional[int] = ..., encodings: _Optional[_Iterable[_Union[PieceEncoding, str]]] = ..., sizes: _Optional[_Iterable[int]] = ...) -> None: ...

class PieceHeader(_message.Message):
    __slots__ = ("manifest", "links", "payload_bytes", "side_channel")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    SIDE_CHANNEL_FIELD_NUMBER: _ClassVar[int]
    manifest: bytes
    links: _containers.RepeatedCompositeFieldContainer[PieceLink]
    payload_bytes: int
    side_channel: SideChannel
    def __init__(self, manifest: _Optional[bytes] = ..., links: _Optional[_Iterable[_Union[PieceLink, _Mapping]]] = ..., payload_bytes: _Optional[int] = ..., side_channel: _Optional[_Union[SideChannel, _Mapping]] = ...) -> None: ...

class GetPieceReply(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: PieceHeader
    chunk: Chunk
    def __init__(self, header: _Optional[_Union[PieceHeader, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ...) -> None: ...
