"""What the training loop iterates: batches of the rows of files, leased or in fixed shares."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

from ps_protocol.cluster.leases import LeaseAnswer, LeaseAsk, Span
from ps_protocol.errors import ConfigError, DamagedData
from ps_worker.data.files.columns import (
    ANY,
    HASHED,
    IDS,
    ColumnSpec,
    Decoder,
    Value,
    columns_of,
    cut,
    joined,
    libraries,
)
from ps_worker.data.files.layout import WINDOW_ROWS, FileLayout
from ps_worker.data.files.reader import ReadAhead, Skipped, Stretch, Window, WindowReader
from ps_worker.data.files.sources import Paths, Source, fingerprint_of, found, groups_of, look, other_files
from ps_worker.data.leased_loader import LeasedItems, LeaseFeed
from ps_worker.data.samples import OwnPart, Share
from ps_worker.session.reporting import Progress, log
from ps_worker.session.session import Session

_PARTS_AHEAD = 2
"""Parts that are read: the one that is trained and the next one."""

_ORDER = 1
"""The way in which rows are ordered; another number if that changes, since a job may go on in the middle."""

Batch = dict[str, Value]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Dataset:
    """Files that were looked at, and how they are read."""

    sources: Sequence[Source]
    decoder: Decoder
    layout: FileLayout
    batch_size: int
    drop_last: bool = False
    #: Makes of a batch what the loop gets.
    transform: Callable[[Batch], Any] | None = None
    #: What cannot be read is left out and counted here; None: it raises.
    skipped: Skipped | None = None

    @property
    def rows(self) -> int:
        """Rows of all files; of text files a guess from their beginnings."""
        return self.layout.rows if self.layout.rows is not None else sum(source.guess for source in self.sources)

    @property
    def fingerprint(self) -> str:
        """Checksums by which all workers have the same rows in the same order."""
        forms = {each.text for each in self.sources if each.text is not None}
        texts = sorted((form.delimiter, form.header or (), form.quoted_lines) for form in forms)
        return fingerprint_of(self.sources, f"{_ORDER} {self.layout.window} {self.layout.shuffled} {texts or ''}")

    def seeded(self, seed: int) -> Dataset:
        """The same rows in the order of ``seed``, where they are mixed."""
        groups = groups_of(self.sources)
        return replace(self, layout=FileLayout(groups, seed if self.layout.shuffled else None, self.layout.window))

    def reader(self, on_skip: Callable[[], None]) -> WindowReader:
        """Reads it, from the beginning of any part."""
        return WindowReader(self.sources, self.decoder.columns, self.decoder, self.layout, self.skipped, on_skip)


def dataset(
    paths: Paths,
    columns: Mapping[str, ColumnSpec | str] | Iterable[str] | None,
    batch_size: int,
    *,
    seed: int,
    shuffle: bool | int = True,
    drop_last: bool = False,
    transform: Callable[[Batch], Any] | None = None,
    on_bad_file: str = "raise",
    format: str | None = None,
    delimiter: str | None = None,
    header: Sequence[str] | None = None,
    quoted_lines: bool = False,
) -> Dataset:
    """Look at the files, and lay out their rows. Raises ConfigError, DamagedData; see ``Cluster.files``."""
    if on_bad_file not in ("raise", "skip"):
        raise ConfigError("on_bad_file is unknown", expected="'raise' or 'skip'", actual=repr(on_bad_file))
    for name, value in (("batch_size", batch_size), ("shuffle", shuffle or True)):
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} is no number of rows", expected="1 or more", actual=repr(value))
    if delimiter is not None and not (len(delimiter) == 1 and delimiter.isascii() and delimiter not in '\r\n"'):
        raise ConfigError(
            "delimiter= cannot divide values",
            expected="one ASCII character, no line end or quote",
            actual=repr(delimiter),
        )
    if isinstance(header, str):
        raise ConfigError("header= is not a list of names", expected='header=["id", "x"]', actual=repr(header))
    wanted = columns_of(columns)
    skip = on_bad_file == "skip"
    sources = look(
        found(paths), format=format, delimiter=delimiter, header=header, quoted_lines=quoted_lines, skip=skip
    )
    decoder = _decoder(sources, wanted)
    skipped = Skipped() if skip else None
    checked = [_checked(source, decoder, skipped) for source in sources]
    window = shuffle if shuffle is not True and shuffle else WINDOW_ROWS
    layout = FileLayout(groups_of(checked), seed if shuffle else None, window)
    if not layout.length:
        raise ConfigError("the files have no rows", actual=f"{len(sources)} files", remedy="look at what wrote them")
    return Dataset(checked, decoder, layout, batch_size, drop_last, transform, skipped)


def _decoder(sources: Sequence[Source], wanted: Mapping[str, ColumnSpec] | None) -> Decoder:
    """Decodes all files by the columns of one that has all that is wanted. Raises ConfigError."""
    (arrow,) = libraries()
    schemas = [source.schema for source in sources if source.schema is not None]
    if not schemas:
        raise ConfigError("the files have no rows", actual=f"{len(sources)} files", remedy="look at what wrote them")
    if wanted is None:
        first = next(source for source in sources if source.schema is not None)
        wanted = columns_of(name for name in first.schema.names if name not in first.partitions) or {}
    names = [name for entry in wanted.values() for name in entry.names]

    def known(schema: Any) -> int:
        types = {field.name: field.type for field in schema}
        return sum(name in types and not arrow.types.is_null(types[name]) for name in names)

    best = max(schemas, key=known)
    in_folders = {name for source in sources for name in source.partitions}
    return Decoder(wanted, best if sources[0].text is None else _as_asked(best, wanted, in_folders))


def _as_asked(schema: Any, wanted: Mapping[str, ColumnSpec], but: Collection[str]) -> Any:
    """The schema of a text file, whose values become what is asked for, ``but`` those. Raises ConfigError."""
    (arrow,) = libraries()
    due: dict[str, Any] = {}
    for entry in wanted.values():
        text = entry.kind == HASHED or entry.split is not None
        for name in entry.names:
            if name not in but and (text or entry.kind != ANY):
                type = arrow.large_string() if text else arrow.int64() if entry.kind == IDS else arrow.float64()
                if due.setdefault(name, type) != type:
                    raise ConfigError(
                        f"column '{name}' of a text file is asked for as text and as numbers", remedy="ask for it once"
                    )
    return arrow.schema([arrow.field(field.name, due.get(field.name, field.type)) for field in schema])


def _checked(source: Source, decoder: Decoder, skipped: Skipped | None) -> Source:
    """``source``, without groups if it cannot be read and is to be left out. Raises DamagedData."""
    error = source.error
    if error is None and source.schema is not None:
        try:
            if source.text is None:
                decoder.check(source.schema, str(source.path))
            else:
                decoder.check_names(source.schema, str(source.path))
        except DamagedData as found_error:
            error = found_error
    if error is None:
        return source
    if skipped is None:
        raise error
    skipped.groups += 1
    skipped.rows += sum(rows or 0 for rows, _ in source.groups)
    skipped.reasons[str(source.path)] = error.message
    log.warning("data.skipped", "left out: %s", error)
    return replace(source, groups=(), error=error, checksum="left out")


@dataclass(slots=True)
class _Made:
    """One batch."""

    batch: Batch
    rows: int
    #: Positions of the epoch that count as trained with it.
    positions: int


class _Batcher:
    """Cuts windows into batches."""

    def __init__(self, batch_size: int) -> None:
        self._size = batch_size
        self._windows: deque[tuple[Window, int]] = deque()
        self.rows = 0
        #: Positions without rows before the next row.
        self._passed = 0

    def add(self, window: Window) -> None:
        """More rows."""
        if not window.rows:
            self._passed += window.positions if not self._windows else 0
            if self._windows:
                last, taken = self._windows[-1]
                self._windows[-1] = replace(last, positions=last.positions + window.positions), taken
            return
        self._windows.append((window, 0))
        self.rows += window.rows

    def take(self) -> _Made:
        """The next batch: as many rows as it has, or all that there are."""
        left = min(self._size, self.rows)
        made = _Made({}, left, self._passed)
        self._passed = 0
        parts: list[Mapping[str, Value]] = []
        while left:
            window, at = self._windows.popleft()
            end = min(window.rows, at + left)
            parts.append({name: cut(value, at, end) for name, value in window.columns.items()})
            made.positions += end - at
            left -= end - at
            if end < window.rows:
                self._windows.appendleft((window, end))
            else:
                made.positions += window.positions - window.rows
        self.rows -= made.rows
        made.batch = {name: joined([part[name] for part in parts]) for name in parts[0]}
        return made


class Stretches(ABC):
    """Where the stretches of an epoch come from, and who is told of what was trained. Used by the training thread."""

    @abstractmethod
    def begin(self) -> None:
        """Begin the next epoch."""

    @abstractmethod
    def next(self, *, now: bool) -> Stretch | None:
        """The next stretch; None if there is none at present. ``now``: only one that need not be waited for."""

    @abstractmethod
    def wait(self) -> bool:
        """Wait until there is one; False at the end of the epoch."""

    @abstractmethod
    def note(self, positions: int) -> None:
        """The next positions of the stretches were read."""

    @abstractmethod
    def handed_out(self, positions: int) -> None:
        """The loop gets a batch: the oldest positions that were read."""

    @abstractmethod
    def trained(self, positions: int | None) -> None:
        """The loop has finished the oldest positions that were read; None: all of them."""

    @abstractmethod
    def end(self) -> None:
        """The iteration ends. Safe to repeat."""

    @abstractmethod
    def start_epochs(self, first: int) -> None:
        """The next epoch is ``first``."""

    @property
    @abstractmethod
    def workers(self) -> int:
        """Among how many an epoch is divided."""


class ShareStretches(Stretches):
    """Every n-th part of an epoch: for one process, an evaluator, or a fixed split."""

    def __init__(self, layout: FileLayout, share: Share, epochs: Iterator[int]) -> None:
        self._layout, self._share, self._epochs = layout, share, epochs
        self._left: Iterator[Stretch] = iter(())

    def begin(self) -> None:
        """See Stretches."""
        epoch = next(self._epochs)
        own, unit = self._layout.order(epoch)[self._share.rank :: self._share.world_size], self._layout.unit
        self._left = (Stretch(run, epoch, first, first + unit) for run, first in own)

    def next(self, *, now: bool) -> Stretch | None:
        """See Stretches."""
        return next(self._left, None)

    def wait(self) -> bool:
        """See Stretches."""
        return False

    def note(self, positions: int) -> None:
        """See Stretches: nobody is told."""

    def handed_out(self, positions: int) -> None:
        """See Stretches: nobody is told."""

    def trained(self, positions: int | None) -> None:
        """See Stretches: nobody is told."""

    def end(self) -> None:
        """See Stretches."""
        self._left = iter(())

    def start_epochs(self, first: int) -> None:
        """See Stretches."""
        self._epochs = itertools.count(first)

    @property
    def workers(self) -> int:
        """See Stretches."""
        return self._share.world_size


class LeasedRows(LeasedItems):
    """The parts of files that this worker leases: one at a time, so that one that is killed loses no more."""

    def __init__(self, data: Dataset, name: str, session: Session, epochs: Iterator[int]) -> None:
        layout = data.layout
        self.data = data
        ask = LeaseAsk(
            name,
            layout.length,
            epoch=0,
            lease_items=layout.unit,
            sequence=0,
            batch_items=layout.unit,
            fingerprint=data.fingerprint,
        )
        super().__init__(ask, session, epochs)

    @property
    def workers(self) -> int:
        """Live workers."""
        return len(self._session.workers)

    def _call(self, ask: LeaseAsk, wait_seconds: float, timeout_seconds: float) -> LeaseAnswer:
        answer = super()._call(ask, wait_seconds, timeout_seconds)
        if answer.fingerprint:
            raise other_files(self.data.sources, ask.fingerprint, answer.fingerprint, ask.dataset)
        return answer


class LeasedStretches(Stretches):
    """Parts that the coordinator leases."""

    def __init__(self, rows: LeasedRows, idle: Callable[[], AbstractContextManager[None]]) -> None:
        """``idle()`` is entered while the loop waits for rows that others have."""
        self._rows, self._idle = rows, idle
        self._layout = rows.data.layout
        self._feed: LeaseFeed | None = None
        self._order: tuple[int, list[tuple[int, int]]] = (-1, [])
        #: Of a lease that has rows of several parts.
        self._stretches: deque[Stretch] = deque()
        #: Positions that are read next.
        self._coming: deque[Span] = deque()

    def begin(self) -> None:
        """See Stretches."""
        self._stretches.clear()
        self._coming.clear()
        self._feed = self._rows.begin()

    def next(self, *, now: bool) -> Stretch | None:
        """See Stretches."""
        feed = self._feed
        if not self._stretches and feed is not None and (feed.ready or not now):
            lease = feed.take()
            if lease is not None:
                self._coming.append(lease)
                self._stretches.extend(self._in_parts(lease, feed.lease_epoch))
        return self._stretches.popleft() if self._stretches else None

    def wait(self) -> bool:
        """See Stretches."""
        return self._feed is not None and self._rows.wait_for_items(self._feed, self._idle)

    def note(self, positions: int) -> None:
        """See Stretches."""
        while positions:
            span = self._coming.popleft()
            part = Span(span.begin, min(span.end, span.begin + positions))
            if part.end < span.end:
                self._coming.appendleft(Span(part.end, span.end))
            self._rows.note(part)
            positions -= len(part)

    def handed_out(self, positions: int) -> None:
        """See Stretches."""
        self._rows.handed_out(positions)

    def trained(self, positions: int | None) -> None:
        """See Stretches."""
        if self._feed is not None:
            self._rows.trained(self._feed, positions)

    def end(self) -> None:
        """See Stretches."""
        feed, self._feed = self._feed, None
        if feed is not None:
            self._rows.end(feed)

    def start_epochs(self, first: int) -> None:
        """See Stretches."""
        self._rows.start_epochs(first)

    @property
    def workers(self) -> int:
        """See Stretches."""
        return self._rows.workers

    def _in_parts(self, lease: Span, epoch: int) -> Iterator[Stretch]:
        if self._order[0] != epoch:
            self._order = epoch, self._layout.order(epoch)
        unit = self._layout.unit
        for place in range(lease.begin // unit, -(-lease.end // unit)):
            run, first = self._order[1][place]
            begin, end = max(lease.begin - place * unit, 0), min(lease.end - place * unit, unit)
            yield Stretch(run, epoch, first + begin, first + end)


class Taken(Generic[T]):
    """A batch that was taken before the loop gets it. Used by the training thread."""

    def __init__(
        self, batch: T, handed_out: Callable[[], None] = lambda: None, finished: Callable[[], None] = lambda: None
    ) -> None:
        """``handed_out`` is to be called when the loop gets it, ``finished`` when the loop asks for the next one."""
        self.batch, self.handed_out, self.finished = batch, handed_out, finished


class FileBatches(OwnPart, Iterable[Any]):
    """What ``Cluster.files`` returns: batches of the rows of files. Used by the training loop.

    Each iteration is the next epoch, and ends one that is still open. A batch is a dict of tensors by name, or what
    ``transform`` makes of it, of ``batch_size`` rows; a worker's last batch before it has to wait for others, or before
    the end, may have fewer. ``len()`` is an estimate: the batches of an equal part among the live workers.
    """

    def __init__(self, data: Dataset, stretches: Stretches, progress: Progress | None = None) -> None:
        """``progress`` counts rows, waits and what is left out."""
        self._data, self._stretches, self._progress = data, stretches, progress
        if progress is not None and data.skipped is not None:
            progress.counters.skipped_groups += data.skipped.groups
        #: Batches that were taken and not finished, of the iteration that is open.
        self._out = 0
        self._open: object = None

    @property
    def data(self) -> Dataset:
        """All rows, and how they are read."""
        return self._data

    @property
    def split(self) -> bool:
        """Whether this is a worker's part of the rows, from ``Cluster.files``; ``files.read`` has all of them."""
        return self._progress is not None

    @property
    def leased(self) -> bool:
        """Whether the coordinator leases the rows of this part."""
        return isinstance(self._stretches, LeasedStretches)

    @property
    def whole(self) -> object:
        """The files."""
        return self._data.sources

    @property
    def own_length(self) -> int | None:
        """About how many rows this part has."""
        return self.rows // max(1, self._stretches.workers)

    @property
    def rows(self) -> int:
        """Rows of all files; of text files a guess from their beginnings."""
        return self._data.rows

    @property
    def files(self) -> list[str]:
        """The files, in their order."""
        return [str(source.path) for source in self._data.sources]

    @property
    def skipped(self) -> Mapping[str, str]:
        """What this process left out, and why: by file, or file and row group."""
        return dict(self._data.skipped.reasons) if self._data.skipped is not None else {}

    def __len__(self) -> int:
        rows = -(-self._data.rows // max(1, self._stretches.workers))
        return rows // self._data.batch_size if self._data.drop_last else -(-rows // self._data.batch_size)

    def __iter__(self) -> Iterator[Any]:
        for taken in self.taken():
            if taken is not None:
                taken.handed_out()
                yield taken.batch
                taken.finished()

    def start_epochs(self, first: int) -> None:
        """The next iteration is epoch ``first``, and those after it the epochs that follow."""
        self._stretches.start_epochs(first)

    def taken(self) -> Iterator[Taken[Any] | None]:
        """The batches of the next epoch, for who takes one before the loop has finished that before it.

        None: there is none at present, and there may be some once the loop has finished those that were taken.
        """
        stretches, batcher = self._stretches, _Batcher(self._data.batch_size)
        self._out = 0
        mine = self._open = object()
        stretches.begin()
        reader = ReadAhead(self._data.reader(self._count_skip).windows)
        try:
            while self._open is mine:
                self._ask(reader)
                while batcher.rows < self._data.batch_size and reader.stretches:
                    window = self._wait_for(reader)
                    stretches.note(window.positions)
                    batcher.add(window)
                    self._ask(reader)
                if batcher.rows >= self._data.batch_size or (batcher.rows and not self._data.drop_last):
                    self._out += 1
                    made = batcher.take()
                    transform = self._data.transform
                    batch = transform(made.batch) if transform is not None else made.batch
                    yield Taken(batch, partial(self._hand_out, mine, made), partial(self._finish, mine, made))
                elif self._out:
                    yield None
                else:
                    # Rows that drop_last omits count as trained, as do positions without rows.
                    batcher = _Batcher(self._data.batch_size)
                    stretches.trained(None)
                    if not stretches.wait():
                        break
        finally:
            reader.close()
            if self._open is mine:
                self._open = None
                stretches.end()
        self._say_skipped()

    def _ask(self, reader: ReadAhead) -> None:
        """Have the reader read the next part, too."""
        while reader.stretches < _PARTS_AHEAD:
            stretch = self._stretches.next(now=reader.stretches > 0)
            if stretch is None:
                return
            reader.ask(stretch)

    def _wait_for(self, reader: ReadAhead) -> Window:
        if reader.ready or self._progress is None:
            return reader.take()
        began = time.perf_counter()
        try:
            return reader.take()
        finally:
            self._progress.counters.data_wait_seconds += time.perf_counter() - began

    def _hand_out(self, of: object, made: _Made) -> None:
        if self._open is not of:
            return
        self._stretches.handed_out(made.positions)
        if self._progress is not None:
            self._progress.record_samples(made.rows)

    def _finish(self, of: object, made: _Made) -> None:
        if self._open is not of:
            return
        self._stretches.trained(made.positions)
        self._out -= 1

    def _count_skip(self) -> None:
        if self._progress is not None:
            self._progress.counters.skipped_groups += 1

    def _say_skipped(self) -> None:
        skipped = self._data.skipped
        if skipped is not None and skipped.groups:
            log.warning(
                "data.skipped",
                "%d files or row groups with %d known rows were left out by this process so far, the first: %s",
                skipped.groups,
                skipped.rows,
                next(iter(skipped.reasons.values())),
            )
