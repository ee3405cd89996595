"""Decides whether a journal lacks commits, from its history of starts and commits and from external proofs.

These proofs are the marks that members have, and the witness: a small file with the last commit.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ps_protocol.errors import DamagedData

_STARTS_KEPT = 200

_MARK = struct.Struct("<8s8sQ")
_MAC_BYTES = 16

WITNESS_NAME = "coordinator.commit"

_MAGIC = b"psc1"
_RECORD = struct.Struct("<4s8s8sQ")
_CRC = struct.Struct("<I")
_SLOT_BYTES = 512
"""One sector, which a disk writes atomically; two slots alternate, so that one is always intact."""


@dataclass(frozen=True, slots=True)
class Commit:
    """One commit: the random name of the start of a coordinator that made it, and its number, from 1."""

    start: bytes
    number: int


@dataclass(frozen=True, slots=True)
class JournalStart:
    """One start of a coordinator on a journal."""

    name: bytes
    first_commit: int
    #: Whether it continues although earlier commits may be missing (``--accept-older-journal``).
    accepts_loss: bool = False


@dataclass(frozen=True, slots=True)
class Lineage:
    """The history of a journal, written with each commit as one of its rows.

    Commit numbers alone would not reveal a loss once new commits have reused the lost numbers. So each start has a
    random name, and a commit belongs to the history if its start does and it precedes the next start.
    """

    #: Random name of the journal.
    journal: bytes
    #: Key that signs marks.
    key: bytes
    commit: int = 0
    starts: tuple[JournalStart, ...] = ()
    #: Sum of the digests of all other rows, which changes when a row is lost or replaced by an older one.
    digest: int = 0

    @classmethod
    def new(cls) -> Lineage:
        """The history of a journal without commits."""
        return cls(secrets.token_bytes(8), secrets.token_bytes(16))

    @property
    def newest(self) -> Commit:
        """The last commit."""
        return Commit(self.starts[-1].name if self.starts else bytes(8), self.commit)

    def begin(self, *, accepts_loss: bool) -> Lineage:
        """Record a start of a coordinator; the next commit is its first."""
        start = JournalStart(secrets.token_bytes(8), self.commit + 1, accepts_loss)
        return replace(self, starts=(*self.starts, start)[-_STARTS_KEPT:])

    def next(self, digest: int) -> Lineage:
        """The lineage after one more commit. ``digest``: of the other rows after it."""
        return replace(self, commit=self.commit + 1, digest=digest % (1 << 64))

    def lacks(self, known: Commit) -> bool:
        """Whether ``known``, once a commit of this journal, is missing from its history and no start has accepted the
        loss.
        """
        for number, start in enumerate(self.starts):
            if start.name == known.start:
                following = self.starts[number + 1] if number + 1 < len(self.starts) else None
                if following is None:
                    return known.number > self.commit
                return known.number >= following.first_commit and not following.accepts_loss
        if len(self.starts) == _STARTS_KEPT and known.number < self.starts[0].first_commit:
            return False
        return not any(start.accepts_loss for start in self.starts)

    def mark(self) -> bytes:
        """A mark of the last commit for members; ``read_mark`` of the same journal reads it."""
        body = _MARK.pack(self.journal, self.newest.start, self.commit)
        return body + self._sign(body)

    def read_mark(self, mark: bytes) -> Commit | None:
        """The commit that ``mark`` proves; None for one of another journal, or with a wrong signature."""
        body, signature = mark[: _MARK.size], mark[_MARK.size :]
        if len(body) < _MARK.size or not hmac.compare_digest(signature, self._sign(body)):
            return None
        _, start, number = _MARK.unpack(body)
        return Commit(start, number)

    def _sign(self, body: bytes) -> bytes:
        return hashlib.blake2b(body, digest_size=_MAC_BYTES, key=self.key).digest()

    def encode(self) -> bytes:
        """Encode as a row of the journal."""
        plain = {
            "journal": self.journal.hex(),
            "key": self.key.hex(),
            "commit": self.commit,
            "starts": [[start.name.hex(), start.first_commit, start.accepts_loss] for start in self.starts],
            "digest": self.digest,
        }
        return json.dumps(plain, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, row: bytes) -> Lineage:
        """Decode a row. Raises ValueError, LookupError or TypeError for one that ``encode`` did not make."""
        plain = json.loads(row)
        starts = tuple(JournalStart(bytes.fromhex(name), first, loss) for name, first, loss in plain["starts"])
        return cls(
            bytes.fromhex(plain["journal"]), bytes.fromhex(plain["key"]), plain["commit"], starts, plain["digest"]
        )


def digest_of(key: str, value: bytes) -> int:
    """The digest of one row."""
    text = key.encode()
    return int.from_bytes(hashlib.blake2b(b"%d %b %b" % (len(text), text, value), digest_size=8).digest())


def sum_of(digests: Mapping[str, int]) -> int:
    """The sum over all rows, in any order."""
    return sum(digests.values()) % (1 << 64)


@dataclass(frozen=True, slots=True)
class WitnessRecord:
    """The contents of the file: the name of a journal, and its last commit."""

    journal: bytes
    commit: Commit


class Witness:
    """The file with the last commit. The journal writes it after each commit, without waiting for the disk.

    After a power loss it may be behind the journal, but never ahead: the commit that it names was on disk.
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
