"""Between the dataclasses the code thinks in and the generated messages the wire carries."""

from __future__ import annotations

from typing import Any

from google.protobuf import json_format

from ps_protocol.errors import InvalidRequest, PsError
from ps_protocol.model.spec import (
    ALIGNMENT_BYTES,
    PACKED_BYTES,
    Buffers,
    Consistency,
    DType,
    Kind,
    Mode,
    ModelSpec,
    NonFinite,
    ShardMap,
    Slice,
    StalePolicy,
    Variable,
)
from ps_protocol.v1 import common_pb2 as pb
from ps_protocol.wire.convert.enums import enum_member
from ps_protocol.wire.convert.options import options_from_pb, options_to_pb
from ps_protocol.wire.convert.tables import table_from_pb, table_to_pb

# Both sides of each enum list the same names; the wire's have a prefix and a zero for "unspecified".
_DTYPES: dict[DType, pb.DType] = {d: getattr(pb, f"DTYPE_{d.name}") for d in DType}
_KINDS: dict[Kind, pb.Kind] = {k: getattr(pb, f"KIND_{k.name}") for k in Kind}
_NONFINITE: dict[NonFinite, pb.NonFinite] = {n: getattr(pb, f"NON_FINITE_{n.name}") for n in NonFinite}
_BUFFERS: dict[Buffers, pb.Buffers] = {b: getattr(pb, f"BUFFERS_{b.name}") for b in Buffers}
_MODES: dict[Mode, pb.Mode] = {m: getattr(pb, f"MODE_{m.name}") for m in Mode}
_STALE: dict[StalePolicy, pb.StalePolicy] = {s: getattr(pb, f"STALE_POLICY_{s.name}") for s in StalePolicy}


def dtype_to_pb(dtype: DType) -> pb.DType:
    """The wire's number of ``dtype``."""
    return _DTYPES[dtype]


def dtype_from_pb(number: int) -> DType:
    """Raises InvalidRequest for a number this version does not know."""
    return enum_member(_DTYPES, number, "dtype")


def spec_to_pb(spec: ModelSpec) -> pb.ModelSpec:
    """The wire form of a model."""
    return pb.ModelSpec(
        name=spec.name,
        optimizer=spec.optimizer,
        variables=[
            pb.Variable(name=v.name, shape=v.shape, dtype=_DTYPES[v.dtype], kind=_KINDS[v.kind], group=v.group)
            for v in spec.variables
        ],
        groups=map(options_to_pb, spec.group_options),
        nonfinite=_NONFINITE[spec.nonfinite],
        buffers=_BUFFERS[spec.buffers],
        unsplit=spec.unsplit,
        tables=map(table_to_pb, spec.tables),
        clip_grad_norm=spec.clip_grad_norm,
    )


def spec_from_pb(message: pb.ModelSpec) -> ModelSpec:
    """Raises InvalidRequest for an unknown enum number, and for options that are none."""
    return ModelSpec(
        name=message.name,
        optimizer=message.optimizer,
        variables=tuple(
            Variable(
                v.name,
                tuple(v.shape),
                enum_member(_DTYPES, v.dtype, f"dtype of variable '{v.name}'"),
                enum_member(_KINDS, v.kind, f"kind of variable '{v.name}'"),
                v.group,
            )
            for v in message.variables
        ),
        group_options=tuple(map(options_from_pb, message.groups)),
        nonfinite=enum_member(_NONFINITE, message.nonfinite, "non-finite policy"),
        buffers=enum_member(_BUFFERS, message.buffers, "buffer policy"),
        unsplit=message.unsplit,
        tables=tuple(map(table_from_pb, message.tables)),
        clip_grad_norm=message.clip_grad_norm,
    )


def shard_map_to_pb(shard_map: ShardMap) -> pb.ShardMap:
    """The wire form of a shard map."""
    return pb.ShardMap(
        epoch=shard_map.epoch,
        spec=spec_to_pb(shard_map.spec),
        shards=shard_map.shards,
        slices=[
            pb.Slice(variable=s.variable, row_begin=s.row_begin, row_end=s.row_end, shard=s.shard)
            for s in shard_map.slices
        ],
        restored_from=shard_map.restored_from,
        tables=[pb.TablePlacement(shards=owners) for owners in shard_map.tables],
        alignment_bytes=0 if shard_map.alignment_bytes == PACKED_BYTES else shard_map.alignment_bytes,
    )


def shard_map_from_pb(message: pb.ShardMap) -> ShardMap:
    """Raises InvalidRequest as ``spec_from_pb`` does, and for an alignment this version does not know."""
    if message.alignment_bytes not in (0, ALIGNMENT_BYTES):
        raise InvalidRequest(
            "slices are aligned in a way this version does not know",
            expected=f"0 or {ALIGNMENT_BYTES} bytes",
            actual=str(message.alignment_bytes),
            remedy="run the same version of torch-ps everywhere",
        )
    return ShardMap(
        epoch=message.epoch,
        spec=spec_from_pb(message.spec),
        shards=message.shards,
        slices=tuple(Slice(s.variable, s.row_begin, s.row_end, s.shard) for s in message.slices),
        restored_from=message.restored_from,
        tables=tuple(tuple(placement.shards) for placement in message.tables),
        alignment_bytes=message.alignment_bytes or PACKED_BYTES,
    )


def shard_map_to_bytes(shard_map: ShardMap) -> bytes:
    """``shard_map`` as files hold it; equal ones are equal bytes."""
    return shard_map_to_pb(shard_map).SerializeToString(deterministic=True)


def shard_map_from_bytes(data: bytes) -> ShardMap:
    """Raises DecodeError, and InvalidRequest as ``shard_map_from_pb``."""
    return shard_map_from_pb(pb.ShardMap.FromString(data))


def shard_map_to_json(shard_map: ShardMap) -> dict[str, Any]:
    """``shard_map`` as JSON's types."""
    return json_format.MessageToDict(shard_map_to_pb(shard_map), preserving_proto_field_name=True)


def shard_map_from_json(data: dict[str, Any]) -> ShardMap:
    """Raises ValueError for what ``shard_map_to_json`` did not make."""
    try:
        return shard_map_from_pb(json_format.ParseDict(data, pb.ShardMap()))
    except (json_format.ParseError, PsError, SystemError) as error:  # the last: numbers beyond what C can hold
        raise ValueError(str(error)) from error


def consistency_to_pb(consistency: Consistency) -> pb.Consistency:
    """The wire form of a consistency mode."""
    return pb.Consistency(
        mode=_MODES[consistency.mode],
        staleness=consistency.staleness,
        backup=consistency.backup,
        stale_policy=_STALE[consistency.stale_policy],
        stale_threshold=consistency.stale_threshold,
        grace_seconds=consistency.grace_seconds,
    )


def consistency_from_pb(message: pb.Consistency) -> Consistency:
    """Raises InvalidRequest for an unknown mode or policy."""
    return Consistency(
        mode=enum_member(_MODES, message.mode, "consistency mode"),
        staleness=message.staleness,
        backup=message.backup,
        stale_policy=enum_member(_STALE, message.stale_policy or pb.STALE_POLICY_ACCEPT, "stale policy"),
        stale_threshold=message.stale_threshold,
        grace_seconds=message.grace_seconds,
    )
