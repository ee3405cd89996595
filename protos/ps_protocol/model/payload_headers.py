"""What announces the bytes of a payload: tensors of optimizer state, and buckets of tables."""

from __future__ import annotations

from dataclasses import dataclass

from ps_protocol.model.spec import DType


@dataclass(frozen=True, slots=True)
class StateHeader:
    """Announces one tensor of optimizer state that belongs to one slice."""

    #: Position in the layout's slices.
    slice_index: int
    #: As in torch: "momentum_buffer", "exp_avg", "step", …
    name: str
    dtype: DType
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BucketHeader:
    """Announces what a shard has of one bucket of a table."""

    #: Number of the table in its model.
    table: int
    bucket: int
    rows: int
    #: Ids that have been used and have no row yet.
    waiting: int
    #: float32 numbers of a row: its values, then the optimizer's state.
    width: int
    #: Updates of the table so far.
    updates: int
    payload_bytes: int
