from ps_protocol.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_SHARD: _ClassVar[Role]
    ROLE_WORKER: _ClassVar[Role]
    ROLE_EVALUATOR: _ClassVar[Role]
    ROLE_STANDBY: _ClassVar[Role]
ROLE_UNSPECIFIED: Role
ROLE_SHARD: Role
ROLE_WORKER: Role
ROLE_EVALUATOR: Role
ROLE_STANDBY: Role

class JoinRequest(_message.Message):
    __slots__ = ("role", "index", "address", "protocol_version", "token", "host", "pid", "data_incarnation", "directory", "yields", "add", "lineage", "take_over")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    DATA_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    YIELDS_FIELD_NUMBER: _ClassVar[int]
    ADD_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    TAKE_OVER_FIELD_NUMBER: _ClassVar[int]
    role: Role
    index: int
    address: str
    protocol_version: int
    token: str
    host: str
    pid: int
    data_incarnation: int
    directory: str
    yields: bool
    add: bool
    lineage: str
    take_over: bool
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., index: _Optional[int] = ..., address: _Optional[str] = ..., protocol_version: _Optional[int] = ..., token: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., data_incarnation: _Optional[int] = ..., directory: _Optional[str] = ..., yields: bool = ..., add: bool = ..., lineage: _Optional[str] = ..., take_over: bool = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("index", "incarnation", "lease_seconds", "heartbeat_seconds", "revision", "seed", "phase", "session", "session_key", "job")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SESSION_KEY_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    index: int
    incarnation: int
    lease_seconds: float
    heartbeat_seconds: float
    revision: int
    seed: int
    phase: int
    session: bytes
    session_key: bytes
    job: str
    def __init__(self, index: _Optional[int] = ..., incarnation: _Optional[int] = ..., lease_seconds: _Optional[float] = ..., heartbeat_seconds: _Optional[float] = ..., revision: _Optional[int] = ..., seed: _Optional[int] = ..., phase: _Optional[int] = ..., session: _Optional[bytes] = ..., session_key: _Optional[bytes] = ..., job: _Optional[str] = ...) -> None: ...

class MemberStats(_message.Message):
    __slots__ = ("steps", "version", "steps_per_second", "bytes_per_second", "samples_per_second", "staleness", "metrics", "transport", "samples", "dropped", "standby_lag", "activity", "versions", "phase", "clock", "wait_seconds", "streams", "held_bytes", "log", "tables", "metrics_address", "queued_pushes", "queued_bytes", "certificate_ends", "updates", "nonfinite")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class WaitSecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class StreamsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    STEPS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    STANDBY_LAG_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PUSHES_FIELD_NUMBER: _ClassVar[int]
    QUEUED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_ENDS_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    NONFINITE_FIELD_NUMBER: _ClassVar[int]
    steps: int
    version: int
    steps_per_second: float
    bytes_per_second: float
    samples_per_second: float
    staleness: int
    metrics: _containers.ScalarMap[str, float]
    transport: str
    samples: int
    dropped: int
    standby_lag: int
    activity: str
    versions: _containers.ScalarMap[str, int]
    phase: int
    clock: int
    wait_seconds: _containers.ScalarMap[str, float]
    streams: _containers.ScalarMap[str, int]
    held_bytes: int
    log: LogCounts
    tables: _containers.RepeatedCompositeFieldContainer[TableCounts]
    metrics_address: str
    queued_pushes: float
    queued_bytes: float
    certificate_ends: float
    updates: _containers.RepeatedCompositeFieldContainer[UpdateCounts]
    nonfinite: int
    def __init__(self, steps: _Optional[int] = ..., version: _Optional[int] = ..., steps_per_second: _Optional[float] = ..., bytes_per_second: _Optional[float] = ..., samples_per_second: _Optional[float] = ..., staleness: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., transport: _Optional[str] = ..., samples: _Optional[int] = ..., dropped: _Optional[int] = ..., standby_lag: _Optional[int] = ..., activity: _Optional[str] = ..., versions: _Optional[_Mapping[str, int]] = ..., phase: _Optional[int] = ..., clock: _Optional[int] = ..., wait_seconds: _Optional[_Mapping[str, float]] = ..., streams: _Optional[_Mapping[str, int]] = ..., held_bytes: _Optional[int] = ..., log: _Optional[_Union[LogCounts, _Mapping]] = ..., tables: _Optional[_Iterable[_Union[TableCounts, _Mapping]]] = ..., metrics_address: _Optional[str] = ..., queued_pushes: _Optional[float] = ..., queued_bytes: _Optional[float] = ..., certificate_ends: _Optional[float] = ..., updates: _Optional[_Iterable[_Union[UpdateCounts, _Mapping]]] = ..., nonfinite: _Optional[int] = ...) -> None: ...

class UpdateCounts(_message.Message):
    __slots__ = ("model", "gradient_norm", "staleness", "staleness_p99")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_NORM_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    STALENESS_P99_FIELD_NUMBER: _ClassVar[int]
    model: str
    gradient_norm: float
    staleness: float
    staleness_p99: float
    def __init__(self, model: _Optional[str] = ..., gradient_norm: _Optional[float] = ..., staleness: _Optional[float] = ..., staleness_p99: _Optional[float] = ...) -> None: ...

class TableCounts(_message.Message):
    __slots__ = ("model", "table", "rows", "waiting", "size_bytes", "inserted", "expired", "evicted", "on_disk")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    INSERTED_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    ON_DISK_FIELD_NUMBER: _ClassVar[int]
    model: str
    table: str
    rows: int
    waiting: int
    size_bytes: int
    inserted: int
    expired: int
    evicted: int
    on_disk: int
    def __init__(self, model: _Optional[str] = ..., table: _Optional[str] = ..., rows: _Optional[int] = ..., waiting: _Optional[int] = ..., size_bytes: _Optional[int] = ..., inserted: _Optional[int] = ..., expired: _Optional[int] = ..., evicted: _Optional[int] = ..., on_disk: _Optional[int] = ...) -> None: ...

class LogCounts(_message.Message):
    __slots__ = ("records", "written_bytes", "unsaved_bytes", "snapshot_age_seconds")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNSAVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    records: int
    written_bytes: int
    unsaved_bytes: int
    snapshot_age_seconds: float
    def __init__(self, records: _Optional[int] = ..., written_bytes: _Optional[int] = ..., unsaved_bytes: _Optional[int] = ..., snapshot_age_seconds: _Optional[float] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("role", "index", "incarnation", "stats", "keeps_state", "sync", "journal_mark")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    KEEPS_STATE_FIELD_NUMBER: _ClassVar[int]
    SYNC_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_MARK_FIELD_NUMBER: _ClassVar[int]
    role: Role
    index: int
    incarnation: int
    stats: MemberStats
    keeps_state: bool
    sync: SyncWord
    journal_mark: bytes
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., index: _Optional[int] = ..., incarnation: _Optional[int] = ..., stats: _Optional[_Union[MemberStats, _Mapping]] = ..., keeps_state: bool = ..., sync: _Optional[_Union[SyncWord, _Mapping]] = ..., journal_mark: _Optional[bytes] = ...) -> None: ...

class SyncWord(_message.Message):
    __slots__ = ("number", "directory")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    number: int
    directory: str
    def __init__(self, number: _Optional[int] = ..., directory: _Optional[str] = ...) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ("revision", "journal_mark", "session", "next_seconds")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_MARK_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NEXT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    revision: int
    journal_mark: bytes
    session: bytes
    next_seconds: float
    def __init__(self, revision: _Optional[int] = ..., journal_mark: _Optional[bytes] = ..., session: _Optional[bytes] = ..., next_seconds: _Optional[float] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("role", "index", "incarnation", "reason")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    role: Role
    index: int
    incarnation: int
    reason: str
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., index: _Optional[int] = ..., incarnation: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("known_revision", "journal_mark", "role", "index", "incarnation", "takes_changes")
    KNOWN_REVISION_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_MARK_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TAKES_CHANGES_FIELD_NUMBER: _ClassVar[int]
    known_revision: int
    journal_mark: bytes
    role: Role
    index: int
    incarnation: int
    takes_changes: bool
    def __init__(self, known_revision: _Optional[int] = ..., journal_mark: _Optional[bytes] = ..., role: _Optional[_Union[Role, str]] = ..., index: _Optional[int] = ..., incarnation: _Optional[int] = ..., takes_changes: bool = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("role", "index", "incarnation", "address")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    role: Role
    index: int
    incarnation: int
    address: str
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., index: _Optional[int] = ..., incarnation: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class ModelEpoch(_message.Message):
    __slots__ = ("name", "epoch")
    NAME_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    name: str
    epoch: int
    def __init__(self, name: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class ClusterView(_message.Message):
    __slots__ = ("revision", "members", "consistency", "models", "expected_shards", "expected_workers", "started", "finished", "spare", "moving", "journal_mark", "released", "released_models", "base_revision", "gone", "least_workers", "wanted_workers", "wanted_shards")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    CONSISTENCY_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_SHARDS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_WORKERS_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    SPARE_FIELD_NUMBER: _ClassVar[int]
    MOVING_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_MARK_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    RELEASED_MODELS_FIELD_NUMBER: _ClassVar[int]
    BASE_REVISION_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    LEAST_WORKERS_FIELD_NUMBER: _ClassVar[int]
    WANTED_WORKERS_FIELD_NUMBER: _ClassVar[int]
    WANTED_SHARDS_FIELD_NUMBER: _ClassVar[int]
    revision: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    consistency: _common_pb2.Consistency
    models: _containers.RepeatedCompositeFieldContainer[ModelEpoch]
    expected_shards: int
    expected_workers: int
    started: bool
    finished: bool
    spare: _containers.RepeatedScalarFieldContainer[int]
    moving: str
    journal_mark: bytes
    released: bool
    released_models: _containers.RepeatedCompositeFieldContainer[ModelEpoch]
    base_revision: int
    gone: _containers.RepeatedCompositeFieldContainer[Member]
    least_workers: int
    wanted_workers: int
    wanted_shards: int
    def __init__(self, revision: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., consistency: _Optional[_Union[_common_pb2.Consistency, _Mapping]] = ..., models: _Optional[_Iterable[_Union[ModelEpoch, _Mapping]]] = ..., expected_shards: _Optional[int] = ..., expected_workers: _Optional[int] = ..., started: bool = ..., finished: bool = ..., spare: _Optional[_Iterable[int]] = ..., moving: _Optional[str] = ..., journal_mark: _Optional[bytes] = ..., released: bool = ..., released_models: _Optional[_Iterable[_Union[ModelEpoch, _Mapping]]] = ..., base_revision: _Optional[int] = ..., gone: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., least_workers: _Optional[int] = ..., wanted_workers: _Optional[int] = ..., wanted_shards: _Optional[int] = ...) -> None: ...

class DeclareModelRequest(_message.Message):
    __slots__ = ("rank", "incarnation", "spec")
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    rank: int
    incarnation: int
    spec: _common_pb2.ModelSpec
    def __init__(self, rank: _Optional[int] = ..., incarnation: _Optional[int] = ..., spec: _Optional[_Union[_common_pb2.ModelSpec, _Mapping]] = ...) -> None: ...

class GetShardMapRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class CloseModelRequest(_message.Message):
    __slots__ = ("rank", "incarnation", "model", "epoch", "release", "wait_seconds")
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    incarnation: int
    model: str
    epoch: int
    release: bool
    wait_seconds: float
    def __init__(self, rank: _Optional[int] = ..., incarnation: _Optional[int] = ..., model: _Optional[str] = ..., epoch: _Optional[int] = ..., release: bool = ..., wait_seconds: _Optional[float] = ...) -> None: ...

class CloseModelReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReleaseModelRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class ReleaseModelReply(_message.Message):
    __slots__ = ("size_bytes",)
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    size_bytes: int
    def __init__(self, size_bytes: _Optional[int] = ...) -> None: ...

class SetConsistencyRequest(_message.Message):
    __slots__ = ("consistency",)
    CONSISTENCY_FIELD_NUMBER: _ClassVar[int]
    consistency: _common_pb2.Consistency
    def __init__(self, consistency: _Optional[_Union[_common_pb2.Consistency, _Mapping]] = ...) -> None: ...

class AcknowledgeDivergenceRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AcknowledgeDivergenceReply(_message.Message):
    __slots__ = ("divergences",)
    DIVERGENCES_FIELD_NUMBER: _ClassVar[int]
    divergences: _containers.RepeatedCompositeFieldContainer[Divergence]
    def __init__(self, divergences: _Optional[_Iterable[_Union[Divergence, _Mapping]]] = ...) -> None: ...

class BarrierRequest(_message.Message):
    __slots__ = ("rank", "incarnation", "phase", "wait_seconds")
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    incarnation: int
    phase: int
    wait_seconds: float
    def __init__(self, rank: _Optional[int] = ..., incarnation: _Optional[int] = ..., phase: _Optional[int] = ..., wait_seconds: _Optional[float] = ...) -> None: ...

class BarrierReply(_message.Message):
    __slots__ = ("released", "missing_ranks")
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    MISSING_RANKS_FIELD_NUMBER: _ClassVar[int]
    released: bool
    missing_ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, released: bool = ..., missing_ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class ExchangeRequest(_message.Message):
    __slots__ = ("rank", "incarnation", "name", "ordinal", "payload", "wait_seconds")
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ORDINAL_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    incarnation: int
    name: str
    ordinal: int
    payload: bytes
    wait_seconds: float
    def __init__(self, rank: _Optional[int] = ..., incarnation: _Optional[int] = ..., name: _Optional[str] = ..., ordinal: _Optional[int] = ..., payload: _Optional[bytes] = ..., wait_seconds: _Optional[float] = ...) -> None: ...

class ExchangeReply(_message.Message):
    __slots__ = ("complete", "contributions", "missing_ranks")
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    MISSING_RANKS_FIELD_NUMBER: _ClassVar[int]
    complete: bool
    contributions: _containers.RepeatedCompositeFieldContainer[Contribution]
    missing_ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, complete: bool = ..., contributions: _Optional[_Iterable[_Union[Contribution, _Mapping]]] = ..., missing_ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class Contribution(_message.Message):
    __slots__ = ("rank", "payload")
    RANK_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    rank: int
    payload: bytes
    def __init__(self, rank: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...

class ExchangeRecord(_message.Message):
    __slots__ = ("number", "contributions")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    number: int
    contributions: _containers.RepeatedCompositeFieldContainer[Contribution]
    def __init__(self, number: _Optional[int] = ..., contributions: _Optional[_Iterable[_Union[Contribution, _Mapping]]] = ...) -> None: ...

class ExchangeValue(_message.Message):
    __slots__ = ("call", "tensor", "json")
    CALL_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    JSON_FIELD_NUMBER: _ClassVar[int]
    call: str
    tensor: TensorValue
    json: str
    def __init__(self, call: _Optional[str] = ..., tensor: _Optional[_Union[TensorValue, _Mapping]] = ..., json: _Optional[str] = ...) -> None: ...

class TensorValue(_message.Message):
    __slots__ = ("dtype", "shape", "elements")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    dtype: _common_pb2.DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    elements: bytes
    def __init__(self, dtype: _Optional[_Union[_common_pb2.DType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., elements: _Optional[bytes] = ...) -> None: ...

class ItemSpan(_message.Message):
    __slots__ = ("begin", "end")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    begin: int
    end: int
    def __init__(self, begin: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class LeaseDataRequest(_message.Message):
    __slots__ = ("rank", "incarnation", "dataset", "length", "epoch", "lease_items", "sequence", "trained", "trained_epoch", "wait_seconds", "batch_items", "fingerprint", "held")
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_ITEMS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TRAINED_FIELD_NUMBER: _ClassVar[int]
    TRAINED_EPOCH_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BATCH_ITEMS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    rank: int
    incarnation: int
    dataset: str
    length: int
    epoch: int
    lease_items: int
    sequence: int
    trained: _containers.RepeatedCompositeFieldContainer[ItemSpan]
    trained_epoch: int
    wait_seconds: float
    batch_items: int
    fingerprint: str
    held: HeldItems
    def __init__(self, rank: _Optional[int] = ..., incarnation: _Optional[int] = ..., dataset: _Optional[str] = ..., length: _Optional[int] = ..., epoch: _Optional[int] = ..., lease_items: _Optional[int] = ..., sequence: _Optional[int] = ..., trained: _Optional[_Iterable[_Union[ItemSpan, _Mapping]]] = ..., trained_epoch: _Optional[int] = ..., wait_seconds: _Optional[float] = ..., batch_items: _Optional[int] = ..., fingerprint: _Optional[str] = ..., held: _Optional[_Union[HeldItems, _Mapping]] = ...) -> None: ...

class HeldItems(_message.Message):
    __slots__ = ("spans",)
    SPANS_FIELD_NUMBER: _ClassVar[int]
    spans: _containers.RepeatedCompositeFieldContainer[ItemSpan]
    def __init__(self, spans: _Optional[_Iterable[_Union[ItemSpan, _Mapping]]] = ...) -> None: ...

class LeaseDataReply(_message.Message):
    __slots__ = ("span", "epoch", "done", "holders", "fingerprint")
    SPAN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    span: ItemSpan
    epoch: int
    done: bool
    holders: _containers.RepeatedScalarFieldContainer[int]
    fingerprint: str
    def __init__(self, span: _Optional[_Union[ItemSpan, _Mapping]] = ..., epoch: _Optional[int] = ..., done: bool = ..., holders: _Optional[_Iterable[int]] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class GetWorkerRequestRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerRequest(_message.Message):
    __slots__ = ("number", "workers", "ranks", "lost", "scale")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    number: int
    workers: int
    ranks: _containers.RepeatedScalarFieldContainer[int]
    lost: _containers.RepeatedCompositeFieldContainer[LostServer]
    scale: ScaleOrder
    def __init__(self, number: _Optional[int] = ..., workers: _Optional[int] = ..., ranks: _Optional[_Iterable[int]] = ..., lost: _Optional[_Iterable[_Union[LostServer, _Mapping]]] = ..., scale: _Optional[_Union[ScaleOrder, _Mapping]] = ...) -> None: ...

class LostServer(_message.Message):
    __slots__ = ("role", "index", "host", "pid", "how", "replaced")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOW_FIELD_NUMBER: _ClassVar[int]
    REPLACED_FIELD_NUMBER: _ClassVar[int]
    role: Role
    index: int
    host: str
    pid: int
    how: str
    replaced: bool
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., index: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., how: _Optional[str] = ..., replaced: bool = ...) -> None: ...

class ScaleOrder(_message.Message):
    __slots__ = ("number", "ranks", "shards", "added_shards", "live_ranks", "live_shards", "finished", "done_ranks")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    ADDED_SHARDS_FIELD_NUMBER: _ClassVar[int]
    LIVE_RANKS_FIELD_NUMBER: _ClassVar[int]
    LIVE_SHARDS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    DONE_RANKS_FIELD_NUMBER: _ClassVar[int]
    number: int
    ranks: Numbers
    shards: Numbers
    added_shards: _containers.RepeatedScalarFieldContainer[int]
    live_ranks: _containers.RepeatedScalarFieldContainer[int]
    live_shards: _containers.RepeatedScalarFieldContainer[int]
    finished: bool
    done_ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, number: _Optional[int] = ..., ranks: _Optional[_Union[Numbers, _Mapping]] = ..., shards: _Optional[_Union[Numbers, _Mapping]] = ..., added_shards: _Optional[_Iterable[int]] = ..., live_ranks: _Optional[_Iterable[int]] = ..., live_shards: _Optional[_Iterable[int]] = ..., finished: bool = ..., done_ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class Numbers(_message.Message):
    __slots__ = ("numbers",)
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    numbers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, numbers: _Optional[_Iterable[int]] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("workers", "shards")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    workers: int
    shards: int
    def __init__(self, workers: _Optional[int] = ..., shards: _Optional[int] = ...) -> None: ...

class ScaleProgress(_message.Message):
    __slots__ = ("text", "done")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    text: str
    done: bool
    def __init__(self, text: _Optional[str] = ..., done: bool = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MemberStatus(_message.Message):
    __slots__ = ("member", "seconds_since_heartbeat", "stats", "host", "pid", "gone", "ended_at")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    SECONDS_SINCE_HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    ENDED_AT_FIELD_NUMBER: _ClassVar[int]
    member: Member
    seconds_since_heartbeat: float
    stats: MemberStats
    host: str
    pid: int
    gone: str
    ended_at: float
    def __init__(self, member: _Optional[_Union[Member, _Mapping]] = ..., seconds_since_heartbeat: _Optional[float] = ..., stats: _Optional[_Union[MemberStats, _Mapping]] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., gone: _Optional[str] = ..., ended_at: _Optional[float] = ...) -> None: ...

class ClusterStatus(_message.Message):
    __slots__ = ("view", "members", "metrics_url", "decisions", "at_seconds", "certificate_ends", "job", "stale_rules", "divergences", "job_id")
    class StaleRulesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    VIEW_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    METRICS_URL_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    AT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_ENDS_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    STALE_RULES_FIELD_NUMBER: _ClassVar[int]
    DIVERGENCES_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    view: ClusterView
    members: _containers.RepeatedCompositeFieldContainer[MemberStatus]
    metrics_url: str
    decisions: _containers.RepeatedCompositeFieldContainer[JobEvent]
    at_seconds: float
    certificate_ends: float
    job: str
    stale_rules: _containers.ScalarMap[str, str]
    divergences: _containers.RepeatedCompositeFieldContainer[Divergence]
    job_id: str
    def __init__(self, view: _Optional[_Union[ClusterView, _Mapping]] = ..., members: _Optional[_Iterable[_Union[MemberStatus, _Mapping]]] = ..., metrics_url: _Optional[str] = ..., decisions: _Optional[_Iterable[_Union[JobEvent, _Mapping]]] = ..., at_seconds: _Optional[float] = ..., certificate_ends: _Optional[float] = ..., job: _Optional[str] = ..., stale_rules: _Optional[_Mapping[str, str]] = ..., divergences: _Optional[_Iterable[_Union[Divergence, _Mapping]]] = ..., job_id: _Optional[str] = ...) -> None: ...

class Divergence(_message.Message):
    __slots__ = ("member", "what", "value", "usual", "since_seconds", "staleness", "staleness_p99", "checkpoint", "step")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    USUAL_FIELD_NUMBER: _ClassVar[int]
    SINCE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    STALENESS_P99_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    member: Member
    what: str
    value: float
    usual: float
    since_seconds: float
    staleness: float
    staleness_p99: float
    checkpoint: str
    step: int
    def __init__(self, member: _Optional[_Union[Member, _Mapping]] = ..., what: _Optional[str] = ..., value: _Optional[float] = ..., usual: _Optional[float] = ..., since_seconds: _Optional[float] = ..., staleness: _Optional[float] = ..., staleness_p99: _Optional[float] = ..., checkpoint: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class GetHistoryRequest(_message.Message):
    __slots__ = ("last_points",)
    LAST_POINTS_FIELD_NUMBER: _ClassVar[int]
    last_points: int
    def __init__(self, last_points: _Optional[int] = ...) -> None: ...

class JobEvent(_message.Message):
    __slots__ = ("number", "at_seconds", "text", "warning")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    AT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    WARNING_FIELD_NUMBER: _ClassVar[int]
    number: int
    at_seconds: float
    text: str
    warning: bool
    def __init__(self, number: _Optional[int] = ..., at_seconds: _Optional[float] = ..., text: _Optional[str] = ..., warning: bool = ...) -> None: ...

class Curve(_message.Message):
    __slots__ = ("name", "reported", "mean", "low", "high")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REPORTED_FIELD_NUMBER: _ClassVar[int]
    MEAN_FIELD_NUMBER: _ClassVar[int]
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    name: str
    reported: bool
    mean: _containers.RepeatedScalarFieldContainer[float]
    low: _containers.RepeatedScalarFieldContainer[float]
    high: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, name: _Optional[str] = ..., reported: bool = ..., mean: _Optional[_Iterable[float]] = ..., low: _Optional[_Iterable[float]] = ..., high: _Optional[_Iterable[float]] = ...) -> None: ...

class CheckpointFacts(_message.Message):
    __slots__ = ("folder", "size_bytes", "seconds", "at_seconds", "step", "kept")
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    AT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    folder: str
    size_bytes: int
    seconds: float
    at_seconds: float
    step: int
    kept: str
    def __init__(self, folder: _Optional[str] = ..., size_bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., at_seconds: _Optional[float] = ..., step: _Optional[int] = ..., kept: _Optional[str] = ...) -> None: ...

class PlacedVariable(_message.Message):
    __slots__ = ("model", "name", "amounts", "table", "count")
    class AmountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    AMOUNTS_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    model: str
    name: str
    amounts: _containers.ScalarMap[int, int]
    table: bool
    count: int
    def __init__(self, model: _Optional[str] = ..., name: _Optional[str] = ..., amounts: _Optional[_Mapping[int, int]] = ..., table: bool = ..., count: _Optional[int] = ...) -> None: ...

class WaitShares(_message.Message):
    __slots__ = ("rank", "shares")
    class SharesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RANK_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    rank: int
    shares: _containers.ScalarMap[str, float]
    def __init__(self, rank: _Optional[int] = ..., shares: _Optional[_Mapping[str, float]] = ...) -> None: ...

class TableGrowth(_message.Message):
    __slots__ = ("model", "table", "rows_per_second")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    ROWS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    model: str
    table: str
    rows_per_second: float
    def __init__(self, model: _Optional[str] = ..., table: _Optional[str] = ..., rows_per_second: _Optional[float] = ...) -> None: ...

class JobHistory(_message.Message):
    __slots__ = ("status", "at_seconds", "began_seconds", "heartbeat_seconds", "lease_seconds", "times", "curves", "point_seconds", "generation", "events", "checkpoints", "placement", "wait_shares", "table_growth", "configuration", "publications")
    class ConfigurationEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    STATUS_FIELD_NUMBER: _ClassVar[int]
    AT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BEGAN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    CURVES_FIELD_NUMBER: _ClassVar[int]
    POINT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    WAIT_SHARES_FIELD_NUMBER: _ClassVar[int]
    TABLE_GROWTH_FIELD_NUMBER: _ClassVar[int]
    CONFIGURATION_FIELD_NUMBER: _ClassVar[int]
    PUBLICATIONS_FIELD_NUMBER: _ClassVar[int]
    status: ClusterStatus
    at_seconds: float
    began_seconds: float
    heartbeat_seconds: float
    lease_seconds: float
    times: _containers.RepeatedScalarFieldContainer[float]
    curves: _containers.RepeatedCompositeFieldContainer[Curve]
    point_seconds: float
    generation: int
    events: _containers.RepeatedCompositeFieldContainer[JobEvent]
    checkpoints: _containers.RepeatedCompositeFieldContainer[CheckpointFacts]
    placement: _containers.RepeatedCompositeFieldContainer[PlacedVariable]
    wait_shares: _containers.RepeatedCompositeFieldContainer[WaitShares]
    table_growth: _containers.RepeatedCompositeFieldContainer[TableGrowth]
    configuration: _containers.ScalarMap[str, str]
    publications: _containers.RepeatedCompositeFieldContainer[WeightsState]
    def __init__(self, status: _Optional[_Union[ClusterStatus, _Mapping]] = ..., at_seconds: _Optional[float] = ..., began_seconds: _Optional[float] = ..., heartbeat_seconds: _Optional[float] = ..., lease_seconds: _Optional[float] = ..., times: _Optional[_Iterable[float]] = ..., curves: _Optional[_Iterable[_Union[Curve, _Mapping]]] = ..., point_seconds: _Optional[float] = ..., generation: _Optional[int] = ..., events: _Optional[_Iterable[_Union[JobEvent, _Mapping]]] = ..., checkpoints: _Optional[_Iterable[_Union[CheckpointFacts, _Mapping]]] = ..., placement: _Optional[_Iterable[_Union[PlacedVariable, _Mapping]]] = ..., wait_shares: _Optional[_Iterable[_Union[WaitShares, _Mapping]]] = ..., table_growth: _Optional[_Iterable[_Union[TableGrowth, _Mapping]]] = ..., configuration: _Optional[_Mapping[str, str]] = ..., publications: _Optional[_Iterable[_Union[WeightsState, _Mapping]]] = ...) -> None: ...

class CheckpointRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckpointReply(_message.Message):
    __slots__ = ("folder", "size_bytes", "seconds")
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    folder: str
    size_bytes: int
    seconds: float
    def __init__(self, folder: _Optional[str] = ..., size_bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class RestoreCheckpointRequest(_message.Message):
    __slots__ = ("folder", "step")
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    folder: str
    step: int
    def __init__(self, folder: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class RestoreCheckpointReply(_message.Message):
    __slots__ = ("folder", "models")
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    folder: str
    models: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, folder: _Optional[str] = ..., models: _Optional[_Iterable[str]] = ...) -> None: ...

class ReshardRequest(_message.Message):
    __slots__ = ("to", "drain", "model", "variable", "batch_bytes")
    TO_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VARIABLE_FIELD_NUMBER: _ClassVar[int]
    BATCH_BYTES_FIELD_NUMBER: _ClassVar[int]
    to: _containers.RepeatedScalarFieldContainer[int]
    drain: _containers.RepeatedScalarFieldContainer[int]
    model: str
    variable: str
    batch_bytes: int
    def __init__(self, to: _Optional[_Iterable[int]] = ..., drain: _Optional[_Iterable[int]] = ..., model: _Optional[str] = ..., variable: _Optional[str] = ..., batch_bytes: _Optional[int] = ...) -> None: ...

class ReshardProgress(_message.Message):
    __slots__ = ("moved_bytes", "total_bytes", "batches", "pause_seconds")
    MOVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    PAUSE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    moved_bytes: int
    total_bytes: int
    batches: int
    pause_seconds: float
    def __init__(self, moved_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., batches: _Optional[int] = ..., pause_seconds: _Optional[float] = ...) -> None: ...

class PublishRequest(_message.Message):
    __slots__ = ("rank", "incarnation", "name", "model", "step", "metadata", "keep", "token")
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    rank: int
    incarnation: int
    name: str
    model: str
    step: int
    metadata: str
    keep: int
    token: str
    def __init__(self, rank: _Optional[int] = ..., incarnation: _Optional[int] = ..., name: _Optional[str] = ..., model: _Optional[str] = ..., step: _Optional[int] = ..., metadata: _Optional[str] = ..., keep: _Optional[int] = ..., token: _Optional[str] = ...) -> None: ...

class PublishReply(_message.Message):
    __slots__ = ("number", "committed")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    number: int
    committed: bool
    def __init__(self, number: _Optional[int] = ..., committed: bool = ...) -> None: ...

class WeightsPiece(_message.Message):
    __slots__ = ("shard", "incarnation", "directory", "checksum", "size_bytes")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    shard: int
    incarnation: int
    directory: str
    checksum: bytes
    size_bytes: int
    def __init__(self, shard: _Optional[int] = ..., incarnation: _Optional[int] = ..., directory: _Optional[str] = ..., checksum: _Optional[bytes] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class WeightsVersion(_message.Message):
    __slots__ = ("number", "model", "step", "metadata", "at_seconds", "pieces", "job_id")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    AT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    number: int
    model: str
    step: int
    metadata: str
    at_seconds: float
    pieces: _containers.RepeatedCompositeFieldContainer[WeightsPiece]
    job_id: str
    def __init__(self, number: _Optional[int] = ..., model: _Optional[str] = ..., step: _Optional[int] = ..., metadata: _Optional[str] = ..., at_seconds: _Optional[float] = ..., pieces: _Optional[_Iterable[_Union[WeightsPiece, _Mapping]]] = ..., job_id: _Optional[str] = ...) -> None: ...

class FollowWeightsRequest(_message.Message):
    __slots__ = ("name", "have", "number", "wait_seconds", "reader", "host", "pid", "delta_bytes", "full_bytes", "leaves", "saved_bytes", "job_id", "readers")
    NAME_FIELD_NUMBER: _ClassVar[int]
    HAVE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    DELTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    FULL_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    SAVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    have: int
    number: int
    wait_seconds: float
    reader: str
    host: str
    pid: int
    delta_bytes: int
    full_bytes: int
    leaves: bool
    saved_bytes: int
    job_id: str
    readers: int
    def __init__(self, name: _Optional[str] = ..., have: _Optional[int] = ..., number: _Optional[int] = ..., wait_seconds: _Optional[float] = ..., reader: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., delta_bytes: _Optional[int] = ..., full_bytes: _Optional[int] = ..., leaves: bool = ..., saved_bytes: _Optional[int] = ..., job_id: _Optional[str] = ..., readers: _Optional[int] = ...) -> None: ...

class FollowWeightsReply(_message.Message):
    __slots__ = ("version", "addresses", "newest", "finished")
    class AddressesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: str
        def __init__(self, key: _Optional[int] = ..., value: _Optional[str] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    version: WeightsVersion
    addresses: _containers.ScalarMap[int, str]
    newest: int
    finished: bool
    def __init__(self, version: _Optional[_Union[WeightsVersion, _Mapping]] = ..., addresses: _Optional[_Mapping[int, str]] = ..., newest: _Optional[int] = ..., finished: bool = ...) -> None: ...

class PinWeightsRequest(_message.Message):
    __slots__ = ("name", "number", "holder", "seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    number: int
    holder: str
    seconds: float
    def __init__(self, name: _Optional[str] = ..., number: _Optional[int] = ..., holder: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class PinWeightsReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetWeightsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WeightsPin(_message.Message):
    __slots__ = ("number", "holder", "until_seconds")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    UNTIL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    number: int
    holder: str
    until_seconds: float
    def __init__(self, number: _Optional[int] = ..., holder: _Optional[str] = ..., until_seconds: _Optional[float] = ...) -> None: ...

class WeightsReader(_message.Message):
    __slots__ = ("reader", "host", "pid", "have", "delta_bytes", "full_bytes", "silent_seconds", "saved_bytes", "readers")
    READER_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HAVE_FIELD_NUMBER: _ClassVar[int]
    DELTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    FULL_BYTES_FIELD_NUMBER: _ClassVar[int]
    SILENT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SAVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    reader: str
    host: str
    pid: int
    have: int
    delta_bytes: int
    full_bytes: int
    silent_seconds: float
    saved_bytes: int
    readers: int
    def __init__(self, reader: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., have: _Optional[int] = ..., delta_bytes: _Optional[int] = ..., full_bytes: _Optional[int] = ..., silent_seconds: _Optional[float] = ..., saved_bytes: _Optional[int] = ..., readers: _Optional[int] = ...) -> None: ...

class WeightsState(_message.Message):
    __slots__ = ("name", "model", "keep", "newest", "versions", "pins", "readers", "gone", "reader_count", "most_behind", "delta_bytes", "full_bytes", "saved_bytes", "relayed_readers")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    READER_COUNT_FIELD_NUMBER: _ClassVar[int]
    MOST_BEHIND_FIELD_NUMBER: _ClassVar[int]
    DELTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    FULL_BYTES_FIELD_NUMBER: _ClassVar[int]
    SAVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RELAYED_READERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: str
    keep: int
    newest: int
    versions: _containers.RepeatedCompositeFieldContainer[WeightsVersion]
    pins: _containers.RepeatedCompositeFieldContainer[WeightsPin]
    readers: _containers.RepeatedCompositeFieldContainer[WeightsReader]
    gone: _containers.RepeatedScalarFieldContainer[int]
    reader_count: int
    most_behind: int
    delta_bytes: int
    full_bytes: int
    saved_bytes: int
    relayed_readers: int
    def __init__(self, name: _Optional[str] = ..., model: _Optional[str] = ..., keep: _Optional[int] = ..., newest: _Optional[int] = ..., versions: _Optional[_Iterable[_Union[WeightsVersion, _Mapping]]] = ..., pins: _Optional[_Iterable[_Union[WeightsPin, _Mapping]]] = ..., readers: _Optional[_Iterable[_Union[WeightsReader, _Mapping]]] = ..., gone: _Optional[_Iterable[int]] = ..., reader_count: _Optional[int] = ..., most_behind: _Optional[int] = ..., delta_bytes: _Optional[int] = ..., full_bytes: _Optional[int] = ..., saved_bytes: _Optional[int] = ..., relayed_readers: _Optional[int] = ...) -> None: ...

class GetWeightsReply(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedCompositeFieldContainer[WeightsState]
    def __init__(self, names: _Optional[_Iterable[_Union[WeightsState, _Mapping]]] = ...) -> None: ...
