"""Follows a table of a running job from outside: an iterator of changes with a cursor, and a copy that applies them."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Self
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
import xxhash

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.errors import DamagedData, InvalidRequest
from ps_protocol.feed.cursor import Cursor, load_cursor, save_cursor
from ps_protocol.feed.reader import Change, Following, TableFeed
from ps_protocol.files import PUBLIC_MODE, replacing
from ps_protocol.model.ids import buckets_of
from ps_protocol.model.tables import Ids
from ps_protocol.security.roles import AccessRole
from ps_protocol.security.security import Security
from ps_protocol.security.settings import SecuritySettings
from ps_worker import copy_kernels
from ps_worker.session.config import WorkerConfig
from ps_worker.session.reporting import log

__all__ = ["Change", "Cursor", "TableCopy", "follow_table", "load_cursor", "save_cursor"]

Floats = npt.NDArray[np.float32]

_FIRST_ROWS = 1024

_ROWS_AT_ONCE = 2048
"""Written or removed before a look-up of another thread has its turn."""


def follow_table(
    coordinator: str | None,
    table: str,
    model: str = "model",
    cursor: Cursor | None = None,
    *,
    with_state: bool = False,
    follow: bool = True,
    reconnect_timeout_seconds: float | None = None,
    security: SecuritySettings | None = None,
) -> Iterator[Change]:
    """Yield the changes of one table on all its shards: first every row, then rows as they are used or removed.

    The rows of one shard come in the order of their last use, with their values at the time of sending; each row comes
    at least once. A reader that applies every change, as ``TableCopy.apply`` does, can continue later from the cursor
    of the last one. After a shard restarts or buckets move, their rows are sent again from the beginning:
    ``Change.reset_buckets`` names these buckets.

    The reader is not a member of the job, and the job never waits for it. The iterator ends when the job ends.

    Args:
        coordinator: Address of the coordinator, host:port. None: ``PS_COORDINATOR``.
        table: Name of the table.
        model: Name of the model that has the table.
        cursor: Position to continue from: ``cursor`` of an earlier change. None: from the beginning.
        with_state: Append the state of the row optimizer to the values of each row.
        follow: Keep following. False: end once every present row was sent.
        reconnect_timeout_seconds: How long to wait for shards and a coordinator that do not answer. None:
            ``PS_RECONNECT_TIMEOUT``, else 60 s.
        security: TLS and tokens. None: from the environment.

    Yields:
        The changes, each of one shard.

    Raises:
        UnknownModel: The job has no such model.
        InvalidRequest: The model has no such table, or ``cursor`` is of another table.
        Unavailable: Coordinator or shards did not answer in time.
    """
    config = WorkerConfig.from_environment(
        os.environ,
        coordinator=coordinator,
        # Whatever this process is otherwise: it may run beside a server, with the TF_CONFIG of that.
        role="evaluator",
        reconnect_timeout_seconds=reconnect_timeout_seconds,
        security=security,
    )
    what = Following(table, model, with_state, follow, config.reconnect_timeout_seconds)
    with CoordinatorClient(config.coordinator, Security(config.security, AccessRole.READER)) as client:
        yield from TableFeed(client, what, cursor, partial(log.warning, "waiting"))


def _checksum(*arrays: npt.NDArray[Any]) -> np.uint64:
    """xxh3_64 over shapes, dtypes and bytes."""
    digest = xxhash.xxh3_64()
    for array in arrays:
        digest.update(f"{array.shape} {array.dtype}".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return np.uint64(digest.intdigest())


class _Turns:
    """A lock that a thread which waits gets before the one that releases it: a plain lock goes to who asks first, and
    a thread that writes one part after another asks again before another one is awake.
    """

    def __init__(self) -> None:
        #: Held by the thread that has the lock next.
        self.next = threading.Lock()
        self._held = threading.Lock()

    def __enter__(self) -> None:
        with self.next:
            self._held.acquire()

    def __exit__(self, *error: object) -> None:
        self._held.release()


class TableCopy:
    """A copy of a table: rows by id in memory, with the position of the last change.

    One thread applies changes and saves the copy. ``rows``, ``has``, ``ids`` and ``len``, the number of rows, may be
    called in any thread meanwhile: they wait for a part of a change at most, and each row is as it was before or after
    it. The copy equals the rows on the shards once a change that is ``whole`` was applied.
    """

    def __init__(self) -> None:
        #: The cursor of the last change applied; None: none was.
        self.cursor: Cursor | None = None
        #: Held while anything below changes.
        self._lock = _Turns()
        self._count = 0
        self._ids: Ids = np.empty(_FIRST_ROWS, np.int64)
        self._rows: Floats = np.empty((_FIRST_ROWS, 0), np.float32)
        self._slots = np.full(2 * _FIRST_ROWS, -1, np.int64)

    def __len__(self) -> int:
        return self._count

    @property
    def ids(self) -> Ids:
        """Ids that have a row, int64 [n], in no order."""
        with self._lock:
            return self._ids[: self._count].copy()

    def apply(self, change: Change) -> None:
        """Apply one change, in the order in which changes come.

        Args:
            change: What ``follow_table`` yielded.

        Raises:
            InvalidRequest: The rows have another width than those of the copy.
        """
        if change.reset_buckets and self._count:
            ids = self._ids[: self._count]
            marked = np.zeros(change.table.buckets, np.bool_)
            marked[list(change.reset_buckets)] = True
            self._remove(ids[marked[buckets_of(ids, marked.size)]])
        self._remove(change.deleted)
        self._write(change.ids, change.rows)
        self.cursor = change.cursor

    def rows(self, ids: npt.ArrayLike, missing: float = 0.0) -> Floats:
        """Return the rows of some ids.

        Args:
            ids: int64 [n].
            missing: Number that fills the rows of ids that have none.

        Returns:
            float32 [n, dim], or [n, width] with the state of the optimizer.
        """
        wanted = np.ascontiguousarray(ids, np.int64)
        with self._lock:
            found = self._find(wanted)
            rows = self._rows[found]
        rows[found < 0] = missing
        return rows

    def has(self, ids: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Return whether each id has a row.

        Args:
            ids: int64 [n].

        Returns:
            bool [n].
        """
        wanted = np.ascontiguousarray(ids, np.int64)
        with self._lock:
            return self._find(wanted) >= 0

    def save(self, path: Path) -> None:
        """Save rows and cursor in one file, atomically.

        Args:
            path: The file; one that exists is replaced.
        """
        with replacing(path, PUBLIC_MODE, durable=False) as file:
            cursor = np.frombuffer(json.dumps(self.cursor).encode(), np.uint8)
            ids, rows = self._ids[: self._count], self._rows[: self._count]
            np.savez(file, ids=ids, rows=rows, cursor=cursor, checksum=_checksum(ids, rows, cursor))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Return the copy that was saved, else an empty one.

        Args:
            path: The file; it need not exist.

        Raises:
            DamagedData: It is not such a file, or was changed.
        """
        copy = cls()
        try:
            with path.open("rb") as file, np.load(file) as arrays:
                ids, rows, cursor = arrays["ids"], arrays["rows"], arrays["cursor"]
                if "checksum" in arrays and arrays["checksum"] != _checksum(ids, rows, cursor):
                    raise ValueError("its checksum differs")
            copy.cursor = json.loads(cursor.tobytes())
        except FileNotFoundError:
            return copy
        except (OSError, EOFError, BadZipFile, ValueError, KeyError, RuntimeError) as error:
            raise DamagedData(
                f"{path} is not a copy of a table",
                expected="a file that TableCopy.save wrote",
                actual=str(error),
                remedy="delete it: the copy then begins from the start",
            ) from error
        copy._write(ids, rows)
        return copy

    def _find(self, ids: Ids) -> npt.NDArray[np.int64]:
        found = np.empty(ids.size, np.int64)
        copy_kernels.find(ids, self._slots, self._ids, found)
        return found

    def _write(self, ids: Ids, rows: Floats) -> None:
        if not ids.size:
            return
        self._make_room(self._count + ids.size, rows.shape[1])
        rows = np.ascontiguousarray(rows)
        found = np.empty(ids.size, np.int64)
        for part in _parts(ids.size):
            with self._lock:
                self._count = copy_kernels.put(ids[part], self._slots, self._ids, self._count, found[part])
                copy_kernels.write(rows[part], found[part], self._rows)

    def _remove(self, ids: Ids) -> None:
        for part in _parts(ids.size):
            with self._lock:
                self._count = copy_kernels.remove(ids[part], self._slots, self._ids, self._count, self._rows)

    def _make_room(self, count: int, width: int) -> None:
        """Make room for ``count`` rows, with slots of which half stay free. Look-ups go on while rows are copied."""
        kept = self._count
        if kept and width != self._rows.shape[1]:
            raise InvalidRequest(
                "rows of another width than those of the copy",
                expected=f"{self._rows.shape[1]} numbers",
                actual=f"{width} numbers",
                remedy="begin a new copy, without a cursor; or follow as before, with or without the optimizer's state",
            )
        ids, rows, slots = self._ids, self._rows, self._slots
        if count > ids.size or width != rows.shape[1]:
            size = max(count, 2 * kept, _FIRST_ROWS)
            ids, rows = np.empty(size, np.int64), np.empty((size, width), np.float32)
            ids[:kept] = self._ids[:kept]
            if kept:
                rows[:kept] = self._rows[:kept]
        if 2 * count > slots.size:
            slots = np.full(4 * (1 << (count - 1).bit_length()), -1, np.int64)
            copy_kernels.fill(kept, slots, ids)
        with self._lock:
            self._ids, self._rows, self._slots = ids, rows, slots


def _parts(count: int) -> Iterator[slice]:
    for begin in range(0, count, _ROWS_AT_ONCE):
        yield slice(begin, begin + _ROWS_AT_ONCE)
