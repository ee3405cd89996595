"""Between the dataclasses of a model, with its tables and its shard map, and their messages."""

from __future__ import annotations

from typing import Any

from google.protobuf import json_format

from ps_protocol.errors import InvalidRequest, PsError
from ps_protocol.model.spec import (
    ALIGNMENT_BYTES,
    Consistency,
    DType,
    ModelSpec,
    ShardMap,
    Slice,
    StalePolicy,
    StaleRule,
    Variable,
)
from ps_protocol.model.tables import Eviction, RowInit, RowLife, TableSpec
from ps_protocol.v1 import common_pb2 as pb
from ps_protocol.wire.convert.fields import Converter, EnumNumbers, Special, Unset
from ps_protocol.wire.convert.options import options_from_pb, options_to_pb, row_options_from_pb

_DTYPES = EnumNumbers(DType, pb.DType.DESCRIPTOR)

TABLE = Converter(
    TableSpec,
    pb.TableSpec,
    init=Converter(RowInit, pb.RowInit),
    options=Special(options_to_pb, row_options_from_pb, "arguments"),
    life=Converter(RowLife, pb.RowLife, eviction=Unset(Eviction.REFUSE)),
)
STALE_RULE = Converter(StaleRule, pb.StaleRule)
VARIABLE = Converter(Variable, pb.Variable)
SPEC = Converter(
    ModelSpec,
    pb.ModelSpec,
    variables=VARIABLE,
    group_options=Special(
        lambda groups: list(map(options_to_pb, groups)), lambda groups: tuple(map(options_from_pb, groups)), "groups"
    ),
    tables=TABLE,
    stale=STALE_RULE,
)
SHARD_MAP = Converter(
    ShardMap,
    pb.ShardMap,
    spec=SPEC,
    slices=Converter(Slice, pb.Slice),
    tables=Special(
        lambda tables: [pb.TablePlacement(shards=owners) for owners in tables],
        lambda tables: tuple(tuple(placement.shards) for placement in tables),
    ),
    alignment_bytes=Special(lambda alignment: alignment, lambda number: _alignment(number)),
)
CONSISTENCY = Converter(Consistency, pb.Consistency, stale_policy=Unset(StalePolicy.ACCEPT))


def dtype_to_pb(dtype: DType) -> pb.DType:
    """The number of ``dtype``."""
    number: pb.DType = _DTYPES.numbers[dtype]
    return number


def dtype_from_pb(number: int) -> DType:
    """Raises InvalidRequest for a number that this version does not know."""
    return _DTYPES.member(number, "dtype")


def _alignment(number: int) -> int:
    """Raises InvalidRequest for an alignment that this version does not know."""
    if number != ALIGNMENT_BYTES:
        raise InvalidRequest(
            "slices are aligned in a way this version does not know",
            expected=f"{ALIGNMENT_BYTES} bytes",
            actual=str(number),
            remedy="run the same version of torch-ps everywhere",
        )
    return number


def shard_map_to_bytes(shard_map: ShardMap) -> bytes:
    """The bytes of ``shard_map`` in files; equal shard maps have equal bytes."""
    return SHARD_MAP.to_pb(shard_map).SerializeToString(deterministic=True)


def shard_map_from_bytes(data: bytes) -> ShardMap:
    """Raises DecodeError, and InvalidRequest."""
    return SHARD_MAP.from_pb(pb.ShardMap.FromString(data))


def shard_map_to_json(shard_map: ShardMap) -> dict[str, Any]:
    """``shard_map`` as JSON's types."""
    return json_format.MessageToDict(SHARD_MAP.to_pb(shard_map), preserving_proto_field_name=True)


def shard_map_from_json(data: dict[str, Any]) -> ShardMap:
    """Raises ValueError for what ``shard_map_to_json`` did not make."""
    try:
        return SHARD_MAP.from_pb(json_format.ParseDict(data, pb.ShardMap()))
    except (json_format.ParseError, PsError, SystemError) as error:  # the last: numbers beyond what C can hold
        raise ValueError(str(error)) from error
