from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    DTYPE_FLOAT32: _ClassVar[DType]
    DTYPE_FLOAT64: _ClassVar[DType]
    DTYPE_FLOAT16: _ClassVar[DType]
    DTYPE_BFLOAT16: _ClassVar[DType]
    DTYPE_INT64: _ClassVar[DType]
    DTYPE_INT32: _ClassVar[DType]
    DTYPE_INT16: _ClassVar[DType]
    DTYPE_INT8: _ClassVar[DType]
    DTYPE_UINT8: _ClassVar[DType]
    DTYPE_BOOL: _ClassVar[DType]

class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KIND_UNSPECIFIED: _ClassVar[Kind]
    KIND_PARAMETER: _ClassVar[Kind]
    KIND_BUFFER: _ClassVar[Kind]

class NonFinite(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NON_FINITE_UNSPECIFIED: _ClassVar[NonFinite]
    NON_FINITE_REFUSE: _ClassVar[NonFinite]
    NON_FINITE_SKIP: _ClassVar[NonFinite]
    NON_FINITE_ALLOW: _ClassVar[NonFinite]

class Buffers(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BUFFERS_UNSPECIFIED: _ClassVar[Buffers]
    BUFFERS_RANK0: _ClassVar[Buffers]
    BUFFERS_AVERAGE: _ClassVar[Buffers]
    BUFFERS_LOCAL: _ClassVar[Buffers]

class Eviction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EVICTION_UNSPECIFIED: _ClassVar[Eviction]
    EVICTION_REFUSE: _ClassVar[Eviction]
    EVICTION_LRU: _ClassVar[Eviction]
    EVICTION_LFU: _ClassVar[Eviction]

class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODE_UNSPECIFIED: _ClassVar[Mode]
    MODE_ASYNC: _ClassVar[Mode]
    MODE_SSP: _ClassVar[Mode]
    MODE_SYNC: _ClassVar[Mode]

class StalePolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STALE_POLICY_UNSPECIFIED: _ClassVar[StalePolicy]
    STALE_POLICY_ACCEPT: _ClassVar[StalePolicy]
    STALE_POLICY_REJECT: _ClassVar[StalePolicy]
    STALE_POLICY_SCALE: _ClassVar[StalePolicy]

class ErrorCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_CODE_UNSPECIFIED: _ClassVar[ErrorCode]
    ERROR_CODE_INTERNAL: _ClassVar[ErrorCode]
    ERROR_CODE_UNAVAILABLE: _ClassVar[ErrorCode]
    ERROR_CODE_FENCED: _ClassVar[ErrorCode]
    ERROR_CODE_MODEL_MISMATCH: _ClassVar[ErrorCode]
    ERROR_CODE_UNKNOWN_MODEL: _ClassVar[ErrorCode]
    ERROR_CODE_UNKNOWN_SHARD: _ClassVar[ErrorCode]
    ERROR_CODE_INVALID_REQUEST: _ClassVar[ErrorCode]
    ERROR_CODE_NON_FINITE: _ClassVar[ErrorCode]
    ERROR_CODE_PROTOCOL_VERSION: _ClassVar[ErrorCode]
    ERROR_CODE_UNSUPPORTED_OPTIMIZER: _ClassVar[ErrorCode]
    ERROR_CODE_NOT_READY: _ClassVar[ErrorCode]
    ERROR_CODE_STATE_LOST: _ClassVar[ErrorCode]
    ERROR_CODE_STORAGE_FULL: _ClassVar[ErrorCode]
    ERROR_CODE_DAMAGED_DATA: _ClassVar[ErrorCode]
    ERROR_CODE_MODEL_MOVED: _ClassVar[ErrorCode]
    ERROR_CODE_TABLE_FULL: _ClassVar[ErrorCode]
    ERROR_CODE_PLACE_TAKEN: _ClassVar[ErrorCode]
    ERROR_CODE_UNAUTHENTICATED: _ClassVar[ErrorCode]
    ERROR_CODE_PERMISSION_DENIED: _ClassVar[ErrorCode]
    ERROR_CODE_MODEL_RELEASED: _ClassVar[ErrorCode]
    ERROR_CODE_VERSION_GONE: _ClassVar[ErrorCode]
    ERROR_CODE_UNKNOWN_VERSION: _ClassVar[ErrorCode]

class Transport(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSPORT_UNSPECIFIED: _ClassVar[Transport]
    TRANSPORT_GRPC: _ClassVar[Transport]
    TRANSPORT_SHM: _ClassVar[Transport]
    TRANSPORT_BULK: _ClassVar[Transport]

class WireFormat(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WIRE_FORMAT_UNSPECIFIED: _ClassVar[WireFormat]
    WIRE_FORMAT_RAW: _ClassVar[WireFormat]
    WIRE_FORMAT_BF16: _ClassVar[WireFormat]
    WIRE_FORMAT_FP16: _ClassVar[WireFormat]
    WIRE_FORMAT_INT8: _ClassVar[WireFormat]
    WIRE_FORMAT_TOPK: _ClassVar[WireFormat]
DTYPE_UNSPECIFIED: DType
DTYPE_FLOAT32: DType
DTYPE_FLOAT64: DType
DTYPE_FLOAT16: DType
DTYPE_BFLOAT16: DType
DTYPE_INT64: DType
DTYPE_INT32: DType
DTYPE_INT16: DType
DTYPE_INT8: DType
DTYPE_UINT8: DType
DTYPE_BOOL: DType
KIND_UNSPECIFIED: Kind
KIND_PARAMETER: Kind
KIND_BUFFER: Kind
NON_FINITE_UNSPECIFIED: NonFinite
NON_FINITE_REFUSE: NonFinite
NON_FINITE_SKIP: NonFinite
NON_FINITE_ALLOW: NonFinite
BUFFERS_UNSPECIFIED: Buffers
BUFFERS_RANK0: Buffers
BUFFERS_AVERAGE: Buffers
BUFFERS_LOCAL: Buffers
EVICTION_UNSPECIFIED: Eviction
EVICTION_REFUSE: Eviction
EVICTION_LRU: Eviction
EVICTION_LFU: Eviction
MODE_UNSPECIFIED: Mode
MODE_ASYNC: Mode
MODE_SSP: Mode
MODE_SYNC: Mode
STALE_POLICY_UNSPECIFIED: StalePolicy
STALE_POLICY_ACCEPT: StalePolicy
STALE_POLICY_REJECT: StalePolicy
STALE_POLICY_SCALE: StalePolicy
ERROR_CODE_UNSPECIFIED: ErrorCode
ERROR_CODE_INTERNAL: ErrorCode
ERROR_CODE_UNAVAILABLE: ErrorCode
ERROR_CODE_FENCED: ErrorCode
ERROR_CODE_MODEL_MISMATCH: ErrorCode
ERROR_CODE_UNKNOWN_MODEL: ErrorCode
ERROR_CODE_UNKNOWN_SHARD: ErrorCode
ERROR_CODE_INVALID_REQUEST: ErrorCode
ERROR_CODE_NON_FINITE: ErrorCode
ERROR_CODE_PROTOCOL_VERSION: ErrorCode
ERROR_CODE_UNSUPPORTED_OPTIMIZER: ErrorCode
ERROR_CODE_NOT_READY: ErrorCode
ERROR_CODE_STATE_LOST: ErrorCode
ERROR_CODE_STORAGE_FULL: ErrorCode
ERROR_CODE_DAMAGED_DATA: ErrorCode
ERROR_CODE_MODEL_MOVED: ErrorCode
ERROR_CODE_TABLE_FULL: ErrorCode
ERROR_CODE_PLACE_TAKEN: ErrorCode
ERROR_CODE_UNAUTHENTICATED: ErrorCode
ERROR_CODE_PERMISSION_DENIED: ErrorCode
ERROR_CODE_MODEL_RELEASED: ErrorCode
ERROR_CODE_VERSION_GONE: ErrorCode
ERROR_CODE_UNKNOWN_VERSION: ErrorCode
TRANSPORT_UNSPECIFIED: Transport
TRANSPORT_GRPC: Transport
TRANSPORT_SHM: Transport
TRANSPORT_BULK: Transport
WIRE_FORMAT_UNSPECIFIED: WireFormat
WIRE_FORMAT_RAW: WireFormat
WIRE_FORMAT_BF16: WireFormat
WIRE_FORMAT_FP16: WireFormat
WIRE_FORMAT_INT8: WireFormat
WIRE_FORMAT_TOPK: WireFormat

class Variable(_message.Message):
    __slots__ = ("name", "shape", "dtype", "kind", "group")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: DType
    kind: Kind
    group: int
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[_Union[DType, str]] = ..., kind: _Optional[_Union[Kind, str]] = ..., group: _Optional[int] = ...) -> None: ...

class RowInit(_message.Message):
    __slots__ = ("kind", "low", "high")
    KIND_FIELD_NUMBER: _ClassVar[int]
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    kind: str
    low: float
    high: float
    def __init__(self, kind: _Optional[str] = ..., low: _Optional[float] = ..., high: _Optional[float] = ...) -> None: ...

class RowLife(_message.Message):
    __slots__ = ("admit_after", "admit_probability", "expire_after_updates", "expire_after_seconds", "max_rows", "eviction", "memory_bytes")
    ADMIT_AFTER_FIELD_NUMBER: _ClassVar[int]
    ADMIT_PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_AFTER_UPDATES_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_AFTER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    EVICTION_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    admit_after: int
    admit_probability: float
    expire_after_updates: int
    expire_after_seconds: float
    max_rows: int
    eviction: Eviction
    memory_bytes: int
    def __init__(self, admit_after: _Optional[int] = ..., admit_probability: _Optional[float] = ..., expire_after_updates: _Optional[int] = ..., expire_after_seconds: _Optional[float] = ..., max_rows: _Optional[int] = ..., eviction: _Optional[_Union[Eviction, str]] = ..., memory_bytes: _Optional[int] = ...) -> None: ...

class NoValue(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OptionValues(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedCompositeFieldContainer[OptionValue]
    def __init__(self, values: _Optional[_Iterable[_Union[OptionValue, _Mapping]]] = ...) -> None: ...

class OptionValue(_message.Message):
    __slots__ = ("none", "truth", "integer", "number", "text", "list")
    NONE_FIELD_NUMBER: _ClassVar[int]
    TRUTH_FIELD_NUMBER: _ClassVar[int]
    INTEGER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LIST_FIELD_NUMBER: _ClassVar[int]
    none: NoValue
    truth: bool
    integer: int
    number: float
    text: str
    list: OptionValues
    def __init__(self, none: _Optional[_Union[NoValue, _Mapping]] = ..., truth: bool = ..., integer: _Optional[int] = ..., number: _Optional[float] = ..., text: _Optional[str] = ..., list: _Optional[_Union[OptionValues, _Mapping]] = ...) -> None: ...

class Option(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: OptionValue
    def __init__(self, name: _Optional[str] = ..., value: _Optional[_Union[OptionValue, _Mapping]] = ...) -> None: ...

class Options(_message.Message):
    __slots__ = ("options",)
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    options: _containers.RepeatedCompositeFieldContainer[Option]
    def __init__(self, options: _Optional[_Iterable[_Union[Option, _Mapping]]] = ...) -> None: ...

class TableSpec(_message.Message):
    __slots__ = ("name", "dim", "buckets", "seed", "init", "optimizer", "life", "arguments")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    INIT_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    LIFE_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    dim: int
    buckets: int
    seed: int
    init: RowInit
    optimizer: str
    life: RowLife
    arguments: Options
    def __init__(self, name: _Optional[str] = ..., dim: _Optional[int] = ..., buckets: _Optional[int] = ..., seed: _Optional[int] = ..., init: _Optional[_Union[RowInit, _Mapping]] = ..., optimizer: _Optional[str] = ..., life: _Optional[_Union[RowLife, _Mapping]] = ..., arguments: _Optional[_Union[Options, _Mapping]] = ...) -> None: ...

class TablePlacement(_message.Message):
    __slots__ = ("shards",)
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    shards: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, shards: _Optional[_Iterable[int]] = ...) -> None: ...

class StaleRule(_message.Message):
    __slots__ = ("policy", "threshold", "by_workers")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    BY_WORKERS_FIELD_NUMBER: _ClassVar[int]
    policy: StalePolicy
    threshold: int
    by_workers: bool
    def __init__(self, policy: _Optional[_Union[StalePolicy, str]] = ..., threshold: _Optional[int] = ..., by_workers: bool = ...) -> None: ...

class ModelSpec(_message.Message):
    __slots__ = ("name", "optimizer", "variables", "nonfinite", "buffers", "unsplit", "tables", "groups", "clip_grad_norm", "stale")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    NONFINITE_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    UNSPLIT_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    CLIP_GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    name: str
    optimizer: str
    variables: _containers.RepeatedCompositeFieldContainer[Variable]
    nonfinite: NonFinite
    buffers: Buffers
    unsplit: bool
    tables: _containers.RepeatedCompositeFieldContainer[TableSpec]
    groups: _containers.RepeatedCompositeFieldContainer[Options]
    clip_grad_norm: float
    stale: StaleRule
    def __init__(self, name: _Optional[str] = ..., optimizer: _Optional[str] = ..., variables: _Optional[_Iterable[_Union[Variable, _Mapping]]] = ..., nonfinite: _Optional[_Union[NonFinite, str]] = ..., buffers: _Optional[_Union[Buffers, str]] = ..., unsplit: bool = ..., tables: _Optional[_Iterable[_Union[TableSpec, _Mapping]]] = ..., groups: _Optional[_Iterable[_Union[Options, _Mapping]]] = ..., clip_grad_norm: _Optional[float] = ..., stale: _Optional[_Union[StaleRule, _Mapping]] = ...) -> None: ...

class Slice(_message.Message):
    __slots__ = ("variable", "row_begin", "row_end", "shard")
    VARIABLE_FIELD_NUMBER: _ClassVar[int]
    ROW_BEGIN_FIELD_NUMBER: _ClassVar[int]
    ROW_END_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    variable: int
    row_begin: int
    row_end: int
    shard: int
    def __init__(self, variable: _Optional[int] = ..., row_begin: _Optional[int] = ..., row_end: _Optional[int] = ..., shard: _Optional[int] = ...) -> None: ...

class ShardMap(_message.Message):
    __slots__ = ("epoch", "spec", "shards", "slices", "restored_from", "tables", "alignment_bytes")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FROM_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    ALIGNMENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    spec: ModelSpec
    shards: int
    slices: _containers.RepeatedCompositeFieldContainer[Slice]
    restored_from: str
    tables: _containers.RepeatedCompositeFieldContainer[TablePlacement]
    alignment_bytes: int
    def __init__(self, epoch: _Optional[int] = ..., spec: _Optional[_Union[ModelSpec, _Mapping]] = ..., shards: _Optional[int] = ..., slices: _Optional[_Iterable[_Union[Slice, _Mapping]]] = ..., restored_from: _Optional[str] = ..., tables: _Optional[_Iterable[_Union[TablePlacement, _Mapping]]] = ..., alignment_bytes: _Optional[int] = ...) -> None: ...

class Consistency(_message.Message):
    __slots__ = ("mode", "staleness", "backup", "stale_policy", "stale_threshold", "grace_seconds", "stale_by_workers")
    MODE_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    BACKUP_FIELD_NUMBER: _ClassVar[int]
    STALE_POLICY_FIELD_NUMBER: _ClassVar[int]
    STALE_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    GRACE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STALE_BY_WORKERS_FIELD_NUMBER: _ClassVar[int]
    mode: Mode
    staleness: int
    backup: int
    stale_policy: StalePolicy
    stale_threshold: int
    grace_seconds: float
    stale_by_workers: bool
    def __init__(self, mode: _Optional[_Union[Mode, str]] = ..., staleness: _Optional[int] = ..., backup: _Optional[int] = ..., stale_policy: _Optional[_Union[StalePolicy, str]] = ..., stale_threshold: _Optional[int] = ..., grace_seconds: _Optional[float] = ..., stale_by_workers: bool = ...) -> None: ...

class ErrorDetail(_message.Message):
    __slots__ = ("code", "message", "variable", "shard", "expected", "actual", "remedy", "progress")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    VARIABLE_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    ACTUAL_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    code: ErrorCode
    message: str
    variable: str
    shard: str
    expected: str
    actual: str
    remedy: str
    progress: int
    def __init__(self, code: _Optional[_Union[ErrorCode, str]] = ..., message: _Optional[str] = ..., variable: _Optional[str] = ..., shard: _Optional[str] = ..., expected: _Optional[str] = ..., actual: _Optional[str] = ..., remedy: _Optional[str] = ..., progress: _Optional[int] = ...) -> None: ...

class Wire(_message.Message):
    __slots__ = ("format", "ratio")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    RATIO_FIELD_NUMBER: _ClassVar[int]
    format: WireFormat
    ratio: float
    def __init__(self, format: _Optional[_Union[WireFormat, str]] = ..., ratio: _Optional[float] = ...) -> None: ...
