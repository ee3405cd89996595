"""The columns of a table file in a checkpoint: names, types, and the index of buckets.

All columns of rows are in the order of the index: bucket by bucket, within one rising by id.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from ps_protocol.model.spec import DType
from ps_protocol.model.tables import TableSpec
from ps_server.checkpoint.file_plan import FileForm, TensorForm, model_folder, numbered

FOLDER = "tables"

INDEX = "index"
IDS = "ids"
LAST_USE = "last_use"
ROWS = "rows"
STATE = "state"
USES = "uses"
DELETED = "deleted"
WAITING_IDS = "waiting_ids"
WAITING_LAST_USE = "waiting_last_use"
WAITING_USES = "waiting_uses"
WAITING_DELETED = "waiting_deleted"

#: Columns with one item per row, per deleted id, per waiting id, per deleted waiting id.
OF_ROWS = (IDS, LAST_USE, ROWS, STATE, USES)
OF_WAITING = (WAITING_IDS, WAITING_LAST_USE, WAITING_USES)


class Index(enum.IntEnum):
    """An entry of the index, which has one per bucket: int64 [buckets, 6]."""

    BUCKET = 0
    #: 1: these are all rows of the bucket; 0: they are added to those of the base, after its deleted ids are removed.
    WHOLE = 1
    #: Items of the bucket in the columns of this kind.
    ROWS = 2
    DELETED = 3
    WAITING = 4
    WAITING_DELETED = 5


#: Which count of the index a column's items are.
COUNTED_BY: Mapping[str, Index] = {
    **dict.fromkeys(OF_ROWS, Index.ROWS),
    **dict.fromkeys(OF_WAITING, Index.WAITING),
    DELETED: Index.DELETED,
    WAITING_DELETED: Index.WAITING_DELETED,
}


#: Every column there is.
COLUMNS = frozenset({INDEX, *COUNTED_BY})


def dtype_of(column: str) -> DType:
    """The dtype of the items of a column."""
    return DType.FLOAT32 if column in (ROWS, STATE) else DType.INT64


def table_file(table: str, shard: int, shards: int) -> str:
    """The file of one shard, inside the model's folder."""
    return str(PurePosixPath(FOLDER, model_folder(table), numbered("rows", shard + 1, shards)))


def item_shape(column: str, spec: TableSpec) -> tuple[int, ...]:
    """Shape of one item of a column."""
    return {INDEX: (len(Index),), ROWS: (spec.dim,), STATE: (spec.state_width,)}.get(column, ())


def whole_file_bytes(spec: TableSpec, rows: int, buckets: int) -> int:
    """Bytes of a file with so many rows in so many buckets, all that there are, and no waiting ids."""
    items = {INDEX: buckets, **dict.fromkeys(OF_ROWS, rows)}
    if not spec.state_width:
        items[STATE] = 0
    if not spec.life.counts_uses:
        items[USES] = 0
    return file_form("", spec, items)[0].size_bytes


def file_form(name: str, spec: TableSpec, items: Mapping[str, int]) -> tuple[FileForm, Sequence[TensorForm]]:
    """The file ``name`` with columns of so many ``items``; empty columns are omitted, except ids and rows."""
    kept = [column for column, count in items.items() if count or column in (INDEX, IDS, ROWS)]
    tensors = [TensorForm(column, dtype_of(column), (items[column], *item_shape(column, spec))) for column in kept]
    return FileForm.of(name, tensors), tensors
