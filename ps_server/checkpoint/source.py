"""Reads tensors from the files of one model, with verified checksums."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ps_protocol.errors import DamagedData
from ps_server.checkpoint.files import CHECKED_BYTES, checksum, open_below, storage_errors
from ps_server.checkpoint.record import FileRecord, ModelRecord, Piece

OnRead = Callable[[int], None]
"""Called with the bytes of each read, by the thread that reads."""


def uncounted(nbytes: int) -> None:
    """Ignore what is read."""


@contextmanager
def opened(folder: Path, model: ModelRecord, on_read: OnRead = uncounted) -> Iterator[ModelFiles]:
    """The files of ``model`` in the checkpoint ``folder``. OSError becomes ConfigError."""
    source = ModelFiles(folder, model, on_read)
    try:
        with storage_errors(folder / model.folder):
            yield source
    finally:
        source.close()


class ModelFiles:
    """The files of one model of a checkpoint, open for reading; used by one thread, and made by ``opened``.

    Every method raises DamagedData, naming file and tensor, for a file that is missing, has another size or other
    bytes, OSError when a file cannot be read.
    """

    def __init__(self, folder: Path, model: ModelRecord, on_read: OnRead = uncounted) -> None:
        self._on_read = on_read
        self._root, self._model, self._folder = folder, model.folder, folder / model.folder
        self._records = {file.name: file for file in model.files}
        self._open: dict[str, int] = {}
        self._buffer = memoryview(bytearray(CHECKED_BYTES))

    def close(self) -> None:
        """Close all files."""
        while self._open:
            os.close(self._open.popitem()[1])

    def read(self, piece: Piece, begin: int, end: int, into: memoryview) -> None:
        """Copy bytes [begin, end) of ``piece`` to ``into``, which is as long; reads up to CHECKED_BYTES around them."""
        for first in range(begin - begin % CHECKED_BYTES, end, CHECKED_BYTES):
            part = self._checked(piece, first)
            low, high = max(begin, first), min(end, first + len(part))
            into[low - begin : high - begin] = part[low - first : high - first]

    def check(self, piece: Piece) -> None:
        """Read all of ``piece``."""
        for first in range(0, piece.nbytes, CHECKED_BYTES):
            self._checked(piece, first)

    def check_file(self, name: str) -> None:
        """Check the size of a file of the model, and its head, once."""
        if name not in self._open:
            self._open_file(name, "")

    def _checked(self, piece: Piece, first: int) -> memoryview:
        """The bytes of ``piece`` from ``first`` that share a checksum; valid until the next call."""
        part = self._buffer[: min(CHECKED_BYTES, piece.nbytes - first)]
        if piece.file not in self._open:
            self._open_file(piece.file, str(piece))
        _fill(self._open[piece.file], part, piece.at + first)
        self._on_read(len(part))
        expected, actual = piece.checksums[first // CHECKED_BYTES], checksum(part)
        if actual != expected:
            where = f"bytes {piece.at + first} to {piece.at + first + len(part)}"
            raise self._damaged(piece.file, str(piece), f"checksum {expected} of {where}", actual)
        return part

    def _open_file(self, name: str, tensor: str) -> None:
        record = self._records[name]
        try:
            descriptor = self._open[name] = open_below(self._root, f"{self._model}/{name}")
        except FileNotFoundError:
            raise self._damaged(name, tensor, f"a file of {record.size_bytes} bytes", "no such file") from None
        size = os.fstat(descriptor).st_size
        if size != record.size_bytes:
            raise self._damaged(name, tensor, f"{record.size_bytes} bytes", f"{size} bytes")
        self._check_head(record, descriptor)

    def _check_head(self, record: FileRecord, descriptor: int) -> None:
        head = bytearray(record.head_bytes)
        _fill(descriptor, memoryview(head), 0)
        actual = checksum(head)
        if actual != record.head_checksum:
            expected = f"checksum {record.head_checksum} of the first {record.head_bytes} bytes"
            raise self._damaged(record.name, "", expected, actual)

    def _damaged(self, file: str, tensor: str, expected: str, actual: str) -> DamagedData:
        return DamagedData(
            f"{self._folder / file} is damaged: it is not what was written",
            variable=tensor,
            expected=expected,
            actual=actual,
            remedy="restore another checkpoint, or a copy of this one",
        )


def _fill(descriptor: int, into: memoryview, position: int) -> None:
    """Read up to the end of the file; if it shrinks meanwhile, the checksum of the old bytes is wrong."""
    while len(into) and (count := os.preadv(descriptor, [into], position)):
        into, position = into[count:], position + count
