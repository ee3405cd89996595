"""Between tables as the code thinks of them and as the wire carries them."""

from __future__ import annotations

from ps_protocol.model.tables import Eviction, RowInit, RowLife, TableSpec
from ps_protocol.v1 import common_pb2 as pb
from ps_protocol.wire.convert.enums import enum_member
from ps_protocol.wire.convert.options import options_to_pb, row_options_from_pb

_EVICTIONS: dict[Eviction, pb.Eviction] = {e: getattr(pb, f"EVICTION_{e.name}") for e in Eviction}


def table_to_pb(spec: TableSpec) -> pb.TableSpec:
    """The wire form of a table."""
    life = spec.life
    return pb.TableSpec(
        name=spec.name,
        dim=spec.dim,
        buckets=spec.buckets,
        seed=spec.seed,
        init=pb.RowInit(kind=spec.init.kind, low=spec.init.low, high=spec.init.high),
        optimizer=spec.optimizer,
        arguments=options_to_pb(spec.options),
        life=pb.RowLife(
            admit_after=life.admit_after,
            admit_probability=life.admit_probability,
            expire_after_updates=life.expire_after_updates,
            expire_after_seconds=life.expire_after_seconds,
            max_rows=life.max_rows,
            eviction=_EVICTIONS[life.eviction],
        ),
    )


def table_from_pb(message: pb.TableSpec) -> TableSpec:
    """Raises InvalidRequest for an unknown enum number and for options that are none."""
    life = message.life
    return TableSpec(
        name=message.name,
        dim=message.dim,
        seed=message.seed,
        init=RowInit(message.init.kind, message.init.low, message.init.high),
        optimizer=message.optimizer,
        options=row_options_from_pb(message.arguments),
        life=RowLife(
            admit_after=life.admit_after,
            admit_probability=life.admit_probability,
            expire_after_updates=life.expire_after_updates,
            expire_after_seconds=life.expire_after_seconds,
            max_rows=life.max_rows,
            eviction=enum_member(
                _EVICTIONS, life.eviction or pb.EVICTION_REFUSE, f"eviction of table '{message.name}'"
            ),
        ),
        buckets=message.buckets,
    )
