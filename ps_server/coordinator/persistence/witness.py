"""Owns the small file beside a journal with its last commit, which shows a loss of the journal's end."""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

from ps_protocol.errors import DamagedData
from ps_server.coordinator.persistence.lineage import Commit

FILE_NAME = "coordinator.commit"

_MAGIC = b"psc1"
_RECORD = struct.Struct("<4s8s8sQ")
_CRC = struct.Struct("<I")
_SLOT_BYTES = 512
"""One sector, which a disk writes atomically; two slots alternate, so that one is always intact."""


@dataclass(frozen=True, slots=True)
class WitnessRecord:
    """The contents of the file: the name of a journal, and its last commit."""

    journal: bytes
    commit: Commit


class Witness:
    """Used by the journal. Written after each commit, without waiting for the disk.

    So it may be behind the journal after a loss of power, but never ahead: what it names was on disk.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def read(self) -> WitnessRecord | None:
        """The last record; None without a file. Raises DamagedData when there is no readable record."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return None
        found = [each for begin in (0, _SLOT_BYTES) if (each := _parse(data[begin : begin + _SLOT_BYTES])) is not None]
        if not found:
            raise DamagedData(
                f"{self.path}, which knows the last commit of the journal beside it, cannot be read",
                actual=f"{len(data)} bytes, and no record in the two places for one",
                remedy="bring back a copy of the folder; or, if the journal is known to be whole, remove this file",
            )
        return max(found, key=lambda each: each.commit.number)

    def note(self, witnessed: WitnessRecord) -> None:
        """Note a commit that is on disk. Raises OSError."""
        body = _RECORD.pack(_MAGIC, witnessed.journal, witnessed.commit.start, witnessed.commit.number)
        slot = (body + _CRC.pack(zlib.crc32(body))).ljust(_SLOT_BYTES, b"\0")
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if os.fstat(self._descriptor).st_size != 2 * _SLOT_BYTES:
                os.pwrite(self._descriptor, slot + slot, 0)
                os.fsync(self._descriptor)
        os.pwrite(self._descriptor, slot, witnessed.commit.number % 2 * _SLOT_BYTES)

    def replace(self, witnessed: WitnessRecord) -> None:
        """Replace all earlier records. Raises OSError."""
        self.close()
        self.path.unlink(missing_ok=True)
        self.note(witnessed)

    def close(self) -> None:
        """Sync and close the file. Repeatable."""
        if self._descriptor is not None:
            try:
                os.fsync(self._descriptor)
            finally:
                os.close(self._descriptor)
                self._descriptor = None


def _parse(slot: bytes) -> WitnessRecord | None:
    end = _RECORD.size + _CRC.size
    body, crc = slot[: _RECORD.size], slot[_RECORD.size : end]
    if len(slot) < end or crc != _CRC.pack(zlib.crc32(body)) or any(slot[end:]):
        return None
    magic, journal, start, number = _RECORD.unpack(body)
    return WitnessRecord(journal, Commit(start, number)) if magic == _MAGIC else None
