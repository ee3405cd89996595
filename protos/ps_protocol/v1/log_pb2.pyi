from ps_protocol.v1 import common_pb2 as _common_pb2
from ps_protocol.v1 import shard_pb2 as _shard_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LoggedPush(_message.Message):
    __slots__ = ("worker", "sequence", "phase", "clock", "pulled_version")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    PULLED_VERSION_FIELD_NUMBER: _ClassVar[int]
    worker: _shard_pb2.WorkerId
    sequence: int
    phase: int
    clock: int
    pulled_version: int
    def __init__(self, worker: _Optional[_Union[_shard_pb2.WorkerId, _Mapping]] = ..., sequence: _Optional[int] = ..., phase: _Optional[int] = ..., clock: _Optional[int] = ..., pulled_version: _Optional[int] = ...) -> None: ...

class PlaceRecord(_message.Message):
    __slots__ = ("shard_map",)
    SHARD_MAP_FIELD_NUMBER: _ClassVar[int]
    shard_map: _common_pb2.ShardMap
    def __init__(self, shard_map: _Optional[_Union[_common_pb2.ShardMap, _Mapping]] = ...) -> None: ...

class LoadRecord(_message.Message):
    __slots__ = ("model", "with_region", "state", "with_state", "tracker")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WITH_REGION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WITH_STATE_FIELD_NUMBER: _ClassVar[int]
    TRACKER_FIELD_NUMBER: _ClassVar[int]
    model: str
    with_region: bool
    state: _containers.RepeatedCompositeFieldContainer[_shard_pb2.StateTensor]
    with_state: bool
    tracker: str
    def __init__(self, model: _Optional[str] = ..., with_region: bool = ..., state: _Optional[_Iterable[_Union[_shard_pb2.StateTensor, _Mapping]]] = ..., with_state: bool = ..., tracker: _Optional[str] = ...) -> None: ...

class UpdateRecord(_message.Message):
    __slots__ = ("model", "version", "pushes", "absent", "group_options", "scale", "buffer_weight", "is_round")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PUSHES_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    GROUP_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    BUFFER_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    IS_ROUND_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: int
    pushes: _containers.RepeatedCompositeFieldContainer[LoggedPush]
    absent: _containers.RepeatedScalarFieldContainer[int]
    group_options: _containers.RepeatedScalarFieldContainer[str]
    scale: float
    buffer_weight: float
    is_round: bool
    def __init__(self, model: _Optional[str] = ..., version: _Optional[int] = ..., pushes: _Optional[_Iterable[_Union[LoggedPush, _Mapping]]] = ..., absent: _Optional[_Iterable[int]] = ..., group_options: _Optional[_Iterable[str]] = ..., scale: _Optional[float] = ..., buffer_weight: _Optional[float] = ..., is_round: bool = ...) -> None: ...

class PrepareRecord(_message.Message):
    __slots__ = ("shard_map", "incoming", "state", "tracker")
    SHARD_MAP_FIELD_NUMBER: _ClassVar[int]
    INCOMING_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TRACKER_FIELD_NUMBER: _ClassVar[int]
    shard_map: _common_pb2.ShardMap
    incoming: _containers.RepeatedScalarFieldContainer[int]
    state: _containers.RepeatedCompositeFieldContainer[_shard_pb2.StateTensor]
    tracker: str
    def __init__(self, shard_map: _Optional[_Union[_common_pb2.ShardMap, _Mapping]] = ..., incoming: _Optional[_Iterable[int]] = ..., state: _Optional[_Iterable[_Union[_shard_pb2.StateTensor, _Mapping]]] = ..., tracker: _Optional[str] = ...) -> None: ...

class SwitchRecord(_message.Message):
    __slots__ = ("model", "epoch")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    model: str
    epoch: int
    def __init__(self, model: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class LogRecord(_message.Message):
    __slots__ = ("place", "load", "update", "prepare", "switch")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    SWITCH_FIELD_NUMBER: _ClassVar[int]
    place: PlaceRecord
    load: LoadRecord
    update: UpdateRecord
    prepare: PrepareRecord
    switch: SwitchRecord
    def __init__(self, place: _Optional[_Union[PlaceRecord, _Mapping]] = ..., load: _Optional[_Union[LoadRecord, _Mapping]] = ..., update: _Optional[_Union[UpdateRecord, _Mapping]] = ..., prepare: _Optional[_Union[PrepareRecord, _Mapping]] = ..., switch: _Optional[_Union[SwitchRecord, _Mapping]] = ...) -> None: ...
