"""Owns the file with the lower bound of a log's end: the segment in use at the last start or roll."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ps_protocol.files import FILE_MODE, sync
from ps_protocol.records import fields_of, from_plain
from ps_protocol.sealed import SEAL_BYTES, load, seal, sealed
from ps_protocol.wire.shared_memory import boot_id

NAME = "head.json"
FORMAT = 1

HEAD_BYTES = 512
"""Of the file: one sector of a disk, overwritten in one piece, so that it is always whole and needs no new room."""

REMEDY = "nothing was changed: restore the data directory from a copy, or start with an empty one and a checkpoint"
"""Where a data directory is damaged."""


@dataclass(frozen=True, slots=True)
class LogHead:
    """Facts about a log when they were written; the next start finds at least as much."""

    #: First record of the segment in use; 0: there was none.
    segment: int = 0
    #: Size of that segment's file.
    segment_bytes: int = 0
    #: With ``every_push``: the last record that was written.
    number: int = 0
    #: A push was acknowledged when its record was written; False where the log is written during snapshots only.
    every_push: bool = False
    #: A record was on the disk when it counted as written.
    synced: bool = False
    #: Of the start of this machine; empty where the system does not tell.
    boot: str = ""
    #: Version of torch that the records were applied with.
    torch: str = ""

    @classmethod
    def now(cls, *, every_push: bool, synced: bool) -> LogHead:
        """The head of a log that this process opens."""
        return cls(every_push=every_push, synced=synced, boot=boot_id(), torch=torch.__version__)

    @property
    def same_boot(self) -> bool:
        """Whether this machine has been running since: nothing was lost that was written to a file."""
        return bool(self.boot) and self.boot == boot_id()

    @property
    def promises(self) -> bool:
        """Whether what was acknowledged must be there: the machine ran on, or records did not need it to."""
        return self.every_push and (self.synced or self.same_boot)


class HeadFile:
    """The file of a LogHead. The log writes it at its start and end and with each new segment; recovery reads it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        #: What ``write_later`` was given last, and its call.
        self._newest: LogHead | None = None
        self._last: Future[None] | None = None
        self._helper: ThreadPoolExecutor | None = None
        self._writing = threading.Lock()

    def write_later(self, head: LogHead) -> None:
        """Have a thread write ``head``, and the names of segments before; a head that comes later replaces it.

        Raises OSError where that has failed before, and fails again.
        """
        if self._last is not None and self._last.done():
            self.settle()
        self._helper = self._helper or ThreadPoolExecutor(1, "log-head")
        self._newest = head
        self._last = self._helper.submit(self._write_newest, head)

    def settle(self) -> None:
        """Returns when what ``write_later`` was given is on the disk. Raises OSError."""
        last, newest = self._last, self._newest
        if last is not None and newest is not None and last.exception() is not None:
            self._write_newest(newest)

    def close(self) -> None:
        """End the thread, after its last head. Repeatable."""
        with suppress(OSError):  # the next start then expects less
            self.settle()
        if self._helper is not None:
            self._helper.shutdown()
            self._helper = self._last = None

    def _write_newest(self, head: LogHead) -> None:
        with self._writing:
            if head is self._newest:
                sync(self.path.parent)
                self.write(head)

    def write(self, head: LogHead) -> None:
        """Write ``head`` to the disk. Raises OSError."""
        text = seal(FORMAT, fields_of(head))
        data = sealed(b"{" + text[SEAL_BYTES:].ljust(HEAD_BYTES - SEAL_BYTES))
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            os.pwrite(descriptor, data, 0)
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)

    def read(self) -> LogHead:
        """What was written last. Raises DamagedData when the file is missing, or not what was written."""
        return load(self.path, FORMAT, partial(from_plain, LogHead), REMEDY)
