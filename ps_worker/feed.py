"""Follows a table of a running job from outside: an iterator of changes with a cursor, and a copy that applies them and
says when it has the rows of a published version.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
import xxhash

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.errors import DamagedData, InvalidRequest, NotReady, PsError, Unavailable
from ps_protocol.feed.cursor import Cursor, Cursors, load_cursor, save_cursor
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
    it. The copy equals the rows on the shards once a change that is ``whole`` was applied; with ``wait_for`` any thread
    waits until it has the rows of a published version.
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
        #: Held while anything below or ``cursor`` changes; notified then.
        self._news = threading.Condition()
        #: A change was applied: the cursor is not that of a file, which may be of an earlier job.
        self._has_applied = False
        #: The epoch of the shard map of the last change that was whole.
        self._whole_epoch = 0
        #: What ``follow`` follows; empty: it was not called.
        self._table = ""
        #: How ``follow`` ended: its error, or True; None: it has not.
        self._ended: BaseException | bool | None = None

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
        with self._news:
            self.cursor, self._has_applied = change.cursor, True
            if change.whole:
                self._whole_epoch = int(change.cursor.get("epoch", 0))
            self._news.notify_all()

    def follow(
        self,
        coordinator: str | None,
        table: str,
        model: str = "model",
        *,
        with_state: bool = False,
        reconnect_timeout_seconds: float | None = None,
        security: SecuritySettings | None = None,
    ) -> None:
        """Apply the changes of a table from where this copy is, until the job ends: what a thread of its own calls.

        The arguments are those of ``follow_table``.

        Raises:
            UnknownModel: The job has no such model.
            InvalidRequest: The model has no such table, or this is the copy of another one.
            Unavailable: Coordinator or shards did not answer in time.
        """
        with self._news:
            self._table, self._ended = table, None
        ended: BaseException | bool = True
        try:
            for change in follow_table(
                coordinator,
                table,
                model,
                self.cursor,
                with_state=with_state,
                reconnect_timeout_seconds=reconnect_timeout_seconds,
                security=security,
            ):
                self.apply(change)
        except BaseException as error:
            ended = error
            raise
        finally:
            with self._news:
                self._ended = ended
                self._news.notify_all()

    def wait_for(self, tables: Mapping[str, Cursor], timeout_seconds: float | None = None) -> None:
        """Wait until this copy has every row of a published version as the version has its weights, or newer.

        Another thread applies changes meanwhile. Rows that have been trained since are newer than the weights.

        Args:
            tables: ``tables`` of a version of ``ps_worker.subscribe``, from which the copy takes its own table.
            timeout_seconds: The longest wait. None: until the copy has come so far.

        Raises:
            NotReady: The copy has not come so far in time. It may be called again.
            InvalidRequest: The version has no such table, or is of another job or model.
            StateLost: A shard has lost updates that the version has, so the copy will never have them. The next version
                fits.
            Unavailable: ``follow`` has ended before: the job is over, or the copy was not in time.
            UnknownModel: ``follow`` has ended with it; so with its other errors.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        with self._news:
            while not self._has_reached(tables):
                if self._ended is not None:
                    raise self._end()
                left = None if deadline is None else deadline - time.monotonic()
                if (left is not None and left <= 0) or not self._news.wait(left):
                    raise NotReady(
                        f"the copy of table '{self._name}' has not come to the version in {timeout_seconds:g} s",
                        variable=self._name,
                        remedy="see that a thread applies its changes, or wait longer",
                    )

    @property
    def _name(self) -> str:
        return self._table or str((self.cursor or {}).get("table", ""))

    def _has_reached(self, tables: Mapping[str, Cursor]) -> bool:
        if not (name := self._name):
            return False
        if name not in tables:
            raise InvalidRequest(
                f"the version has no table '{name}', of which this is a copy",
                variable=name,
                expected=", ".join(sorted(tables)) or "a version of a model with tables",
                remedy="subscribe to weights of the model that has the table",
            )
        if self.cursor is None or not self._has_applied:
            return False
        model = str(self.cursor.get("model", ""))
        here = Cursors.of(self.cursor, model, name)
        return here.has_reached(Cursors.of(tables[name], model, name), self._whole_epoch)

    def _end(self) -> BaseException:
        if isinstance(self._ended, PsError):
            return self._ended
        found = Unavailable(
            f"the copy of table '{self._name}' does not follow it any more, and has not come to the version",
            variable=self._name,
            actual="the job is over" if self._ended is True else repr(self._ended)[:200],
        )
        found.__cause__ = self._ended if isinstance(self._ended, BaseException) else None
        return found

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
