"""Reader of the Criteo click logs: tab-separated lines of a label, 13 integers and 26 hexadecimal categories."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import IO, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from ps_worker import InvalidRequest

from .batch import CATEGORIES, NUMBERS, Batch, by_feature
from .hashing import key, mix

FIELDS = 1 + NUMBERS + CATEGORIES
EXPECTED = (
    f"{FIELDS} fields between tabs: 0 or 1, {NUMBERS} integers, {CATEGORIES} hexadecimal numbers of up to 8 digits"
)

#: The id of a category that is not given, before it is mixed with its column: above every 32-bit number.
_MISSING = 1 << 32
_MOST_INTEGER_DIGITS = 18
_MOST_HEX_DIGITS = 8
_TAB, _NEWLINE, _MINUS = b"\t\n-"
_WRONG = 255

Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class Block(NamedTuple):
    """Lines as they stand in the file."""

    #: Number of the first line, from 1.
    first: int
    lines: bytes


class LineBlocks(IterableDataset[Block]):
    """A file's lines in blocks, plain or ``.gz``, read as they are asked for; nothing is parsed here.

    A block is the unit that ``cluster.shard`` splits by, so that a worker parses its own part only: used as
    ``DataLoader(LineBlocks(…), batch_size=1, collate_fn=Parser(…))``.
    """

    def __init__(self, path: Path, block_lines: int, *, skip: int = 0, lines: int | None = None) -> None:
        """``skip`` lines are left out, then ``lines`` taken; None: all."""
        self._path, self._block_lines = path, block_lines
        self._skip, self._lines = skip, lines

    def __iter__(self) -> Iterator[Block]:
        end = None if self._lines is None else self._skip + self._lines
        with open_lines(self._path) as file:
            lines = islice(file, self._skip, end)
            first = self._skip + 1
            while block := list(islice(lines, self._block_lines)):
                yield Block(first, b"".join(block))
                first += len(block)


class Parser:
    """Turns blocks into batches. Used as a DataLoader's ``collate_fn``, by one thread; ``skipped`` counts lines.

    Numbers become log(1 + max(0, x)), missing ones 0. Categories become ids by (column, value), missing ones the id
    of "missing" of their column.
    """

    def __init__(self, path: Path, *, skip_wrong: bool = False) -> None:
        self._path = path
        self._skip_wrong = skip_wrong
        self._columns = mix(key(NUMBERS, CATEGORIES) + np.arange(CATEGORIES, dtype=np.uint64))
        #: Wrong lines left out.
        self.skipped = 0

    def __call__(self, blocks: Sequence[Block]) -> Batch:
        """The samples of ``blocks`` in order: fewer than lines where wrong ones are skipped, perhaps none.

        Raises InvalidRequest for a wrong line, naming the file and the line, unless wrong lines are skipped.
        """
        parsed = [self._parse(block) for block in blocks]
        numbers, ids, labels = (torch.cat(parts) for parts in zip(*parsed, strict=True))
        return Batch(numbers, by_feature(ids), labels)

    def _parse(self, block: Block) -> tuple[Tensor, Tensor, Tensor]:
        data = block.lines.replace(b"\r\n", b"\n")
        text = np.frombuffer(data if data.endswith(b"\n") else data + b"\n", np.uint8)
        starts, ends, complete = _fields(text)
        labels, wrong_labels = _integers(text, starts[:, :1], ends[:, :1])
        numbers, wrong_numbers = _integers(text, starts[:, 1 : 1 + NUMBERS], ends[:, 1 : 1 + NUMBERS])
        values, wrong_values = _hexadecimals(text, starts[:, 1 + NUMBERS :], ends[:, 1 + NUMBERS :])
        wrong_labels |= (ends[:, :1] - starts[:, :1] != 1) | (labels > 1)
        fine = ~np.hstack([wrong_labels, wrong_numbers, wrong_values]).any(axis=1)
        complete[complete] = fine
        if not complete.all():
            self._leave_out(block, complete)
        ids = mix(self._columns + values[fine].view(np.uint64)).view(np.int64)
        return (
            torch.from_numpy(np.log1p(np.maximum(numbers[fine], 0).astype(np.float32))),
            torch.from_numpy(ids),
            torch.from_numpy(labels[fine, 0].astype(np.float32)),
        )

    def _leave_out(self, block: Block, right: Flags) -> None:
        if self._skip_wrong:
            self.skipped += int((~right).sum())
            return
        index = int(np.argmin(right))
        raise InvalidRequest(
            f"{self._path}, line {block.first + index} is not a sample",
            expected=EXPECTED,
            actual=repr(block.lines.split(b"\n")[index])[1:121],
            remedy="mend the line, or leave such lines out: --skip-wrong-lines",
        )


def open_lines(path: Path) -> AbstractContextManager[IO[bytes]]:
    """The file for reading, decompressed if its name ends with ``.gz``."""
    opener = cast(Callable[[Path, str], IO[bytes]], gzip.open if path.suffix == ".gz" else open)
    return opener(path, "rb")


def _fields(text: Bytes) -> tuple[Integers, Integers, Flags]:
    """Where the fields of complete lines begin and end, [complete, 40] each; and which lines are complete, [lines]."""
    ends = np.flatnonzero((text == _TAB) | (text == _NEWLINE))
    starts = np.concatenate(([0], ends[:-1] + 1))
    counts = np.diff(np.flatnonzero(text[ends] == _NEWLINE), prepend=-1)
    complete = counts == FIELDS
    kept = np.repeat(complete, counts)
    return starts[kept].reshape(-1, FIELDS), ends[kept].reshape(-1, FIELDS), complete


def _integers(text: Bytes, starts: Integers, ends: Integers) -> tuple[Integers, Flags]:
    """Decimal fields as int64, 0 where nothing is given; and which are no such number."""
    negative = (text[starts] == _MINUS) & (ends > starts)
    values, wrong = _digits(text, starts + negative, ends, 10, _MOST_INTEGER_DIGITS)
    wrong |= negative & (ends - starts == 1)
    return np.where(negative, -values, values), wrong


def _hexadecimals(text: Bytes, starts: Integers, ends: Integers) -> tuple[Integers, Flags]:
    """Hexadecimal fields as int64, ``_MISSING`` where nothing is given; and which are no such number."""
    values, wrong = _digits(text, starts, ends, 16, _MOST_HEX_DIGITS)
    values[starts == ends] = _MISSING
    return values, wrong


def _digits(text: Bytes, starts: Integers, ends: Integers, base: int, most: int) -> tuple[Integers, Flags]:
    values = np.zeros(starts.shape, np.int64)
    lengths = ends - starts
    wrong = lengths > most
    for place in range(min(most, int(lengths.max(initial=0)))):
        # A field that is shorter repeats its end, which changes nothing.
        inside = place < lengths
        digits = _DIGITS[text[np.minimum(starts + place, ends)]]
        wrong |= inside & (digits >= base)
        values = np.where(inside, values * base + digits, values)
    return values, wrong


def _digit_table() -> Bytes:
    table = np.full(256, _WRONG, np.uint8)
    for digit in range(16):
        table[[ord(f"{digit:x}"), ord(f"{digit:X}")]] = digit
    return table


_DIGITS = _digit_table()
