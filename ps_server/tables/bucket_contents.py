"""A consistent copy of one bucket, and its bytes on the wire and on disk (message Bucket)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ps_protocol.errors import InvalidRequest
from ps_protocol.model.payload_headers import BucketHeader
from ps_protocol.model.tables import Ids, TableSpec

MAX_UPDATES = 1 << 62
"""More updates than any table makes; sums of them still fit an int64."""


#: Bytes of a waiting id: the id, its last use, its uses.
_WAITING_SIZES = 8, 8, 4


def _row_sizes(width: int) -> tuple[int, ...]:
    """Bytes of a row: id, last use, values and state, uses."""
    return 8, 8, 4 * width, 4


def row_bytes(width: int) -> int:
    """Bytes of a row in a payload."""
    return sum(_row_sizes(width))


@dataclass(frozen=True, slots=True)
class BucketContents:
    """Rows and waiting ids of one bucket, both ascending by id, without duplicates."""

    bucket: int
    #: Updates of the table at the copy.
    updates: int
    ids: Ids
    #: The table's update of the last use.
    touched: npt.NDArray[np.int64]
    #: float32 [n, width]
    rows: npt.NDArray[np.float32]
    #: Zeros if the table does not count uses.
    uses: npt.NDArray[np.uint32]
    waiting_ids: Ids
    waiting_touched: npt.NDArray[np.int64]
    waiting_uses: npt.NDArray[np.uint32]

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(array.nbytes for array in self._arrays)

    @property
    def _arrays(self) -> tuple[npt.NDArray[np.generic], ...]:
        waiting = self.waiting_ids, self.waiting_touched, self.waiting_uses
        return self.ids, self.touched, self.rows, self.uses, *waiting

    def pieces(self) -> list[memoryview]:
        """The payload: views of the bytes of this object, in the order of message Bucket."""
        return [memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data) for array in self._arrays]

    def header(self, table: int) -> BucketHeader:
        """What announces the payload; ``table`` is the number of the table in its model."""
        rows, waiting = self.ids.size, self.waiting_ids.size
        return BucketHeader(table, self.bucket, rows, waiting, self.rows.shape[1], self.updates, self.nbytes)

    @classmethod
    def read(cls, spec: TableSpec, header: BucketHeader, payload: memoryview) -> BucketContents:
        """A copy of what ``payload`` holds. Raises InvalidRequest unless it fits ``header``."""
        rows, waiting = header.rows, header.waiting
        sizes = *(size * rows for size in _row_sizes(spec.width)), *(size * waiting for size in _WAITING_SIZES)
        _check(spec, "row width", spec.width, header.width)
        _check(spec, "number of payload bytes", sum(sizes), header.payload_bytes)
        _check(spec, "payload", sum(sizes), len(payload))
        if header.updates > MAX_UPDATES:
            _check(spec, "number of updates", f"at most {MAX_UPDATES}", header.updates)
        if header.bucket >= spec.buckets:
            _check(spec, "bucket number", f"below {spec.buckets}", header.bucket)
        kinds = np.int64, np.int64, np.float32, np.uint32, np.int64, np.int64, np.uint32
        arrays, at = [], 0
        for size, kind in zip(sizes, kinds, strict=True):
            arrays.append(np.frombuffer(payload[at : at + size], kind).copy())
            at += size
        ids, touched, values, uses, *others = arrays
        return cls(
            header.bucket, header.updates, ids, touched, values.reshape(rows, spec.width), uses, *others
        ).checked(spec)

    def checked(self, spec: TableSpec) -> BucketContents:
        """The same object. Raises InvalidRequest for a duplicate id, or one of another bucket."""
        from ps_protocol.model.ids import buckets_of, unique  # Compiled code: not for those who only name this class.

        for ids in (self.ids, self.waiting_ids):
            _check(spec, "number of different ids", ids.size, int(unique(ids)[0].size))
            _check(
                spec,
                "number of ids of this bucket",
                ids.size,
                int((buckets_of(ids, spec.buckets) == self.bucket).sum()),
            )
        return self


@dataclass(frozen=True, slots=True)
class BucketChanges:
    """What has become of one bucket since an earlier copy of it."""

    #: Rows and waiting ids used since then, as they are now.
    contents: BucketContents
    #: Ids removed since then, before those of ``contents`` came.
    deleted: Ids
    waiting_deleted: Ids

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return self.contents.nbytes + self.deleted.nbytes + self.waiting_deleted.nbytes


def _check(spec: TableSpec, what: str, expected: object, actual: object) -> None:
    if expected != actual:
        raise InvalidRequest(
            f"a bucket of table '{spec.name}' has another {what} than the table",
            variable=spec.name,
            expected=str(expected),
            actual=str(actual),
        )
