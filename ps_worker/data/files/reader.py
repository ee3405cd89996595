"""Reads and decodes the rows of leased parts, in a thread beside the training loop."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ps_protocol.errors import DamagedData
from ps_protocol.interruptible import next_item
from ps_worker.data.files.columns import ColumnSpec, Decoder, RowPlace, Value, cut, libraries
from ps_worker.data.files.formats import FileReader, GroupRows
from ps_worker.data.files.layout import FileLayout, Group, Run
from ps_worker.data.files.sources import Source
from ps_worker.session.reporting import log

WINDOWS_AHEAD = 2
"""Windows that are decoded before the loop needs them."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Rows [begin, end) of a run, in the order of an epoch, as a lease has them; ``end`` may be beyond its last row."""

    run: int
    epoch: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Window:
    """Decoded rows in the order in which they are trained."""

    columns: Mapping[str, Value]
    rows: int
    #: Positions of the epoch that they take: more than rows at the end of a part.
    positions: int
    #: The stretch ends with it.
    last: bool


@dataclass(frozen=True, slots=True)
class _Decoded:
    """A whole window."""

    columns: Mapping[str, Value]
    #: In the files.
    rows: int
    #: Of these, those that could be read.
    kept: int


@dataclass(slots=True)
class Skipped:
    """What was left out since it could not be read. Written by the reading thread."""

    #: Files and row groups.
    groups: int = 0
    #: Rows in them, as far as they are known.
    rows: int = 0
    #: Why, by place.
    reasons: dict[str, str] = field(default_factory=dict)


class WindowReader:
    """Decodes stretches into windows, in the thread that calls it."""

    def __init__(
        self,
        sources: Sequence[Source],
        columns: Mapping[str, ColumnSpec],
        decoder: Decoder,
        layout: FileLayout,
        skipped: Skipped | None,
        on_skip: Callable[[], None] = lambda: None,
    ) -> None:
        """``skipped``: counts what cannot be read, which is then left out; None: it raises DamagedData."""
        (self._arrow,) = libraries()
        self._reader = FileReader(sources, columns, layout.window)
        self._decoder = decoder
        self._layout = layout
        self._skipped = skipped
        self._on_skip = on_skip
        #: The window that was decoded last, by epoch, run and number.
        self._kept: tuple[tuple[int, int, int], _Decoded] | None = None

    def windows(self, stretch: Stretch) -> Iterator[Window]:
        """The windows of ``stretch``, at least one. Raises DamagedData."""
        size = self._layout.window
        number = stretch.begin // size
        at, done = number * size, stretch.begin
        waiting: Window | None = None
        for window in self._whole_windows(stretch, number):
            if waiting is not None:
                yield waiting
            first, end = max(0, stretch.begin - at), min(window.rows, stretch.end - at)
            # Of rows that cannot be read and are left out, only the places are there.
            begin, beyond = min(first, window.kept), window.kept if end == window.rows else min(end, window.kept)
            taken = {name: cut(value, begin, beyond) for name, value in window.columns.items()}
            waiting = Window(taken, max(0, beyond - begin), max(0, end - first), last=False)
            done += waiting.positions
            at += window.rows
            if at >= stretch.end:
                break
        if waiting is None:
            yield Window({}, 0, stretch.end - done, last=True)
        else:
            yield Window(waiting.columns, waiting.rows, waiting.positions + stretch.end - done, last=True)

    def _whole_windows(self, stretch: Stretch, first: int) -> Iterator[_Decoded]:
        """The windows of a run from number ``first`` on. The last one is kept: the next part may begin in it."""
        size = self._layout.window
        key = stretch.epoch, stretch.run, first
        if self._kept is not None and self._kept[0] == key:
            yield self._kept[1]
            if self._kept[1].rows < size:
                return
            key = stretch.epoch, stretch.run, first + 1
        self._kept = None
        rows = self._rows(self._layout.runs[stretch.run], key[2] * size)
        for number, window in enumerate(_in_windows(rows, size), key[2]):
            columns, kept = self._decoded(window, stretch, number)
            made = _Decoded(columns, sum(len(each.data) for each in window), kept)
            self._kept = (stretch.epoch, stretch.run, number), made
            yield made

    def _rows(self, run: Run, begin: int) -> Iterator[GroupRows]:
        """The rows of a run from ``begin`` on; the places of those that cannot be read if these are left out."""
        for group in run:
            if group.rows is not None and begin >= group.rows:
                begin -= group.rows
                continue
            at, begin = begin, 0
            try:
                for rows in self._reader.read(group, at):
                    at += len(rows.data)
                    yield rows
            except DamagedData as error:
                if self._skipped is None:
                    raise
                missing = 0 if group.rows is None else group.rows - at
                self._leave_out(self._skipped, group, missing, error)
                if missing:
                    yield GroupRows(_Missing(missing), group, at)

    def _decoded(self, window: Sequence[GroupRows], stretch: Stretch, number: int) -> tuple[dict[str, Value], int]:
        """The rows of a window in their order, and their number."""
        whole = [each for each in window if not isinstance(each.data, _Missing)]
        rows = sum(len(each.data) for each in whole)
        if not rows:
            return self._decoder.nothing(), 0
        order = self._layout.mixed(stretch.epoch, stretch.run, number, rows)
        table = self._table(whole)
        try:
            return self._decoder.decode(
                table, order, RowPlace(self._reader.place(whole[0].group), whole[0].first)
            ), rows
        except DamagedData:
            fine = [each for each in whole if self._is_fine(each)]
            if self._skipped is None or len(fine) == len(whole):
                raise
            return self._decoded(fine, stretch, number)

    def _is_fine(self, rows: GroupRows) -> bool:
        """Whether ``rows`` can be decoded alone. Raises DamagedData with their group, unless they are left out."""
        try:
            self._decoder.decode(self._table([rows]), None, RowPlace(self._reader.place(rows.group), rows.first))
        except DamagedData as error:
            if self._skipped is None:
                raise
            self._leave_out(self._skipped, rows.group, len(rows.data), error)
            return False
        return True

    def _table(self, rows: Sequence[GroupRows]) -> Any:
        tables = [
            each.data if isinstance(each.data, self._arrow.Table) else self._arrow.Table.from_batches([each.data])
            for each in rows
        ]
        names = self._decoder.names
        try:
            return self._arrow.concat_tables([table.select(names) for table in tables], promote_options="permissive")
        except self._arrow.ArrowException as error:
            first, last = (self._reader.place(rows[at].group) for at in (0, -1))
            raise DamagedData(
                f"{first} to {last}: values that do not go together: {error}"[:600],
                remedy="write all files with one type",
            ) from error

    def _leave_out(self, skipped: Skipped, group: Group, rows: int, error: DamagedData) -> None:
        place = self._reader.place(group)
        skipped.rows += rows
        if place not in skipped.reasons:
            skipped.groups += 1
            skipped.reasons[place] = error.message
            log.warning("data.skipped", "left out: %s", error)
            self._on_skip()


class ReadAhead:
    """Has a thread decode stretches while the loop trains. Used by the training thread.

    At most ``WINDOWS_AHEAD`` windows wait, and one is being decoded: memory does not grow with the files.
    """

    def __init__(self, windows: Callable[[Stretch], Iterator[Window]]) -> None:
        self._windows = windows
        self._asked: queue.SimpleQueue[Stretch | None] = queue.SimpleQueue()
        self._made: queue.Queue[Window | BaseException] = queue.Queue(WINDOWS_AHEAD)
        self._closed = threading.Event()
        #: Stretches asked for whose last window has not been taken.
        self.stretches = 0
        threading.Thread(target=self._run, name="ps-files", daemon=True).start()

    def ask(self, stretch: Stretch) -> None:
        """Have ``stretch`` decoded after those before it."""
        self.stretches += 1
        self._asked.put(stretch)

    def take(self) -> Window:
        """The next window. Raises what reading it raised; then nothing more comes."""
        made = next_item(self._made)
        if isinstance(made, BaseException):
            self.close()
            raise made
        self.stretches -= made.last
        return made

    @property
    def ready(self) -> bool:
        """Whether ``take`` need not wait."""
        return not self._made.empty()

    def close(self) -> None:
        """End the thread soon. Safe to repeat."""
        self._closed.set()
        self._asked.put(None)

    def _run(self) -> None:
        try:
            while not self._closed.is_set() and (stretch := self._asked.get()) is not None:
                for window in self._windows(stretch):
                    if not self._put(window):
                        return
        except BaseException as error:  # noqa: BLE001  # raised again by the training thread
            self._put(error)

    def _put(self, made: Window | BaseException) -> bool:
        while not self._closed.is_set():
            try:
                self._made.put(made, timeout=0.5)
            except queue.Full:
                continue
            return True
        return False


class _Missing:
    """Rows that cannot be read."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, rows: slice) -> _Missing:
        return _Missing(len(range(self._rows)[rows]))


def _in_windows(rows: Iterator[GroupRows], size: int) -> Iterator[list[GroupRows]]:
    """All rows, in lists of ``size``; the last one may have fewer."""
    window: list[GroupRows] = []
    free = size
    for each in rows:
        rest = each
        while len(rest.data) >= free:
            window.append(GroupRows(rest.data[:free], rest.group, rest.first))
            rest = GroupRows(rest.data[free:], rest.group, rest.first + free)
            yield window
            window, free = [], size
        if len(rest.data):
            window.append(rest)
            free -= len(rest.data)
    if window:
        yield window
