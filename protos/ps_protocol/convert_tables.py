"""Between tables as the code thinks of them and as the wire carries them."""

from __future__ import annotations

import json

from ps_protocol.enums import enum_member
from ps_protocol.errors import InvalidRequest
from ps_protocol.tables import Eviction, RowInit, RowLife, RowOptions, TableSpec
from ps_protocol.v1 import common_pb2 as pb

_EVICTIONS: dict[Eviction, pb.Eviction] = {e: getattr(pb, f"EVICTION_{e.name}") for e in Eviction}


def row_options_to_json(options: RowOptions) -> str:
    """JSON text of a row optimizer's arguments; equal ones give equal text."""
    return json.dumps(dict(options), sort_keys=True, separators=(",", ":"))


def row_options_from_json(text: str) -> RowOptions:
    """Raises InvalidRequest unless ``text`` is a JSON object of numbers."""
    try:
        options = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("row options are not JSON", actual=text[:200], expected=str(error)) from error
    if not isinstance(options, dict) or not all(type(value) in (int, float) for value in options.values()):
        raise InvalidRequest("row options are not numbers by name", actual=text[:200], expected='{"lr": 0.1, …}')
    try:
        return {name: float(value) for name, value in options.items()}
    except OverflowError as error:
        raise InvalidRequest("a row option is too large", actual=text[:200], expected="numbers of 64 bits") from error


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
        options=row_options_to_json(spec.options),
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
    """Raises InvalidRequest for an unknown enum number or options that are not JSON."""
    life = message.life
    return TableSpec(
        name=message.name,
        dim=message.dim,
        seed=message.seed,
        init=RowInit(message.init.kind, message.init.low, message.init.high),
        optimizer=message.optimizer,
        options=row_options_from_json(message.options),
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
