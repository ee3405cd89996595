from ps_protocol.v1 import common_pb2 as _common_pb2
from ps_protocol.v1 import shard_pb2 as _shard_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LoggedPush(_message.Message):
    __slots__ = ("worker", "sequence", "phase", "clock", "pulled_version", "others")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    PULLED_VERSION_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    worker: _shard_pb2.WorkerId
    sequence: int
    phase: int
    clock: int
    pulled_version: int
    others: _containers.RepeatedCompositeFieldContainer[LoggedPush]
    def __init__(self, worker: _Optional[_Union[_shard_pb2.WorkerId, _Mapping]] = ..., sequence: _Optional[int] = ..., phase: _Optional[int] = ..., clock: _Optional[int] = ..., pulled_version: _Optional[int] = ..., others: _Optional[_Iterable[_Union[LoggedPush, _Mapping]]] = ...) -> None: ...

class PlaceRecord(_message.Message):
    __slots__ = ("shard_map",)
    SHARD_MAP_FIELD_NUMBER: _ClassVar[int]
    shard_map: _common_pb2.ShardMap
    def __init__(self, shard_map: _Optional[_Union[_common_pb2.ShardMap, _Mapping]] = ...) -> None: ...

class LoadRecord(_message.Message):
    __slots__ = ("model", "with_region", "state", "with_state", "pushes")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WITH_REGION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WITH_STATE_FIELD_NUMBER: _ClassVar[int]
    PUSHES_FIELD_NUMBER: _ClassVar[int]
    model: str
    with_region: bool
    state: _containers.RepeatedCompositeFieldContainer[_shard_pb2.StateTensor]
    with_state: bool
    pushes: _shard_pb2.KnownPushes
    def __init__(self, model: _Optional[str] = ..., with_region: bool = ..., state: _Optional[_Iterable[_Union[_shard_pb2.StateTensor, _Mapping]]] = ..., with_state: bool = ..., pushes: _Optional[_Union[_shard_pb2.KnownPushes, _Mapping]] = ...) -> None: ...

class UpdateRecord(_message.Message):
    __slots__ = ("model", "version", "pushes", "absent", "scale", "buffer_weight", "is_round", "tables", "groups", "squared_norm")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PUSHES_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    BUFFER_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    IS_ROUND_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    SQUARED_NORM_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: int
    pushes: _containers.RepeatedCompositeFieldContainer[LoggedPush]
    absent: _containers.RepeatedScalarFieldContainer[int]
    scale: float
    buffer_weight: float
    is_round: bool
    tables: _containers.RepeatedCompositeFieldContainer[TableUpdate]
    groups: _containers.RepeatedCompositeFieldContainer[_common_pb2.Options]
    squared_norm: float
    def __init__(self, model: _Optional[str] = ..., version: _Optional[int] = ..., pushes: _Optional[_Iterable[_Union[LoggedPush, _Mapping]]] = ..., absent: _Optional[_Iterable[int]] = ..., scale: _Optional[float] = ..., buffer_weight: _Optional[float] = ..., is_round: bool = ..., tables: _Optional[_Iterable[_Union[TableUpdate, _Mapping]]] = ..., groups: _Optional[_Iterable[_Union[_common_pb2.Options, _Mapping]]] = ..., squared_norm: _Optional[float] = ...) -> None: ...

class TableUpdate(_message.Message):
    __slots__ = ("table", "rows", "updates", "arguments")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    table: int
    rows: int
    updates: int
    arguments: _common_pb2.Options
    def __init__(self, table: _Optional[int] = ..., rows: _Optional[int] = ..., updates: _Optional[int] = ..., arguments: _Optional[_Union[_common_pb2.Options, _Mapping]] = ...) -> None: ...

class LoadRowsRecord(_message.Message):
    __slots__ = ("model", "table", "rows", "with_state", "only_new")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    WITH_STATE_FIELD_NUMBER: _ClassVar[int]
    ONLY_NEW_FIELD_NUMBER: _ClassVar[int]
    model: str
    table: int
    rows: int
    with_state: bool
    only_new: bool
    def __init__(self, model: _Optional[str] = ..., table: _Optional[int] = ..., rows: _Optional[int] = ..., with_state: bool = ..., only_new: bool = ...) -> None: ...

class DropRowsRecord(_message.Message):
    __slots__ = ("model", "table", "rows", "waiting")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    model: str
    table: int
    rows: int
    waiting: int
    def __init__(self, model: _Optional[str] = ..., table: _Optional[int] = ..., rows: _Optional[int] = ..., waiting: _Optional[int] = ...) -> None: ...

class BucketsRecord(_message.Message):
    __slots__ = ("model", "buckets", "changed")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    model: str
    buckets: _containers.RepeatedCompositeFieldContainer[_shard_pb2.Bucket]
    changed: _containers.RepeatedCompositeFieldContainer[ChangedBucket]
    def __init__(self, model: _Optional[str] = ..., buckets: _Optional[_Iterable[_Union[_shard_pb2.Bucket, _Mapping]]] = ..., changed: _Optional[_Iterable[_Union[ChangedBucket, _Mapping]]] = ...) -> None: ...

class ChangedBucket(_message.Message):
    __slots__ = ("at", "deleted", "waiting_deleted")
    AT_FIELD_NUMBER: _ClassVar[int]
    DELETED_FIELD_NUMBER: _ClassVar[int]
    WAITING_DELETED_FIELD_NUMBER: _ClassVar[int]
    at: int
    deleted: int
    waiting_deleted: int
    def __init__(self, at: _Optional[int] = ..., deleted: _Optional[int] = ..., waiting_deleted: _Optional[int] = ...) -> None: ...

class PrepareRecord(_message.Message):
    __slots__ = ("shard_map", "incoming", "state", "buckets", "pushes")
    SHARD_MAP_FIELD_NUMBER: _ClassVar[int]
    INCOMING_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    PUSHES_FIELD_NUMBER: _ClassVar[int]
    shard_map: _common_pb2.ShardMap
    incoming: _containers.RepeatedScalarFieldContainer[int]
    state: _containers.RepeatedCompositeFieldContainer[_shard_pb2.StateTensor]
    buckets: _containers.RepeatedCompositeFieldContainer[_shard_pb2.Bucket]
    pushes: _shard_pb2.KnownPushes
    def __init__(self, shard_map: _Optional[_Union[_common_pb2.ShardMap, _Mapping]] = ..., incoming: _Optional[_Iterable[int]] = ..., state: _Optional[_Iterable[_Union[_shard_pb2.StateTensor, _Mapping]]] = ..., buckets: _Optional[_Iterable[_Union[_shard_pb2.Bucket, _Mapping]]] = ..., pushes: _Optional[_Union[_shard_pb2.KnownPushes, _Mapping]] = ...) -> None: ...

class SwitchRecord(_message.Message):
    __slots__ = ("model", "epoch")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    model: str
    epoch: int
    def __init__(self, model: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class ReleaseRecord(_message.Message):
    __slots__ = ("model", "epoch")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    model: str
    epoch: int
    def __init__(self, model: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class LogRecord(_message.Message):
    __slots__ = ("place", "load", "update", "prepare", "switch", "load_rows", "drop_rows", "buckets", "release")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    SWITCH_FIELD_NUMBER: _ClassVar[int]
    LOAD_ROWS_FIELD_NUMBER: _ClassVar[int]
    DROP_ROWS_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    place: PlaceRecord
    load: LoadRecord
    update: UpdateRecord
    prepare: PrepareRecord
    switch: SwitchRecord
    load_rows: LoadRowsRecord
    drop_rows: DropRowsRecord
    buckets: BucketsRecord
    release: ReleaseRecord
    def __init__(self, place: _Optional[_Union[PlaceRecord, _Mapping]] = ..., load: _Optional[_Union[LoadRecord, _Mapping]] = ..., update: _Optional[_Union[UpdateRecord, _Mapping]] = ..., prepare: _Optional[_Union[PrepareRecord, _Mapping]] = ..., switch: _Optional[_Union[SwitchRecord, _Mapping]] = ..., load_rows: _Optional[_Union[LoadRowsRecord, _Mapping]] = ..., drop_rows: _Optional[_Union[DropRowsRecord, _Mapping]] = ..., buckets: _Optional[_Union[BucketsRecord, _Mapping]] = ..., release: _Optional[_Union[ReleaseRecord, _Mapping]] = ...) -> None: ...
