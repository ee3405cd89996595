"""Owns one table on one shard: its rows, the ids that wait for one, and what has changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ps_protocol.errors import InvalidRequest, TableFull
from ps_protocol.model.ids import buckets_of, unique
from ps_protocol.model.tables import Eviction, Ids, TableSpec
from ps_server.tables.bucket_contents import BucketChanges, BucketContents
from ps_server.tables.changes import Changes
from ps_server.tables.initial import InitialRows
from ps_server.tables.invalid import has_duplicates
from ps_server.tables.paged_rows import KeptRows, PagedRows
from ps_server.tables.retention import Calendar, Sweep, admitted
from ps_server.tables.row_memory import RowMemory
from ps_server.tables.row_optimizers import update
from ps_server.tables.saves import SavedBuckets, TableSave
from ps_server.tables.step import RowStep
from ps_server.tables.store import Columns, RowStore
from ps_server.tables.waiting import WaitingIds

Floats = npt.NDArray[np.float32]
#: For each bucket of the table, whether its ids are skipped.
Skip = npt.NDArray[np.bool_] | None

_NO_IDS: Ids = np.empty(0, np.int64)


class ShardTable:
    """One table on one shard. Owned by optimizers.Replica; called by the shard's executor only, one call at a time.

    The same calls in the same order on the same state give the same rows, bit by bit. A row depends on its id and on
    the updates of that id; not on its place in memory, on other rows, or on which buckets are here. Methods that change
    something check nothing: call ``check_here``, ``room_for`` and the functions of ``merge`` first.
    """

    def __init__(self, spec: TableSpec, buckets: Sequence[int], memory: RowMemory | None = None) -> None:
        """``buckets``: those that are here; ``spec`` is valid. ``memory``: where rows are above a limit of all tables,
        or of this one.

        Raises TableFull when there is no address space.
        """
        life = spec.life
        self.spec = spec
        #: The number of the last update in which the table took part, here or elsewhere.
        self.updates = 0
        #: What the newest snapshot has; None: it may be anything.
        self.saved: SavedBuckets | None = None
        #: Rows that were added by updates and loads, that expired, and that were evicted, since this object was made.
        self.inserted = self.expired = self.evicted = 0
        self._here = np.zeros(spec.buckets, np.bool_)
        self._here[list(buckets)] = True
        if memory is None and life.memory_bytes:
            memory = RowMemory()
        elif memory is not None and not memory.limit_bytes and not life.memory_bytes:
            memory = None
        self._store = RowStore(spec.buckets, spec.width, with_uses=life.counts_uses, memory=memory, name=spec.name)
        self._admits_all = life.admit_after <= 1 and life.admit_probability in (0, 1)
        self._waiting = WaitingIds(spec.buckets) if life.admit_after > 1 else None
        self._initial = InitialRows(spec)
        self._changes = Changes(spec.buckets)
        self._limit_memory()
        self._calendar = Calendar(life)
        self._sweep = Sweep(self._store, life.eviction)

    def _limit_memory(self) -> None:
        if self.paged is not None:
            self.paged.limit_bytes = self.spec.life.memory_bytes * int(self._here.sum()) // self.spec.buckets

    # -- sizes

    @property
    def rows(self) -> int:
        """Rows that are here."""
        return self._store.count

    @property
    def waiting(self) -> int:
        """Ids that have been used and have no row yet."""
        return len(self._waiting) if self._waiting is not None else 0

    @property
    def size_bytes(self) -> int:
        """Bytes of rows, ids and maps, in memory and on disk."""
        return self._store.size_bytes + (self._waiting.size_bytes if self._waiting is not None else 0)

    @property
    def paged(self) -> PagedRows | None:
        """What brings rows to memory; None: all are there."""
        return self._store.paged

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory."""
        on_disk = 4 * self.spec.width * self.rows - self.paged.size_bytes if self.paged else 0
        return self.size_bytes - on_disk

    @property
    def on_disk(self) -> int:
        """Rows that are not in memory."""
        return self.paged.on_disk if self.paged else 0

    @property
    def share(self) -> int:
        """The most rows that the buckets here may have together; 0: as many as fit."""
        return self.spec.life.max_rows * int(self._here.sum()) // self.spec.buckets

    @property
    def ages(self) -> bool:
        """Whether rows or waiting ids may ever expire or be evicted."""
        life = self.spec.life
        limited = life.max_rows and (life.eviction is not Eviction.REFUSE or self._waiting is not None)
        return bool(life.expire_after_updates or life.expire_after_seconds or limited)

    # -- checks, before anything changes

    def check_here(self, ids: Ids) -> None:
        """Raises InvalidRequest for an id whose bucket is on another shard."""
        if self._here.all():
            return
        here = self._here[buckets_of(ids, self.spec.buckets)]
        if not here.all():
            wrong = ids[np.flatnonzero(~here)[:1]]
            raise InvalidRequest(
                "an id is of a bucket that another shard holds",
                variable=self.spec.name,
                expected=f"ids of the {int(self._here.sum())} buckets that are here, of {self.spec.buckets}",
                actual=f"id {wrong[0]}, bucket {buckets_of(wrong, self.spec.buckets)[0]}",
                remedy="send ids to the shard that the shard map says",
            )

    def room_for(self, ids: Ids, *, loading: bool = False) -> None:
        """Raises TableFull when a push, or a load, of ``ids`` would add more rows than allowed.

        Only the policy REFUSE limits them here; with the others they have to fit into memory.
        """
        refuses = self.spec.life.max_rows and self.spec.life.eviction is Eviction.REFUSE
        if not refuses and self._store.count + ids.size <= self._store.capacity:
            return
        new = ids[self._store.find(ids) < 0]
        coming = new.size if loading else int(self._admitted(new, self.updates + 1).sum())
        self._store.room_for(coming)
        if refuses and coming and self._store.count + coming > self.share:
            raise TableFull(
                "a table has as many rows as it may, and refuses new ones; nothing was applied",
                variable=self.spec.name,
                expected=f"at most {self.share} rows in the buckets of this shard, of {self.spec.life.max_rows}",
                actual=f"{self._store.count} and {coming} new ones",
                remedy="raise max_rows, let rows expire, or choose an eviction policy",
            )

    # -- reading

    def look_up(self, ids: Ids, out: Floats) -> None:
        """The values of ``ids``, float32 [n, dim], into ``out``; initial values where there is no row."""
        if (missing := self._store.look_up(ids, out)).size:
            self._initial.values(ids[missing], missing, out)

    # -- before a push

    def prepare(self, ids: Ids) -> bool:
        """Do a part of what a push of ``ids``, which were just looked up, would have to do; whether more is left."""
        return self._store.prepare(ids) and self._admits_all

    def memory_ahead(self, ids: Ids) -> Callable[[], None] | None:
        """What gets memory for the rows of a push of ``ids``, which were just looked up, before it needs them.

        To be called in any thread; None: nothing is to be done.
        """
        return self._store.memory_ahead(ids) if self._admits_all else None

    def has_duplicates(self, ids: Ids) -> bool:
        """Whether an id comes more than once."""
        return not self._store.are_distinct(ids) and has_duplicates(ids)

    # -- changing

    def apply(self, step: RowStep, scale: float = 1.0, skip: Skip = None) -> None:
        """Make one update: admitted ids get rows, then the optimizer runs on the rows of all ids that have one.

        ``scale`` multiplies the learning rate. ``skip``: buckets that contain the update already.
        """
        self.updates = step.updates
        ids, gradients = step.ids, step.gradients
        if skip is not None:
            left = ~skip[buckets_of(ids, self.spec.buckets)]
            ids, gradients = ids[left], gradients[left]
        found = self._rows_for(ids) if self._admits_all else self._admit(ids)
        rows = found if self._admits_all else found[found >= 0]
        self._store.touch(rows, step.updates)
        for piece in self._store.pieces(found.size):
            update(self.spec, self._store.rows, self._store.places(found[piece]), gradients[piece], step, scale)

    def load(self, ids: Ids, rows: Floats, with_state: bool, only_new: bool, skip: Skip = None) -> int:
        """Write rows, float32 [n, dim], or [n, width] ``with_state``; returns how many.

        Of a duplicate id the last row counts. ``only_new``: existing rows are not changed. Without state, a row gets
        initial state. Admission does not apply.
        """
        if skip is not None:
            left = ~skip[buckets_of(ids, self.spec.buckets)]
            ids, rows = ids[left], rows[left]
        different, places = unique(ids)
        if different.size != ids.size:
            last = np.empty(different.size, np.int64)
            last[places] = np.arange(ids.size)
            ids, rows = different, rows[last]
        if only_new:
            new = self._store.find(ids) < 0
            ids, rows = ids[new], rows[new]
        found = self._rows_for(ids)
        for piece in self._store.pieces(found.size):
            places = self._store.places(found[piece])
            self._initial.state(places, self._store.rows)
            self._store.rows[places, : rows.shape[1]] = rows[piece]
        self._store.touched[found] = self.updates
        self._changes.arrive(np.unique(buckets_of(ids, self.spec.buckets)))
        return int(ids.size)

    def drop(self, ids: Ids, waiting_ids: Ids, skip: Skip = None) -> None:
        """Remove rows and waiting ids; those that do not exist are ignored."""
        if skip is not None:
            ids = ids[~skip[buckets_of(ids, self.spec.buckets)]]
            waiting_ids = waiting_ids[~skip[buckets_of(waiting_ids, self.spec.buckets)]]
        ids = unique(ids)[0]
        ids = ids[self._store.find(ids) >= 0]
        self._store.remove(ids)
        self._changes.delete(ids)
        if self._waiting is not None:
            self._waiting.drop(waiting_ids)

    def to_drop(self, now_seconds: float, keep: Ids) -> tuple[Ids, Ids]:
        """Some rows and some waiting ids to drop now, a bounded number, none of ``keep``; counted as dropped.

        Call it again until it returns nothing. ``now_seconds`` is of any one clock.
        """
        through = self._calendar.expired_through(now_seconds, self.updates)
        kept = self._store.find(keep)
        kept = kept[kept >= 0]
        rows = self._sweep.expired(through, kept)
        self.expired += rows.size
        if not rows.size and self.share and self.spec.life.eviction is not Eviction.REFUSE:
            rows = self._sweep.evicted(self.share, kept)
            self.evicted += rows.size
        waiting = _NO_IDS if self._waiting is None else self._waiting.to_drop(through, self.share, keep)
        return self._store.ids[rows], waiting

    def _admitted(self, ids: Ids, updates: int) -> npt.NDArray[np.bool_]:
        uses = np.zeros(ids.size, np.uint32) if self._waiting is None else self._waiting.uses_of(ids)
        return admitted(self.spec.life, self.spec.seed, ids, uses, updates)

    def _admit(self, ids: Ids) -> npt.NDArray[np.int64]:
        """One use of ``ids``: the row of each, a new one where it is admitted, -1 where it is not."""
        found = self._store.find(ids)
        missing = np.flatnonzero(found < 0)
        comes = self._admitted(ids[missing], self.updates)
        coming = missing[comes]
        found[coming] = self._rows_for(ids[coming])
        if self._waiting is not None:
            self._waiting.use(ids[missing[~comes]], self.updates)
        return found

    def _rows_for(self, ids: Ids) -> npt.NDArray[np.int64]:
        """The row of each id; a new one with initial values if there was none."""
        first = self._store.count
        found = self._store.insert(ids, self.updates)
        rows = np.arange(first, self._store.count)
        if rows.size:
            new = self._store.ids[first : self._store.count]
            for piece in self._store.pieces(rows.size):
                places = self._store.places(rows[piece])
                self._initial.values(new[piece], places, self._store.rows)
                self._initial.state(places, self._store.rows)
            self.inserted += rows.size
            if self._waiting is not None:
                uses = self._waiting.admit(new)
                if self._store.uses.size:
                    self._store.uses[rows] = uses
        return found

    # -- whole buckets

    def contents(self, bucket: int, since: int = -1) -> BucketContents:
        """A consistent copy of a bucket; it does not depend on what happened to other rows. ``since``: only what was
        used after this update.
        """
        held = self._store.copy(self._store.of_bucket(bucket, since))
        waiting = None if self._waiting is None else self._waiting.copy(bucket, since)
        others = (waiting.ids, waiting.touched, waiting.uses) if waiting else (_NO_IDS, _NO_IDS, np.empty(0, np.uint32))
        return BucketContents(bucket, self.updates, held.ids, held.touched, held.rows, held.uses, *others)

    def put(self, contents: BucketContents) -> None:
        """Replace the contents of a bucket. Raises the table's count of updates to that of ``contents``."""
        self.forget(contents.bucket)
        self._here[contents.bucket] = True
        self._limit_memory()
        self.updates = max(self.updates, contents.updates)
        self._store.write(Columns(contents.ids, contents.touched, contents.rows, contents.uses))
        if self._waiting is not None:
            self._waiting.write(contents.waiting_ids, contents.waiting_touched, contents.waiting_uses)
        self._changes.arrive([contents.bucket])

    def put_changes(self, changes: BucketChanges) -> None:
        """Bring a bucket from an earlier copy to a later one."""
        contents = changes.contents
        self.updates = max(self.updates, contents.updates)
        gone = unique(np.concatenate((changes.deleted, contents.ids)))[0]
        self._store.remove(gone[self._store.find(gone) >= 0])
        self._store.write(Columns(contents.ids, contents.touched, contents.rows, contents.uses))
        if self._waiting is not None:
            waiting = contents.waiting_ids, contents.waiting_touched, contents.waiting_uses
            self._waiting.put(*waiting, np.concatenate((changes.waiting_deleted, gone)))
        self._changes.arrive([contents.bucket])

    def save(self, since: SavedBuckets | None) -> TableSave:
        """What copies all buckets for a snapshot: what has changed ``since`` an earlier one, or everything."""
        return TableSave(self, since, self._changes, self._waiting.dropped if self._waiting is not None else None)

    def forget(self, bucket: int) -> None:
        """Remove a bucket and what it holds."""
        self._store.remove(self.ids_of(bucket))
        if self._waiting is not None:
            self._waiting.forget(bucket)
        self._here[bucket] = False
        self._limit_memory()

    # -- changes, for feeds and incremental checkpoints

    @property
    def changes(self) -> int:
        """Number of the last deletion of a row or arrival of a bucket."""
        return self._changes.number

    @property
    def arrived(self) -> npt.NDArray[np.int64]:
        """Of each bucket: the change by which it was last written from outside, 0: never. int64 [buckets]."""
        return self._changes.arrived

    def deletions_since(self, change: int) -> Ids | None:
        """Ids of rows dropped after this change, in order; None when that is no longer known."""
        return self._changes.deletions_since(change)

    @property
    def waiting_changes(self) -> int:
        """Number of the last waiting id that was dropped."""
        return 0 if self._waiting is None else self._waiting.dropped.number

    def waiting_deletions_since(self, change: int) -> Ids | None:
        """Waiting ids dropped after this change, in order; None when that is no longer known.

        Ids that got a row are not among them: these are among the rows, or the deletions.
        """
        return _NO_IDS if self._waiting is None else self._waiting.dropped.deletions_since(change)

    @property
    def here(self) -> npt.NDArray[np.bool_]:
        """Of each bucket: whether it is here."""
        return self._here

    def views(self) -> tuple[Columns, Columns]:
        """All rows and all waiting ids, in the order of memory: not copied, valid until the next change."""
        nothing = Columns(_NO_IDS, _NO_IDS, np.empty((0, 0), np.float32), np.empty(0, np.uint32))
        return self._store.view(), nothing if self._waiting is None else self._waiting.view()

    def keep_values(self, rows: npt.NDArray[np.int64] | None) -> KeptRows | None:
        """Values and state of these rows, None: of all, as they are now, to be read later, where rows may be on disk;
        None where all are in ``views``.
        """
        return self._store.keep(rows)

    def changed(self, begin: int, end: int, since: int) -> npt.NDArray[np.int64]:
        """Of rows [begin, end) those used after update ``since``, rising.

        A row's number is valid until the next change of the table. A dropped row is replaced by the last one: a reader
        that goes from the last row to the first, with changes in between, misses no row that exists throughout.
        """
        return begin + np.flatnonzero(self._store.touched[begin : min(end, self.rows)] > since)

    def last_uses(self, rows: npt.NDArray[np.int64]) -> tuple[Ids, npt.NDArray[np.int64]]:
        """Ids of these rows, and the update of each one's last use."""
        return self._store.ids[rows], self._store.touched[rows]

    def ids_of(self, bucket: int) -> Ids:
        """Ids that have a row in a bucket, rising."""
        return self._store.ids[self._store.of_bucket(bucket)]

    def copy_ids(self, ids: Ids) -> Columns:
        """Ids, last uses, values with state, and uses of those of ``ids`` that have a row, in their order."""
        found = self._store.find(ids)
        return self._store.copy(found[found >= 0])


def warm_up(spec: TableSpec) -> None:
    """Load everything that a table of this kind needs, so that serving never waits for it."""
    table = ShardTable(spec, range(spec.buckets))
    ids = np.arange(2)
    table.room_for(ids)
    table.apply(RowStep(0, ids, np.zeros((2, spec.dim), np.float32), 1, spec.options))
    table.look_up(ids, np.empty((2, spec.dim), np.float32))
    table.load(ids, np.zeros((2, spec.dim), np.float32), with_state=False, only_new=False)
    bucket = int(buckets_of(ids, spec.buckets)[0])
    table.put(table.contents(bucket))
    table.drop(ids, ids)
    table.to_drop(0.0, ids)
